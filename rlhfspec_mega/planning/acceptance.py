"""The probability that a draft token is accepted if its parent was: learnt on line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.calibration import Calibration, CalibrationReport, Sums, add_outcomes
from rlhfspec_mega.planning.log_odds import MIN_PROBABILITY, learn, probabilities_of
from rlhfspec_mega.planning.nodes import multiply_down
from rlhfspec_mega.planning.tree import (
    MATCHED,
    NO_MATCH,
    NOT_DRAFTED,
    NOT_NAMED,
    OTHER_FOLLOWS,
    ROOT,
    Batch,
    Bools,
    DraftTree,
    Floats,
    Ints,
    StepRecord,
)

TEMPERATURE_EDGES = np.array([0.0, 0.4, 0.8])  # classes: greedy, up to 0.4, up to 0.8, above
GAP_EDGES = np.array([0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.5, 7.0])
GAP_MIDPOINTS = np.array([0.05, 0.17, 0.37, 0.62, 0.87, 1.25, 1.75, 2.5, 3.7, 5.5, 9.0])
CLASSES, GAPS = len(TEMPERATURE_EDGES) + 1, len(GAP_EDGES) + 1
RANKS = 8  # the last one includes all worse ranks
DEPTHS = 16  # the last one includes all deeper layers
POSITIONS = 20  # sample lengths by powers of two; the last one includes all longer samples
CELLS = CLASSES * RANKS * GAPS
SAMPLE_PLACES = 1024  # for entries of single samples; a newer sample replaces an older one at its place
# Cells of nodes that earlier text gives: rank, length of the match, gap. Each has an entry for nodes that the draft
# names too, one for those that it does not name, and one for those whose parent it was not run on.
MATCH_RANKS, MATCH_EDGES = 3, np.array([6, 12, 24])
MATCH_CELLS = MATCH_RANKS * (len(MATCH_EDGES) + 1) * GAPS
KINDS, CODES = 3, MATCHED + MATCH_CELLS
MATCH_ENTRIES = CLASSES * KINDS * CODES
# Depth, position and sample have one entry for best children and another for the rest, since the others are accepted
# more often where the best child is accepted less often.
FIRST_MATCH = CELLS + 2 * DEPTHS + 2 * POSITIONS
NONE = FIRST_MATCH + MATCH_ENTRIES  # an entry that stays 0: of nodes that the draft, or earlier text, does not give
SHARED_ENTRIES = NONE + 1  # followed by the entries of single samples
ALL_ENTRIES = SHARED_ENTRIES + 2 * SAMPLE_PLACES
FACTORS = 5  # entries that are summed to log-odds: of cell, depth, position, sample and match

# Of a cell; of a depth or position; of a match; of a sample. A cell follows the data faster than a depth does, and
# samples differ from each other by about half a unit of log-odds.
PRIOR_INFORMATION = (1.0, 8.0, 1.0, 4.0)
MAX_INFORMATION = (40.0, 120.0, 40.0, 12.0)  # about 250, 800, 250 and 80 outcomes; older outcomes are forgotten
SIBLINGS_DECAY = 0.99  # factor per step on the weight of earlier sibling groups in the distribution of gaps
MIN_WEIGHT = 1e-9
# Steps with drafting after which expected layers are computed again: each of the first 64, then every eighth.
EXPECTED_AT_FIRST, EXPECTED_EVERY = 64, 8


class AcceptanceModel:
    """P(child accepted | parent accepted) from temperature class, rank, gap, depth, sample length, sample and match.

    The log-odds are the sum of five table entries: of the cell (temperature class, rank, gap bin), the depth, the
    position (sample length), the sample, and of what earlier text says of the node (`DraftTree.matches`). Depth,
    position and sample have separate entries for best children and for the rest. In each step every entry moves by a
    damped Newton step on the log-likelihood, where the curvature is the entry's information: the sum of p (1 - p) over
    its outcomes. Where a node has n entries, each goes an n-th of the way, so that they do not overshoot together: the
    curvature of a sum of n is at most n times the diagonal's. Information is capped, so an entry forgets old outcomes
    as new ones arrive, and an entry without outcomes stays as it is.

    EAGLE-2 (arXiv 2406.16858) uses the draft's probability and does not calibrate it. The method follows on-line
    Bayesian logistic regression (Graepel et al., ICML 2010).

    The prior accounts for shared noise: the best child is rejected only if target and draft scores differ by more than
    the gap.
    """

    def __init__(self) -> None:
        sizes = CELLS, FIRST_MATCH - CELLS, SHARED_ENTRIES - FIRST_MATCH, ALL_ENTRIES - SHARED_ENTRIES
        self._log_odds = np.zeros(ALL_ENTRIES)
        self._log_odds[:CELLS], self._log_odds[FIRST_MATCH:NONE] = _prior_log_odds().ravel(), _match_prior().ravel()
        self._information = np.repeat(PRIOR_INFORMATION, sizes)
        self._max_information = np.repeat(MAX_INFORMATION, sizes)
        self._sums = np.zeros((3, ALL_ENTRIES))  # see `learn`
        self._owners = np.full(SAMPLE_PLACES, -1)  # number of the sample that has each place
        # Weight of sibling groups by temperature class, depth and gap. A group counts with its parent's survival.
        self._siblings = np.ones((CLASSES, DEPTHS, GAPS)) / GAPS
        self._calibration = Calibration()
        self._batch: Batch | None = None  # that of `_row_entries`, which is computed once per step
        self._row_entries = np.zeros((FACTORS, 0), np.int64)
        self._expected: Floats | None = None
        self._recalled: Floats | None = None
        self._observed = 0

    def conditional(self, batch: Batch, tree: DraftTree, nodes: slice | Ints) -> Floats:
        """Probability [k] that each of these nodes is accepted if its parent is."""
        return probabilities_of(self._log_odds, self._entries(batch, tree, nodes))

    def fill_survival(self, batch: Batch, tree: DraftTree, first: int) -> None:
        """Set the survival of the nodes from `first` on: the parent's times the conditional acceptance; 0 beyond the
        length limit."""
        set_survival(
            *self.of_samples(batch),
            tree.rows,
            tree.parents,
            tree.depths,
            tree.ranks,
            tree.gaps,
            tree.matches,
            batch.remaining,
            tree.survival,
            first,
        )

    def of_samples(self, batch: Batch) -> tuple[Floats, Ints]:
        """The log-odds of all table entries, and the indices [FACTORS, B] of the samples' own; see `_row_entries`."""
        if self._batch is None or batch.samples is not self._batch.samples:
            self._batch = batch
            self._row_entries = _row_entries(temperature_classes(batch), batch.lengths, batch.samples)
            _reset_new_samples(batch.samples, self._owners, self._log_odds, self._information)
        return self._log_odds, self._row_entries

    def expected_layers(self) -> Floats:
        """Mean conditional acceptance [CLASSES, DEPTHS, RANKS] by rank, of layers that are not drafted yet.

        The mean is over the gaps that were observed in each class at this depth (from 1).
        """
        if self._expected is None:
            self._expected = _expected_layers(self._log_odds, self._siblings)
        return self._expected

    def layer_table(self, temperature_class: int, depth_index: int) -> Floats:
        """Conditional acceptance [RANKS, GAPS] at this depth (from 0), without position and sample entries."""
        cells = self._log_odds[:CELLS].reshape(CLASSES, RANKS, GAPS)[temperature_class]
        best, rest = self._log_odds[CELLS + depth_index], self._log_odds[CELLS + DEPTHS + depth_index]
        return _probability(cells + np.where(np.arange(RANKS) == 0, best, rest)[:, None])

    def recalled_table(self) -> Floats:
        """Conditional acceptance [CLASSES, MATCH_CELLS] of nodes that earlier text gives and no draft was run for."""
        if self._recalled is None:
            entries = self._log_odds[FIRST_MATCH:NONE].reshape(CLASSES, KINDS, CODES)
            self._recalled = _probability(entries[:, -NOT_DRAFTED, MATCHED:])
        return self._recalled

    def gap_weights(self, temperature_class: int, depth_index: int) -> Floats:
        """Observed distribution [GAPS] of the gaps of sibling groups at this depth (from 0)."""
        weights = self._siblings[temperature_class, depth_index]
        return weights / weights.sum()

    def observe(self, record: StepRecord) -> None:
        """Learn from one step: from verified nodes whose parent is the root or was accepted."""
        batch, tree = record.batch, record.tree
        if not tree.size:
            return
        if tree.depth:
            _add_gaps(
                self._siblings,
                temperature_classes(batch),
                tree.rows,
                tree.parents,
                tree.depths,
                tree.ranks,
                tree.gaps,
                tree.survival,
            )
        if len(record.chosen):
            self._learn(record)
        self._observed += 1
        if self._observed <= EXPECTED_AT_FIRST or self._observed % EXPECTED_EVERY == 0:
            self._expected = None
            self._recalled = None

    def report(self) -> CalibrationReport:
        """How well predictions agree with the outcomes so far."""
        return self._calibration.report()

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, except the entries of single samples, as plain data for JSON."""
        return {
            "odds": self._log_odds[:SHARED_ENTRIES].tolist(),
            "information": self._information[:SHARED_ENTRIES].tolist(),
            "siblings": self._siblings.tolist(),
            "calibration": self._calibration.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._log_odds[:SHARED_ENTRIES], self._information[:SHARED_ENTRIES] = state["odds"], state["information"]
        self._owners[:] = -1
        self._siblings = np.array(state["siblings"])
        self._calibration.load_state_dict(state["calibration"])
        self._expected = None
        self._recalled = None

    def _learn(self, record: StepRecord) -> None:
        tree = record.tree
        _learn_from(
            self._log_odds,
            self._information,
            self._max_information,
            self._sums,
            self._calibration.sums,
            self.of_samples(record.batch)[1],
            (tree.rows, tree.parents, tree.depths, tree.ranks, tree.matches),
            (tree.gaps, tree.survival),
            record.chosen,
            record.accepted,
        )

    def _entries(self, batch: Batch, tree: DraftTree, nodes: slice | Ints) -> Ints:
        """Table entries [FACTORS, k] whose sum is the log-odds of each node."""
        rows, ranks, gaps, depths = tree.rows[nodes], tree.ranks[nodes], tree.gaps[nodes], tree.depths[nodes]
        return _node_entries(self.of_samples(batch)[1], rows, ranks, gaps, depths, tree.matches[nodes])


def temperature_classes(batch: Batch) -> Ints:
    """The temperature class of each sample."""
    return TEMPERATURE_EDGES.searchsorted(batch.temperatures)


@compiled
def _reset_new_samples(samples: Ints, owners: Ints, log_odds: Floats, information: Floats) -> None:
    """Give samples that have no place yet one with entries of 0."""
    for sample in samples:
        place = sample % SAMPLE_PLACES
        if owners[place] != sample:
            owners[place] = sample
            for entry in (SHARED_ENTRIES + place, SHARED_ENTRIES + SAMPLE_PLACES + place):
                log_odds[entry], information[entry] = 0.0, PRIOR_INFORMATION[3]


@compiled
def _row_entries(classes: Ints, lengths: Ints, samples: Ints) -> Ints:
    """Indices of table entries [FACTORS, B] of each sample, to which those of rank, gap, depth and match are added."""
    entries = np.empty((FACTORS, len(classes)), np.int64)
    for row in range(len(classes)):
        entries[0, row] = classes[row] * (RANKS * GAPS)
        entries[1, row] = CELLS - 1  # before the first depth
        entries[2, row] = CELLS + 2 * DEPTHS + min(math.frexp(float(lengths[row]))[1], POSITIONS - 1)
        entries[3, row] = SHARED_ENTRIES + samples[row] % SAMPLE_PLACES
        entries[4, row] = FIRST_MATCH + classes[row] * (KINDS * CODES)
    return entries


@compiled
def _node_entries(row_entries: Ints, rows: Ints, ranks: Ints, gaps: Floats, depths: Ints, matches: Ints) -> Ints:
    """Entries [FACTORS, k] of nodes from those of their samples."""
    entries = np.empty((FACTORS, len(rows)), np.int64)
    for node in range(len(rows)):
        row, rank, match = rows[node], ranks[node], matches[node]
        cell = row_entries[0, row] + min(rank, RANKS - 1) * GAPS + np.searchsorted(GAP_EDGES, gaps[node])
        entries[0, node] = cell if rank >= 0 else NONE
        rest = rank > 0 if rank >= 0 else match >= MATCHED + MATCH_CELLS // MATCH_RANKS
        entries[1, node] = row_entries[1, row] + min(depths[node], DEPTHS) + rest * DEPTHS
        entries[2, node] = row_entries[2, row] + rest * POSITIONS
        entries[3, node] = row_entries[3, row] + rest * SAMPLE_PLACES
        kind = 0 if rank >= 0 else -rank
        entries[4, node] = NONE if match == NO_MATCH else row_entries[4, row] + kind * CODES + match
    return entries


@compiled
def set_survival(
    log_odds: Floats,
    row_entries: Ints,
    rows: Ints,
    parents: Ints,
    depths: Ints,
    ranks: Ints,
    gaps: Floats,
    matches: Ints,
    remaining: Ints,
    survival: Floats,
    first: int,
) -> None:
    """See AcceptanceModel.fill_survival."""
    entries = _node_entries(row_entries, rows[first:], ranks[first:], gaps[first:], depths[first:], matches[first:])
    survival[first:] = probabilities_of(log_odds, entries)
    multiply_down(parents, rows, depths, remaining, survival, first)


@compiled
def _expected_layers(log_odds: Floats, siblings: Floats) -> Floats:
    """See AcceptanceModel.expected_layers."""
    found = np.zeros((CLASSES, DEPTHS, RANKS))
    for own in range(CLASSES):
        for depth in range(DEPTHS):
            weights = siblings[own, depth] / siblings[own, depth].sum()
            for rank in range(RANKS):
                added = log_odds[CELLS + depth + (DEPTHS if rank else 0)]
                for gap in range(GAPS):
                    odds = log_odds[(own * RANKS + rank) * GAPS + gap] + added
                    probability = 1.0 / (1.0 + math.exp(-odds))
                    bounded = min(max(probability, MIN_PROBABILITY), 1.0 - MIN_PROBABILITY)
                    found[own, depth, rank] += weights[gap] * bounded
    return found


@compiled
def _add_gaps(
    siblings: Floats,
    classes: Ints,
    rows: Ints,
    parents: Ints,
    depths: Ints,
    ranks: Ints,
    gaps: Floats,
    survival: Floats,
) -> None:
    """Add the gap of each sibling group to the distribution, weighted by the survival of the group's parent."""
    siblings *= SIBLINGS_DECAY
    siblings += MIN_WEIGHT
    for node in range(len(rows)):
        if ranks[node] == 0:
            weight = 1.0 if parents[node] == ROOT else survival[parents[node]]
            depth, gap = min(depths[node], DEPTHS) - 1, np.searchsorted(GAP_EDGES, gaps[node])
            siblings[classes[rows[node]], depth, gap] += weight


