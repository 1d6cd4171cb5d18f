"""How good a policy's decisions and predictions are: against hindsight, and against what then happened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.contenders import MOST_NODES
from rlhfspec_mega.planning.cost import CostModel, step_cost
from rlhfspec_mega.planning.nodes import rank_nodes
from rlhfspec_mega.planning.tree import Batch, DraftingPolicy, DraftTree, Floats, Ints, Recall, StepRecord


@dataclass(frozen=True)
class Options:
    """One step: tokens and seconds for every number n of verified nodes, best first, and the n that was chosen."""

    tokens: Floats
    seconds: Floats
    chosen: int


class Hindsight(DraftingPolicy):
    """A policy that drafts as another, verifies all it has drafted, and so learns what every n would have brought.

    Seconds are those of a cost model, the same for the policy and for hindsight: only the choice of n is judged.
    """

    def __init__(self, policy: DraftingPolicy, cost: CostModel) -> None:
        self.width, self.max_depth, self.max_nodes = policy.width, policy.max_depth, MOST_NODES
        self._policy, self._cost, self._own = policy, cost, 0
        self.steps: list[Options] = []

    def recall(self, batch: Batch) -> Recall | None:
        ask = self._policy.recall(batch)
        return ask and ask._replace(worth=None)  # nodes are chosen here

    def depth(self, batch: Batch) -> int:
        self._own = 0
        return self._policy.depth(batch)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        return self._policy.expand(batch, tree)

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        self._own = len(self._policy.choose(batch, tree))
        return np.sort(rank_nodes(tree, tree.survival, self.max_nodes))

    def observe(self, record: StepRecord) -> None:
        self._policy.observe(record)
        batch, tree = record.batch, record.tree
        order = rank_nodes(tree, tree.survival, self.max_nodes)
        accepted = record.accepted[np.searchsorted(record.chosen, order)]
        tokens = batch.size + np.concatenate((np.zeros(1), np.cumsum(accepted, dtype=np.float64)))
        drafting = float(
            self._cost.draft_seconds(batch.size, batch.kv_tokens, batch.backlog, tree.depth, record.drafted)
        )
        counts = batch.size + np.arange(len(tokens), dtype=np.float64)
        seconds = drafting + self._cost.verify_seconds(batch.size, batch.kv_tokens, counts)
        self.steps.append(Options(tokens, seconds, self._own))


def share_of_oracle(steps: Sequence[Options]) -> float:
    """Tokens per second of the chosen n over those of the best n of every step, known afterwards.

    The best rate sum(tokens) / sum(seconds) is found by Dinkelbach's iteration (1967): with the rate r of the last
    round every step takes the n of largest tokens - r * seconds.
    """
    own = sum(s.tokens[s.chosen] for s in steps) / sum(s.seconds[s.chosen] for s in steps)
    rate = own
    for _ in range(20):
        best = [int(np.argmax(s.tokens - rate * s.seconds)) for s in steps]
        better = sum(s.tokens[n] for s, n in zip(steps, best, strict=True))
        better /= sum(s.seconds[n] for s, n in zip(steps, best, strict=True))
        if better <= rate * (1 + 1e-9):
            break
        rate = better
    return float(own / rate)


@dataclass
class Predictions:
    """Sums and errors of predictions made before each step.

    Attributes:
        predicted, realised: tokens of all samples and steps.
        squares: of each run's difference between the two.
        time_errors: shares by which predicted seconds of each step were off.
    """

    predicted: float = 0.0
    realised: float = 0.0
    squares: float = 0.0
    time_errors: list[float] = field(default_factory=list)

    @property
    def tokens_error(self) -> float:
        """Predicted over realised tokens, less 1."""
        return self.predicted / self.realised - 1.0

    @property
    def tokens_error_deviation(self) -> float:
        """Standard error of `tokens_error`: runs, each of other prompts, are independent."""
        return math.sqrt(self.squares) / self.realised


class Predicted(DraftingPolicy):
    """Passes a policy's decisions on and compares its predictions with what happens.

    Args:
        cost: the model whose predictions are judged, before it learns the step.
    """

    def __init__(self, policy: DraftingPolicy, cost: CostModel) -> None:
        self.width, self.max_depth, self.max_nodes = policy.width, policy.max_depth, policy.max_nodes
        self._policy, self._cost = policy, cost
        self.found = Predictions()
        self._difference = 0.0  # of this run's predicted and realised tokens
        self.live: list[tuple[int, float]] = []  # samples, draft tokens per sample

    def recall(self, batch: Batch) -> Recall | None:
        return self._policy.recall(batch)

    def depth(self, batch: Batch) -> int:
        return self._policy.depth(batch)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        return self._policy.expand(batch, tree)

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        return self._policy.choose(batch, tree)

    def observe(self, record: StepRecord) -> None:
        batch, step = record.batch, step_cost(record)
        predicted, realised = float(record.tree.survival[record.chosen].sum()), float(record.accepted.sum())
        self.found.predicted += batch.size + predicted
        self.found.realised += batch.size + realised
        self._difference += predicted - realised
        expected = float(self._cost.verify_seconds(batch.size, batch.kv_tokens, step.tokens))
        expected += float(
            self._cost.draft_seconds(batch.size, batch.kv_tokens, batch.backlog, step.depth, step.drafted)
        )
        measured = step.verify_seconds + (step.draft_seconds if step.depth else 0.0)
        self.found.time_errors.append(abs(expected - measured) / measured)
        self.live.append((batch.size, len(record.chosen) / batch.size))
        self._policy.observe(record)

    def end_run(self) -> None:
        """What follows are other samples."""
        self.found.squares += self._difference**2
        self._difference = 0.0
