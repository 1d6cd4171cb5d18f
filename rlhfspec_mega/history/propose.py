"""Draft trees from earlier text: what followed a sample's last tokens elsewhere, ranked under shared noise."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.history.store import ORDERS, Doubles, Ints, Store, find_matches, follower, place_of
from rlhfspec_mega.planning.acceptance import GAP_EDGES, GAPS, MATCH_EDGES, MATCH_RANKS
from rlhfspec_mega.sampling.token_noise import gumbel_of_token

Bools = NDArray[np.bool_]

MATCHES = 32  # earlier places that are kept for a node
WIDTH = MATCH_RANKS  # most children of a node
LENGTHS = len(MATCH_EDGES) + 1
# How much a match counts, by its length: six times as much as one that is shorter by a token.
_WEIGHTS = 6.0 ** np.arange(17)
_EULER = 0.5772156649015329  # mean of the noise


class Wanted(NamedTuple):
    """The samples of a step, one entry each.

    Attributes:
        last: id of the sample's last token in the store.
        noise: hash state of the sample's seed (`sampling.noise.seed_states`).
        lengths: tokens of prompt and response.
        depths: most layers of its tree.
        sampled: whether the temperature is above 0.
        classes: row of `accepted` that holds for the sample.
        accepted: [classes, MATCH_CELLS] probability that a node of this cell is accepted if its parent is.
        stops: [B, vocabulary] tokens that end the sample, unless it is forced. They are not proposed: verifying the
            node before one gives it, too.
        forced: whether the sample has a forced length.
    """

    last: Ints
    noise: Ints
    lengths: Ints
    depths: Ints
    sampled: Bools
    classes: Ints
    accepted: Doubles
    stops: Bools
    forced: Bools


class Proposed(NamedTuple):
    """Nodes, sample by sample, parents before children: arrays [most nodes].

    Attributes:
        parents: index of the parent; -1 for children of a sample's last token.
        ranks: place among siblings by score, from 0.
        cells: index of (rank, length of the match, gap).
        survival: predicted probability that the node is accepted.
    """

    rows: Ints
    parents: Ints
    depths: Ints
    tokens: Ints
    ranks: Ints
    cells: Ints
    survival: Doubles


@compiled
def _children(
    lengths: Ints,
    following: Ints,
    state: int,
    position: int,
    sampled: bool,
    tokens: Ints,
    scores: Doubles,
) -> tuple[int, float]:
    """(number, gap) of the best continuations of matches; their tokens and scores, best first, are filled in.

    The share of a token is that of its matches by weight; as in PPM (method C, Moffat 1990), a token that did not
    follow any of n matches with d different followers has the probability d / (n + d). The gap is that of the best
    score to the next one, or to the score that such a token has on average.

    Args:
        lengths, following: [n] of the matches, and the token behind each, or -1.
        state: hash state of the sample's seed.
        position: index of the last input token.
    """
    number, total, count = 0, 0.0, 0
    for one in range(len(lengths)):
        token = following[one]
        if token < 0:
            continue
        weight = _WEIGHTS[min(lengths[one], len(_WEIGHTS) - 1)]
        total += weight
        count += 1
        for known in range(number):
            if tokens[known] == token:
                scores[known] += weight
                break
        else:
            tokens[number], scores[number] = token, weight
            number += 1
    if number == 0:
        return 0, 0.0
    unseen = math.log(number / (count + number)) + (_EULER if sampled else 0.0)
    scale = math.log(count / (count + number)) - math.log(total)
    for one in range(number):
        scores[one] = math.log(scores[one]) + scale
        if sampled:
            scores[one] += gumbel_of_token(state, position, tokens[one])
    for place in range(min(number, WIDTH + 1)):  # the best ones to the front
        best = place
        for one in range(place + 1, number):
            if scores[one] > scores[best]:
                best = one
        tokens[place], tokens[best] = tokens[best], tokens[place]
        scores[place], scores[best] = scores[best], scores[place]
    second = scores[1] if number > 1 else -np.inf
    return min(number, WIDTH), scores[0] - max(second, unseen)


@compiled
def cell_of(rank: int, length: int, gap: float) -> int:
    """The cell of a node: of its rank, the length of its parent's longest match, and the gap among its siblings."""
    lengths, gaps = np.searchsorted(MATCH_EDGES, length, "right"), np.searchsorted(GAP_EDGES, gap)
    return int((rank * LENGTHS + lengths) * GAPS + gaps)


class _Scratch(NamedTuple):
    """Buffers of one tree. Entry 0 of the first five is the sample's last token, entry n the tree's n-th node.

    Attributes:
        ids, lengths: [most + 1, MATCHES] matches of each node.
        behind, following: [most + 1, MATCHES] the id behind each match, and its token, or -1.
        found: [most + 1] how many there are.
        waiting: [WIDTH * (most + 1), 4] candidates: entry of the parent, rank, token, cell.
        chances: [WIDTH * (most + 1)] their survival.
    """

    ids: Ints
    lengths: Ints
    behind: Ints
    following: Ints
    found: Ints
    waiting: Ints
    chances: Doubles
    buckets: Ints
    tokens: Ints
    scores: Doubles


