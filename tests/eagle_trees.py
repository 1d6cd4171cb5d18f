"""Batches of random draft trees as SGLang's EAGLE drafts and chooses them, and slots of KV for their requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

ROOT, NOT_CHOSEN = -1, -2


@dataclass(frozen=True)
class EagleTrees:
    """A batch of trees of one size.

    `parents` and `selected` are what SGLang's organize_draft_results gives. `above` has, for every tree, the place of
    each node's parent among the chosen ones: 0 is the root, whose own entry is ROOT.
    """

    branches: int
    depth: int
    count: int
    parents: Tensor
    selected: Tensor
    above: list[list[int]]

    @property
    def batch(self) -> int:
        return len(self.above)

    def path(self, tree: int, node: int) -> list[int]:
        """A node and its ancestors, up to the root or to below a parent that was not chosen."""
        found = [node]
        while (parent := self.above[tree][found[-1]]) >= 0:
            found.append(parent)
        return found

    def children(self, tree: int, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.above[tree]) if parent == node]


def random_trees(rng: random.Random, batch: int, branches: int, depth: int, *, closed: bool = True) -> EagleTrees:
    """Closed: a chosen node's parent is chosen too."""
    drafted = [_draft(rng, branches, depth) for _ in range(batch)]
    kept = rng.randint(1, min(12, len(drafted[0][1])))
    chosen = [_choose(rng, parent_of, kept, closed) for _, parent_of in drafted]
    above = []
    for (_, parent_of), nodes in zip(drafted, chosen, strict=True):
        place = {ROOT: 0} | {node: at for at, node in enumerate(nodes, start=1)}
        above.append([ROOT, *(place.get(parent_of[node], NOT_CHOSEN) for node in nodes)])
    parents = torch.tensor([listed for listed, _ in drafted], dtype=torch.long)
    return EagleTrees(branches, depth, kept + 1, parents, torch.tensor(chosen), above)


def slot_table(rng: random.Random, batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Slots by request and position, no two the same, and the rows of a batch's requests."""
    table = torch.tensor(rng.sample(range(1, 10_000), 6 * width), dtype=torch.int32).view(6, width)
    return table, torch.tensor(rng.sample(range(6), batch))


def _draft(rng: random.Random, branches: int, depth: int) -> tuple[list[int], dict[int, int]]:
    """SGLang's list of the nodes that were drafted from, and the parent of every drafted node."""
    drafted_from = list(range(branches))
    parent_of, listed = dict.fromkeys(drafted_from, ROOT), [ROOT, *drafted_from]
    for _ in range(depth - 1):
        layer = [(len(parent_of) + at, drafted_from[at // branches]) for at in range(branches * branches)]
        parent_of.update(layer)
        drafted_from = rng.sample([node for node, _ in layer], branches)
        listed += drafted_from
    return listed[:-branches] if depth > 1 else [], parent_of


def _choose(rng: random.Random, parent_of: dict[int, int], count: int, closed: bool) -> list[int]:
    chosen: set[int] = set()
    while len(chosen) < count:
        known = chosen | {ROOT} if closed else parent_of.keys() | {ROOT}
        chosen.add(rng.choice([node for node in parent_of if node not in chosen and parent_of[node] in known]))
    return sorted(chosen)
