"""A drafting policy that knows nothing: random depths, random trees, random nodes to verify."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.acceptance import MATCH_CELLS
from rlhfspec_mega.planning.tree import ROOT, Batch, DraftingPolicy, DraftTree, Recall, StepRecord


class RandomTrees(DraftingPolicy):
    """Whatever it chooses, the output must be that of plain decoding."""

    def __init__(self, seed: int, *, width: int = 8, max_depth: int = 5, max_nodes: int = 60) -> None:
        self.width, self.max_depth, self.max_nodes = width, max_depth, max_nodes
        self._random = np.random.default_rng(seed)
        self.records: list[StepRecord] = []

    def follows(self, size: int) -> bool:
        return bool(self._random.random() < 0.97)

    def rests(self, size: int, able: bool) -> int:
        return int(self._random.integers(1, 6)) if self._random.random() < 0.1 else 0

    def recall(self, batch: Batch) -> Recall:
        accepted = np.full((1, MATCH_CELLS), 0.6)
        return Recall(self.max_nodes, 0.02, np.zeros(batch.size, np.int64), accepted)

    def depth(self, batch: Batch) -> int:
        return int(self._random.choice((0, 1, 3, self.max_depth)))

    def expand(self, batch: Batch, tree: DraftTree) -> np.ndarray:
        last = np.arange(tree.size)[tree.last_layer]
        return last[self._random.random(len(last)) < self._random.choice((0.6, 0.9, 1.0))]

    def choose(self, batch: Batch, tree: DraftTree) -> np.ndarray:
        wanted = self._random.random(tree.size) < self._random.choice((0.7, 0.95, 1.0))
        taken = np.zeros(batch.size, int)
        for node in range(tree.size):
            parent = tree.parents[node]
            room = taken[tree.rows[node]] < self.max_nodes
            wanted[node] = wanted[node] and room and (parent == ROOT or wanted[parent])
            taken[tree.rows[node]] += wanted[node]
        return np.flatnonzero(wanted)

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)
