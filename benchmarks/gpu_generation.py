"""SGLang on a GPU: speed against its stock settings, costs of its steps, times of weight updates.

    python -m benchmarks.gpu_generation speed|curve|updates --out DIR [--repeats 5] [--model tiny] [--seconds 480]

speed: tokens per second of a pair of model and draft made here (acceptance is real) at temperature 1, by engines that
live side by side on one GPU and take turns: SGLang plain and unseeded, its fixed EAGLE-3 setting with target-only
verification and with rejection sampling, its adaptive rule, and ours plain, adaptive and adaptive with trees; at
batches of 1 to 256 and over a long-tail decay. Repeats that were measured before are kept: a run that was cut off goes
on.
curve: seconds of a step by batch, length and draft tokens, of shapes of 8 billion random weights, as the simulator
reads them. updates: seconds of a weight update of these shapes.

Prints a table; the last line of `speed` is one JSON object of ratios (baseline time / ours, above 1 is better).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.paired import Interval, ratio_interval
from benchmarks.samples import load_target, word_prompts, words_target
from benchmarks.sglang_engines import DEVICE, GRAPHS, PORTABLE, decode, ours, save, settings, started, stock
from rlhfspec_mega.bootstrap.start import first_draft
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.data.tokenizer import make_byte_tokenizer
from rlhfspec_mega.draft.directory import write_draft
from rlhfspec_mega.draft.shape import draft_shape, draft_tensors
from rlhfspec_mega.models.hf_config import config_of, write_json
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.planning.draft_tokens import StepTable
from rlhfspec_mega.rollout.sglang_engine.choice import DraftingControl
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.launch import start
from rlhfspec_mega.rollout.sglang_engine.profile import measure
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes, trees
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve, MigrationTimes
from rlhfspec_mega.simulate.workload import LENGTH_DISTRIBUTIONS, draw_workload

BATCHES = (1, 4, 16, 64, 256)
TOKENS, PROMPT, WARM_UP = 128, 120, 16  # of a response in a batch that stays whole, of a prompt, and to warm up
DECAY, SCALE, LONGEST = 256, 2.0, 800  # samples of the decay, its lengths over chat's
UNSEEDED, OFF, OURS, OURS_TREES = "stock plain", "ours, plain", "ours, adaptive", "ours, adaptive trees"
FIXED = {3: "stock fixed n=3", 7: "stock fixed n=7"}
REJECTING, ADAPTIVE = "stock fixed n=3, rejection sampling", "stock adaptive"
POSITIONS, ROOM = 960, 300_000  # of a sample, and tokens of all samples of an engine
CHAINS = DraftShapes((0, 1, 3, 7), 7)  # to choose from: those of SGLang's own adaptive rule
TREES = trees(16, 5, 4)
OURS_BY_SHAPES = {OFF: DraftShapes(), OURS: CHAINS, OURS_TREES: TREES}
LENGTHS = (512, 2048, 8192)  # tokens of samples that the curve is measured at
SLOTS, KV_TOKENS = 128, 340_000  # of the engine that the curve is measured on
ASSUMED = (
    "scoring takes a prefill's time and begins after 1 s; a move stops a sample for 0.1 s and copies at half of it"
)
Run = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], float]


def eagle(draft: Path, count: int, **more: Any) -> dict[str, Any]:
    """SGLang's arguments for chains of so many draft tokens."""
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": count,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": count + 1,
        **more,
    }


def engines(model: Path, draft: Path, work: Path) -> dict[str, Run]:
    """Started engines, by name; each has room for as many tokens."""
    usual = {
        "model_path": str(model),
        "dtype": "bfloat16",
        "context_length": POSITIONS + CHAINS.spare_positions,
        "max_running_requests": max(BATCHES),
        "mem_fraction_static": 0.1,
        "max_total_tokens": ROOM,
        **GRAPHS,
    }
    shipped: dict[str, dict[str, Any]] = {UNSEEDED: {}}
    shipped |= {name: eagle(draft, count) for count, name in FIXED.items()}
    shipped[REJECTING] = eagle(draft, 3, speculative_use_rejection_sampling=True)
    shipped[ADAPTIVE] = eagle(draft, 3, speculative_adaptive=True)
    if DEVICE == "cpu":  # for checking this script: drafting needs the plug-in's hooks there, SGLang's own rule graphs
        shipped = {UNSEEDED: {}}
    found: dict[str, Run] = {name: partial(_unseeded, stock(usual | given)) for name, given in shipped.items()}
    options = PORTABLE | GRAPHS | {"max_total_tokens": ROOM}
    for name, shapes in OURS_BY_SHAPES.items():
        own = draft if shapes.depth else None
        chosen = settings(model, own, shapes=shapes, slots=max(BATCHES), max_positions=POSITIONS, options=options)
        found[name] = partial(decode, ours(chosen, work / re.sub(r"\W+", "_", name))[0]._engine)
    return found


