"""Whole runs whose rewards fail: a function that raises now and then, and a service that goes away and comes back."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from rlhfspec_mega.reward.runner import RewardRunner
from tests.e2e.conftest import make_reward_model, scores_of, small_run, start, train
from tests.e2e.rewards import evenness
from tools.reward_server import RewardServer

EVENNESS = "tests.e2e.rewards.evenness"


@contextmanager
def service(port: int = 0) -> Iterator[RewardServer]:
    with RewardRunner(EVENNESS) as runner, RewardServer("127.0.0.1", port, runner) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_step(process: object, steps: Path, number: int) -> None:
    end = time.monotonic() + 150.0
    while not steps.exists() or len(steps.read_text().splitlines()) < number:
        assert time.monotonic() < end and process.poll() is None, "the run has ended, or does not come on"
        time.sleep(0.1)


def test_a_function_that_raises_on_every_tenth_sample(model: Path, tmp_path: Path) -> None:
    """24 samples of training and 3 x 5 held-out prompts: three samples fail, and are no part of any update."""
    function = "reward.function=tests.e2e.rewards.evenness_but_every_tenth"
    result = train(*small_run(model, tmp_path, "tenth", function, "trainer.deterministic=true"))
    assert result.returncode == 0, result.stderr
    run = tmp_path / "tenth"
    samples = lines(run / "rollouts.jsonl")
    states = Counter((sample["failure"], sample["state"]) for sample in samples)
    failed = states["exception", "dropped"]
    assert failed >= 2 and states == {("", "trained"): 24 - failed, ("exception", "dropped"): failed}
    assert sum(row.get("reward/failures_exception", 0) for row in lines(run / "metrics.jsonl")) == failed
    assert all(sample["advantage"] == 0.0 for sample in samples if sample["failure"])
    assert "ValueError: call" in (run / "reward_failure.txt").read_text()


def test_too_many_failures_end_the_run_with_the_first_trace_in_a_file(model: Path, tmp_path: Path) -> None:
    function = "reward.function=tests.e2e.rewards.evenness_but_every_tenth"
    result = train(*small_run(model, tmp_path, "many", function, "reward.max_failures=0"))
    assert result.returncode == 2
    assert "reward.max_failures=0 of a step failed" in result.stderr and "Traceback" not in result.stderr
    assert "raise ValueError" in (tmp_path / "many/reward_failure.txt").read_text()


def test_a_service_that_goes_away_for_a_while_and_for_good(model: Path, tmp_path: Path) -> None:
    """The run goes on when the service is back; when it stays away, the run saves and ends, and is resumed.

    A reward model scores on generation devices beside it.
    """
    reward_model = make_reward_model(tmp_path / "reward_model")
    with service() as server:
        port = server.server_port
        options = ("reward.remote.deadline=12", "reward.function=null", "trainer.steps=6", "trainer.eval_every=4")
        options += ("placement.reference=generation", f"reward.model.path={reward_model}", "reward.remote.weight=2")
        url = f"reward.remote.url=http://127.0.0.1:{port}/score"
        command = [one for one in small_run(model, tmp_path, "away", url, *options) if EVENNESS not in one]
        process = start(*command, mark=uuid4().hex)
        steps = tmp_path / "away/metrics.jsonl"
        wait_for_step(process, steps, 2)
    time.sleep(3.0)
    with service(port):
        wait_for_step(process, steps, 4)
    output, errors = process.communicate(timeout=150)
    assert process.returncode == 75
    assert "it is asked again for up to 12 s" in output + errors
    assert (
        "Stopped by a reward that does not come (The reward service" in errors
        and "trainer.resume=true goes on" in errors
    )
    with service(port):
        result = train(*command, "trainer.resume=true")
    assert result.returncode == 0, result.stderr
    samples = lines(tmp_path / "away/rollouts.jsonl")
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(6), 6)
    scores = scores_of(reward_model, samples)
    expected = [2 * evenness("", one["response"], "") + score for one, score in zip(samples, scores, strict=True)]
    assert [one["reward"] for one in samples] == pytest.approx(expected, abs=1e-4)
    assert '"score"' in (tmp_path / "away/timeline.json").read_text(), "the reward model scored on engines' devices"
