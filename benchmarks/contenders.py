"""The drafting policies of the generation benchmark: ours as it is shipped, others with grids they are tuned over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.rivals import Bandit, EmaTiers
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.strategy import Adaptive, Fixed, Uniform
from rlhfspec_mega.planning.tree import DraftingPolicy

OFF, ADAPTIVE, UNIFORM, FIXED, EMA_TIERS, BANDIT = "off", "adaptive", "uniform", "fixed", "ema_tiers", "bandit"
FAMILIES = (OFF, ADAPTIVE, UNIFORM, FIXED, EMA_TIERS, BANDIT)
# SGLang's own tiers and the bandit's own arms, judged beside the tuned ones.
PUBLISHED = (f"{EMA_TIERS} published", f"{BANDIT} published")
MOST_DEPTH, MOST_NODES, MOST_WIDTH = 8, 64, 8  # no contender goes beyond

Make = Callable[[AcceptanceModel, CostModel], DraftingPolicy]


@dataclass(frozen=True)
class Contender:
    """A policy with a setting; `make` is None for plain decoding."""

    name: str
    family: str
    make: Make | None


def contenders(quick: bool) -> list[Contender]:
    """All settings of all families, fewer for a quick run; of `adaptive` the shipped one: users do not tune it."""
    fixed = ((2, 2), (4, 4), (8, 6)) if quick else ((1, 1), (2, 2), (4, 4), (6, 6), (8, 8), (16, 6))
    depths = (4,) if quick else (2, 6)
    tiers: dict[str, Mapping[int, tuple[int, ...]] | None] = {"published": None}
    tiers["shallow"] = {1: (1, 2, 4), 8: (0, 1, 2), 32: (0, 1)}
    arms: dict[str, tuple[tuple[int, int, int], ...] | None] = {"published": None}
    arms["shallow"] = ((1, 1, 1), (2, 1, 2), (4, 1, 4), (4, 2, 8))
    if not quick:
        arms["deep"] = ((3, 1, 3), (4, 2, 6), (6, 4, 16))
    found = [Contender(OFF, OFF, None), Contender("adaptive w4 d8", ADAPTIVE, lambda a, c: Adaptive(a, c, 4, 8, 32))]
    for depth in depths:
        found.append(Contender(f"uniform d{depth}", UNIFORM, _bind(Uniform, 4, depth, 32)))
    for nodes, depth in fixed:
        found.append(Contender(f"fixed n{nodes} d{depth}", FIXED, _bind(Fixed, 4, depth, nodes)))
    for name, table in tiers.items():
        found.append(Contender(f"{EMA_TIERS} {name}", EMA_TIERS, _bind(EmaTiers, *([] if table is None else [table]))))
    for name, choices in arms.items():
        found.append(Contender(f"{BANDIT} {name}", BANDIT, _bind(Bandit, *([] if choices is None else [choices]))))
    return found


def _bind(policy: Any, *arguments: Any) -> Make:
    return lambda acceptance, cost: policy(acceptance, cost, *arguments)
