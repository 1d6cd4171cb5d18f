"""Whether a step has a pass of its own for the actor's log-probs, or its update's forward pass gives them."""

from __future__ import annotations

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.config.sizes import Sizes


def update_gives_logprobs(algorithm: AlgorithmConfig, samples: int, samples_per_update: int) -> bool:
    """Whether a step has one update, of the policy that sampled, and nothing before it reads the log-probs.

    The ratio of the policies is 1 then, whatever the log-probs are. A loss of the user's may read them.
    """
    once = algorithm.ppo_epochs == 1 and samples <= samples_per_update
    read_before = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    return once and algorithm.loss is None and not read_before


def skips_logprob_pass(config: RunConfig, sizes: Sizes) -> bool:
    """Whether steps of this run have no pass of their own: a draft that learns would learn from it."""
    learns = sizes.draft_memory.actor and config.speculation.refresh_every
    return not learns and update_gives_logprobs(config.algorithm, sizes.samples_per_step, sizes.samples_per_update)
