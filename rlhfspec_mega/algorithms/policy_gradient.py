"""The part that GRPO and RLOO share: log-probs of actor and reference, advantages within groups, clipped updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.rl.advantages import learning_samples, shaped_rewards, shuffled
from rlhfspec_mega.rl.experience import Experience, Floats
from rlhfspec_mega.rl.losses import kl_estimate
from rlhfspec_mega.rl.microbatch import WEIGHTS, TokenLoss
from rlhfspec_mega.rl.objectives import policy_metrics, policy_objective
from rlhfspec_mega.rl.token_weights import token_weights
from rlhfspec_mega.types import Sample
from rlhfspec_mega.workers.model_group import ModelGroup

ACTOR, REFERENCE = "actor", "reference"


class PolicyGradient(ABC):
    """An algorithm without a critic: advantages follow from the rewards of a sample's group.

    Args:
        members: samples of each prompt.
        samples_per_update: most samples of a mini-batch.
        loss: a user's loss in place of the clipped policy gradient; its attribute `metrics` names what it reports.
    """

    def __init__(
        self, config: AlgorithmConfig, members: int, samples_per_update: int, loss: TokenLoss | None = None
    ) -> None:
        self._config, self._members, self._samples_per_update = config, members, samples_per_update
        self._loss: TokenLoss = loss or partial(policy_objective, config=config)
        self._metrics: Sequence[str] = getattr(loss, "metrics", ()) if loss else policy_metrics(config)

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of shaped float64 rewards [prompts, members].

        The same shape, or flat with one per response token.
        """

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the algorithm needs."""
        return (ACTOR, REFERENCE) if self._config.kl_coef > 0 else (ACTOR,)

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm compares the actor with a frozen reference."""
        return REFERENCE in self.models

    def experience(self, samples: Sequence[Sample]) -> Experience:
        """The experience of scored samples, ordered by prompt and member, with the engines' log-probs."""
        made = Experience.of(
            [sample.prompt.tokens for sample in samples], [sample.response_tokens for sample in samples]
        )
        made.columns["engine_logprobs"] = made.joined([sample.engine_logprobs for sample in samples])
        made.per_sample["rewards"] = np.array([sample.reward for sample in samples], np.float64)
        made.per_sample["truncated"] = np.array([sample.truncated for sample in samples], np.bool_)
        return made

    def add_reference(self, experience: Experience, reference: ModelGroup) -> None:
        """Compute and add the frozen reference's log-probs."""
        experience.columns["reference_logprobs"], _ = reference.logprobs(experience, "reference")

    def take_reference(self, samples: Sequence[Sample], experience: Experience, found: Mapping[str, Floats]) -> None:
        """Add the frozen reference's log-probs that were computed during the rollout, by sample id.

        Raises RunError unless there is one for every response token of every sample.
        """
        for sample in samples:
            scored = len(found.get(sample.sample_id, ()))
            if sample.sample_id not in found or scored != len(sample.response_tokens):
                raise RunError(
                    f"The reference has scored {scored} of the {len(sample.response_tokens)} response tokens of sample "
                    f"{sample.sample_id}: every finished sample must be scored before a step goes on."
                )
        experience.columns["reference_logprobs"] = experience.joined([found[sample.sample_id] for sample in samples])

    def add_old_logprobs(
        self, experience: Experience, actor: ModelGroup, refresh_follows: bool = False
    ) -> dict[str, float]:
        """Compute and add the log-probs of the actor before this step's updates.

        Args:
            refresh_follows: whether a draft learns from these samples before the next call.

        Returns:
            entropy per token, and the differences between the engines' log-probs and the actor's.
        """
        column, entropy = actor.logprobs(experience, "logprobs", refresh_follows=refresh_follows)
        experience.columns["old_logprobs"] = column
        differences = np.abs(column.astype(np.float64) - experience.columns["engine_logprobs"])
        return {
            "actor/old_entropy": entropy,
            "rollout/logprob_diff_mean": float(differences.mean()) if len(column) else 0.0,
            "rollout/logprob_diff_max": float(differences.max(initial=0.0)),
        }

    def add_advantages(self, experience: Experience, generator: torch.Generator) -> None:
        """Compute and add advantages.

        Args:
            generator: for the shuffle control.

        Raises RunError for advantages that are neither one per sample nor one per response token.
        """
        config, columns = self._config, experience.columns
        rewards, truncated = (
            torch.from_numpy(experience.per_sample[name]).view(-1, self._members) for name in ("rewards", "truncated")
        )
        kl = None
        if config.kl_in == "reward" and config.kl_coef > 0:
            policy, reference = (
                torch.from_numpy(columns[name]).double() for name in ("old_logprobs", "reference_logprobs")
            )
            summed = experience.summed(kl_estimate(policy, reference, config.kl_loss_type).numpy())
            kl = torch.from_numpy(summed).view(-1, self._members)
        found = self.advantages(shaped_rewards(rewards, truncated, kl, config))
        if config.shuffle_advantages:
            found = shuffled(found, generator)
        flat = found.flatten().numpy()
        tokens = int(experience.response_offsets[-1])
        if len(flat) not in (len(experience), tokens):
            raise RunError(
                f"algorithm.adv_estimator={config.adv_estimator} gave {len(flat)} advantages for "
                f"{len(experience)} samples of {tokens} response tokens: give one for each sample or each token."
            )
        columns["advantages"] = experience.spread(flat) if len(flat) == len(experience) else flat.astype(np.float32)

    def update(self, experience: Experience, actor: ModelGroup) -> dict[str, float]:
        """Run the optimizer steps of a step: every sample is used exactly once, in mini-batches in the given order.

        Returns:
            The metrics of MegatronModel.accumulate and .step as `actor/NAME`, averaged over the mini-batches; skipped
            updates are summed.
        """
        results = []
        for first in range(0, len(experience), self._samples_per_update):
            batch = experience.select(np.arange(len(experience))[first : first + self._samples_per_update])
            learns = learning_samples(torch.from_numpy(batch.per_sample["truncated"]), self._config)
            lengths = torch.from_numpy(batch.response_lengths)
            weights, _ = token_weights(lengths, learns, self._config.loss_agg_mode)
            batch.columns[WEIGHTS] = batch.spread(weights.numpy())
            results.append(actor.accumulate(batch, self._loss, self._metrics) | actor.step())
        sums = {name: sum(result[name] for result in results) for name in results[0]}
        metrics = {f"actor/{name}": value / len(results) for name, value in sums.items()}
        return metrics | {"actor/skipped_updates": sums["skipped_updates"]}

    @staticmethod
    def note_on_samples(samples: Sequence[Sample], experience: Experience) -> None:
        """Record each sample's log-probs and advantage (the mean over its tokens) in the Sample objects."""
        for name in ("old_logprobs", "reference_logprobs"):
            if name in experience.columns:
                for sample, part in zip(samples, experience.by_sample(experience.columns[name]), strict=True):
                    setattr(sample, name, part.tolist())
        for sample, part in zip(samples, experience.by_sample(experience.columns["advantages"]), strict=True):
            sample.advantage = float(part.mean(dtype=np.float64)) if len(part) else 0.0
