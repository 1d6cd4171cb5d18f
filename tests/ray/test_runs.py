"""Whole runs with workers as Ray actors: the numbers of launcher=local, on this machine and on two Ray nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import small_run, train
from tests.ray.two_nodes import two_nodes

STEPS = ("trainer.steps=2", "trainer.deterministic=true", "trainer.export=false", "launcher.start_timeout=180")


def numbers(directory: Path) -> list[dict]:
    """Metrics of every step but times, and what is reckoned from them."""
    timed = re.compile("time$|timing_s/|second")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not timed.search(name)} for row in rows]


def samples(directory: Path) -> list[dict]:
    lines = (directory / "rollouts.jsonl").read_text().splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda sample: sample["sample_id"])


@pytest.fixture(scope="module")
def local(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    result = train(*small_run(model, output, "local", *STEPS))
    assert result.returncode == 0, result.stderr
    return output / "local"


def assert_the_same(run: Path, local: Path) -> None:
    assert numbers(run) == numbers(local)
    assert samples(run) == samples(local)


def test_an_own_instance_gives_the_run_of_local(local: Path, model: Path, tmp_path: Path) -> None:
    result = train(*small_run(model, tmp_path, "own", *STEPS, "launcher=ray"))
    assert result.returncode == 0, result.stderr
    assert "ray" not in (result.stdout + result.stderr).lower(), "Ray's own messages do not reach the console"
    assert_the_same(tmp_path / "own", local)


def test_two_nodes_and_the_object_store_give_the_run_of_local(local: Path, model: Path, tmp_path: Path) -> None:
    """Two devices with two workers of one CPU each: a node of two CPUs holds one device."""
    with two_nodes(cpus=2) as address:
        options = ("launcher=ray", f"launcher.address={address}", "resharding.transport=object_store")
        result = train(*small_run(model, tmp_path, "nodes", *STEPS, *options))
    assert result.returncode == 0, result.stderr
    assert_the_same(tmp_path / "nodes", local)


def test_a_cluster_that_does_not_answer_is_refused(model: Path, tmp_path: Path) -> None:
    refused = train(*small_run(model, tmp_path, "nowhere", "launcher=ray", "launcher.address=127.0.0.1:1"))
    assert refused.returncode == 2
    assert "No Ray cluster answers at 127.0.0.1:1" in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "nowhere").exists()
