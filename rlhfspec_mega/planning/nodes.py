"""The nodes of draft trees: ranked, numbered and multiplied down their paths."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import Bools, DraftTree, Floats, Ints


@compiled
def multiply_down(parents: Ints, rows: Ints, depths: Ints, remaining: Ints, survival: Floats, first: int) -> None:
    """Turn the conditional acceptance of the nodes from `first` on into survival, in place: 0 beyond the length limit.

    Parents come before children.
    """
    for node in range(first, len(parents)):
        if depths[node] >= remaining[rows[node]]:
            survival[node] = 0.0
        elif parents[node] >= 0:
            survival[node] *= survival[parents[node]]


@compiled
def possible_parents(rows: Ints, ends: Bools, remaining: Ints, first: int, depth: int) -> Ints:
    """Those of the nodes from `first` on, which are at this depth, whose children could still be used."""
    found, count = np.empty(len(rows) - first, np.int64), 0
    for node in range(first, len(rows)):
        if not ends[node] and depth < remaining[rows[node]] - 1:
            found[count] = node
            count += 1
    return found[:count]


def rank_nodes(tree: DraftTree, values: Floats, most_per_sample: int) -> Ints:
    """Nodes of positive value, best first and parents before children, at most `most_per_sample` of one sample.

    Nodes that end their sample are left out: if one would be accepted, verifying its parent already gives its token.
    Every prefix contains the parents of its nodes: a child's value is at most its parent's, and ties keep their order.
    """
    return ranked(tree.rows, tree.ends, values, most_per_sample)


@compiled
def ranked(rows: Ints, ends: Bools, values: Floats, most: int) -> Ints:
    """See rank_nodes."""
    positive = np.empty(len(values), np.int64)
    count, last = 0, -1
    for node in range(len(values)):
        if values[node] > 0.0 and not ends[node]:
            positive[count] = node
            count += 1
            last = max(last, rows[node])
    positive = positive[:count]
    order = positive[np.argsort(-values[positive], kind="mergesort")]
    if count <= most:
        return order
    taken, kept = np.zeros(last + 1, np.int64), 0
    for place in range(count):
        row = rows[order[place]]
        if taken[row] < most:
            taken[row] += 1
            order[kept] = order[place]
            kept += 1
    return order[:kept]


def index_within_row(rows: Ints) -> Ints:
    """For each entry, the number of earlier entries with the same row: [0, 1, 0, 2] for rows [a, a, b, a]."""
    by_row = np.argsort(rows, kind="stable")
    grouped = rows[by_row]
    result = np.empty(len(rows), np.int64)
    result[by_row] = np.arange(len(rows)) - np.searchsorted(grouped, grouped)
    return result