@compiled
def _learn_from(
    log_odds: Floats,
    information: Floats,
    most: Floats,
    sums: Floats,
    calibration: Sums,
    row_entries: Ints,
    ints: tuple[Ints, Ints, Ints, Ints, Ints],
    floats: tuple[Floats, Floats],
    chosen: Ints,
    accepted: Bools,
) -> None:
    """Learn from those of the chosen nodes of a step whose parent is the root or was accepted, by `learn`.

    Args:
        ints: rows, parents, depths, ranks and matches of the tree's nodes; `floats` their gaps and survival.
    """
    rows, parents, depths, ranks, matches = ints
    gaps, survival = floats
    judged, outcomes = _judged(parents, chosen, accepted)
    entries = _node_entries(row_entries, rows[judged], ranks[judged], gaps[judged], depths[judged], matches[judged])
    expected = probabilities_of(log_odds, entries)
    learn(log_odds, information, most, sums, entries, outcomes, expected, NONE)
    add_outcomes(calibration, expected, outcomes, survival[chosen].sum())


@compiled
def _judged(parents: Ints, chosen: Ints, accepted: Bools) -> tuple[Ints, Bools]:
    """Those of the chosen nodes whose parent is the root or was accepted, and whether they were; `chosen` ascends."""
    passed = np.zeros(len(parents), np.bool_)
    judged, outcomes, count = np.empty(len(chosen), np.int64), np.empty(len(chosen), np.bool_), 0
    for place in range(len(chosen)):
        node = chosen[place]
        passed[node] = accepted[place]
        if parents[node] == ROOT or passed[parents[node]]:
            judged[count], outcomes[count] = node, accepted[place]
            count += 1
    return judged[:count], outcomes[:count]


