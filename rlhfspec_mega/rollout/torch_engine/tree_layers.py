"""The compiled functions of `Drafter`: what a layer of a draft tree takes beside the draft model."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import Bools, Floats, Ints


@compiled
def unread_places(read: Ints, counts: Ints) -> tuple[Ints, Bools]:
    """Rows, columns and places [3, N] of the next counts[i] entries of slot i, which has read[i] entries; and whether
    others of the same slot follow."""
    made, further, found = np.empty((3, counts.sum()), np.int64), np.empty(counts.sum(), np.bool_), 0
    for row in range(len(counts)):
        for column in range(counts[row]):
            made[0, found], made[1, found], made[2, found] = row, column, read[row] + column
            further[found] = column + 1 < counts[row]
            found += 1
    return made, further


@compiled
def seen_before(places: Ints) -> Bools:
    """[N, longest], the committed entries and an entry itself."""
    visible = np.zeros((len(places), places.max() + 1), np.bool_)
    for one in range(len(places)):
        visible[one, : places[one] + 1] = True
    return visible


@compiled
def best_children(
    columns: Ints, scores: Floats, rows: Ints, parents: Ints, width: int, ids: Ints, stops: Bools, forced: Bools
) -> tuple[Ints, Floats, Bools]:
    """Tokens, rows, parents and ranks [4, parents x width] of the best children of each of the nodes `parents`, their
    gaps, and whether they end their samples.

    Args:
        columns, scores: [parents, width or more] of the children, best first.
        ids: target tokens of the draft's; empty if they are the same.
        stops, forced: of slots; see NextTokens.
    """
    count = len(rows) * width
    made, gaps, ends = np.empty((4, count), np.int64), np.empty(count), np.empty(count, np.bool_)
    for parent in range(len(rows)):
        row = rows[parent]
        for rank in range(width):
            child, token = parent * width + rank, columns[parent, rank]
            token = ids[token] if len(ids) else token
            made[0, child], made[1, child], made[2, child], made[3, child] = token, row, parents[parent], rank
            gaps[child] = scores[parent, 0] - scores[parent, 1]  # no number where a draft overflows
            ends[child] = stops[row, token] and not forced[row]
    return made, gaps, ends


@compiled
def with_room(
    nodes: Ints, rows: Ints, ends: Bools, remaining: Ints, depth: int, used: Ints, most: int
) -> tuple[Ints, Ints]:
    """Those of the nodes whose children may be used and for which there is room, and the columns of their entries.

    Args:
        rows, ends: of all nodes.
        used: columns taken by each row, at most `most`; the nodes' are added.
    """
    kept, columns, count = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64), 0
    for node in nodes:
        row = rows[node]
        if not ends[node] and remaining[row] - 1 > depth and used[row] < most:
            kept[count], columns[count] = node, used[row]
            used[row] += 1
            count += 1
    return kept[:count], columns[:count]


@compiled
def masks_below(above: Bools, sources: Ints, columns: Ints) -> Bools:
    """The ancestor masks of nodes whose parents have the masks above[sources]: with each node's own column added."""
    known = above.shape[1]
    masks = np.zeros((len(columns), max(known, columns.max() + 1)), np.bool_)
    for node in range(len(columns)):
        masks[node, :known] = above[sources[node]]
        masks[node, columns[node]] = True
    return masks


@compiled
def layer_inputs(
    settled: Ints, rows: Ints, tokens: Ints, nodes: Ints, columns: Ints, above: Bools, depth: int
) -> tuple[Ints, Bools, int]:
    """Inputs for nodes of the last layer: tokens, positions, rows, numbers in their rows and places [5, nodes]; what
    each node sees, the committed entries of its row and its ancestors behind them; most inputs of a row.

    Args:
        settled: committed entries of each row.
        rows, tokens: of all nodes of the tree.
        columns: places of the nodes' entries behind the committed ones.
        above: the ancestors of each node by column, itself included.
    """
    longest = 0
    for node in nodes:
        longest = max(longest, settled[rows[node]])
    made = np.empty((5, len(nodes)), np.int64)
    visible, queries, number = np.zeros((len(nodes), longest + above.shape[1]), np.bool_), 0, 0
    for one in range(len(nodes)):
        node = nodes[one]
        row, committed = rows[node], settled[rows[node]]
        number = number + 1 if one and row == made[2, one - 1] else 0
        queries = max(queries, number + 1)
        made[0, one], made[1, one], made[2, one] = tokens[node], committed - 1 + depth, row
        made[3, one], made[4, one] = number, committed + columns[one]
        visible[one, :committed] = True
        visible[one, committed : committed + above.shape[1]] = above[one]
    return made, visible, queries
