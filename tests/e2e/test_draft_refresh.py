"""A run that keeps its draft fresh: it is refreshed, sent and saved, and comes back with the same bits."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhfspec_mega.draft.directory import load_draft, write_draft
from rlhfspec_mega.draft.distillation import initial_draft
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights
from tests.e2e.chaos import differences, process_of, timeless
from tests.e2e.conftest import SHAPE, left_behind, small_run, start, train

STEPS = 4


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, shape = tmp_path_factory.mktemp("draft") / "random", draft_shape(SHAPE)
    write_draft(directory, shape, initial_draft(shape, HfWeights(model).get("model.embed_tokens.weight"), seed=5))
    return directory


DETERMINISTIC = (
    *("actor.tensor_parallel=1", "actor.pipeline_parallel=2", "rollout.engines=1", "trainer.prompts_per_step=4"),
    *("trainer.deterministic=true", "trainer.checkpoint_every=1", f"trainer.keep_checkpoints={STEPS}"),
)


def options(model: Path, draft: Path, output: Path, name: str, *more: str) -> list[str]:
    """A refresh after every step; eight samples a step, those of one prompt or more held out."""
    drafting = (
        "speculation=adaptive",
        f"speculation.draft_model_path={draft}",
        "speculation.refresh_every=1",
        "speculation.refresh_steps=6",
    )
    return small_run(model, output, name, *DETERMINISTIC, *drafting, *more)


def saved_draft(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step}" / "actor" / "draft.safetensors")


@pytest.fixture(scope="module")
def whole(model: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    result = train(*options(model, draft, output, "whole"))
    assert result.returncode == 0, result.stderr
    return output / "whole"


def test_a_draft_is_kept_exactly_when_it_got_better(whole: Path, draft: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/loss" in row]
    assert len(steps) == STEPS and all(row["timing_s/draft"] > 0 for row in steps)
    better = [row["draft/expected_length_after"] > row["draft/expected_length_before"] for row in steps]
    assert any(better) and [bool(row["draft/refresh_kept"]) for row in steps] == better
    name = "midlayer.self_attn.q_proj.weight"
    weights = [load_file(draft / "model.safetensors")[name]]
    weights += [saved_draft(whole, step + 1)[f"weight.{name}"] for step in range(STEPS)]
    assert [not torch.equal(old, new) for old, new in pairwise(weights)] == better


def test_the_last_draft_is_exported_as_a_directory_of_its_own(whole: Path) -> None:
    """Beside the model it was made for, so that speculation.draft_model_path takes it in another run."""
    shape, exported = load_draft(whole / "draft", read_shape(whole / "model"))
    assert shape == draft_shape(SHAPE)
    saved = saved_draft(whole, STEPS)
    assert all(torch.equal(tensor, saved[f"weight.{name}"]) for name, tensor in exported.items())


def test_training_is_that_of_plain_decoding(whole: Path, model: Path, tmp_path: Path) -> None:
    """Every figure of training, to the last bit; of the engines' own log-probs only the tokens they belong to."""
    result = train(*small_run(model, tmp_path, "plain", *DETERMINISTIC, "speculation=off"))
    assert result.returncode == 0, result.stderr
    plain = timeless(tmp_path / "plain")
    engines_own = ("rollout/logprob_diff_mean", "rollout/logprob_diff_max")
    assert len(plain) > STEPS
    for drafted, row in zip(timeless(whole), plain, strict=True):
        compared = row.keys() - set(engines_own)
        assert {name: drafted[name] for name in compared} == {name: row[name] for name in compared}
    tokens = [
        [json.loads(line)["response_tokens"] for line in (run / "rollouts.jsonl").read_text().splitlines()]
        for run in (whole, tmp_path / "plain")
    ]
    assert tokens[0] == tokens[1] and tokens[0]


def test_a_device_without_engines_refreshes_while_others_generate(model: Path, draft: Path, tmp_path: Path) -> None:
    """The actor on a device of its own; steps without a refresh in the rollout have one afterwards."""
    separate = ("placement=separate", "cluster.devices_per_node=3", "actor.tensor_parallel=1", "rollout.engines=2")
    drafting = (
        f"speculation.draft_model_path={draft}",
        "speculation.refresh_every=1",
        "speculation.refresh_seconds=0.02",  # it begins if half of that is left
        "rollout.max_running_requests=1",  # so that a rollout lasts many times as long
        "trainer.samples_per_prompt=12",
        "algorithm.kl_coef=0",  # finished samples would be scored first
    )
    result = train(*small_run(model, tmp_path, "fused", *separate, *drafting, "rollout.max_new_tokens=80"))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "fused" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/loss" in row]
    fused = [row["draft/fused_refresh_seconds"] for row in steps]
    assert len(steps) == STEPS and fused[0] == 0.0 and sum(fused) > 0.0
    summary = json.loads((tmp_path / "fused" / "summary.json").read_text())
    assert summary["fused_refresh_seconds"] == pytest.approx(sum(fused))
    assert "the draft was refreshed for" in " ".join(result.stdout.split())
    for row in steps:
        better = row["draft/expected_length_after"] > row["draft/expected_length_before"]
        assert row["draft/refresh_kept"] == float(better)


def test_a_stopped_and_disturbed_run_has_the_same_draft_bit_for_bit(
    whole: Path, model: Path, draft: Path, tmp_path: Path
) -> None:
    """Stopped after one step, resumed, and the rank that has the draft killed after the second."""
    first = train(*options(model, draft, tmp_path, "cut", "trainer.steps=1"))
    assert first.returncode == 0, first.stderr
    cut, mark = tmp_path / "cut", f"{tmp_path}"
    run = start(*options(model, draft, tmp_path, "cut", "trainer.resume=true"), mark=mark)
    while not (cut / "checkpoints" / "step_2").exists() and run.poll() is None:
        time.sleep(0.02)
    owner = process_of(run.pid, "actor-1")
    assert owner is not None
    owner.kill()
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    assert "started anew from the last checkpoint" in output + errors and left_behind(mark) == []
    assert [wrong for wrong in differences(whole, cut) if wrong != "metrics"] == []
    assert timeless(whole) == timeless(cut)
    last, wanted = saved_draft(cut, STEPS), saved_draft(whole, STEPS)
    assert last.keys() == wanted.keys() and all(torch.equal(tensor, wanted[key]) for key, tensor in last.items())
