"""From the configuration to a drafting policy."""

from __future__ import annotations

from rlhfspec_mega.config.schema import DraftingConfig
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.rivals import Bandit, EmaTiers
from rlhfspec_mega.planning.strategy import Adaptive
from rlhfspec_mega.planning.tree import DraftingPolicy
from rlhfspec_mega.planning.uniform import Fixed, Uniform


def make_policy(
    config: DraftingConfig, acceptance: AcceptanceModel, cost: CostModel, seed: int
) -> DraftingPolicy | None:
    """The policy of one engine; None for plain decoding without a draft. `seed` is for those that explore at random."""
    c = config
    if c.policy == "off":
        return None
    if c.policy == "adaptive":
        return Adaptive(acceptance, cost, c.width, c.max_depth, c.max_tokens, c.tail_weight)
    if c.policy == "uniform":
        return Uniform(acceptance, cost, c.width, c.depth, c.max_tokens)
    if c.policy == "fixed":
        return Fixed(acceptance, cost, c.width, c.depth, c.tokens)
    if c.policy == "ema_tiers":
        return EmaTiers(
            acceptance,
            cost,
            c.tiers,
            ema_weight=c.ema_weight,
            check_every=c.check_every,
            down_hysteresis=c.down_hysteresis,
            up_hysteresis=c.up_hysteresis,
        )
    assert c.policy == "bandit", c.policy
    return Bandit(acceptance, cost, c.arms, c.epsilon, c.max_batch, seed=seed)
