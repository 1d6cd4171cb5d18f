"""The acceptance study's counting: steps against walks by hand, and its noise against the engine's own choices."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.samples import Target, sample
from benchmarks.tokens_per_step import CHAIN, DEPTHS, KEPT, SETTINGS, SHARED, TOP_K, Task, expected_steps, measure
from benchmarks.verification_rules import perturbed_scores
from rlhfspec_mega.draft.examples import collect_examples
from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.sampling.noise import gumbel

VOCAB, EOS = 24, 23
SHAPE = ModelShape("llama", 32, 3, 4, 2, 8, 48, VOCAB, 128, 500.0, 1e-5, True)


@pytest.fixture(scope="module")
def target() -> Target:
    model = Transformer(SHAPE, max_positions=128, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.hf_tensors().items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + ("norm" in name))
    return Target(Path("unused"), model, SimpleNamespace(eos_token_id=EOS))


def random_draft(target: Target) -> DraftModel:
    draft = DraftModel(draft_shape(SHAPE), target.model)
    generator = torch.Generator().manual_seed(2)
    for name, tensor in draft.tensors().items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + ("norm" in name))
    return draft


PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8), (9, 10), (2, 2, 2, 2), (11, 3), (1, 9, 9)]


def walked(accepts: Tensor) -> int:
    """Steps of a walk over [R, depth] zeros and ones."""
    steps = at = 0
    while at < len(accepts):
        at += int(accepts[at].cumprod(0).sum()) + 1
        steps += 1
    return steps


def test_steps_are_those_of_walking_from_step_to_step():
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 7, 40):
        accepts = (torch.rand(5, length, 4, generator=generator) < 0.7).double()
        assert expected_steps(accepts).tolist() == [walked(row) for row in accepts]


def test_expected_steps_are_the_mean_over_coins():
    generator = torch.Generator().manual_seed(0)
    odds = torch.rand(1, 12, 3, generator=generator, dtype=torch.float64)
    trials = [walked(torch.rand(12, 3, generator=generator) < odds[0]) for _ in range(4000)]
    spread = torch.tensor(trials, dtype=torch.float64).std() / len(trials) ** 0.5
    assert float(expected_steps(odds)[0]) == pytest.approx(sum(trials) / len(trials), abs=float(4 * spread))


def test_never_and_always_accepted():
    assert expected_steps(torch.zeros(1, 9, 4)).tolist() == [9.0]
    assert expected_steps(torch.ones(1, 9, 4)).tolist() == [2.0]  # 5 tokens, then 4
    assert expected_steps(torch.ones(1, 10, 4)).tolist() == [2.0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_noise_is_the_one_that_the_engine_chose_the_sequence_with(target: Target, temperature: float):
    """With the target's own logits for a draft, the best perturbed score is always the sequence's token."""
    samples = sample(target, PROMPTS, temperature=temperature, max_new_tokens=40, seed=3, forced=True)
    shape = draft_shape(SHAPE)
    examples = collect_examples(target.model, shape, [(list(s.tokens), s.prompt_length) for s in samples])
    for sampled, example in zip(samples, examples, strict=True):
        assert len(sampled.response) == 40
        positions = torch.arange(sampled.prompt_length - 1, len(sampled.tokens) - 1)
        logits = target.model.logits(example.states[positions])
        scores = perturbed_scores(logits, temperature, gumbel(torch.tensor([sampled.seed]), positions, VOCAB))
        scores[:, EOS] = float("-inf")  # masked in forced lengths
        assert scores.argmax(-1).tolist() == list(sampled.response)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_measured_steps_obey_what_must_hold(target: Target, temperature: float):
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(VOCAB - 1) for _ in range(4)) for _ in range(10)]
    task = Task("toy", target, random_draft(target), prompts, tokens=30, forced=True)
    tokens, steps = measure(task, temperature, learnt=4)
    assert tokens.tolist() == [30] * 6 and set(steps) == set(SETTINGS)
    for rule in (SHARED, TOP_K, CHAIN):
        for depth in DEPTHS:
            assert all(30 / (min(depth, kept) + 1) <= float(steps[rule, depth, kept].min()) for kept in KEPT)
            assert steps[rule, depth, 64].sum() < steps[rule, depth, 1].sum() < tokens.sum()
        for kept in KEPT[:3]:  # a chain of n tokens is no deeper than n
            assert torch.equal(steps[CHAIN, 8, kept], steps[CHAIN, 4, kept])
    if temperature == 0:  # the same children, and with one node the same node
        assert torch.equal(steps[SHARED, 8, 1], steps[TOP_K, 8, 1])
        assert torch.equal(steps[SHARED, 8, 1], steps[CHAIN, 8, 1])
