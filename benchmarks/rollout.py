"""Long-tail rollouts on two real engines: makespan of static assignment, queue dispatch, reallocation, and with fusion.

    python -m benchmarks.rollout [--quick] [--pairs 15]

Two engine processes with a core each decode samples of forced lengths (chat and reasoning laws, scaled), from an even
and from a skewed start (all long samples on one engine), and score them with the reference; mechanisms are interleaved,
with other prompts, noise and lengths in every repeat. From even starts there is little to gain and much is chance:
static and reallocation have twice as many repeats more. Ratios are times of a baseline over those of a mechanism: above
1, the mechanism is quicker. Lengths are predicted from what ended before, as in a run. The simulator, calibrated on the
first scenario, then predicts the makespans of the others. Prints tables; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.migration_cost import described, measure_migrations, source_rate
from benchmarks.paired import Interval, interleaved, ratio_interval
from benchmarks.rollout_fleet import (
    FUSED,
    MECHANISMS,
    MOVING,
    QUEUE,
    SHIPPED,
    STATIC,
    Fleet,
    Outcome,
    Recorder,
    reallocation_of,
)
from benchmarks.rollout_simulated import curves_of, predict, print_predictions, workload_of, worst_error
from benchmarks.samples import Target, load_target, word_prompts, words_target
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.simulate.curves import CostCurves
from rlhfspec_mega.simulate.workload import LENGTH_DISTRIBUTIONS, draw_workload
from rlhfspec_mega.types import GenerationRequest

RESULTS = Path(__file__).parent / "results"
SAMPLES, MEMBERS, LONGEST, PROMPT = 96, 4, 150, 120  # six samples a slot, as a run of many has
SCALES = {"chat": 0.26, "reasoning": 0.023}
STARTS = ("even", "skewed")
FIRST_SEED = 5000  # of the lengths: others than those that anything was tried on
FURTHER = 2  # times as many repeats more of static and reallocation from even starts


def requests_of(law: str, start: str, repeat: int, prompts: list[tuple[int, ...]], eos: int) -> list[GenerationRequest]:
    """A rollout's samples, in the order in which whole groups are dealt to the two engines in turn.

    Skewed: lengths are sorted into groups, and every other group, for the first engine, is one of the long half.
    """
    workload = draw_workload(LENGTH_DISTRIBUTIONS[law].scaled(SCALES[law]), SAMPLES, MEMBERS, seed=FIRST_SEED + repeat)
    lengths = np.minimum(workload.lengths, LONGEST)
    groups = lengths.reshape(-1, MEMBERS)
    if start == "skewed":
        groups = np.sort(lengths)[::-1].reshape(-1, MEMBERS)
        half = len(groups) // 2
        groups = np.stack((groups[:half], groups[half:]), axis=1).reshape(-1, MEMBERS)
    chosen = np.random.default_rng(repeat).permutation(len(prompts))
    return [
        GenerationRequest(
            sample_id=f"{repeat}.{law}.{start}.{group}.{member}",
            group_id=f"{repeat}.{law}.{start}.{group}",
            prompt_tokens=prompts[chosen[group]],
            seed=sample_seed(31, repeat, group, member),
            max_new_tokens=int(length),
            stop_tokens=(eos,),
            ignore_stop=True,
        )
        for group, members in enumerate(groups)
        for member, length in enumerate(members)
    ]


@dataclass
class Reality:
    """What happens in one scenario.

    Attributes:
        samples: of every repeat, the warm-up's first.
        outcomes: by mechanism, one per repeat; the first is the warm-up's.
        reallocations: by mechanism, what moves samples, with what its rollouts have taught.
        recorder: what engines did in all of them.
    """

    law: str
    start: str
    samples: list[list[GenerationRequest]]
    recorder: Recorder
    outcomes: dict[str, list[Outcome]] = field(default_factory=lambda: {name: [] for name in MECHANISMS})
    reallocations: dict[str, Reallocation | None] = field(
        default_factory=lambda: {name: reallocation_of(name, LONGEST) for name in MECHANISMS}
    )

    def run(self, fleet: Fleet, mechanism: str) -> float:
        """The next repeat; its seconds."""
        found = self.outcomes[mechanism]
        found.append(fleet.run(mechanism, self.samples[len(found)], self.reallocations[mechanism], self.recorder))
        return found[-1].rollout

    @property
    def judged(self) -> dict[str, list[Outcome]]:
        """Outcomes without the warm-up's."""
        return {name: found[1:] for name, found in self.outcomes.items()}


