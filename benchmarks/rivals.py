"""Drafting policies of other systems, written from their description, on the same trees and verification."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.nodes import index_within_row, rank_nodes
from rlhfspec_mega.planning.strategy import CalibratedPolicy
from rlhfspec_mega.planning.tree import Batch, DraftTree, Ints, StepRecord

SGLANG_TIERS: Mapping[int, Sequence[int]] = {1: (1, 3, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}


class _Tier:
    """The steps of one batch-size tier and the moving average that decides among them."""

    def __init__(self, candidates: Sequence[int]) -> None:
        self.candidates = sorted(candidates)
        self.at = len(self.candidates) // 2
        self.average = max(self.steps - 1.0, 0.0)
        self.batches = 0

    @property
    def steps(self) -> int:
        return self.candidates[self.at]


class EmaTiers(CalibratedPolicy):
    """SGLang's adaptive rule: a chain whose steps follow a moving average of accepted length; no cost model.

    The tier with the batch size nearest to the batch's holds candidate steps. Every `check_every` batches
    (after `warm_up` ones) the steps fall a candidate while the average is at most the lower candidate's steps - 0.5 +
    `down_hysteresis` (0.5 + `down_hysteresis` where that is 0 steps), else they rise a candidate while it is above the
    present steps - 0.5 + `up_hysteresis`. From 0 steps the next candidate is tried at the next check.
    """

    learns_acceptance = learns_cost = False

    def __init__(
        self,
        acceptance: AcceptanceModel,
        cost: CostModel,
        tiers: Mapping[int, Sequence[int]] = SGLANG_TIERS,
        ema_weight: float = 0.2,
        check_every: int = 5,
        warm_up: int = 10,
        down_hysteresis: float = -0.25,
        up_hysteresis: float = 0.0,
    ) -> None:
        """`tiers`: batch size -> candidate steps; `ema_weight`: of the newest batch."""
        deepest = max(max(candidates) for candidates in tiers.values())
        super().__init__(acceptance, cost, 1, deepest, deepest)
        self._tiers = {size: _Tier(candidates) for size, candidates in sorted(tiers.items())}
        self._ema_weight = ema_weight
        self._check_every = check_every
        self._warm_up = warm_up
        self._down_hysteresis = down_hysteresis
        self._up_hysteresis = up_hysteresis

    def depth(self, batch: Batch) -> int:
        return self._usable_depth(batch, self._tier(batch).steps)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        return self._possible_parents(batch, tree)

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        """All that can be used: the rule trusts its chain. With history's tokens, as many of all as the chain has."""
        if len(batch.recalled):
            self.acceptance.fill_survival(batch, tree, 0)
            return np.sort(rank_nodes(tree, tree.survival, self._tier(batch).steps))
        return np.flatnonzero((tree.depths < batch.remaining[tree.rows]) & ~tree.ends)

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        tier = self._tier(record.batch)
        if record.tree.depth:
            accepted = float(record.accepted.sum()) / record.batch.size
            tier.average += self._ema_weight * (accepted - tier.average)
        tier.batches += 1
        late = tier.batches - self._warm_up
        if late > 0 and late % self._check_every == 0:
            self._check(tier)

    def _tier(self, batch: Batch) -> _Tier:
        return self._tiers[min(self._tiers, key=lambda size: abs(size - batch.size))]

    def _check(self, tier: _Tier) -> None:
        last = len(tier.candidates) - 1
        if tier.steps == 0:
            tier.at = min(tier.at + 1, last)
            return
        before = tier.at
        while tier.at > 0:
            lower = tier.candidates[tier.at - 1]
            if tier.average > (lower - 0.5 if lower else 0.5) + self._down_hysteresis:
                break
            tier.at -= 1
        while before <= tier.at < last and tier.average > tier.steps - 0.5 + self._up_hysteresis:
            tier.at += 1


class Arm(NamedTuple):
    """One strategy of the bandit; `tokens` is draft tokens of a sample."""

    depth: int
    width: int
    tokens: int


DEFAULT_ARMS = ((3, 1, 3), (4, 2, 6), (6, 4, 16), (8, 8, 32))


class Bandit(CalibratedPolicy):
    """TLT's rule: epsilon-greedy choice among arms per batch-size bucket, plain decoding above `max_batch`.

    The reward of an arm is the median, over its last `window` uses in the bucket, of tokens per second measured in the
    step. Untried arms come first, in order. Buckets are powers of two. Trees are EAGLE-2's: the `width` best nodes of
    each sample and layer are drafted from, the `tokens` best nodes verified.
    """

    learns_cost = False

    def __init__(
        self,
        acceptance: AcceptanceModel,
        cost: CostModel,
        arms: Sequence[Sequence[int]] = DEFAULT_ARMS,
        epsilon: float = 0.1,
        max_batch: int = 32,
        window: int = 20,
        seed: int = 0,
    ) -> None:
        """`arms`: (depth, width, draft tokens) each."""
        self._arms = [Arm(*arm) for arm in arms]
        super().__init__(
            acceptance,
            cost,
            width=max(arm.width for arm in self._arms),
            max_depth=max(arm.depth for arm in self._arms),
            max_nodes=max(arm.tokens for arm in self._arms),
        )
        self._epsilon = epsilon
        self._max_batch = max_batch
        self._window = window
        self._rewards: dict[int, list[deque[float]]] = {}
        self._random = np.random.default_rng(seed)
        self._explored = self._draw()

    def depth(self, batch: Batch) -> int:
        if batch.size > self._max_batch:
            return 0
        return self._usable_depth(batch, self._arm(batch).depth)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        self._fill_survival(batch, tree)
        arm = self._arm(batch)
        tree.survival[tree.last_layer][tree.ranks[tree.last_layer] >= arm.width] = 0.0
        if tree.depth >= arm.depth:
            return np.zeros(0, np.int64)
        parents = self._possible_parents(batch, tree)
        parents = parents[tree.survival[parents] > 0.0]
        parents = parents[np.argsort(-tree.survival[parents], kind="stable")]
        return np.sort(parents[index_within_row(tree.rows[parents]) < arm.width])

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        if len(batch.recalled):
            self.acceptance.fill_survival(batch, tree, 0)
        return np.sort(rank_nodes(tree, tree.survival, self._arm(batch).tokens))

    def observe(self, record: StepRecord) -> None:
        batch = record.batch
        if batch.size <= self._max_batch and record.tree.depth:
            seconds = record.draft_seconds + record.verify_seconds
            reward = (batch.size + int(record.accepted.sum())) / max(seconds, 1e-9)
            self._bucket(batch)[self._index(batch)].append(reward)
        self._explored = self._draw()
        super().observe(record)

    def _arm(self, batch: Batch) -> Arm:
        return self._arms[self._index(batch)]

    def _index(self, batch: Batch) -> int:
        if self._explored is not None:
            return self._explored
        bucket = self._bucket(batch)
        return max(range(len(bucket)), key=lambda arm: median(bucket[arm]) if bucket[arm] else float("inf"))

    def _bucket(self, batch: Batch) -> list[deque[float]]:
        key = (batch.size - 1).bit_length()
        if key not in self._rewards:
            self._rewards[key] = [deque(maxlen=self._window) for _ in self._arms]
        return self._rewards[key]

    def _draw(self) -> int | None:
        """The arm to explore in the next step, whatever its batch, or None."""
        if self._random.random() >= self._epsilon:
            return None
        return int(self._random.integers(len(self._arms)))
