"""SGLang engines for checks and benchmarks on a GPU: several at once on one, with weights from a directory."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.planning.draft_tokens import StepTable
from rlhfspec_mega.rollout.sglang_engine import cpu_kernels, launch
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED, DraftingControl
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.profile import measure
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes, chains
from rlhfspec_mega.types import GenerationRequest, GenerationResult, WeightTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels that need no package beside SGLang's own; on a CPU the engine chooses.
PORTABLE: dict[str, Any] = {"attention_backend": "triton", "grammar_backend": "none"} if DEVICE == "cuda" else {}
# Graphs of few sizes, the same for all engines that are compared: each takes time to start, for every number of draft
# tokens.
GRAPHS: dict[str, Any] = {
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64, 128, 192, 256],
    "disable_prefill_cuda_graph": True,
}
# A quick start on a GPU that several engines share. SGLang counts what others take while it starts against its own
# share of memory: here it may take nearly all, and a number of tokens limits its KV.
SHARED_GPU: dict[str, Any] = {}
if DEVICE == "cuda":
    SHARED_GPU = PORTABLE | {
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32],
        "disable_prefill_cuda_graph": True,
        "mem_fraction_static": 0.9,
        "max_total_tokens": 65536,
    }
NOBODY = "nobody"  # a plug-in that is not there: SGLang loads none
_numbers = itertools.count()
_engines: list[Any] = []


def settings(model: Path, draft: Path | None, **given: Any) -> launch.EngineSettings:
    """Of a small engine; `given` wins."""
    usual: dict[str, Any] = {
        "shapes": chains(8) if draft else DraftShapes(),
        "fixed": None,
        "collapse_ratio": 0.5,
        "history_tokens": 0,
        "slots": 64,
        "max_positions": 960,
        "prefill_chunk": 8192,
        "dtype": "bfloat16",
        "tensor_parallel": 1,
        "memory": 0.1,
        "sleeps": False,
        "device": DEVICE,
        "options": SHARED_GPU,
    }
    return launch.EngineSettings(model=model, draft=draft, **(usual | given))


def ours(chosen: launch.EngineSettings, directory: Path) -> tuple[SGLangEngine, DraftingControl | None]:
    """An engine with this package's plug-in and the model's weights; one with a draft knows its costs.

    Engines end with the process: SGLang's own end of one kills all that this process has started.
    """
    directory.mkdir(parents=True)
    engine = started(lambda: launch.start(chosen, directory))
    made = SGLangEngine(engine, chosen.slots, chosen.max_positions)
    control = DraftingControl(engine, directory) if chosen.draft else None
    if control:
        control.learn_costs(_costs(engine, chosen, control))
        control.force(NOT_FIXED)
    send(made, chosen.model, 0)
    return made, control


def _costs(engine: Any, chosen: launch.EngineSettings, control: DraftingControl) -> StepTable:
    """Measured; on a CPU, whose speed tells nothing, made up."""
    counts = chosen.shapes.counts
    if DEVICE == "cpu":
        return StepTable((1,), counts, (tuple(1.0 + count / 16 for count in counts),))
    sizes = {"slots": chosen.slots, "length": chosen.max_positions // 2, "vocabulary": 250}
    return measure(engine, counts, control.force, **sizes).table


def stock(arguments: dict[str, Any]) -> Any:
    """An `sglang.Engine` as SGLang ships it."""
    launch.load_few_models()
    if DEVICE == "cpu" and cpu_kernels.prepare():
        cpu_kernels.allow_attention()
    import sglang

    os.environ["SGLANG_PLUGINS"] = NOBODY
    given = PORTABLE | {"skip_tokenizer_init": True, "log_level": "warning"} | arguments
    if DEVICE == "cpu":
        given |= launch.ON_CPU
    return started(lambda: sglang.Engine(**given))


def started(start: Callable[[], Any]) -> Any:
    """A started engine, whose watchdog ends before any engine does: it would take that for a crash, and kill us."""
    engine = start()
    _engines.append(engine)
    atexit.register(_call_watchdogs_off)
    return engine


def end(engine: Any) -> None:
    """End the processes of an `sglang.Engine`: its own shutdown ends all that this process has started.

    All of them are stopped before any is killed: a tensor-parallel rank whose peer has gone reports a crash to its
    parent, which would end with that where it is this process.
    """
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    watchdog.stop()
    running = [process for process in watchdog._processes if process.is_alive()]
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
    for process in running:
        process.kill()
    for process in watchdog._processes:
        process.join()


def _call_watchdogs_off() -> None:
    while _engines:
        _engines.pop().tokenizer_manager._subprocess_watchdog.stop()


def send(engine: SGLangEngine, directory: Path, number: int, target: WeightTarget = WeightTarget.ACTOR) -> float:
    """Make the weights of a directory live; seconds that it took."""
    weights = HfWeights(directory)
    names = [name for name in weights.names() if name not in ("d2t", "t2d")]  # a draft's vocabulary does not change
    started = time.perf_counter()
    engine.begin_update(number, [weights.info(name) for name in names], target)
    for name in names:
        engine.update_weights([(name, 0, weights.get(name).flatten())])
    engine.end_update(number)
    return time.perf_counter() - started


def finish(engine: Any, requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    """Decode these to their end, by any RolloutEngine."""
    engine.submit(requests)
    found: dict[str, GenerationResult] = {}
    while len(found) < len(requests):
        found |= {result.sample_id: result for result in engine.poll(1.0)}
    return found


def decode(engine: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int], seeds: Sequence[int] | None) -> float:
    """Seconds in which an `sglang.Engine` decodes responses of exactly these lengths at temperature 1.

    Args:
        seeds: of the noise; None: SGLang draws as it likes.
    """

    async def one(at: int) -> None:
        params: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": lengths[at], "ignore_eos": True}
        if seeds is not None:
            params["sampling_seed"] = seeds[at]
        await engine.async_generate(
            input_ids=list(prompts[at]), sampling_params=params, rid=f"benchmark/{next(_numbers)}/"
        )

    async def together() -> None:
        await asyncio.gather(*(one(at) for at in range(len(prompts))))

    started = time.perf_counter()
    engine.loop.run_until_complete(together())
    return time.perf_counter() - started


def conditions() -> dict[str, Any]:
    """GPU, driver and versions, for a results file."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        gpu = "none"
    packages = {}
    for name in ("sglang", "torch", "transformers", "triton"):
        try:
            packages[name] = version(name)
        except ModuleNotFoundError:
            packages[name] = "not installed"
    return {"gpu": gpu, "cuda": torch.version.cuda, "python": platform.python_version()} | packages


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write figures and their conditions; the file appears when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(figures | {"conditions": conditions()}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
