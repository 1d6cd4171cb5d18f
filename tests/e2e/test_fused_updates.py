"""PPO whose actor and critic train in one pass: the same result as one after the other, whatever dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.chaos import differences
from tests.e2e.conftest import small_run, train
from tests.e2e.test_supervision import killed_stopped_and_resumed
from tools import pipeline

FUSED = (
    "algorithm=ppo",
    "actor.tensor_parallel=1",
    "actor.pipeline_parallel=2",
    "algorithm.ppo_epochs=2",
    "trainer.mini_batch_size=3",
    "trainer.max_tokens_per_microbatch=64",
    "trainer.steps=5",
    "trainer.checkpoint_every=2",
    "trainer.deterministic=true",
)


@pytest.fixture(scope="module")
def fused(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("fused")
    result = train(*small_run(model, output, "fused", *FUSED, "placement.fuse=always"))
    assert result.returncode == 0, result.stderr
    return output / "fused"


def test_one_pass_gives_what_one_after_the_other_gives(fused: Path, model: Path, tmp_path: Path) -> None:
    result = train(*small_run(model, tmp_path, "apart", *FUSED, "placement.fuse=off", "critic.pipeline_parallel=2"))
    assert result.returncode == 0, result.stderr
    rows = {
        directory: [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        for directory in (fused, tmp_path / "apart")
    }
    shares = [[row["perf/fused_updates"] for row in found if "perf/fused_updates" in row] for found in rows.values()]
    assert shares == [[1.0] * 5, []]
    for name in ("model", "critic"):
        one, other = (load_file(directory / name / "model.safetensors") for directory in rows)
        assert one.keys() == other.keys()
        assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-5
    for first, second in zip(*rows.values(), strict=True):
        assert first.get("rollout/reward_mean") == second.get("rollout/reward_mean")
        assert first.get("critic/loss", 0.0) == pytest.approx(second.get("critic/loss", 0.0), abs=1e-5)


def test_the_tool_draws_what_ran(fused: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "chart.png"
    assert pipeline.main(["--run", str(fused), "--seconds", "0.2", "--json", "--out", str(chart)]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {event.get("name") for event in json.loads((fused / "timeline.json").read_text())}
    assert {"actor forward", "actor backward", "critic forward", "critic backward"} <= names
    assert [len(tasks) for tasks in found["schedule"]] == [len(found["schedule"][0])] * 2
    assert 0 < found["lower_bound"] <= found["makespan"] <= found["serial"]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_the_same_bits_after_a_death_and_after_a_stop(fused: Path, model: Path, tmp_path: Path) -> None:
    directory = killed_stopped_and_resumed(model, tmp_path, *FUSED, "placement.fuse=always", done=2, until=4)
    assert differences(fused, directory) == []
