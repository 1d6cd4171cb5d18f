"""Whole runs to which something happens: deaths, a hang, signals. Deterministic runs must end with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.chaos import differences, process_of, steps_done
from tests.e2e.conftest import left_behind, marked, small_run, start, train
from tools.status import status

STEPS = 6
DETERMINISTIC = (f"trainer.steps={STEPS}", "trainer.checkpoint_every=2", "trainer.deterministic=true")


class Disturbed:
    """A run that is waited for until so many steps are done, and then disturbed."""

    def __init__(self, model: Path, output: Path, *options: str, done: int = 1) -> None:
        self.directory, self.mark = output / "disturbed", f"{output}-disturbed"
        self.process = start(*small_run(model, output, "disturbed", *options), mark=self.mark)
        while steps_done(self.directory) < done and self.process.poll() is None:
            time.sleep(0.02)

    def worker(self, name: str) -> psutil.Process:
        found = process_of(self.process.pid, name)
        assert found is not None, f"{name} does not run"
        return found

    def end(self, seconds: float = 120.0) -> str:
        """Standard output and error; nothing of the run may be left."""
        output, errors = self.process.communicate(timeout=seconds)
        assert "Traceback" not in errors, errors
        assert left_behind(self.mark) == []
        return output + errors


def killed_stopped_and_resumed(model: Path, output: Path, *options: str, done: int, until: int) -> Path:
    """A run whose actor loses rank 1 after `done` steps, that is stopped after `until`, and goes on to its end."""
    run = Disturbed(model, output, *options, done=done)
    run.worker("actor-1").kill()
    while steps_done(run.directory) < until and run.process.poll() is None:
        time.sleep(0.02)
    run.process.send_signal(signal.SIGTERM)
    said = run.end()
    assert run.process.returncode in (0, 75), said
    assert "actor rank 1 died" in said
    resumed = train(*small_run(model, output, "disturbed", *options, "trainer.resume=true"))
    assert resumed.returncode in (0, 2), resumed.stderr  # 2: it had finished before the signal came
    return run.directory


@pytest.fixture(scope="module")
def quiet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quiet")
    result = train(*small_run(model, output, "quiet", *DETERMINISTIC))
    assert result.returncode == 0, result.stderr
    return output / "quiet"


@pytest.fixture
def disturb(model: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[subprocess.Popen[str]] = []

    def begin(*options: str, done: int = 1) -> Disturbed:
        run = Disturbed(model, tmp_path, *options, done=done)
        runs.append(run.process)
        return run

    yield begin
    for process in runs:
        process.kill()
        process.wait()


def test_a_dead_rank_restarts_the_actor_from_the_last_checkpoint(disturb: Any, quiet: Path) -> None:
    run = disturb(*DETERMINISTIC, "trainer.checkpoint_every=3", done=4)  # it goes on at a step without an evaluation
    run.worker("actor-1").kill()
    said = run.end()
    assert run.process.returncode == 0, said
    assert "actor rank 1 died with exit status -9" in said and "started anew from the last checkpoint" in said
    assert differences(quiet, run.directory) == []


def test_a_dead_engine_is_replaced_and_no_sample_is_lost(disturb: Any) -> None:
    run = disturb("trainer.steps=8", "logger.console=false")
    run.worker("engine-0").kill()
    said = run.end()
    assert run.process.returncode == 0, said
    assert "engine rank 0 died with exit status -9" in said and "Another is starting" in said
    samples = [json.loads(line) for line in (run.directory / "rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == len({sample["sample_id"] for sample in samples}) == 8 * 3 * 2
    assert {sample["state"] for sample in samples} == {"trained"}


def test_a_dead_replica_of_the_reference_is_replaced_as_a_whole(disturb: Any) -> None:
    run = disturb("trainer.steps=8", "logger.console=false", "placement.reference_tensor_parallel=2")
    run.worker("reference-0").kill()
    said = run.end()
    assert run.process.returncode == 0, said
    assert "reference rank 0 died with exit status -9" in said and "Another is starting" in said
    samples = [json.loads(line) for line in (run.directory / "rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == 8 * 3 * 2
    assert all(len(sample["reference_logprobs"]) == len(sample["response_tokens"]) for sample in samples)


def test_engines_come_back_in_the_middle_of_a_rollout_when_all_have_died(disturb: Any, quiet: Path) -> None:
    run = disturb(*DETERMINISTIC, done=2)
    for name in ("engine-0", "engine-1"):
        run.worker(name).kill()
    said = run.end()
    assert run.process.returncode == 0, said
    assert differences(quiet, run.directory, engine_died=True) == []


def test_a_rank_that_dies_too_often_ends_the_run_with_a_sentence(disturb: Any) -> None:
    run = disturb("trainer.steps=1000", "launcher.max_restarts=0")
    run.worker("actor-0").kill()
    said = run.end()
    assert run.process.returncode == 1
    assert "actor rank 0 died" in said and "restarted launcher.max_restarts=0 times" in said


def test_a_stopped_rank_ends_the_run_with_phase_rank_and_stacks(disturb: Any) -> None:
    run = disturb("trainer.steps=1000", "launcher.heartbeat_timeout=5", "launcher.call_timeout=60")
    begin = time.monotonic()
    run.worker("actor-1").send_signal(signal.SIGSTOP)
    said = run.end(60.0)
    assert time.monotonic() - begin < 60.0, "the configured deadline"
    assert run.process.returncode == 1
    assert "In phase '" in said and "no sign of life from actor rank 1" in said
    report = (run.directory / "logs" / "stacks-1.txt").read_text()
    for who in ("actor rank 0", "actor rank 1", "engine rank 0", "engine rank 1", "driver"):
        assert f"== {who}" in report
    assert "no stacks" not in report


def test_sigterm_finishes_the_step_and_the_run_can_be_resumed(
    disturb: Any, quiet: Path, model: Path, tmp_path: Path
) -> None:
    run = disturb(*DETERMINISTIC, "logger.console=false", done=3)
    run.process.send_signal(signal.SIGTERM)
    said = run.end()
    assert run.process.returncode == 75
    assert "Stopped by SIGTERM after" in said and "trainer.resume=true" in said
    done = steps_done(run.directory)
    assert (run.directory / "checkpoints" / "latest").read_text().strip() == f"step_{done}"
    resumed = train(*small_run(model, tmp_path, "disturbed", *DETERMINISTIC, "trainer.resume=true"))
    assert resumed.returncode == 0, resumed.stderr
    assert differences(quiet, run.directory) == []


def test_the_same_signal_twice_stops_at_once(disturb: Any) -> None:
    # Slow steps of many samples: the first signal's step is not over when the second comes. Nor does the first come
    # before a step has begun, between two of which a run stops at once.
    slow = "reward.function=tests.e2e.rewards.slow_evenness"
    run = disturb("trainer.steps=1000", "trainer.prompts_per_step=64", "logger.rollouts_per_step=1", slow)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    said = run.end(30.0)
    assert run.process.returncode == 128 + signal.SIGINT, said


def test_what_a_batch_system_sends_to_every_process_leaves_the_workers_alive(disturb: Any) -> None:
    """scancel and srun's time limit signal the whole job step, not the driver alone."""
    run = disturb("trainer.steps=1000", "logger.console=false")
    for number in marked(run.mark):
        if number != run.process.pid:
            for name in (signal.SIGTERM, signal.SIGUSR1):
                os.kill(number, name)
    before = steps_done(run.directory)
    while steps_done(run.directory) < before + 2 and run.process.poll() is None:
        time.sleep(0.05)
    assert run.process.poll() is None
    going = status(run.directory, time.time())
    assert going.state == "runs" and going.step >= before + 2 and going.steps == 1000
    assert going.phase in {*going.phases, "checkpoint"} and going.seconds_left
    run.process.send_signal(signal.SIGUSR1)
    assert "Stopped by SIGUSR1" in run.end()
    assert run.process.returncode == 75
    stopped = status(run.directory, time.time())
    assert stopped.state == "stopped" and stopped.checkpoint == steps_done(run.directory)