def measure(fleet: Fleet, pairs: int, prompts: list[tuple[int, ...]], eos: int) -> list[Reality]:
    """Every mechanism `pairs` times in every scenario, all interleaved: a machine's slow minutes fall on all alike."""
    most = (1 + FURTHER) * pairs + 1
    realities = [
        Reality(
            law,
            start,
            [requests_of(law, start, repeat, prompts, eos) for repeat in range(most)],
            fleet.recorder(f"{law}.{start}"),
        )
        for law in SCALES
        for start in STARTS
    ]
    variants = {(one.law, one.start, name): partial(one.run, fleet, name) for one in realities for name in MECHANISMS}
    further = {key: run for key, run in variants.items() if key[1] == "even" and key[2] in (STATIC, MOVING)}
    _interleave(variants, pairs, warm_up=1)
    _interleave(further, FURTHER * pairs, warm_up=0)
    return realities


def _interleave(variants: Mapping[Any, Callable[[], float]], repeats: int, warm_up: int) -> None:
    started = time.monotonic()

    def progress(done: int) -> None:
        seconds = time.monotonic() - started
        print(f"{done} of {repeats} repeats of {len(variants)} rollouts, {seconds:.0f} s", flush=True)

    interleaved({" ".join(key): run for key, run in variants.items()}, repeats, warm_up, progress)


def compared(reality: Reality) -> dict[str, Any]:
    """Figures of one scenario."""
    judged = reality.judged
    return {
        "law": reality.law,
        "start": reality.start,
        "outcomes": {name: [asdict(outcome) for outcome in found] for name, found in judged.items()},
        "rollout": {name: asdict(_over(judged, STATIC, name, "rollout")) for name in MECHANISMS[1:]},
        "total": {name: asdict(_over(judged, STATIC, name, "total")) for name in MECHANISMS[1:]},
        "vs_queue": asdict(_over(judged, QUEUE, MOVING, "rollout")),
        "fusion": asdict(_over(judged, MOVING, FUSED, "total")),
        "scoring_share": statistics.median(1 - one.rollout / one.total for one in judged[MOVING]),
        "fused_share": statistics.median(
            one.tail.fused_seconds / max(one.score_seconds, 1e-9) for one in judged[FUSED]
        ),
    }


def _over(found: dict[str, list[Outcome]], baseline: str, mechanism: str, what: str) -> Interval:
    """Of the repeats that both were measured in: the first ones."""
    pairs = list(zip(found[baseline], found[mechanism], strict=False))
    return ratio_interval(*([getattr(one, what) for one in column] for column in zip(*pairs, strict=True)))


def run(model: str, pairs: int, rounds: int, long: int) -> dict[str, Any]:
    """All figures."""
    started = time.monotonic()
    target = load_target(words_target(model))
    prompts = [prompt[-PROMPT:] for prompt in word_prompts(64, target.tokenizer, "eval")]
    eos, found = target.tokenizer.eos_token_id, []
    positions = max(LONGEST, long)
    with Fleet(target, positions, PROMPT) as fleet:
        realities = measure(fleet, pairs, prompts, eos)
        for one in realities:
            found.append(compared(one))
            print_scenario(found[-1])
        peer, _ = fleet.engines.call("join_migration", 1.0, phase="join migration")
        migrations = described(measure_migrations(fleet, _long(target, prompts, 4, long), rounds))
        rates = source_rate(fleet, _long(target, prompts, 6, long), steps=60, repeats=pairs)
    first, *others = realities
    rate = statistics.median(rates)
    curves = curves_of(first.recorder, PROMPT + positions, peer.copy_seconds, rate)
    predictions = []
    for one in others:
        predictions.append({"law": one.law, "start": one.start} | as_predicted(curves, one))
    return {
        "scenarios": found,
        "migrations": migrations,
        "source_rate": rates,
        "simulated": {
            "calibrated_on": [first.law, first.start],
            "curves": curves.as_json(),
            "predictions": predictions,
        },
        "conditions": {
            "model": model,
            "pairs": pairs,
            "pairs_from_even_starts": (1 + FURTHER) * pairs,
            "samples": SAMPLES,
            "reallocation": asdict(SHIPPED),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "longest_migrated": long,
            "seconds": time.monotonic() - started,
        },
    }


