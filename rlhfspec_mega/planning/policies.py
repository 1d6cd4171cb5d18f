"""From the configuration to a drafting policy."""

from __future__ import annotations

from rlhfspec_mega.config.schema import DraftingConfig
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.strategy import Adaptive
from rlhfspec_mega.planning.tree import DraftingPolicy
from rlhfspec_mega.planning.uniform import Fixed, Uniform


def make_policy(config: DraftingConfig, acceptance: AcceptanceModel, cost: CostModel) -> DraftingPolicy | None:
    """The policy of one engine; None for plain decoding without a draft."""
    c = config
    if c.policy == "off":
        return None
    if c.policy == "adaptive":
        return Adaptive(acceptance, cost, c.width, c.max_depth, c.max_tokens, c.tail_weight)
    if c.policy == "uniform":
        return Uniform(acceptance, cost, c.width, c.depth, c.max_tokens)
    assert c.policy == "fixed", c.policy
    return Fixed(acceptance, cost, c.width, c.depth, c.tokens)
