"""From scored samples to updates: log-probs, advantages, mini-batches. Used by the trainer and by replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from rlhfspec_mega.algorithm.advantages import compute_advantages, learning_samples
from rlhfspec_mega.algorithm.losses import kl_estimate
from rlhfspec_mega.algorithm.microbatch import TrainSequence
from rlhfspec_mega.algorithm.objectives import policy_metrics, policy_objective
from rlhfspec_mega.algorithm.token_weights import token_weights
from rlhfspec_mega.config.schema import AlgorithmConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.types import Sample
from rlhfspec_mega.workers.actor_group import ActorGroup


def _sequence(sample: Sample, weight: float = 1.0) -> TrainSequence:
    return TrainSequence(
        tokens=[*sample.prompt.tokens, *sample.response_tokens],
        prompt_length=len(sample.prompt.tokens),
        weight=weight,
        advantage=sample.advantage,
        old_logprobs=sample.old_logprobs,
        engine_logprobs=sample.engine_logprobs,
        reference_logprobs=sample.reference_logprobs,
    )


def add_reference_logprobs(actor: ActorGroup, samples: Sequence[Sample]) -> None:
    """Fill `reference_logprobs` from the frozen reference."""
    found, _ = actor.logprobs([_sequence(sample) for sample in samples], use_reference=True)
    for sample, logprobs in zip(samples, found, strict=True):
        sample.reference_logprobs = logprobs


def take_reference_logprobs(samples: Sequence[Sample], found: Mapping[str, list[float]]) -> None:
    """Fill `reference_logprobs` from what engines have scored, by sample id.

    Raises RunError, and fills nothing, unless there is one log-prob for every response token of every sample.
    """
    for sample in samples:
        scored = found.get(sample.sample_id)
        if scored is None or len(scored) != len(sample.response_tokens):
            raise RunError(
                f"The reference has scored {len(scored or [])} of the {len(sample.response_tokens)} response tokens of "
                f"sample {sample.sample_id}: engines must score every finished sample before a step goes on."
            )
    for sample in samples:
        sample.reference_logprobs = found[sample.sample_id]


def add_old_logprobs(actor: ActorGroup, samples: Sequence[Sample], refresh_follows: bool) -> dict[str, float]:
    """Fill `old_logprobs` from the actor as it is before this step's updates.

    Args:
        refresh_follows: whether a draft learns from these samples before the next call.

    Returns:
        entropy per token, and how far the engine's log-probs of the same tokens lie from the actor's.
    """
    sequences = [_sequence(sample) for sample in samples]
    found, entropy = actor.logprobs(sequences, use_reference=False, refresh_follows=refresh_follows)
    for sample, logprobs in zip(samples, found, strict=True):
        sample.old_logprobs = logprobs
    differences = torch.tensor(
        [abs(a - b) for sample in samples for a, b in zip(sample.old_logprobs, sample.engine_logprobs, strict=True)]
        or [0.0]
    )
    return {
        "policy_entropy": entropy,
        "logprob_difference_mean": float(differences.mean()),
        "logprob_difference_max": float(differences.max()),
    }


def assign_advantages(
    samples: Sequence[Sample], members: int, config: AlgorithmConfig, generator: torch.Generator
) -> None:
    """Fill `advantage` from the rewards; samples lie in order of prompt, then member.

    Args:
        generator: of the shuffle control.
    """

    def by_group(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).view(-1, members)

    kl = None
    if config.kl_in == "reward" and config.kl_coef > 0:
        kl = by_group([_sample_kl(sample, config.kl_estimator) for sample in samples])
    rewards = by_group([sample.reward for sample in samples])
    truncated = by_group([float(sample.truncated) for sample in samples]).bool()
    advantages = compute_advantages(rewards, truncated, kl, config, generator).flatten().tolist()
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage = advantage


def _sample_kl(sample: Sample, estimator: str) -> float:
    policy = torch.tensor(sample.old_logprobs, dtype=torch.float64)
    reference = torch.tensor(sample.reference_logprobs, dtype=torch.float64)
    return float(kl_estimate(policy, reference, estimator).sum())


def update(
    actor: ActorGroup, samples: Sequence[Sample], samples_per_update: int, config: AlgorithmConfig
) -> dict[str, float]:
    """Optimizer steps over all samples, each used exactly once, in mini-batches in the order given.

    Returns:
        The metrics of Actor.update, averaged over the mini-batches; "skipped" is their sum.
    """
    objective, names = partial(policy_objective, config=config), policy_metrics(config)
    results = []
    for batch in _mini_batches(samples, samples_per_update):
        truncated = torch.tensor([sample.truncated for sample in batch])
        lengths = torch.tensor([len(sample.response_tokens) for sample in batch])
        weights, _ = token_weights(lengths, learning_samples(truncated, config), config.loss_average)
        sequences = [_sequence(sample, weight) for sample, weight in zip(batch, weights.tolist(), strict=True)]
        results.append(actor.update(sequences, objective, names))
    metrics = {name: sum(result[name] for result in results) / len(results) for name in results[0]}
    return metrics | {"skipped": sum(result["skipped"] for result in results)}


def _mini_batches(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    for first in range(0, len(samples), size):
        yield samples[first : first + size]
