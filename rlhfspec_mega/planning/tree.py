"""What drafting decisions are about: the samples of a step, the draft tree grown for them, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROOT = -1  # the parent of depth-1 nodes: the sample's last token

# Accepted tokens a sample may have that the draft has not read, while nothing is drafted. Many: reading costs as much
# as drafting, and of a batch that is too large to draft for, few samples are left when it has become small enough.
BACKLOG = 256


@dataclass(frozen=True)
class Batch:
    """The decoding samples of one step, one entry each.

    Attributes:
        lengths: tokens of prompt and response so far.
        generated: response tokens so far.
        remaining: response tokens until the length limit; a node deeper than `remaining - 1` could not be used.
        temperatures: 0 is greedy.
        backlog: accepted tokens of the whole batch that the draft has not read yet; its first pass reads them.
        samples: which sample of the engine, counted as they came: what is learnt of one is kept under its number.
    """

    lengths: Ints
    generated: Ints
    remaining: Ints
    temperatures: Floats
    backlog: int
    samples: Ints

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def kv_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass
class DraftTree:
    """Draft tokens of all samples of a step as flat arrays: a forest whose parents come before their children.

    Attributes:
        rows: sample of each node.
        parents: index of the parent node, or ROOT.
        depths: from 1.
        ranks: place among its siblings by perturbed score, from 0.
        gaps: best perturbed score among the siblings minus the second best: how sure the draft is.
        survival: predicted probability that the node is accepted; filled by the policy, layer by layer.
        ends: the node's token would end its sample: children are useless and never drafted.
        layers: first node of each layer.
    """

    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    parents: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    depths: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    ranks: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    gaps: Floats = field(default_factory=lambda: np.zeros(0, np.float64))
    survival: Floats = field(default_factory=lambda: np.zeros(0, np.float64))
    ends: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    layers: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def depth(self) -> int:
        """Layers drafted."""
        return len(self.layers)

    @property
    def last_layer(self) -> slice:
        """The newest nodes, which may be drafted from; empty before the first layer."""
        return slice(self.layers[-1] if self.layers else 0, self.size)

    def add_layer(self, rows: Ints, parents: Ints, ranks: Ints, gaps: Floats, ends: Bools) -> None:
        """Append the children of nodes of the last layer; their survival is still 0."""
        self.layers.append(self.size)
        self.rows = np.concatenate((self.rows, rows))
        self.parents = np.concatenate((self.parents, parents))
        self.depths = np.concatenate((self.depths, np.full(len(rows), self.depth)))
        self.ranks = np.concatenate((self.ranks, ranks))
        self.gaps = np.concatenate((self.gaps, gaps))
        self.survival = np.concatenate((self.survival, np.zeros(len(rows))))
        self.ends = np.concatenate((self.ends, ends))


@dataclass(frozen=True)
class StepRecord:
    """What one decode step did and took.

    Attributes:
        chosen: nodes verified, ascending.
        accepted: of each chosen node.
        drafted: nodes the draft was run on after its first pass.
        draft_seconds, verify_seconds: wall time of drafting (decisions included) and of the rest of the step.
        root_hits: of each sample that was drafted for, whether the draft's best first token is the target's choice.
    """

    batch: Batch
    tree: DraftTree
    chosen: Ints
    accepted: Bools
    drafted: int
    draft_seconds: float
    verify_seconds: float
    root_hits: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))


class DraftingPolicy(Protocol):
    """Decides each step how deep to draft and which nodes to verify. Called in this order, by one engine:

        depth -> (add_layer -> expand)* -> choose -> observe

    Everything but `observe` is a function of the arguments and of what was observed: deterministic.
    """

    width: int  # children kept per drafted node, at most
    max_depth: int  # `depth` never returns more
    max_nodes: int  # of one sample, `choose` never keeps more

    def depth(self, batch: Batch) -> int:
        """Layers to draft at most; 0 decodes plainly."""

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        """Called after each layer: fills its survival; nodes of the last layer to draft children of, none to stop."""

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        """Nodes to verify, ascending, parents included; may be empty."""

    def observe(self, record: StepRecord) -> None:
        """Learn from a step, plain ones too."""


def most_drafted(policy: DraftingPolicy) -> int:
    """Nodes of a sample that the draft is run on in a step at most: as many as may be kept, or `width` of each layer.

    None of the last layer.
    """
    return max(policy.max_nodes, policy.width * (policy.max_depth - 1))
