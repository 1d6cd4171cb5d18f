"""Drafting policies by name for tests: ours, as a run makes them, and the rivals of the benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.rivals import Bandit, EmaTiers
from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.strategy import make_policy
from rlhfspec_mega.planning.tree import DraftingPolicy


def any_policy(name: str, acceptance: AcceptanceModel, cost: CostModel, **options: Any) -> DraftingPolicy:
    """Options are those of the configuration; rivals read num_steps, topk and num_draft_tokens where they are given."""
    depth = options.get("num_steps")
    if name == "ema_tiers":
        return EmaTiers(acceptance, cost, {1: [depth] if depth else [2, 3]})
    if name == "bandit":
        arms = {"arms": [[depth, options.get("topk", 1), options.get("num_draft_tokens", 4)]]} if depth else {}
        return Bandit(acceptance, cost, **arms)
    policy = make_policy(SpeculationConfig(policy=name, **options), acceptance, cost)
    assert policy is not None
    return policy
