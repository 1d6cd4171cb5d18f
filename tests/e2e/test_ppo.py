"""PPO in whole runs: an actor on TP 2 and a critic of another shape on PP 2, in the same two processes.

The critic starts from the reward model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.e2e.chaos import differences
from tests.e2e.conftest import make_reward_model, scores_of, small_run, train
from tests.e2e.rewards import evenness
from tests.e2e.test_supervision import killed_stopped_and_resumed

PPO = (
    "algorithm=ppo",
    "actor.tensor_parallel=2",
    "critic.tensor_parallel=1",
    "critic.pipeline_parallel=2",
    "algorithm.ppo_epochs=2",
    "trainer.mini_batch_size=3",
    "trainer.steps=6",
    "trainer.checkpoint_every=2",
    "trainer.deterministic=true",
)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    reward_model = make_reward_model(tmp_path_factory.mktemp("reward") / "model")
    return (*PPO, f"critic.path={reward_model}", f"reward.model.path={reward_model}", "reward.model.weight=0.5")


@pytest.fixture(scope="module")
def quiet(model: Path, options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("ppo")
    result = train(*small_run(model, output, "quiet", *options))
    assert result.returncode == 0, result.stderr
    return output / "quiet"


def test_actor_and_critic_learn(quiet: Path) -> None:
    rows = [json.loads(line) for line in (quiet / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "critic/loss" in row]
    assert len(steps) == 6 and all(row["critic/skipped_updates"] == row["actor/skipped_updates"] == 0 for row in steps)
    assert all(row["critic/grad_norm"] > 0 and row["timing_s/values"] > 0 for row in steps)
    assert all("critic/explained_variance" in row and row["actor/kl_coef"] == 0.01 for row in steps)
    summary = json.loads((quiet / "summary.json").read_text())
    assert summary["value_loss_last"] > 0 and "explained_variance_last" in summary
    held = {path.name for path in (quiet / "checkpoints" / "step_6").iterdir()}
    assert held == {"actor", "critic", "state.json", "manifest.json"}


def test_transformers_loads_the_trained_critic(quiet: Path, options: tuple[str, ...]) -> None:
    found, start = (
        transformers.AutoModelForSequenceClassification.from_pretrained(path)
        for path in (quiet / "critic", options[-3].partition("=")[2])
    )
    assert found.config.num_labels == 1 and found.config.pad_token_id == 256
    assert found.config.hidden_size == start.config.hidden_size
    trained = dict(found.named_parameters())
    assert all(not torch.equal(weight, trained[name]) for name, weight in start.named_parameters())


def test_a_reward_model_on_the_actors_ranks_is_part_of_the_reward(quiet: Path, options: tuple[str, ...]) -> None:
    samples = [json.loads(line) for line in (quiet / "rollouts.jsonl").read_text().splitlines()]
    scores = scores_of(Path(options[-2].partition("=")[2]), samples)
    expected = [evenness("", one["response"], "") + 0.5 * score for one, score in zip(samples, scores, strict=True)]
    assert [one["reward"] for one in samples] == pytest.approx(expected, abs=1e-4)
    rows = [json.loads(line) for line in (quiet / "metrics.jsonl").read_text().splitlines()]
    means = [row["reward/model_mean"] for row in rows if "reward/model_mean" in row]
    assert means == pytest.approx([sum(scores[i : i + 6]) / 6 for i in range(0, len(scores), 6)], abs=1e-4)


def test_the_same_bits_after_a_death_and_after_a_stop(
    quiet: Path, model: Path, options: tuple[str, ...], tmp_path: Path
) -> None:
    directory = killed_stopped_and_resumed(model, tmp_path, *options, done=3, until=5)
    assert differences(quiet, directory) == []


def test_another_critic_does_not_go_on_from_these_checkpoints(quiet: Path, model: Path, tmp_path: Path) -> None:
    result = train(*small_run(model, quiet.parent, "quiet", *PPO, "trainer.resume=true", "trainer.steps=7"))
    assert result.returncode == 2 and "critic" in result.stderr and "another model" in result.stderr, result.stderr
