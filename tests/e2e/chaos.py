"""Kills a random process of a run at a random moment, again and again, and compares each end with a quiet run's.

    python -m tests.e2e.chaos --runs 20 --seed 0
    python -m tests.e2e.chaos --runs 10 --while-saving      the driver or an actor rank, while a checkpoint is written

Every run is deterministic (trainer.deterministic=true): metrics, samples and trained weights must be, bit for bit,
those of the run that nobody disturbed. A run whose driver died is resumed; so is one that ended before its first
step. The exit status is 0 only when nothing differs, nothing was lost and no other run ended.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4

import psutil
import torch
from safetensors.torch import load_file

from tests.clusters import worker_process
from tests.e2e.conftest import make_model, marked, small_run, start

PAIRED = ("speculation/paired_seconds", "speculation/paired_plain_seconds")
# What the clock says, not the algorithm; and timing_s/<phase>.
TIMED = ("time", "perf/generation_tokens_per_second", "speculation/speedup_vs_plain", *PAIRED)
RUN_SECONDS = 300.0
CHECKPOINT_EVERY = 3
SAVE_SECONDS = 0.1  # about as long as a checkpoint of the small model is being written


@dataclass
class Outcome:
    """A row of the table: the kill came `moment` seconds after `done` steps were done (0: after the workers' start)."""

    run: int
    victim: str
    done: int
    moment: float
    ended: str
    resumed: int
    verdict: str


def timeless(directory: Path) -> list[dict]:
    """The lines of metrics.jsonl without what the clock says."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMED and not k.startswith("timing_s/")} for row in rows]


def differences(expected: Path, found: Path, engine_died: bool = False) -> list[str]:
    """What of a run's results is not, bit for bit, what it should be.

    Args:
        engine_died: in one step; what the engine has counted of its draft tokens since the last one is lost with it.
    """
    wrong, rows = [], [timeless(expected), timeless(found)]
    other = [number for number, (one, two) in enumerate(zip(*rows, strict=False)) if one != two]
    if engine_died and len(other) == 1:
        rows = [[{k: v for k, v in row.items() if not k.startswith("speculation/")} for row in side] for side in rows]
    if rows[0] != rows[1]:
        wrong.append("metrics")
    samples = [(directory / "rollouts.jsonl").read_text().splitlines() for directory in (expected, found)]
    ids = [json.loads(line)["sample_id"] for line in samples[1]]
    if len(ids) != len(set(ids)) or len(ids) != len(samples[0]):
        wrong.append(f"{len(ids)} samples, {len(set(ids))} distinct, instead of {len(samples[0])}")
    elif samples[0] != samples[1]:
        wrong.append("samples")
    weights = [load_file(directory / "model" / "model.safetensors") for directory in (expected, found)]
    if any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0]):
        wrong.append("weights")
    return wrong


def process_of(driver: int, victim: str) -> psutil.Process | None:
    """The driver, or this worker of it."""
    if victim == "driver":
        return psutil.Process(driver)
    return worker_process(victim, driver)


def steps_done(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


class Chaos:
    """Runs of one small model in one directory."""

    def __init__(self, root: Path, steps: int, options: Sequence[str]) -> None:
        self._root, self._steps = root, steps
        self._model = make_model(root / "model")
        self._options = [
            f"trainer.steps={steps}",
            f"trainer.checkpoint_every={CHECKPOINT_EVERY}",
            "trainer.deterministic=true",
            "logger.console=false",
            *options,
        ]
        self.quiet = root / "quiet"
        self._seconds: list[float] = []  # by steps done: how long a run stays in this state

    def run_quietly(self) -> None:
        """The reference; also how long a run takes from its workers' start to the first step, for each step, and
        from the last one to the end."""
        process = self._start("quiet")
        self._wait_for_workers("quiet", process)
        for done in range(self._steps + 1):
            begin = time.monotonic()
            while steps_done(self.quiet) <= done and process.poll() is None:
                time.sleep(0.01)
            self._seconds.append(time.monotonic() - begin)
        errors = self._end(process)
        if process.returncode:
            raise SystemExit(f"The undisturbed run failed: {errors}")

    def _wait_for_workers(self, name: str, process: subprocess.Popen[str]) -> None:
        while not (self._root / name / "logs" / "actor-0.log").exists() and process.poll() is None:
            time.sleep(0.01)

    def disturb(self, number: int, chance: random.Random, while_saving: bool) -> Outcome:
        """One run with one kill; a moment at which the victim was gone already is drawn anew."""
        for attempt in count():
            name, done = f"run{number}.{attempt}", chance.randint(0, self._steps)
            if while_saving:
                done = CHECKPOINT_EVERY * chance.randint(1, (self._steps - 1) // CHECKPOINT_EVERY)
            moment = chance.random() * (SAVE_SECONDS if while_saving else self._seconds[done])
            process = self._start(name)
            self._wait_for_workers(name, process)
            workers = sorted(log.stem for log in (self._root / name / "logs").glob("*-*.log"))
            victim = chance.choice(["driver", *(w for w in workers if not while_saving or w.startswith("actor"))])
            begun = self._root / name / "checkpoints" / f"step_{done}.partial"
            while not (begun.exists() if while_saving else steps_done(self._root / name) >= done):
                if process.poll() is not None:
                    break
                time.sleep(0.001 if while_saving else 0.01)
            time.sleep(moment)
            target = process_of(process.pid, victim) if process.poll() is None else None
            if target is not None:
                target.send_signal(signal.SIGKILL)
                return Outcome(number, victim, done, round(moment, 2), *self._outcome(name, process, victim, done))
            self._end(process)
        raise AssertionError

    def _outcome(self, name: str, process: subprocess.Popen[str], victim: str, done: int) -> tuple[str, int, str]:
        """How the run ended, how often it was resumed, and the verdict.

        Only the driver's death may end a run, or any death before the first step: work has not begun, and a sentence
        says so.
        """
        errors, resumed = self._end(process), 0
        ended = f"status {process.returncode}"
        if "Traceback" in errors:
            return ended, resumed, f"TRACEBACK: {errors.strip()[-300:]}"
        if process.returncode and victim != "driver" and done:
            return ended, resumed, f"ENDED: {errors.strip()[-300:]}"
        if process.returncode:
            resumed = 1
            process = self._start(name, *(["trainer.resume=true"] if (self._root / name).exists() else []))
            errors = self._end(process)
            if process.returncode:
                return ended, resumed, f"NOT RESUMED: {errors.strip()[-300:]}"
        wrong = differences(self.quiet, self._root / name, victim.startswith("engine"))
        return ended, resumed, f"DIFFERS: {', '.join(wrong)}" if wrong else "same bits"

    def _start(self, name: str, *more: str) -> subprocess.Popen[str]:
        self._mark = uuid4().hex
        return start(*small_run(self._model, self._root, name, *self._options, *more), mark=self._mark)

    def _end(self, process: subprocess.Popen[str]) -> str:
        _, errors = process.communicate(timeout=RUN_SECONDS)
        end = time.monotonic() + 10.0
        while marked(self._mark) and time.monotonic() < end:
            time.sleep(0.1)
        if left := marked(self._mark):
            raise SystemExit(f"Processes {left} outlived their run.")
        return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--while-saving", action="store_true", help="kill while a checkpoint is being written")
    parser.add_argument("options", nargs="*", help="option=value for every run")
    arguments = parser.parse_intermixed_args()
    chance = random.Random(arguments.seed)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="chaos.") as root:
        chaos = Chaos(Path(root), arguments.steps, arguments.options)
        chaos.run_quietly()
        print(f"{'run':>3}  {'victim':9} {'steps':>5} {'seconds':>7}  {'ended':16} {'resumed':>7}  verdict")
        for number in range(arguments.runs):
            outcomes.append(chaos.disturb(number, chance, arguments.while_saving))
            run, victim, done, moment, ended, resumed, verdict = astuple(outcomes[-1])
            print(f"{run:>3}  {victim:9} {done:>5} {moment:>7}  {ended:16} {resumed:>7}  {verdict}", flush=True)
    good = sum(outcome.verdict == "same bits" for outcome in outcomes)
    print(f"seed {arguments.seed}: {good} of {len(outcomes)} runs ended with the bits of the undisturbed one")
    sys.exit(0 if good == len(outcomes) else 1)


if __name__ == "__main__":
    main()
