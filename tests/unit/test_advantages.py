"""Advantages against sums written out in Python floats, and the weights of tokens in the loss."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rl.advantages import degenerate, grpo, learning_samples, rloo
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.token_weights import token_weights

REWARDS = st.integers(2, 6).flatmap(
    lambda members: st.lists(
        st.lists(st.integers(-20, 20).map(lambda k: k / 10), min_size=members, max_size=members), min_size=1, max_size=5
    )
)


def advantages(rewards, truncated=None, kl=None, **options):
    """Through an algorithm: samples of one response token each, whose KL to the reference is given."""
    flat = torch.tensor(rewards, dtype=torch.float64).flatten().numpy()
    experience = Experience.of([[1]] * len(flat), [[2]] * len(flat))
    experience.per_sample["rewards"] = flat
    experience.per_sample["truncated"] = np.array(truncated or np.zeros(len(flat)), np.bool_).flatten()
    experience.columns["old_logprobs"] = np.array(kl or np.zeros(len(flat)), np.float32).flatten()
    experience.columns["reference_logprobs"] = np.zeros(len(flat), np.float32)
    algorithm = made(len(rewards[0]), kl_loss_type="k1", **options)
    algorithm.add_advantages(experience, torch.Generator().manual_seed(3))
    return torch.from_numpy(experience.columns["advantages"]).view(len(rewards), -1)


def made(members, **options):
    return make_algorithm(AlgorithmConfig(**options), members, samples_per_update=1)


@settings(max_examples=100, deadline=None)
@given(rewards=REWARDS)
def test_grpo_and_rloo_against_written_out_sums(rewards):
    for row, plain, normalized, leave_one_out in zip(
        rewards,
        *(
            made(len(rewards[0]), **options).advantages(torch.tensor(rewards, dtype=torch.float64)).tolist()
            for options in ({"norm_adv_by_std": False}, {}, {"adv_estimator": "rloo"})
        ),
        strict=True,
    ):
        mean = statistics.fmean(row)
        deviation = statistics.stdev(row)
        for i, reward in enumerate(row):
            others = row[:i] + row[i + 1 :]
            assert plain[i] == pytest.approx(reward - mean, abs=1e-12)
            assert normalized[i] == pytest.approx((reward - mean) / deviation if deviation > 1e-9 else 0.0, abs=1e-9)
            assert leave_one_out[i] == pytest.approx(reward - statistics.fmean(others), abs=1e-12)


def test_groups_without_signal_give_exactly_zero():
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.1, 0.4]])  # the mean of three 0.1 is not 0.1 in fp32
    assert degenerate(rewards).tolist() == [True, False]
    for result in (grpo(rewards, True), grpo(rewards, False), rloo(rewards)):
        assert not result[0].any() and result[1].all()
    assert not grpo(rewards[:, :1], True).any() and not rloo(rewards[:, :1]).any()


def test_overlong_samples_are_penalised_or_masked_by_choice():
    rewards, truncated = [[1.0, 0.0, 0.0, 1.0]], [[False, True, False, False]]
    plain = {"norm_adv_by_std": False}
    assert advantages(rewards, truncated, **plain).tolist() == [[0.5, -0.5, -0.5, 0.5]]
    penalised = advantages(rewards, truncated, overlong="penalize", overlong_penalty=2.0, **plain)
    assert penalised.tolist() == [[1.0, -2.0, 0.0, 1.0]]
    mask = torch.tensor(truncated)
    assert learning_samples(mask, AlgorithmConfig(overlong="mask")).tolist() == [[True, False, True, True]]
    assert learning_samples(mask, AlgorithmConfig(overlong="penalize")).all()


def test_kl_enters_the_reward_only_when_asked():
    rewards, kl = [[1.0, 0.0]], [[0.0, 3.0]]
    options = {"norm_adv_by_std": False, "kl_coef": 0.5}
    assert advantages(rewards, kl=kl, kl_in="reward", **options).tolist() == [[1.25, -1.25]]
    assert advantages(rewards, kl=kl, kl_in="loss", **options).tolist() == [[0.5, -0.5]]


def test_shuffle_keeps_the_values_and_breaks_their_places():
    rewards = torch.rand(8, 8).tolist()
    shuffled, plain = advantages(rewards, shuffle_advantages=True), advantages(rewards)
    assert torch.equal(shuffled.flatten().sort().values, plain.flatten().sort().values)
    assert (shuffled == plain).double().mean() < 0.2
    assert torch.equal(shuffled, advantages(rewards, shuffle_advantages=True))


def one_a_token(rewards):
    """An advantage of one's own: the reward spread over a sample's tokens, here two each."""
    return rewards.flatten().repeat_interleave(2) / 2


def three(rewards):
    return torch.ones(3)


def upside_down(logprobs, entropy, batch):
    return logprobs, {"surprise": -logprobs}


upside_down.metrics = ("surprise",)


class Recorder:
    """In place of the actor: what it was asked to learn from."""

    def __init__(self):
        self.asked = []

    def accumulate(self, samples, loss, metrics):
        self.asked.append((samples, loss, metrics))
        return {"loss": float(len(samples))}

    def step(self):
        return {"skipped_updates": 1.0}


def two_tokens_each(count):
    experience = Experience.of([[1]] * count, [[2, 3]] * count)
    experience.per_sample["rewards"] = np.arange(count, dtype=np.float64)
    experience.per_sample["truncated"] = np.array([index == 1 for index in range(count)])
    experience.columns["old_logprobs"] = np.full(2 * count, -1.0, np.float32)
    return experience


def test_an_advantage_and_a_loss_of_ones_own():
    experience, path = two_tokens_each(4), f"{__name__}.one_a_token"
    config = AlgorithmConfig(adv_estimator=path, loss=f"{__name__}.upside_down", overlong="mask", kl_coef=0.0)
    algorithm = make_algorithm(config, members=2, samples_per_update=3)
    assert algorithm.models == ("actor",)
    algorithm.add_advantages(experience, torch.Generator())
    spread = [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    assert experience.columns["advantages"].tolist() == spread
    actor = Recorder()
    metrics = algorithm.update(experience, {"actor": actor}, 0, torch.Generator())
    assert metrics == {"actor/loss": 2.0, "actor/skipped_updates": 2.0}
    batches = [samples for samples, *_ in actor.asked]
    assert [len(batch) for batch in batches] == [3, 1], "each sample once, in their order"
    assert np.concatenate([batch.columns["advantages"] for batch in batches]).tolist() == spread
    assert batches[0].columns["weights"].tolist() == [1, 1, 0, 0, 1, 1], "a masked sample has no weight"
    assert all((loss, names) == (upside_down, ("surprise",)) for _, loss, names in actor.asked)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"adv_estimator": "nowhere.at_all"},
            "algorithm.adv_estimator=nowhere.at_all cannot be imported: there is no module",
        ),
        ({"loss": f"{__name__}.nothing"}, "algorithm.loss=.* does not exist"),
        ({"loss": f"{__name__}.SAMPLES"}, "is not callable"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make_algorithm(AlgorithmConfig(**options), members=2, samples_per_update=1)


def test_advantages_of_another_number_are_refused():
    algorithm = make_algorithm(AlgorithmConfig(adv_estimator=f"{__name__}.three"), members=2, samples_per_update=1)
    with pytest.raises(RunError, match="gave 3 advantages for 4 samples of 8 response tokens"):
        algorithm.add_advantages(two_tokens_each(4), torch.Generator())


SAMPLES = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=20)


MODES = ["token-mean", "seq-mean-token-mean"]


@settings(max_examples=100, deadline=None)
@given(samples=SAMPLES, average=st.sampled_from(MODES), cuts=st.integers(1, 5), data=st.data())
def test_weighted_sum_is_the_average_however_it_is_cut(samples, average, cuts, data):
    lengths = torch.tensor([length for length, _ in samples])
    learning = torch.tensor([keep for _, keep in samples])
    losses = [[data.draw(st.integers(-50, 50)) / 10 for _ in range(length)] for length, _ in samples]
    used = [row for row, (_, keep) in zip(losses, samples, strict=True) if keep and row]
    if not used:
        expected = 0.0
    elif average == "token-mean":
        expected = statistics.fmean(value for row in used for value in row)
    else:
        expected = statistics.fmean(statistics.fmean(row) for row in used)
    weights, count = token_weights(lengths, learning, average)
    weighted = [float(weight) * sum(row) for weight, row in zip(weights, losses, strict=True)]
    assert sum(sum(weighted[first::cuts]) / count for first in range(cuts)) == pytest.approx(expected, abs=1e-9)
    assert float(weights @ lengths.double()) == pytest.approx(count if used else 0.0)
    assert not weights[~learning].any()


def test_unknown_average_is_refused():
    with pytest.raises(UserError, match="token-mean or seq-mean-token-mean"):
        token_weights(torch.tensor([1]), torch.tensor([True]), "group")
