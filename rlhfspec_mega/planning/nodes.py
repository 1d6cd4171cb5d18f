"""The nodes of draft trees: counted, ranked and multiplied down their paths."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import DraftTree, Floats, Ints


def drafted_nodes(tree: DraftTree) -> int:
    """Number of nodes that have children by the draft: it was run on them after its first pass."""
    if tree.depth < 2:
        return 0
    by_draft = tree.ranks[tree.layers[1] :] >= 0
    return int(np.count_nonzero(np.bincount(tree.parents[tree.layers[1] :][by_draft])))


@compiled
def multiply_down(parents: Ints, survival: Floats) -> None:
    """Turn conditional acceptance into survival, in place; parents come before children."""
    for node in range(len(parents)):
        if parents[node] >= 0:
            survival[node] *= survival[parents[node]]


def rank_nodes(tree: DraftTree, values: Floats, most_per_sample: int) -> Ints:
    """Nodes of positive value, best first and parents before children, at most `most_per_sample` of one sample.

    Nodes that end their sample are left out: if one would be accepted, verifying its parent already gives its token.
    Every prefix contains the parents of its nodes: a child's value is at most its parent's, and ties keep their order.
    """
    if tree.ends.any():
        values = np.where(tree.ends, 0.0, values)
    order = (-values).argsort(kind="stable")
    if len(order) and values[order[-1]] <= 0.0:
        order = order[: np.count_nonzero(values > 0.0)]
    if len(order) > most_per_sample:
        order = order[index_within_row(tree.rows[order]) < most_per_sample]
    return order


def index_within_row(rows: Ints) -> Ints:
    """For each entry, the number of earlier entries with the same row: [0, 1, 0, 2] for rows [a, a, b, a]."""
    by_row = np.argsort(rows, kind="stable")
    grouped = rows[by_row]
    result = np.empty(len(rows), np.int64)
    result[by_row] = np.arange(len(rows)) - np.searchsorted(grouped, grouped)
    return result
