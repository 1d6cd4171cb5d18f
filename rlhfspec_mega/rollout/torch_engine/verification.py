"""The target's pass over the last tokens and the chosen draft tokens of all samples, as one flat batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import ROOT, Bools, DraftTree, Ints
from rlhfspec_mega.rollout.torch_engine.cache import Inputs
from rlhfspec_mega.sampling.verify import accepted_nodes


class TreeNodes(NamedTuple):
    """Arrays [N] on the host about the inputs of a pass; a sample's last token is the root of its tree.

    Attributes:
        tokens, rows, places: as in `Inputs`.
        depths: 0 for roots.
        parents: flat index of the parent, which comes before; a root is its own parent.
        numbers: index into the chosen nodes, or ROOT.
    """

    tokens: Ints
    rows: Ints
    places: Ints
    depths: Ints
    parents: Ints
    numbers: Ints


class Verification(NamedTuple):
    """Inputs of a verifying forward pass, in which a sample's last token has column 0, and the trees that they form."""

    inputs: Inputs
    nodes: TreeNodes

    @property
    def has_drafts(self) -> bool:
        return len(self.nodes.rows) > self.inputs.batch


class Accepted(NamedTuple):
    """The path that the target takes through the trees of B samples.

    Attributes:
        taken: [N] whether an input is on it; roots are.
        counts: [B] inputs on the path of each sample: its new tokens.
        last: [B] the newest token of each sample.
        nodes: [chosen nodes] whether a node is on it.
        moves: [3, n] slots, places and positions of the draft tokens whose KV moves from place to position: it was
            written behind the sample's own, in the order in which it was drafted.
    """

    taken: Bools
    counts: Ints
    last: Ints
    nodes: Bools
    moves: Ints


@compiled
def accept(nodes: TreeNodes, choices: Ints, lengths: Ints) -> Accepted:
    """Follow the target's choices [N] after all inputs; `lengths` are the samples' tokens before the step."""
    taken = accepted_nodes(choices, nodes.tokens, nodes.parents)
    count, batch = len(taken), nodes.rows[-1] + 1
    counts, last = np.zeros(batch, np.int64), np.empty(batch, np.int64)
    chosen, moves, moved = np.zeros(count - batch, np.bool_), np.empty((3, count), np.int64), 0
    for node in range(count):
        row, depth = nodes.rows[node], nodes.depths[node]
        if depth:
            chosen[nodes.numbers[node]] = taken[node]
        if not taken[node]:
            continue
        counts[row] += 1
        last[row] = choices[node]
        target = lengths[row] - 1 + depth
        if target != nodes.places[node]:
            moves[0, moved], moves[1, moved], moves[2, moved] = row, nodes.places[node], target
            moved += 1
    return Accepted(taken, counts, last, chosen, moves[:, :moved])


def plain(last_tokens: Ints, lengths: Ints, device: torch.device) -> Verification:
    """A pass without draft tokens: only the last tokens [B] of samples of these lengths."""
    return verification(_plain_inputs(last_tokens, lengths), len(lengths), device)


def with_drafts(
    last_tokens: Ints, lengths: Ints, tree: DraftTree, chosen: Ints, tokens: Ints, device: torch.device
) -> Verification:
    """A pass over the last tokens [B] and the chosen draft tokens.

    Args:
        chosen: indices of the chosen nodes of `tree`, ascending and with their parents.
        tokens: [nodes], the tokens of all nodes of `tree`.
    """
    made = flat_inputs(last_tokens, lengths, (tree.rows, tree.parents, tree.depths, tokens), chosen)
    return verification(made, len(lengths), device)


class FlatInputs(NamedTuple):
    """Inputs of a pass on the host, by sample: its last token first, then its chosen nodes as they were drafted.

    Attributes:
        arrays: int64 [8, N]: token, position, row, column, place in the cache, depth, parent, and index into the chosen
            nodes, or ROOT.
        visible: bool [N, longest + most nodes of a sample], which places of the cache an input attends to.
        queries: most inputs of a sample.
    """

    arrays: Ints
    visible: Bools
    queries: int


def verification(made: FlatInputs, batch: int, device: torch.device) -> Verification:
    """The pass over these inputs of so many samples."""
    tokens, positions, rows, columns, places = torch.from_numpy(made.arrays[:5]).to(device).unbind()
    visible = torch.from_numpy(made.visible).to(device)
    inputs = Inputs(tokens, positions, rows, columns, places, visible, batch, made.queries)
    flat, _, slots, _, at, depths, parents, nodes = made.arrays
    return Verification(inputs, TreeNodes(flat, slots, at, depths, parents, nodes))


@compiled
def _plain_inputs(last_tokens: Ints, lengths: Ints) -> FlatInputs:
    batch = len(lengths)
    arrays, visible = np.zeros((8, batch), np.int64), np.zeros((batch, lengths.max()), np.bool_)
    for row in range(batch):
        arrays[0, row], arrays[1, row], arrays[2, row] = last_tokens[row], lengths[row] - 1, row
        arrays[4, row], arrays[6, row], arrays[7, row] = lengths[row] - 1, row, ROOT
        visible[row, : lengths[row]] = True
    return FlatInputs(arrays, visible, 1)


@compiled
def flat_inputs(last_tokens: Ints, lengths: Ints, tree: tuple[Ints, Ints, Ints, Ints], chosen: Ints) -> FlatInputs:
    """See `with_drafts`; `tree` has the rows, parents, depths and tokens of its nodes."""
    node_rows, node_parents, node_depths, node_tokens = tree
    batch, count, longest = len(lengths), len(lengths) + len(chosen), lengths.max()
    sizes = np.ones(batch, np.int64)
    for node in chosen:
        sizes[node_rows[node]] += 1
    roots = np.cumsum(sizes) - sizes
    arrays, queries = np.empty((8, count), np.int64), sizes.max()
    tokens, positions, rows, columns, places, depths, parents, nodes = arrays
    visible = np.zeros((count, longest + queries - 1), np.bool_)
    for row in range(batch):
        root = roots[row]
        tokens[root], positions[root], rows[root], columns[root] = last_tokens[row], lengths[row] - 1, row, 0
        places[root], depths[root], parents[root], nodes[root] = lengths[row] - 1, 0, root, ROOT
        visible[root, : lengths[row]] = True
    following, found = roots + 1, np.empty(len(node_rows), np.int64)
    for number in range(len(chosen)):
        node = chosen[number]
        row = node_rows[node]
        here, root = following[row], roots[row]
        following[row], found[node] = here + 1, here
        above, column = root if node_parents[node] == ROOT else found[node_parents[node]], here - root
        tokens[here], rows[here], columns[here], nodes[here] = node_tokens[node], row, column, number
        positions[here], depths[here] = lengths[row] - 1 + node_depths[node], node_depths[node]
        places[here], parents[here] = lengths[row] + column - 1, above
        visible[here] = visible[above]
        visible[here, lengths[row] + column - 1] = True
    return FlatInputs(arrays, visible, queries)
