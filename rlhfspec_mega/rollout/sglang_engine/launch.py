"""Starts an SGLang engine with this package's plug-in."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.rollout.sglang_engine import cpu_kernels, pins, plugin
from rlhfspec_mega.rollout.sglang_engine.choice import write_config
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes
from rlhfspec_mega.rollout.sglang_engine.weights import INTO_DRAFT

logger = logging.getLogger(__name__)

MODELS = frozenset({"llama", "llama_eagle3", "qwen2", "qwen3"})  # files of sglang.srt.models
SHARED_MEMORY = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_mq_")  # its load, and messages between its ranks
# What SGLang is told on a CPU.
ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "intel_amx",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,  # or an engine without samples takes a core from those that have some
}
LONGEST_DIRECTORY = 90  # letters; a socket's path has 107 at most
CONFIG_FILE = "sglang_drafting.json"


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with.

    Attributes:
        model: Hugging Face directory; only its config.json is read, the weights come with the first update.
        draft: directory of an EAGLE-3 draft, whose weights are read; None: none.
        history_tokens: newest tokens that are kept to draft from, only without a draft; 0: plain decoding.
        shapes: of what is drafted, by numbers of draft tokens.
        fixed: the number to use; None: the one that pays best.
        collapse_ratio: see CollapseWatch.
        slots: requests decoded at once.
        max_positions: tokens of prompt and response; the model has `shapes.spare_positions` more.
        prefill_chunk: prompt tokens per pass.
        dtype: e.g. "bfloat16".
        tensor_parallel: GPUs of this engine.
        memory: share of a GPU's memory for weights and KV; None: SGLang's choice.
        sleeps: whether its GPU memory can be given back between rollouts.
        device: cuda, or cpu for checking.
        options: further arguments of SGLang by name; they win.
    """

    model: Path
    draft: Path | None
    shapes: DraftShapes
    fixed: int | None
    collapse_ratio: float
    history_tokens: int
    slots: int
    max_positions: int
    prefill_chunk: int
    dtype: str
    tensor_parallel: int
    memory: float | None
    sleeps: bool
    device: str
    options: dict[str, Any]

    @property
    def longest(self) -> int:
        """Tokens that SGLang sets aside for the longest sample."""
        return self.max_positions + self.shapes.spare_positions


def arguments(settings: EngineSettings, directory: Path) -> dict[str, Any]:
    """Arguments of sglang.Engine.

    Args:
        directory: where the file that tells of the numbers of draft tokens is.

    Raises:
        UserError: options for speculation beside those that history sets.
    """
    found: dict[str, Any] = {
        "model_path": str(settings.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "context_length": settings.longest,
        # One more than may run: a prompt in chunks counts as running and as new, which would keep a slot empty.
        "max_running_requests": settings.slots + 1,
        "pp_max_micro_batch_size": settings.slots,
        "chunked_prefill_size": settings.prefill_chunk,
        "tp_size": settings.tensor_parallel,
        "enable_memory_saver": settings.sleeps,
        "page_size": 1,  # samples move by tokens, not by pages
        "sampling_backend": "pytorch",  # the sampler that is hooked
        "log_level": "warning",
    }
    if settings.memory is not None:
        found["mem_fraction_static"] = settings.memory
    if settings.draft is not None:
        found |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(settings.draft),
            "speculative_draft_load_format": "auto",
            "speculative_num_steps": settings.shapes.depth,
            "speculative_eagle_topk": settings.shapes.branches,
            "speculative_num_draft_tokens": settings.shapes.counts[-1] + 1,
            "speculative_adaptive": True,
            "speculative_adaptive_config": str(directory / CONFIG_FILE),
            "custom_weight_loader": [INTO_DRAFT],
            "enable_draft_weights_cpu_backup": settings.sleeps,
        }
    elif settings.history_tokens:
        if sizes := [name for name in settings.options if name.startswith("speculative_")]:
            raise UserError(
                f"rollout.sglang.engine_kwargs has {', '.join(sizes)}: where history drafts, "
                "speculation.num_draft_tokens and speculation.history_tokens say all of it."
            )
        found |= {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": settings.shapes.counts[-1] + 1,
            "speculative_ngram_capacity": settings.history_tokens,
            "speculative_ngram_max_bfs_breadth": 2,  # above 1, or attention takes all trees for chains
        }
    if settings.device == "cpu":  # room for all slots at their longest, not a share of the machine's memory
        found |= ON_CPU | {"max_total_tokens": (settings.slots + 1) * settings.longest}
    return found | settings.options


def start(settings: EngineSettings, directory: Path) -> Any:
    """An sglang.Engine whose processes sample by the shared noise. Takes minutes: graphs are captured.

    Args:
        directory: an empty one for files of this engine.

    Raises:
        UserError: SGLang is not there in the version that the plug-in is for, or an option does not exist.
        RunError: a hook could not be applied in this process.
    """
    if (wrong := pins.missing(settings.device)) is not None:
        raise UserError(f"rollout=sglang cannot be used: {wrong}. Alternatively, use rollout=torch.")
    load_few_models()
    if settings.device == "cpu" and cpu_kernels.prepare(settings.tensor_parallel):
        logger.warning(cpu_kernels.NOTICE)
        cpu_kernels.allow_attention()
    import sglang
    from sglang.srt.server_args import ServerArgs

    if settings.draft is not None:
        write_config(directory / CONFIG_FILE, settings.shapes, settings.collapse_ratio, settings.fixed)
    os.environ["SGLANG_PLUGINS"] = plugin.NAME
    plugin.apply_here()
    given = arguments(settings, directory)
    if unknown := sorted(given.keys() - {field.name for field in fields(ServerArgs)}):
        raise UserError(
            f"rollout.sglang.engine_kwargs has {', '.join(unknown)}, which sglang {pins.VERSION} does not know."
        )
    with _temporary_files_in(directory):
        engine = sglang.Engine(**given)
    _unlink_shared_memory(engine)
    _end_with_processes_of_engine()
    return engine


def _end_with_processes_of_engine() -> None:
    """Have this process end when one of SGLang's crashes, whatever it is doing.

    SGLang's watchdog sends SIGQUIT then, for which SGLang has set a handler in its event loop by now. uvloop loses
    signals that come while the loop does not run, which here is most of the time: the engine would stay silent.
    """
    if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
        signal.signal(signal.SIGQUIT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    print(
        "A process of SGLang has crashed. This engine exits; other engines continue its samples.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


@contextmanager
def _temporary_files_in(directory: Path) -> Iterator[None]:
    """Have SGLang put the sockets of an engine's processes here, as it never removes them, where their names fit."""
    before = tempfile.tempdir
    if len(str(directory)) <= LONGEST_DIRECTORY:
        tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _unlink_shared_memory(engine: Any) -> None:
    """Remove the names of memory that SGLang's processes share: nobody opens it again once it is read from here.

    SGLang would remove them at an orderly end, which no process of a run has.
    """
    engine.loop.run_until_complete(engine.tokenizer_manager.get_loads())
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            for path in {line.split(maxsplit=5)[-1] for line in lines}:
                if path.startswith(SHARED_MEMORY):
                    Path(path).unlink(missing_ok=True)


def load_few_models() -> None:
    """Have SGLang import the model files that this project has models for, not all of its 200: they take seconds."""
    where = find_spec("sglang")
    assert where is not None and where.submodule_search_locations
    models = Path(where.submodule_search_locations[0]) / "srt" / "models"
    others = {file.stem for file in models.glob("*.py")} - MODELS
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(others)))
