"""The target's pass over the last tokens and the chosen draft tokens of all samples, as one flat batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import ROOT, Bools, DraftTree, Ints
from rlhfspec_mega.rollout.torch_engine.cache import Inputs


class Verification(NamedTuple):
    """Inputs of a verifying forward pass and the trees that they form. A sample's last token is the root of its tree.

    Attributes:
        inputs: the flat inputs; a sample's last token has column 0.
        depths: int64 [N], 0 for roots.
        parents: int64 [N], flat index of the parent; a root is its own parent.
        roots: bool [N], the samples' last tokens.
        depth: depth of the deepest input.
        nodes: int64 [N] on the host, index into the chosen nodes, or ROOT.
        longest: tokens of the longest sample; the KV of draft tokens is cached behind this position.
    """

    inputs: Inputs
    depths: torch.Tensor
    parents: torch.Tensor
    roots: torch.Tensor
    depth: int
    nodes: Ints
    longest: int


def plain(last_tokens: torch.Tensor, lengths: Ints) -> Verification:
    """A pass without draft tokens: only the last tokens [B] of samples of these lengths."""
    batch, device = len(lengths), last_tokens.device
    rows = torch.arange(batch, device=device)
    positions = torch.from_numpy(lengths - 1).to(device)
    zeros = torch.zeros_like(rows)
    longest = int(lengths.max())
    visible = torch.arange(longest, device=device) <= positions[:, None]
    inputs = Inputs(last_tokens, positions, rows, zeros, positions, visible, batch, 1)
    return Verification(inputs, zeros, rows, torch.ones_like(rows, dtype=torch.bool), 0, np.full(batch, ROOT), longest)


def with_drafts(
    last_tokens: torch.Tensor, lengths: Ints, tree: DraftTree, chosen: Ints, tokens: torch.Tensor
) -> Verification:
    """A pass over the last tokens [B] and the chosen draft tokens.

    Args:
        chosen: indices of the chosen nodes of `tree`, ascending and with their parents.
        tokens: int64 [nodes], the tokens of all nodes of `tree`.
    """
    device, longest = last_tokens.device, int(lengths.max())
    made = _flat_inputs(lengths, tree.rows, tree.parents, tree.depths, chosen, longest)
    order, positions, rows, columns, places, depths, parents = (torch.from_numpy(a).to(device) for a in made.arrays)
    flat = torch.cat((last_tokens, tokens[torch.from_numpy(chosen).to(device)]))[order]
    visible, queries = torch.from_numpy(made.visible).to(device), made.visible.shape[1] - longest + 1
    inputs = Inputs(flat, positions, rows, columns, places, visible, len(lengths), queries)
    depth = int(tree.depths[chosen].max(initial=0))
    return Verification(inputs, depths, parents, depths == 0, depth, made.nodes, longest)


class _FlatInputs(NamedTuple):
    """Inputs by sample: its last token first, then its chosen nodes as they were drafted.

    Attributes:
        arrays: int64 [7, N]: index into last tokens and chosen nodes, position, row, column, place in the cache, depth,
            parent.
        visible: bool [N, longest + most nodes of a sample], which places of the cache an input attends to.
        nodes: int64 [N], index into the chosen nodes, or ROOT.
    """

    arrays: Ints
    visible: Bools
    nodes: Ints


@compiled
def _flat_inputs(
    lengths: Ints, node_rows: Ints, node_parents: Ints, node_depths: Ints, chosen: Ints, longest: int
) -> _FlatInputs:
    batch, count = len(lengths), len(lengths) + len(chosen)
    sizes = np.ones(batch, np.int64)
    for node in chosen:
        sizes[node_rows[node]] += 1
    roots = np.cumsum(sizes) - sizes
    arrays, nodes = np.empty((7, count), np.int64), np.full(count, ROOT)
    order, positions, rows, columns, places, depths, parents = arrays
    visible = np.zeros((count, longest + sizes.max() - 1), np.bool_)
    for row in range(batch):
        root = roots[row]
        order[root], positions[root], rows[root], columns[root] = row, lengths[row] - 1, row, 0
        places[root], depths[root], parents[root] = lengths[row] - 1, 0, root
        visible[root, : lengths[row]] = True
    following, found = roots + 1, np.empty(len(node_rows), np.int64)
    for number in range(len(chosen)):
        node = chosen[number]
        row = node_rows[node]
        here, root = following[row], roots[row]
        following[row], found[node] = here + 1, here
        above, column = root if node_parents[node] == ROOT else found[node_parents[node]], here - root
        order[here], rows[here], columns[here], nodes[here] = batch + number, row, column, number
        positions[here], depths[here] = lengths[row] - 1 + node_depths[node], node_depths[node]
        places[here], parents[here] = longest + column - 1, above
        visible[here] = visible[above]
        visible[here, longest + column - 1] = True
    return _FlatInputs(arrays, visible, nodes)