@compiled
def _add_candidates(
    store: Store,
    wanted: Wanted,
    row: int,
    scratch: _Scratch,
    above: int,
    depth: int,
    survival: float,
    least: float,
    count: int,
) -> int:
    """Add the children of the node `above`, whose depth and survival are given, to `count` candidates."""
    matches = scratch.found[above]
    if matches == 0 or depth >= wanted.depths[row]:
        return count
    lengths, following = scratch.lengths[above, :matches], scratch.following[above, :matches]
    for one in range(matches):
        behind = follower(store.chunks, scratch.ids[above, one])
        scratch.behind[above, one] = behind
        following[one] = store.tokens[place_of(store.chunks, behind)] if behind >= 0 else -1
    number, gap = _children(
        lengths,
        following,
        wanted.noise[row],
        wanted.lengths[row] - 1 + depth,
        wanted.sampled[row],
        scratch.tokens,
        scratch.scores,
    )
    longest = lengths.max()
    for rank in range(number):
        cell, token = cell_of(rank, longest, gap), scratch.tokens[rank]
        chance = survival * wanted.accepted[wanted.classes[row], cell]
        if chance >= least and (wanted.forced[row] or not wanted.stops[row, token]):
            scratch.waiting[count, 0], scratch.waiting[count, 1] = above, rank
            scratch.waiting[count, 2], scratch.waiting[count, 3] = token, cell
            scratch.chances[count] = chance
            count += 1
    return count


@compiled
def _keep_matches(scratch: _Scratch, above: int, token: int, node: int) -> None:
    """The matches of a node are those of its parent that go on with its token."""
    kept = 0
    for one in range(scratch.found[above]):
        if scratch.following[above, one] == token:
            scratch.ids[node, kept] = scratch.behind[above, one]
            scratch.lengths[node, kept] = scratch.lengths[above, one] + 1
            kept += 1
    scratch.found[node] = kept


@compiled
def _grow(
    store: Store, wanted: Wanted, row: int, most: int, least: float, scratch: _Scratch, result: Proposed, first: int
) -> int:
    """Add the tree of one sample to the result, from place `first` on; returns the number of its nodes."""
    scratch.found[0] = find_matches(store, wanted.last[row], scratch.buckets, scratch.ids[0], scratch.lengths[0])
    nodes, above, depth, survival = 0, 0, 0, 1.0
    count = _add_candidates(store, wanted, row, scratch, above, depth, survival, least, 0)
    while count and nodes < most:
        best = np.argmax(scratch.chances[:count])
        above, rank = scratch.waiting[best, 0], scratch.waiting[best, 1]
        token, cell, survival = scratch.waiting[best, 2], scratch.waiting[best, 3], scratch.chances[best]
        count -= 1
        scratch.waiting[best], scratch.chances[best] = scratch.waiting[count], scratch.chances[count]
        place, parent = first + nodes, first + above - 1 if above else -1
        depth = 1 + (result.depths[parent] if above else 0)
        result.rows[place], result.parents[place], result.depths[place] = row, parent, depth
        result.tokens[place], result.ranks[place], result.cells[place] = token, rank, cell
        result.survival[place] = survival
        nodes += 1
        _keep_matches(scratch, above, token, nodes)
        count = _add_candidates(store, wanted, row, scratch, nodes, depth, survival, least, count)
    return nodes


@compiled
def propose(store: Store, wanted: Wanted, most: int, least: float, result: Proposed) -> int:
    """Fill in the trees of a batch; returns the number of their nodes.

    A tree grows by its best candidate, as long as its survival is at least `least`.

    Args:
        most: nodes of a sample.
        result: arrays [B * most] or longer.
    """
    candidates = WIDTH * (most + 1)
    scratch = _Scratch(
        np.empty((most + 1, MATCHES), np.int64),
        np.empty((most + 1, MATCHES), np.int64),
        np.empty((most + 1, MATCHES), np.int64),
        np.empty((most + 1, MATCHES), np.int64),
        np.zeros(most + 1, np.int64),
        np.empty((candidates, 4), np.int64),
        np.empty(candidates),
        np.empty(len(ORDERS), np.int64),
        np.empty(MATCHES, np.int64),
        np.empty(MATCHES),
    )
    size = 0
    for row in range(len(wanted.last)):
        if wanted.depths[row] > 0 and place_of(store.chunks, wanted.last[row]) >= 0:
            size += _grow(store, wanted, row, most, least, scratch, result, size)
    return size