def _probability(log_odds: Floats) -> Floats:
    """The probabilities of log-odds, at least `MIN_PROBABILITY` away from 0 and 1."""
    probabilities = 1.0 / (1.0 + np.exp(-log_odds))
    np.maximum(probabilities, MIN_PROBABILITY, out=probabilities)
    return np.minimum(probabilities, 1.0 - MIN_PROBABILITY, out=probabilities)


def _prior_log_odds() -> Floats:
    """Log-odds [CLASSES, RANKS, GAPS] before any data: of a draft of medium quality."""
    best = 0.45 + 0.5 * (1.0 - np.exp(-GAP_MIDPOINTS))
    probabilities = np.empty((RANKS, GAPS))
    probabilities[0] = best
    for rank in range(1, RANKS):
        probabilities[rank] = 0.7 * (1.0 - best) * 0.5**rank
    log_odds = np.log(probabilities / (1.0 - probabilities))
    return np.broadcast_to(log_odds, (CLASSES, RANKS, GAPS))


def _match_prior() -> Floats:
    """Log-odds [CLASSES, KINDS, CODES] before any data.

    Long matches and clear gaps are trusted; a draft that does not name a token makes it unlikely, one that does adds
    its own log-odds.
    """
    lengths = np.array([0.25, 0.4, 0.55, 0.65])[:, None]
    best = lengths + (0.97 - lengths) * (1.0 - np.exp(-GAP_MIDPOINTS / 1.5))
    alone = np.stack([best if rank == 0 else 0.5 * (1.0 - best) * 0.5 ** (rank - 1) for rank in range(MATCH_RANKS)])
    odds = np.log(alone / (1.0 - alone)).ravel()
    prior = np.zeros((CLASSES, KINDS, CODES))
    prior[:, 0, MATCHED : MATCHED + MATCH_CELLS // MATCH_RANKS] = 0.7
    prior[:, 0, OTHER_FOLLOWS] = -0.5
    prior[:, -NOT_NAMED, MATCHED:], prior[:, -NOT_DRAFTED, MATCHED:] = odds - 1.5, odds
    return prior
