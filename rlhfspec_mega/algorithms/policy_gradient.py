"""The part that all algorithms share: log-probs of actor and reference, and clipped updates of the actor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlhfspec_mega.config.logprob_pass import update_gives_logprobs
from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.planning.placement import ACTOR, REFERENCE
from rlhfspec_mega.rl.advantages import learning_samples
from rlhfspec_mega.rl.experience import Experience, Floats
from rlhfspec_mega.rl.microbatch import WEIGHTS, TokenLoss
from rlhfspec_mega.rl.objectives import policy_metrics, policy_objective
from rlhfspec_mega.rl.shaping import RewardShaping
from rlhfspec_mega.rl.token_weights import token_weights
from rlhfspec_mega.types import Sample
from rlhfspec_mega.workers.fused_group import FusedGroup
from rlhfspec_mega.workers.model_group import ModelGroup


class PolicyGradient(ABC):
    """An algorithm that updates the actor by a policy gradient.

    Args:
        members: samples of each prompt.
        samples_per_update: most samples of a mini-batch.
        loss: a user's loss in place of the clipped policy gradient; its attribute `metrics` names what it reports.
        shaping: of rewards; None: they are used as they are.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        members: int,
        samples_per_update: int,
        loss: TokenLoss | None = None,
        shaping: RewardShaping | None = None,
    ) -> None:
        self._shaping = shaping
        self._config, self._members, self._samples_per_update = config, members, samples_per_update
        self._loss: TokenLoss = loss or partial(policy_objective, config=config)
        self._metrics: Sequence[str] = getattr(loss, "metrics", ()) if loss else policy_metrics(config)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the algorithm needs."""
        return (ACTOR, REFERENCE) if self._config.kl_coef > 0 else (ACTOR,)

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm compares the actor with a frozen reference."""
        return REFERENCE in self.models

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm has learnt itself, as JSON for checkpoints."""
        return {"shaping": self._shaping.state_dict()} if self._shaping else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        if self._shaping and "shaping" in state:
            self._shaping.load_state_dict(state["shaping"])

    def experience(self, samples: Sequence[Sample]) -> Experience:
        """The experience of samples, ordered by prompt and member, with the engines' log-probs."""
        made = Experience.of(
            [sample.prompt.tokens for sample in samples], [sample.response_tokens for sample in samples]
        )
        made.columns["engine_logprobs"] = made.joined([sample.engine_logprobs for sample in samples])
        made.per_sample["truncated"] = np.array([sample.truncated for sample in samples], np.bool_)
        return made

    def add_rewards(self, samples: Sequence[Sample], experience: Experience) -> None:
        """Add the rewards of scored samples, shaped; NaN of a sample without one."""
        rewards = np.array([np.nan if sample.failure else sample.reward for sample in samples], np.float64)
        if self._shaping:
            rewards = self._shaping.shape(rewards, experience.response_lengths)
        experience.per_sample["rewards"] = rewards

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
        return add_old(experience, *actor.logprobs(experience, "logprobs", refresh_follows=refresh_follows))

    def update_gives_logprobs(self, experience: Experience, step: int) -> bool:
        """Whether the only update of this step may do without `add_old_logprobs`, and then adds what that would."""
        return update_gives_logprobs(self._config, len(experience), self._samples_per_update)

    @abstractmethod
    def add_advantages(self, experience: Experience, generator: torch.Generator) -> dict[str, float]:
        """Compute and add advantages, and what the critic learns where there is one; returns metrics.

        Args:
            generator: for the shuffle control.
        """

    def add_values(self, experience: Experience, critic: ModelGroup) -> None:
        """Compute and add the critic's values before this step's updates; only of an algorithm with a critic."""
        raise NotImplementedError

    def update(
        self,
        experience: Experience,
        models: Mapping[str, ModelGroup],
        step: int,
        generator: torch.Generator,
        fused: FusedGroup | None = None,
    ) -> dict[str, float]:
        """Run the optimizer steps of a step of RL: every sample is used once in each epoch.

        Args:
            models: those that learn, by name.
            step: the step's number.
            generator: for the order of samples in epochs after the first.
            fused: two of the models, for updates in one pass; only PPO has them.

        Returns:
            The metrics of MegatronModel.accumulate and .step as `actor/NAME`, averaged over the mini-batches; skipped
            updates are summed. And those of `add_old_logprobs`, if that was left out.
        """
        results: list[dict[str, float]] = []
        differences: dict[str, float] = {}
        for batch in self._mini_batches(experience, generator):
            if not self._diverged(results):
                found, differences = self._update_actor(batch, experience, models[ACTOR])
                results.append(found)
        return averaged(ACTOR, results) | differences

    def _mini_batches(self, experience: Experience, generator: torch.Generator) -> Iterator[Experience]:
        """Mini-batches with the weights of their tokens, epoch after epoch: in the given order, then in random ones."""
        for epoch in range(self._config.ppo_epochs):
            order = torch.randperm(len(experience), generator=generator) if epoch else torch.arange(len(experience))
            for chosen in order.split(self._samples_per_update):
                batch = experience.select(chosen.numpy())
                learns = self._learning(batch)
                lengths = torch.from_numpy(batch.response_lengths)
                weights, _ = token_weights(lengths, learns, self._config.loss_agg_mode)
                batch.columns[WEIGHTS] = batch.spread(weights.numpy())
                yield batch

    def _learning(self, experience: Experience) -> torch.Tensor:
        """Which samples are in the loss, bool [samples]: none without a reward."""
        truncated, rewards = (torch.from_numpy(experience.per_sample[name]) for name in ("truncated", "rewards"))
        return learning_samples(truncated, self._config) & ~rewards.isnan()

    def _update_actor(
        self, batch: Experience, experience: Experience, actor: ModelGroup
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of a mini-batch, and those of `add_old_logprobs` if that was left out; there is one batch then."""
        if "old_logprobs" in experience.columns:
            return actor.accumulate(batch, self._loss, self._metrics) | actor.step(), {}
        found, column, entropy = actor.accumulate_with_logprobs(batch, self._loss, self._metrics)
        return found | actor.step(), add_old(experience, column, entropy)

    def _diverged(self, results: Sequence[Mapping[str, float]]) -> bool:
        """Whether the last update took the actor too far from the policy that the samples are of."""
        bound = self._config.early_stop_kl
        return bound is not None and bool(results) and results[-1]["approx_kl"] > bound

    @staticmethod
    def note_on_samples(samples: Sequence[Sample], experience: Experience) -> None:
        """Record each sample's log-probs and advantage (the mean over its tokens) in the Sample objects."""
        for name in ("old_logprobs", "reference_logprobs"):
            if name in experience.columns:
                for sample, part in zip(samples, experience.by_sample(experience.columns[name]), strict=True):
                    setattr(sample, name, part.tolist())
        for sample, part in zip(samples, experience.by_sample(experience.columns["advantages"]), strict=True):
            sample.advantage = float(part.mean(dtype=np.float64)) if len(part) else 0.0


def add_old(experience: Experience, column: Floats, entropy: float) -> dict[str, float]:
    """Add the log-probs from before the updates; returns metrics (see PolicyGradient.add_old_logprobs)."""
    experience.columns["old_logprobs"] = column
    differences = np.abs(column.astype(np.float64) - experience.columns["engine_logprobs"])
    return {
        "actor/old_entropy": entropy,
        "rollout/logprob_diff_mean": float(differences.mean()) if len(column) else 0.0,
        "rollout/logprob_diff_max": float(differences.max(initial=0.0)),
    }


def averaged(model: str, results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a model's mini-batches as `MODEL/NAME`: means, and the sum of skipped updates; {} without any."""
    if not results:
        return {}
    sums = {name: sum(result[name] for result in results) for name in results[0]}
    means = {f"{model}/{name}": value / len(results) for name, value in sums.items()}
    return means | {f"{model}/skipped_updates": sums["skipped_updates"]}
