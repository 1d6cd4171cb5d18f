"""What supervision costs a step of the demo: the ledger, progress reports of engines, looks at workers, heartbeats.

    python -m benchmarks.supervision --pairs 20

One run of the demo's sizes; the same step (same prompts, seeds and, with a learning rate of 1e-30, weights) is repeated
with and without reports and looks, in alternating order. Ratios are noisy on small machines, so the time spent in
ledger, looks and reports is also measured directly (direct_share, of a supervised step). The ledger cannot be switched
off, as it says which engine has which sample, nor can heartbeats: their share is the CPU time of the beating threads
over the time that has passed. Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.rollout.migration.messages import MigrationOrders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.run import Run
from rlhfspec_mega.startup import started
from rlhfspec_mega.system import system
from rlhfspec_mega.trainer import train_step
from rlhfspec_mega.types import EngineReport
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker

VARIANTS = ("supervised", "bare")


class SwitchedEngine(TorchEngineWorker):
    """An engine whose progress reports can be switched off."""

    reports = True

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._clock = Timed()
        self.engine.progress = self._clock.timed(self.engine.progress)  # type: ignore[method-assign]

    def report_seconds(self) -> float:
        """Spent on reports so far."""
        return self._clock.spent

    def switch_reports(self, on: bool) -> None:
        self.reports = on

    def advance(
        self,
        samples: Sequence[SampleSnapshot],
        seconds: float,
        orders: MigrationOrders | None = None,
        forget: bool = False,
        others_wait: bool = False,
    ) -> EngineReport:
        if self.reports:
            return super().advance(samples, seconds, orders, forget, others_wait)
        self.engine.submit([sample.request for sample in samples])
        finished, load = self.engine.poll(seconds), self.engine.load()
        return EngineReport(finished, [], load.running + load.waiting)

    def beat_seconds(self) -> float:
        """CPU seconds of the heartbeat's thread so far."""
        beat = next(thread for thread in threading.enumerate() if thread.name == "beat")
        fields = Path(f"/proc/self/task/{beat.native_id}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Timed:
    """Times methods together; `spent` in seconds."""

    def __init__(self) -> None:
        self.spent = 0.0

    def time(self, part: Any) -> None:
        """Time its public methods from now on."""
        for name in dir(type(part)):
            if not name.startswith("_") and callable(getattr(type(part), name)):
                setattr(part, name, self.timed(getattr(part, name)))

    def timed(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.perf_counter() - start

        return call


class Switch:
    """Turns one run's supervision on and off."""

    def __init__(self, run: Run) -> None:
        self._run, self._clock = run, Timed()
        self._engines, self._cluster = run.system._engines, run.system._cluster
        self._clock.time(run.ledger)
        self._watch = self._clock.timed(self._cluster._watch)

    def spent(self) -> float:
        """Seconds that ledger, looks and (of the slowest engine) reports took so far."""
        return self._clock.spent + max(self._engines.call("report_seconds", phase="benchmark"))

    def set(self, variant: str) -> None:
        on = variant == "supervised"
        self._engines.call("switch_reports", on, phase="benchmark")
        self._cluster._watch = self._watch if on else lambda *_, **__: None  # type: ignore[method-assign]
        self._run.prompts.load_state_dict(self._run.beginning["prompts"])
        self._run.ledger.load_state_dict(self._run.beginning["ledger"])
        self._clock.time(self._run.ledger.custody)  # a new one


def measure(pairs: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Seconds of every step by variant, in order, and the share of heartbeats."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    cpu: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="benchmark.") as output:
        own = [f"output_dir={output}", "actor.optimizer.lr=1e-30", "logger.console=false", "seed=0"]
        config = load_config([*own, "reallocation=off", *overrides])
        system.engine_specs = _switched_specs(system.engine_specs)
        (Path(output) / config.name).mkdir()
        with started(config) as run:
            run.system.reshard(0)
            switch, begin = Switch(run), 0.0
            for pair in range(-1, pairs):  # the first is to warm up
                if pair == 0:
                    begin, beats = time.monotonic(), _beats(run)
                for variant in VARIANTS if pair % 2 else reversed(VARIANTS):
                    switch.set(variant)
                    start, used = time.monotonic(), _cpu_seconds()
                    train_step(run, 0)
                    if pair >= 0:
                        seconds[variant].append(time.monotonic() - start)
                        cpu[variant].append(_cpu_seconds() - used)
            share = (_beats(run) - beats) / (time.monotonic() - begin) / run.system._engines.size
            direct = switch.spent() / (pairs + 1) / statistics.median(seconds["supervised"])
    return {"seconds": seconds, "cpu_seconds": cpu, "heartbeat_share": share, "direct_share": direct}


def _cpu_seconds() -> float:
    """Of this process and its workers so far."""
    times = [process.cpu_times() for process in (psutil.Process(), *psutil.Process().children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _beats(run: Run) -> float:
    return sum(run.system._engines.call("beat_seconds", phase="benchmark"))


def _switched_specs(specs: Any) -> Any:
    def switched(*args: Any) -> list[WorkerSpec]:
        return [WorkerSpec("benchmarks.supervision.SwitchedEngine", s.arguments, s.devices) for s in specs(*args)]

    return switched


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Medians, the paired ratio with its quartiles, and the conditions."""
    on, off = (found["seconds"][variant] for variant in VARIANTS)
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    cpu = [a / b for a, b in zip(*(found["cpu_seconds"][variant] for variant in VARIANTS), strict=True)]
    cpu_low, cpu_middle, cpu_high = statistics.quantiles(cpu, n=4)
    return {
        "cpu_ratio_median": cpu_middle,
        "cpu_ratio_quartiles": [cpu_low, cpu_high],
        "supervised_seconds_median": statistics.median(on),
        "bare_seconds_median": statistics.median(off),
        "ratio_median": middle,
        "ratio_quartiles": [low, high],
        "ratio_of_medians": statistics.median(on) / statistics.median(off),
        "direct_share": found["direct_share"],
        "heartbeat_share": found["heartbeat_share"],
        "pairs": len(ratios),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the JSON here, with every single time")
    parser.add_argument("overrides", nargs="*", help="option=value, as for train.py")
    arguments = parser.parse_intermixed_args()
    found = measure(arguments.pairs, arguments.overrides)
    summary = summarize(found)
    print(f"{'pair':>4}  {'supervised s':>12}  {'bare s':>8}  {'ratio':>6}")
    for number, (on, off) in enumerate(zip(*(found["seconds"][variant] for variant in VARIANTS), strict=True)):
        print(f"{number:>4}  {on:>12.3f}  {off:>8.3f}  {on / off:>6.3f}")
    if arguments.out:
        arguments.out.write_text(json.dumps(summary | found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