def as_predicted(curves: CostCurves, reality: Reality) -> dict[str, Any]:
    """Simulated over real seconds, by mechanism; printed too."""
    workloads = [workload_of(requests, LONGEST) for requests in reality.samples]
    predictions = predict(curves, workloads, reality.judged)
    print_predictions(reality.law, reality.start, predictions)
    return {"ratios": {name: {k: asdict(v) for k, v in found.items()} for name, found in predictions.items()}}


def _long(target: Target, prompts: list[tuple[int, ...]], count: int, tokens: int) -> list[GenerationRequest]:
    eos = target.tokenizer.eos_token_id
    return [
        GenerationRequest(f"long.{i}", f"long.{i}", prompts[i], 7 + i, tokens, stop_tokens=(eos,), ignore_stop=True)
        for i in range(count)
    ]


def print_scenario(found: dict[str, Any]) -> None:
    """One line per mechanism: seconds, and how much quicker than static."""
    print(f"{found['law']} lengths, {found['start']} start", flush=True)
    for name in MECHANISMS:
        outcomes = found["outcomes"][name]
        rollout, total = (statistics.median(one[what] for one in outcomes) for what in ("rollout", "total"))
        moved = statistics.median(one["tail"]["migrations"] for one in outcomes)
        line = f"  {name:<22} rollout {rollout:6.2f} s  with scoring {total:6.2f} s  moved {moved:4.0f}"
        if name != STATIC:
            line += f"  static is {Interval(**found['rollout'][name])} / {Interval(**found['total'][name])} of it"
        print(line, flush=True)


def summarize(found: dict[str, Any]) -> dict[str, float]:
    """Headline figures; geometric means over the laws, but of even starts the worse law."""
    by = {(entry["law"], entry["start"]): entry for entry in found["scenarios"]}

    def mean(start: str, *keys: str) -> float:
        values = []
        for law in SCALES:
            value: Any = by[law, start]
            for key in keys:
                value = value[key]
            values.append(value["value"])
        return statistics.geometric_mean(values)

    summary = {
        "skewed_vs_static": mean("skewed", "rollout", MOVING),
        "even_vs_static": min(by[law, "even"]["rollout"][MOVING]["value"] for law in SCALES),
        "even_vs_static_low": min(by[law, "even"]["rollout"][MOVING]["low"] for law in SCALES),
        "vs_queue": statistics.geometric_mean([mean(start, "vs_queue") for start in STARTS]),
        "fusion_gain": statistics.geometric_mean([mean(start, "fusion") for start in STARTS]),
        "scoring_share": statistics.mean(entry["scoring_share"] for entry in found["scenarios"]),
        "fused_share": statistics.mean(entry["fused_share"] for entry in found["scenarios"]),
        "downtime_steps_median": found["migrations"]["downtime_steps_median"],
        "delta_bytes_share": found["migrations"]["delta_bytes_share"],
        "source_rate_during_copy": statistics.median(found["source_rate"]),
        "simulated_error_worst": worst_error([one["ratios"] for one in found["simulated"]["predictions"]]),
    }
    return {name: round(float(value), 4) for name, value in summary.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model and few repeats")
    parser.add_argument("--pairs", type=int, help="repeats of every mechanism; 15, or 3 for --quick")
    parser.add_argument("--out", type=Path, help="JSON with all figures")
    arguments = parser.parse_args()
    model, pairs = ("tiny", 3) if arguments.quick else ("small", 15)
    long = 800 if arguments.quick else 1900
    found = run(model, arguments.pairs or pairs, rounds=8 if arguments.quick else 40, long=long)
    summary = summarize(found)
    out = arguments.out or RESULTS / f"rollout{'_quick' if arguments.quick else ''}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found | {"summary": summary}) + "\n", encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
