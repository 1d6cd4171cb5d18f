"""The data of drafting decisions: the samples of a step, their draft tree, and the record of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.compiled import compiled

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROOT = -1  # the parent of depth-1 nodes: the sample's last token
# In place of a rank: the draft model names other children of the node's parent, or it was not run on the parent.
NOT_NAMED, NOT_DRAFTED = -1, -2
# Codes of what earlier text says of a node: nothing is known of what follows its parent, or other tokens follow; from
# MATCHED on, code - MATCHED is its cell among those that follow (`history.propose`).
NO_MATCH, OTHER_FOLLOWS, MATCHED = 0, 1, 2

# Most accepted tokens of a sample that the draft may leave unread during plain steps. Many, because reading tokens
# costs as much as drafting them, and few samples are left once a batch has become small enough to draft for.
BACKLOG = 256
# Plain steps, or as many inputs of others, of which the target's hidden states are kept as its pass has put them out.
STEPS_KEPT = 64


@dataclass(frozen=True)
class Batch:
    """The decoding samples of one step, one entry each.

    Attributes:
        lengths: tokens of prompt and response so far.
        generated: response tokens so far.
        remaining: response tokens until the length limit. A node deeper than `remaining - 1` cannot be used.
        temperatures: 0 is greedy.
        backlog: tokens, of all samples together, that the draft has not read yet; its first pass reads them.
        samples: serial number of each sample in its engine, under which what is learnt about it is kept. An array
            of its own for each step, which copies of the batch share: by it they are known to be of the same step.
        recalled: predicted survival of the draft tokens that earlier text gives.
        draftable: whether there is a draft model to run, and it follows nearly all samples.
    """

    lengths: Ints
    generated: Ints
    remaining: Ints
    temperatures: Floats
    backlog: int
    samples: Ints
    recalled: Floats = field(default_factory=lambda: np.zeros(0))
    draftable: bool = True

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def kv_tokens(self) -> int:
        return int(self.lengths.sum())

    def first(self, size: int) -> Batch:
        """The first samples alone, when the draft has read all but their newest tokens."""
        some = slice(size)
        return Batch(
            lengths=self.lengths[some],
            generated=self.generated[some],
            remaining=self.remaining[some],
            temperatures=self.temperatures[some],
            backlog=size,
            samples=self.samples[some],
        )


@dataclass
class DraftTree:
    """Draft tokens of all samples of a step, as flat arrays with an entry per node; parents come before children.

    Attributes:
        rows: index of the node's sample in the batch.
        parents: index of the parent node, or ROOT.
        depths: from 1.
        ranks: rank among its siblings by the draft's perturbed score log q + g, from 0; NOT_NAMED, or NOT_DRAFTED.
        gaps: best perturbed score among the siblings minus the second best; large where the draft is confident.
        survival: predicted probability that the node is accepted; the policy fills it, layer by layer.
        ends: whether the node's token would end its sample; such nodes get no children.
        matches: what earlier text says of the node: NO_MATCH, OTHER_FOLLOWS, or MATCHED + its cell.
        layers: index of the first node of each layer that the draft model made.
        drafted: nodes that have children by the draft: it was run on them after its first pass.
    """

    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    parents: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    depths: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    ranks: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    gaps: Floats = field(default_factory=lambda: np.zeros(0, np.float64))
    survival: Floats = field(default_factory=lambda: np.zeros(0, np.float64))
    ends: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    matches: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    layers: list[int] = field(default_factory=list)
    drafted: int = 0

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def depth(self) -> int:
        """Number of drafted layers."""
        return len(self.layers)

    @property
    def last_layer(self) -> slice:
        """The nodes of the last layer; empty before the first layer. Not to be used after `add_recalled`."""
        return slice(self.layers[-1] if self.layers else 0, self.size)

    def add_layer(self, rows: Ints, parents: Ints, ranks: Ints, gaps: Floats, ends: Bools) -> None:
        """Append children of nodes of the last layer, with a survival of 0; those of a node stand together."""
        self.layers.append(self.size)
        grown = _with_layer(
            (self.rows, self.parents, self.depths, self.ranks, self.matches),
            (self.gaps, self.survival, self.ends),
            (rows, parents, ranks),
            (gaps, ends),
            self.depth,
        )
        joined, self.gaps, self.survival, self.ends, drafted = grown
        self.rows, self.parents, self.depths, self.ranks, self.matches = joined
        self.drafted += drafted

    def add_recalled(self, rows: Ints, parents: Ints, depths: Ints, matches: Ints, drafted: Bools) -> None:
        """Append nodes that only earlier text gives, none of which ends its sample.

        Args:
            drafted: whether the draft model was run on their parents.
        """
        joined, self.gaps, self.survival, self.ends = _with_recalled(
            (self.rows, self.parents, self.depths, self.ranks, self.matches),
            (self.gaps, self.survival, self.ends),
            (rows, parents, depths, matches),
            drafted,
        )
        self.rows, self.parents, self.depths, self.ranks, self.matches = joined


@compiled
def _with_layer(
    whole: tuple[Ints, Ints, Ints, Ints, Ints],
    others: tuple[Floats, Floats, Bools],
    new: tuple[Ints, Ints, Ints],
    new_others: tuple[Floats, Bools],
    depth: int,
) -> tuple[Ints, Floats, Floats, Bools, int]:
    """A tree's arrays with those of a new layer behind them, and how many nodes the draft was run on for the layer.

    That is 0 for the first layer, which the draft's first pass gives.

    Args:
        whole: rows, parents, depths, ranks and matches; `others` gaps, survival and ends.
        new: rows, parents and ranks of the layer; `new_others` its gaps and ends.
        depth: of the layer.
    """
    rows, parents, depths, ranks, matches = whole
    own, added = len(rows), len(new[0])
    joined, gaps = np.empty((5, own + added), np.int64), np.empty(own + added)
    survival, ends = np.zeros(own + added), np.empty(own + added, np.bool_)
    joined[0, :own], joined[1, :own], joined[2, :own], joined[3, :own] = rows, parents, depths, ranks
    joined[4, :own], gaps[:own], survival[:own], ends[:own] = matches, others[0], others[1], others[2]
    joined[0, own:], joined[1, own:], joined[2, own:], joined[3, own:] = new[0], new[1], depth, new[2]
    joined[4, own:], gaps[own:], ends[own:] = NO_MATCH, new_others[0], new_others[1]
    drafted = 0
    for one in range(added):
        drafted += depth > 1 and (one == 0 or new[1][one] != new[1][one - 1])
    return joined, gaps, survival, ends, drafted


@compiled
def _with_recalled(
    whole: tuple[Ints, Ints, Ints, Ints, Ints],
    others: tuple[Floats, Floats, Bools],
    new: tuple[Ints, Ints, Ints, Ints],
    drafted: Bools,
) -> tuple[Ints, Floats, Floats, Bools]:
    """See DraftTree.add_recalled.

    Args:
        whole: rows, parents, depths, ranks and matches; `others` gaps, survival and ends.
        new: rows, parents, depths and matches.
    """
    own, added = len(whole[0]), len(drafted)
    joined, gaps = np.empty((5, own + added), np.int64), np.zeros(own + added)
    survival, ends = np.zeros(own + added), np.zeros(own + added, np.bool_)
    joined[0, :own], joined[1, :own], joined[2, :own], joined[3, :own] = whole[0], whole[1], whole[2], whole[3]
    joined[4, :own], gaps[:own], survival[:own], ends[:own] = whole[4], others[0], others[1], others[2]
    joined[0, own:], joined[1, own:], joined[2, own:], joined[4, own:] = new
    for one in range(added):
        joined[3, own + one] = NOT_NAMED if drafted[one] else NOT_DRAFTED
    return joined, gaps, survival, ends


@dataclass(frozen=True)
class StepRecord:
    """What one decode step did, and its times.

    Attributes:
        chosen: indices of the verified nodes, ascending.
        accepted: whether each chosen node was accepted.
        drafted: number of nodes that the draft was run on after its first pass.
        draft_seconds, verify_seconds: wall time of drafting (policy included) and of the rest of the step.
        root_hits: for each sample that was drafted for, whether the draft's best first token is the target's choice.
    """

    batch: Batch
    tree: DraftTree
    chosen: Ints
    accepted: Bools
    drafted: int
    draft_seconds: float
    verify_seconds: float
    root_hits: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))


class Prices(NamedTuple):
    """What a step takes.

    Attributes:
        tokens: that it gives without draft tokens.
        pace: tokens per second of such steps; 0 if it is unknown.
        verify: seconds of verifying 0, 1, ... draft tokens, up to the most.
        first, per_layer: seconds of the first drafted layer, and of each layer beside its nodes.
        nodes, seconds: of a later layer: its seconds where it is drafted from so many nodes, linear in between.
    """

    tokens: float
    pace: float
    verify: Floats
    first: float
    per_layer: float
    nodes: Floats
    seconds: Floats


class Worth(NamedTuple):
    """What decides which nodes from earlier text are verified where there are no others.

    Attributes:
        odds, entries: see AcceptanceModel.of_samples.
        remaining: [B] as in `Batch`.
        weights: [B] of the samples' tokens.
    """

    odds: Floats
    entries: Ints
    remaining: Ints
    weights: Floats
    prices: Prices


class Recall(NamedTuple):
    """How many draft tokens earlier text is asked for.

    Attributes:
        most: nodes of a sample.
        least: survival below which a node is left out.
        classes: int64 [B], row of `accepted` that holds for each sample.
        accepted: [classes, cells] probability that a node of this cell is accepted if its parent is.
        worth: of a step in which nothing else is drafted: the nodes are chosen as they are found, in one compiled call.
            The policy's `depth` and `choose` are not called in it, so that a policy that chooses in another way than
            this says leaves it out.
    """

    most: int
    least: float
    classes: Ints
    accepted: Floats
    worth: Worth | None = None


class DraftingPolicy(Protocol):
    """Decides in each step how many layers to draft and which nodes to verify. One engine calls it in this order:

        follows, draft_returns (when samples join the batch), ended (when samples leave it)
        rests -> recall -> depth -> (add_layer -> expand)* -> add_recalled -> choose -> observe
              -> rested

    Steps of which `rests` says so are plain, without further questions, as long as no sample joins or leaves; a step
    whose `recall` says what tokens are `worth` goes on with `observe`. All methods but `observe`, `rested`, `ended` and
    `draft_returns` depend only on their arguments and on what was observed before.
    """

    width: int  # most children per drafted node
    max_depth: int  # most layers that `depth` returns
    max_nodes: int  # most nodes of one sample that `choose` returns

    def follows(self, size: int) -> bool:
        """Whether the draft is to follow samples that join a batch, now of this size: else it never drafts for them."""
        return True

    def rests(self, size: int, able: bool) -> int:
        """How many steps from the next one on are plain, by a decision that still holds; 0: the policy is to be asked.

        Args:
            size: samples in the batch.
            able: whether there is anything to draft from: history, or a sample that the draft follows.
        """
        return 0

    def rested(self, samples: Ints, kv_tokens: int, seconds: Sequence[float]) -> None:
        """Learn from such steps of the same samples; fewer were made if a sample joined, ended or left.

        Args:
            samples: their numbers (`Batch.samples`).
            kv_tokens: in the KV caches at the first step.
            seconds: of each step.
        """
        return

    def ended(self, samples: Ints, tokens: Ints, joined: Floats, left: int) -> None:
        """Learn from samples that have ended, or left the engine.

        Args:
            samples, tokens: of each its number (`Batch.samples`) and the response tokens that it got here.
            joined: of each, how many tokens of a sample the engine had decoded in the mean when it got a slot.
            left: samples that are still here.
        """
        return

    def draft_returns(self) -> None:
        """The draft model, which had no sample to follow, follows one now."""
        return

    def recall(self, batch: Batch) -> Recall | None:
        """What earlier text is asked for in this step; None: nothing."""

    def depth(self, batch: Batch) -> int:
        """Most layers to draft in this step with the draft model; 0: none."""

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        """Set the survival of the new layer, and return its nodes that get children; none ends drafting."""

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        """Indices of the nodes to verify, ascending, with their parents; may be empty."""

    def observe(self, record: StepRecord) -> None:
        """Learn from a step, with or without a draft."""


def most_drafted(policy: DraftingPolicy) -> int:
    """The upper bound on the nodes of one sample that the draft is run on in a step.

    It is the larger of the nodes that may be verified and of `width` nodes in each layer but the last, on whose nodes
    the draft is not run.
    """
    return max(policy.max_nodes, policy.width * (policy.max_depth - 1))
