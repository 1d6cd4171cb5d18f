"""Draft tokens from earlier text, in a tree with those of the draft model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.history.index import History
from rlhfspec_mega.history.propose import Proposed
from rlhfspec_mega.planning.tree import MATCHED, OTHER_FOLLOWS, Batch, Bools, Ints, Recall
from rlhfspec_mega.rollout.torch_engine.drafter import GrownTree
from rlhfspec_mega.rollout.torch_engine.slots import SlotState


class Joined(NamedTuple):
    """Where proposed nodes stand in a tree.

    Attributes:
        places: [proposed] index of each in the tree; new ones follow the tree's own nodes in their order.
        parents: [proposed] index of each parent in the tree, or ROOT.
        followed: [nodes of the tree] whether earlier text says what follows the node's parent.
        drafted: [proposed] whether the draft model was run on the parent.
    """

    places: Ints
    parents: Ints
    followed: Bools
    drafted: Bools


def recall(history: History, ask: Recall, batch: Batch, slots: SlotState, depth: int) -> Proposed:
    """Trees of up to `depth` layers from earlier text."""
    size = batch.size
    return history.propose(
        size,
        ask.most,
        ask.least,
        noise=slots.host_noise[:size],
        lengths=batch.lengths,
        depths=np.minimum(batch.remaining - 1, depth),
        sampled=batch.temperatures > 0,
        classes=ask.classes,
        accepted=ask.accepted,
        stops=slots.host_stops[:size],
        forced=slots.host_forced[:size],
    )


def join(grown: GrownTree, proposed: Proposed, samples: int) -> None:
    """Add proposed nodes to the draft tree of so many samples; a token that both give under a parent is one node."""
    tree = grown.tree
    if not tree.size:
        undrafted = np.zeros(len(proposed.rows), np.bool_)
        tree.add_recalled(proposed.rows, proposed.parents, proposed.depths, MATCHED + proposed.cells, undrafted)
        grown.tokens = proposed.tokens
        return
    joined = _join(tree.rows, tree.parents, grown.tokens, proposed, samples)
    new = joined.places >= tree.size
    tree.matches[joined.followed] = OTHER_FOLLOWS
    tree.matches[joined.places[~new]] = MATCHED + proposed.cells[~new]
    rows, tokens = proposed.rows[new], proposed.tokens[new]
    tree.add_recalled(
        rows,
        joined.parents[new],
        proposed.depths[new],
        MATCHED + proposed.cells[new],
        joined.drafted[new],
    )
    grown.tokens = np.concatenate((grown.tokens, tokens))


@compiled
def _join(rows: Ints, parents: Ints, tokens: Ints, proposed: Proposed, samples: int) -> Joined:
    """Find each proposed node among the children of its parent."""
    own, count = len(rows), len(proposed.rows)
    # Children of node n are a list that begins at first[samples + n], those of a sample's last token one at first[row].
    first, following = np.full(samples + own + count, -1), np.full(own + count, -1)
    for node in range(own):
        anchor = samples + parents[node] if parents[node] >= 0 else rows[node]
        following[node], first[anchor] = first[anchor], node
    places, above = np.empty(count, np.int64), np.empty(count, np.int64)
    followed, drafted = np.zeros(own, np.bool_), np.zeros(count, np.bool_)
    size = own
    for one in range(count):
        parent = proposed.parents[one]
        above[one] = places[parent] if parent >= 0 else -1
        child = first[samples + above[one] if parent >= 0 else proposed.rows[one]]
        drafted[one] = child >= 0
        places[one] = -1
        while child >= 0:
            followed[child] = True
            if tokens[child] == proposed.tokens[one]:
                places[one] = child
            child = following[child]
        if places[one] < 0:
            places[one] = size
            size += 1
    return Joined(places, above, followed, drafted)
