"""Whether draft tokens, and another layer of them, are worth their time: the compiled functions of `Adaptive`."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.acceptance import set_survival
from rlhfspec_mega.planning.nodes import possible_parents, ranked
from rlhfspec_mega.planning.tree import Bools, Floats, Ints, Prices, Worth


@compiled
def drafting_seconds(prices: Prices, depth: int, drafted: int) -> float:
    """Seconds of drafting so many layers, the later ones from `drafted` nodes all together."""
    if depth == 0:
        return 0.0
    found = prices.first + prices.per_layer * depth
    if depth > 1:
        found += (depth - 1) * np.interp(drafted / (depth - 1), prices.nodes, prices.seconds)
    return found


@compiled
def least_to_pay(verify: Floats, size: int) -> float:
    """Least mean survival with which draft tokens pay in a batch of this size: for k of them it is

        (seconds of a step with k of them / seconds of a plain step - 1) * size / k

    and the k counts for which that is least.

    Args:
        verify: seconds of steps with 0, 1, ... draft tokens.
    """
    least = np.inf
    for k in range(1, len(verify)):
        least = min(least, (verify[k] / verify[0] - 1.0) * size / k)
    return least


@compiled
def most_worth(prices: Prices, values: Floats, draft_seconds: float, least: int) -> tuple[int, float]:
    """The n >= `least` draft tokens that are worth most, and what they are worth; `values` fall.

    A step that takes longer must give what other steps would have given in that time: tokens - pace x seconds is
    largest, with the pace of such steps so far, where tokens / seconds is largest over all steps together (Dinkelbach
    1967). While that pace is unknown, it is the step's own rate that counts. Of equal ones the smallest counts.
    """
    tokens, count, best = prices.tokens, -1, -np.inf
    most = min(len(values), len(prices.verify) - 1)
    for n in range(most + 1):
        if n:
            tokens += values[n - 1]
        if n >= least or n == most:
            seconds = draft_seconds + prices.verify[n]
            worth = tokens - prices.pace * seconds if prices.pace > 0.0 else tokens / seconds
            if worth > best:
                count, best = n, worth
    return count, best


@compiled
def most_worth_nodes(
    prices: Prices, values: Floats, rows: Ints, ends: Bools, depth: int, drafted: int, most: int, least: int
) -> tuple[Ints, bool]:
    """The nodes that are worth most, ascending, and whether they are more than that because of `least`.

    Args:
        values, rows, ends: of all nodes.
        depth, drafted: of the tree; see DraftTree.
        most: draft tokens of a sample.
        least: draft tokens of the batch, if there are as many.
    """
    order = ranked(rows, ends, values, most)
    count, _ = most_worth(prices, values[order], drafting_seconds(prices, depth, drafted), 0)
    forced, kept = count < least, np.zeros(len(values), np.bool_)
    kept[order[: max(count, least)]] = True
    return np.flatnonzero(kept), forced


@compiled
def worth_verifying(worth: Worth, nodes: tuple[Ints, Ints, Ints, Ints, Ints], most: int) -> tuple[Floats, Ints]:
    """The survival of nodes that only earlier text gives, and those of them that are worth most, ascending.

    Args:
        nodes: rows, parents, depths, ranks (all NOT_DRAFTED) and matches, as in DraftTree.
        most: draft tokens of a sample.
    """
    rows, parents, depths, ranks, matches = nodes
    survival, gaps, ends = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows), np.bool_)
    set_survival(worth.odds, worth.entries, rows, parents, depths, ranks, gaps, matches, worth.remaining, survival, 0)
    chosen, _ = most_worth_nodes(worth.prices, survival * worth.weights[rows], rows, ends, 0, 0, most, 0)
    return survival, chosen


@compiled
def worth_children(
    prices: Prices,
    values: Floats,
    rows: Ints,
    ends: Bools,
    first: int,
    depth: int,
    drafted: int,
    remaining: Ints,
    classes: Ints,
    expected: Floats,
    most: int,
    width: int,
) -> Ints:
    """Nodes of the last layer whose children are predicted to be verified; none if a layer is not worth its time.

    Args:
        values, rows, ends: of all nodes so far.
        first: index of the last layer's first node.
        depth, drafted: of the tree; see DraftTree.
        remaining, classes: of the samples: see Batch, and the row of `expected` that holds for each.
        expected: [classes, layers, ranks] acceptance of children, the last layer's for all deeper ones, best first.
        most: draft tokens of a sample.
        width: children of a node.
    """
    parents = possible_parents(rows, ends, remaining, first, depth)
    if not len(parents):
        return parents
    kept = values[ranked(rows, ends, values, most)]
    # To keep no node is not considered: that something is drafted was decided with all layers in view.
    _, current = most_worth(prices, kept, drafting_seconds(prices, depth, drafted), 1)
    layer, width = min(depth, expected.shape[1] - 1), min(width, expected.shape[2])
    together = np.empty(len(kept) + width * len(parents))
    together[: len(kept)] = kept
    for place in range(len(parents)):
        start, parent = len(kept) + width * place, parents[place]
        together[start : start + width] = values[parent] * expected[classes[rows[parent]], layer, :width]
    together = together[np.argsort(-together, kind="mergesort")]  # other kinds take seconds to compile
    count, deeper = most_worth(prices, together, drafting_seconds(prices, depth + 1, drafted + len(parents)), 1)
    worth, found = np.empty(len(parents), np.int64), 0
    for parent in parents:
        if values[parent] * expected[classes[rows[parent]], layer, 0] >= together[count - 1]:
            worth[found] = parent
            found += 1
    if found < len(parents):  # the draft need not be run on the others, which makes the layer cheaper
        _, deeper = most_worth(prices, together, drafting_seconds(prices, depth + 1, drafted + found), 1)
    return worth[:found] if deeper > current else worth[:0]
