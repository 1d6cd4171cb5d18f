"""Draft tokens from earlier text, alone or in a tree with those of the draft model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.history.index import History
from rlhfspec_mega.history.propose import Proposed, Wanted, propose
from rlhfspec_mega.history.store import Store
from rlhfspec_mega.planning.growth import worth_verifying
from rlhfspec_mega.planning.tree import (
    MATCHED,
    NOT_DRAFTED,
    OTHER_FOLLOWS,
    Batch,
    Bools,
    DraftTree,
    Floats,
    Ints,
    Recall,
    Worth,
)
from rlhfspec_mega.rollout.torch_engine.drafter import GrownTree
from rlhfspec_mega.rollout.torch_engine.slots import SlotState
from rlhfspec_mega.rollout.torch_engine.verification import FlatInputs, Verification, flat_inputs, verification


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
    return history.propose(batch.size, ask.most, ask.least, **_wanted(ask, batch, slots, depth))


def recall_alone(
    history: History, ask: Recall, worth: Worth, batch: Batch, slots: SlotState, depth: int, device: torch.device
) -> tuple[GrownTree, Ints, Verification]:
    """A step in which only earlier text gives draft tokens: its tree, the chosen nodes and the target's pass.

    It is what `recall`, `join`, the policy's choice and `with_drafts` give, in one compiled call: between two passes of
    the target each call takes two to three times as long as alone.
    """
    (store, last), size = history.of_slots(batch.size), batch.size
    wanted = Wanted(last, **_wanted(ask, batch, slots, depth))
    nodes, survival, chosen, made = _recalled(
        store, wanted, ask.most, ask.least, worth, slots.tokens[:size], batch.lengths
    )
    rows, parents, depths, ranks, matches, tokens = nodes
    gaps, ends = np.zeros(len(rows)), np.zeros(len(rows), np.bool_)
    grown = GrownTree(DraftTree(rows, parents, depths, ranks, gaps, survival, ends, matches), tokens)
    return grown, chosen, verification(made, size, device)


def _wanted(ask: Recall, batch: Batch, slots: SlotState, depth: int) -> dict[str, Any]:
    """All fields of Wanted but the last tokens."""
    size = batch.size
    return {
        "noise": slots.host_noise[:size],
        "lengths": batch.lengths,
        "depths": np.minimum(batch.remaining - 1, depth),
        "sampled": batch.temperatures > 0,
        "classes": ask.classes,
        "accepted": ask.accepted,
        "stops": slots.host_stops[:size],
        "forced": slots.host_forced[:size],
    }


@compiled
def _recalled(
    store: Store, wanted: Wanted, most: int, least: float, worth: Worth, last_tokens: Ints, lengths: Ints
) -> tuple[Ints, Floats, Ints, FlatInputs]:
    """See recall_alone; the first array has the rows, parents, depths, ranks, matches and tokens of the nodes."""
    room = len(lengths) * most
    ints, chances = np.empty((6, room), np.int64), np.empty(room)
    size = propose(store, wanted, most, least, Proposed(ints[0], ints[1], ints[2], ints[3], ints[4], ints[5], chances))
    nodes = np.empty((6, size), np.int64)
    nodes[:3], nodes[3], nodes[4], nodes[5] = ints[:3, :size], NOT_DRAFTED, MATCHED + ints[5, :size], ints[3, :size]
    rows, parents, depths, ranks, matches, tokens = nodes
    survival, chosen = worth_verifying(worth, (rows, parents, depths, ranks, matches), most)
    return nodes, survival, chosen, flat_inputs(last_tokens, lengths, (rows, parents, depths, tokens), chosen)


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
