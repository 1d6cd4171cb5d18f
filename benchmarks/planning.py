"""How long a plan of the rollout takes: predictions, reallocation and consolidation, by the state of the engines."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.rollout_state import EngineState, MigrationCost, RolloutState, Throughput
from rlhfspec_mega.planning.tail import Consolidator, TailPolicy

LIMIT, GROUP, PROMPT_TOKENS = 8192, 8, 200
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CURVE = Throughput(BATCHES, tuple(0.01 * max(1.0, batch / 24) for batch in BATCHES))  # a knee at 24 samples
COST = MigrationCost(downtime=0.02, per_token=1e-6)
WORK_SECONDS = 10.0  # of inference tasks for each engine
STARTS = ("even", "by length", "half empty", "tail")


def rollout(start: str, engines: int, per_engine: int, seed: int) -> RolloutState:
    """Samples of lognormal lengths: spread evenly, long ones together, on every other engine, or the last tenth."""
    generator = np.random.default_rng(seed)
    count = engines * per_engine
    level = np.repeat(generator.normal(0.0, 0.7, -(-count // GROUP)), GROUP)[:count]
    remaining = np.clip(np.exp(6.0 + level + generator.normal(0.0, 0.7, count)), 1.0, LIMIT)
    at = np.repeat(np.arange(engines), per_engine)
    if start == "by length":
        remaining = np.sort(remaining)
    elif start == "half empty":
        at = at // 2 * 2
    kept = remaining > (np.quantile(remaining, 0.9) if start == "tail" else 0.0)
    generated = generator.integers(1, LIMIT // 4, count)
    states = tuple(EngineState(rank, 2 * per_engine, 4 * LIMIT * per_engine, CURVE) for rank in range(engines))
    return RolloutState(
        now=0.0,
        engines=states,
        ids=tuple(str(i) for i in np.flatnonzero(kept)),
        at=at[kept],
        groups=(np.arange(count) // GROUP)[kept],
        generated=generated[kept],
        lengths=generated[kept] + PROMPT_TOKENS,
        remaining=remaining[kept],
        movable=np.ones(int(kept.sum()), np.bool_),
    )


def milliseconds(call: Callable[[], object], before: Callable[[], None], repeats: int) -> float:
    """Median of so many repeats, each after `before`, which is not counted."""
    times = []
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def measure(start: str, engines: int, per_engine: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one prediction and of one plan from scratch, and the moves in it."""
    state = rollout(start, engines, per_engine, seed=0)
    predictor = LengthPredictor(LIMIT)
    predictor.begin([str(group) for group in range(int(state.groups.max()) + 1)])
    policy = TailPolicy(Reallocator(COST), Consolidator(COST), lambda: WORK_SECONDS * engines)
    policy.begin()
    plan = policy.plan(state)
    return {
        "samples": len(state.ids),
        "predict_ms": milliseconds(lambda: predictor.predict(state.groups, state.generated), lambda: None, repeats),
        "plan_ms": milliseconds(lambda: policy.plan(state), policy.begin, repeats),
        "moves": len(plan.moves),
        "freed": len(plan.freed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--samples-per-engine", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    for name in ("engines", "samples_per_engine", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more.")
    found = {s: measure(s, options.engines, options.samples_per_engine, options.repeats) for s in STARTS}
    print(f"{options.engines} engines, {options.samples_per_engine} samples each; medians of {options.repeats}")
    print(f"{'start':<12}{'samples':>8}{'predict ms':>12}{'plan ms':>9}{'moves':>7}{'freed':>7}")
    for start, row in found.items():
        print(
            f"{start:<12}{row['samples']:>8}{row['predict_ms']:>12.2f}{row['plan_ms']:>9.2f}{row['moves']:>7}"
            f"{row['freed']:>7}"
        )
    print(json.dumps({"engines": options.engines, "samples_per_engine": options.samples_per_engine, "starts": found}))


if __name__ == "__main__":
    main()
