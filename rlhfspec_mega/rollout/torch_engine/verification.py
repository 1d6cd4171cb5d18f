"""The target's pass over the last tokens and the chosen draft tokens of all samples, as one flat batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rlhfspec_mega.planning.tree import ROOT, Bools, DraftTree, Ints
from rlhfspec_mega.rollout.torch_engine.cache import Inputs, number_in_row


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
    batch, device = len(lengths), last_tokens.device
    rows = np.concatenate((np.arange(batch), tree.rows[chosen]))
    order = np.argsort(rows, kind="stable")  # by sample, its last token first, then as the nodes were drafted
    place = np.empty(len(rows) + 1, np.int64)
    place[order] = np.arange(len(rows))
    found = np.searchsorted(chosen, tree.parents[chosen])  # of ROOT: 0, replaced in the next line
    parents = np.where(tree.parents[chosen] == ROOT, tree.rows[chosen], batch + found)
    parents = place[np.concatenate((np.arange(batch), parents))][order]
    depths = np.concatenate((np.zeros(batch, np.int64), tree.depths[chosen]))[order]
    rows, nodes = rows[order], np.concatenate((np.full(batch, ROOT), np.arange(len(chosen))))[order]
    columns, longest = number_in_row(rows), int(lengths.max())
    depth = int(depths.max())
    paths = _paths(parents, columns, depth)
    visible = np.concatenate((np.arange(longest) < lengths[rows, None], paths[:, 1:]), axis=1)
    places = np.where(depths == 0, lengths[rows] - 1, longest + columns - 1)
    arrays = (lengths[rows] - 1 + depths, rows, columns, places, depths, parents, order)
    positions, rows_, columns_, places_, depths_, parents_, order_ = (torch.from_numpy(a).to(device) for a in arrays)
    flat = torch.cat((last_tokens, tokens[torch.from_numpy(chosen).to(device)]))[order_]
    inputs = Inputs(
        flat, positions, rows_, columns_, places_, torch.from_numpy(visible).to(device), batch, int(columns.max()) + 1
    )
    return Verification(inputs, depths_, parents_, depths_ == 0, depth, nodes, longest)


def _paths(parents: Ints, columns: Ints, depth: int) -> Bools:
    """bool [N, queries]: the columns on the path from each input's root to itself."""
    paths = np.zeros((len(parents), int(columns.max()) + 1), np.bool_)
    paths[np.arange(len(parents)), columns] = True
    for _ in range(depth):
        paths |= paths[parents]
    return paths