def _unseeded(engine: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int], seeds: Sequence[int]) -> float:
    return decode(engine, prompts, lengths, None)


def scenarios() -> dict[str, list[int]]:
    """Lengths of responses, by name."""
    decay = draw_workload(LENGTH_DISTRIBUTIONS["chat"].scaled(SCALE), DECAY, 8, seed=1).lengths
    whole = {f"batch {batch}": [TOKENS] * batch for batch in BATCHES}
    return whole | {"decay": np.clip(decay, 1, LONGEST).tolist()}


def speed(model: str, repeats: int, seconds: float, out: Path) -> dict[str, Any] | None:
    """All times, or None if there was no time for all repeats: then the next call goes on."""
    end, log = time.monotonic() + seconds, out / "gpu_speed.jsonl"
    target, draft = pair(model)
    prompts = [prompt[-PROMPT:] for prompt in word_prompts(512, load_target(target).tokenizer, "eval")]
    known = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    done = {(row["repeat"], row["scenario"], row["engine"]) for row in known}
    running = engines(target, draft, out / f"files.{time.time_ns()}")
    for run in running.values():  # kernels that are compiled on first use
        run(prompts[: max(BATCHES)], [WARM_UP] * min(max(BATCHES), len(prompts)), range(max(BATCHES)))
    measured = 0
    with log.open("a", encoding="utf-8") as file:
        for repeat in range(repeats):
            for scenario, lengths in scenarios().items():
                for name in np.roll(list(running), repeat).tolist():
                    if (repeat, scenario, name) in done:
                        continue
                    if time.monotonic() > end and measured:  # every call goes on by one at least
                        return None
                    order = np.random.default_rng(repeat).permutation(len(prompts))[: len(lengths)]
                    seeds = [sample_seed(41, repeat, at, 0) for at in range(len(lengths))]
                    took = running[name]([prompts[at] for at in order], lengths, seeds)
                    known.append({"repeat": repeat, "scenario": scenario, "engine": name, "seconds": took})
                    print(json.dumps(known[-1]), file=file, flush=True)
                    measured += 1
    return {"times": known, "summary": summary(known), "model": model, "repeats": repeats}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Ratios of medians' pairs: how much longer the others took than ours."""
    times: dict[tuple[str, str], list[float]] = {}
    for row in sorted(rows, key=lambda row: row["repeat"]):
        times.setdefault((row["scenario"], row["engine"]), []).append(row["seconds"])

    def over(scenario: str, name: str) -> Interval:
        return ratio_interval(times[scenario, name], times[scenario, OURS])

    found = {scenario for scenario, _ in times}
    rivals = {
        "decay_vs_stock_adaptive": (ADAPTIVE,),
        "decay_vs_best_stock_fixed": (*FIXED.values(), REJECTING),
        "decay_vs_stock_plain": (UNSEEDED,),
    }
    there = {figure: [name for name in names if ("decay", name) in times] for figure, names in rivals.items()}
    best = {figure: min(over("decay", name).value for name in names) for figure, names in there.items() if names}
    return best | {
        "worst_vs_off": min(over(scenario, OFF).value for scenario in found),
        "batch1_vs_off": over("batch 1", OFF).value,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second, medians over repeats: a line per engine."""
    lengths = {name: sum(found) for name, found in scenarios().items()}
    lines = [f"{'tokens per second':<38}" + "".join(f"{name:>12}" for name in lengths)]
    for engine in dict.fromkeys(row["engine"] for row in rows):
        cells = []
        for scenario, tokens in lengths.items():
            own = [row["seconds"] for row in rows if (row["scenario"], row["engine"]) == (scenario, engine)]
            cells.append(f"{tokens / float(np.median(own)):>12,.0f}" if own else f"{'-':>12}")
        lines.append(f"{engine:<38}" + "".join(cells))
    return "\n".join(lines)


def pair(name: str) -> tuple[Path, Path]:
    """Directories of a model made here and of its draft."""
    model = words_target(name)
    with Console(0) as console:
        return model, first_draft(load_config([f"model={name}"]), model, console)


def shapes_of_8b(directory: Path) -> tuple[Path, Path, ModelShape]:
    """A model without weights and a draft with random ones, in the shapes of 8 billion."""
    shape = replace(model_shape(load_config(["model=8b"]).model), max_positions=16384)
    model, draft = directory / "model", directory / "draft"
    if not (draft / "config.json").exists():
        model.mkdir(parents=True, exist_ok=True)
        write_json(model / "config.json", config_of(shape, "bfloat16", {}))
        make_byte_tokenizer(model)
        of_draft = draft_shape(shape, 32000)
        tensors = {info.name: 0.02 * torch.randn(info.shape).bfloat16() for info in draft_tensors(of_draft)}
        write_draft(draft, of_draft, tensors, torch.arange(32000))
    return model, draft, shape


def curve(out: Path) -> dict[str, Any]:
    """Step times by length, batch and draft tokens, and curves for the simulator; lengths done before are kept."""
    model, draft, shape = shapes_of_8b(out / "8b")
    found: dict[int, dict[str, Any]] = {}
    for length in LENGTHS:
        file = out / f"gpu_curve.{length}.json"
        if file.exists():
            found[length] = json.loads(file.read_text("utf-8"))
    if missing := [length for length in LENGTHS if length not in found]:
        work = out / f"files.{time.time_ns()}"
        work.mkdir(parents=True)
        longest, options = max(LENGTHS) + 64, PORTABLE | GRAPHS
        chosen = settings(model, draft, slots=SLOTS, max_positions=longest, memory=0.85, shapes=CHAINS, options=options)
        engine = started(lambda: start(chosen, work))
        control = DraftingControl(engine, work)
        for length in missing:
            fitting, vocabulary = max(1, min(SLOTS, KV_TOKENS // length)), shape.vocab_size
            profile = measure(engine, CHAINS.counts, control.force, slots=fitting, length=length, vocabulary=vocabulary)
            found[length] = {"table": profile.table.as_json(), "prefill_seconds": profile.prefill_seconds}
            save(out / f"gpu_curve.{length}.json", found[length])
    prefill = found[LENGTHS[0]]["prefill_seconds"]
    curves = CostCurves(
        name="8b",
        source={"kind": "measured", "engine": "sglang, random weights", "lengths": list(LENGTHS), "assumed": ASSUMED},
        slots=SLOTS,
        kv_tokens=KV_TOKENS,
        plain=_plain_curve({length: StepTable.from_json(entry["table"]) for length, entry in found.items()}),
        drafting=None,
        prefill_seconds=prefill,
        scoring_seconds=prefill,  # a forward pass over the sample, as prefilling is
        scoring_start=1.0,
        migration=MigrationTimes(downtime=0.1, copy_seconds=prefill / 2, copy_share=0.05),
    )
    return {"tables": {str(length): entry["table"] for length, entry in found.items()}, "curves": curves.as_json()}


def _plain_curve(tables: Mapping[int, StepTable]) -> DecodeCurve:
    """Steps without draft tokens: a time by batch, and one more for each token in the cache."""
    batches = tables[LENGTHS[-1]].batches  # the fewest
    slopes, bases = [], []
    for batch in batches:
        seconds = [tables[length].seconds_at(batch)[0] for length in LENGTHS]
        slope, base = np.polyfit([batch * length for length in LENGTHS], seconds, 1)
        slopes.append(max(float(slope), 0.0))
        bases.append(max(float(base), 1e-6))
    return DecodeCurve(batches, tuple(bases), tuple(slopes))


def updates(out: Path, repeats: int) -> dict[str, Any]:
    """Seconds of an update of all weights of 8 billion, made in buckets of this process's GPU memory."""
    model, _, shape = shapes_of_8b(out / "8b")
    work = out / f"files.{time.time_ns()}"
    work.mkdir(parents=True)
    chosen = settings(model, None, memory=0.4, max_positions=POSITIONS, options=PORTABLE | GRAPHS)
    made, found = SGLangEngine(started(lambda: start(chosen, work)), chosen.slots, chosen.max_positions), []
    infos = [replace(info, dtype="bfloat16") for info in mapping_for(shape.architecture).hf_tensors(shape)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {info.name: 0.02 * torch.randn(info.shape, dtype=torch.bfloat16, device=device) for info in infos}
    for number in range(repeats + 1):
        begun = time.perf_counter()
        made.begin_update(number, infos)
        for name, tensor in weights.items():
            made.update_weights([(name, 0, tensor.flatten())])
        made.end_update(number)
        found.append(time.perf_counter() - begun)
    return {"seconds": found[1:], "first": found[0], "parameters": shape.parameters, "options": chosen.options}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("speed", "curve", "updates"))
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for figures, and for what a run that was cut off has done"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="tiny", help="tiny or small (default tiny)")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which speed stops; the next call goes on")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.stage == "speed":
        found = speed(arguments.model, arguments.repeats, arguments.seconds, arguments.out)
        if found is None:
            raise SystemExit("There was not time for all repeats: the same command goes on.")
        save(arguments.out / "gpu_speed.json", found)
        print(table(found["times"]))
        print(json.dumps({name: round(value, 4) for name, value in found["summary"].items()}))
        return
    figures = curve(arguments.out) if arguments.stage == "curve" else updates(arguments.out, arguments.repeats)
    save(arguments.out / f"gpu_{arguments.stage}.json", figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
