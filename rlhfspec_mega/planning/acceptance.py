"""The probability that a draft token is accepted if its parent was: learnt on line, and how well it is calibrated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.log_odds import MIN_PROBABILITY, learn, probabilities_of
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

BINS = 10  # of probability, of equal width
STEPS_DECAY = 0.99  # factor per step on the weight of earlier steps in a report's recent means
NODES_DECAY = 0.999  # the same in its calibration error


@dataclass(frozen=True)
class CalibrationReport:
    """How well predicted acceptance agrees with the outcomes.

    Attributes:
        observations: verified nodes whose parent was accepted.
        calibration_error: expected calibration error over about the last 1000 steps, from 0 to 1: the mean over these
            nodes of |predicted - observed frequency| in the node's probability bin.
        predicted, realised: mean accepted draft tokens per step with drafting.
        recent_predicted, recent_realised: the same over about the last 100 steps.
    """

    observations: int
    calibration_error: float
    predicted: float
    realised: float
    recent_predicted: float
    recent_realised: float


class Calibration:
    """Running sums behind a `CalibrationReport`."""

    def __init__(self) -> None:
        self._observations = 0
        self._bins = np.zeros((3, BINS))  # decayed sums by bin: observations, predictions, accepted
        self._steps = np.zeros(3)  # sums: steps, predicted and realised accepted draft tokens
        self._recent = np.zeros(3)  # the same sums, decayed

    def add(self, conditional: Floats, accepted: Bools, predicted_tokens: float, accepted_tokens: int) -> None:
        """Add a step: predictions and outcomes of nodes whose parent was accepted, and total accepted tokens."""
        self._observations += len(conditional)
        _add_to_bins(self._bins, conditional, accepted)
        _add_step(self._steps, self._recent, predicted_tokens, float(accepted_tokens))

    def report(self) -> CalibrationReport:
        """The current report; all values are 0 before the first step."""
        error = float(np.abs(self._bins[1] - self._bins[2]).sum()) / max(float(self._bins[0].sum()), 1e-9)
        steps, recent = self._steps / max(self._steps[0], 1e-9), self._recent / max(self._recent[0], 1e-9)
        return CalibrationReport(
            self._observations, error, float(steps[1]), float(steps[2]), float(recent[1]), float(recent[2])
        )

    def state_dict(self) -> dict[str, Any]:
        sums = {"bins": self._bins.tolist(), "steps": self._steps.tolist(), "recent": self._recent.tolist()}
        return {"observations": self._observations, **sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._observations = state["observations"]
        self._bins, self._steps = np.array(state["bins"]), np.array(state["steps"])
        self._recent = np.array(state["recent"])


@compiled
def _add_to_bins(bins: Floats, conditional: Floats, accepted: Bools) -> None:
    bins *= NODES_DECAY
    for node in range(len(conditional)):
        own = min(int(conditional[node] * BINS), BINS - 1)
        bins[0, own] += 1.0
        bins[1, own] += conditional[node]
        bins[2, own] += accepted[node]


@compiled
def _add_step(steps: Floats, recent: Floats, predicted: float, realised: float) -> None:
    recent *= STEPS_DECAY
    for sums in (steps, recent):
        sums[0] += 1.0
        sums[1] += predicted
        sums[2] += realised


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
        self._owners = np.full(SAMPLE_PLACES, -1)  # number of the sample that has each place
        # Weight of sibling groups by temperature class, depth and gap. A group counts with its parent's survival.
        self._siblings = np.ones((CLASSES, DEPTHS, GAPS)) / GAPS
        self._calibration = Calibration()
        self._batch: Batch | None = None  # that of `_row_entries`, which is computed once per step
        self._row_entries = np.zeros((FACTORS, 0), np.int64)
        self._expected: dict[tuple[int, int], Floats] = {}
        self._recalled: Floats | None = None
        self._observed = 0

    def conditional(self, batch: Batch, tree: DraftTree, nodes: slice | Ints) -> Floats:
        """Probability [k] that each of these nodes is accepted if its parent is."""
        return probabilities_of(self._log_odds, self._entries(batch, tree, nodes))

    def expected_layer(self, depth: int, temperature: float) -> Floats:
        """Mean conditional acceptance [RANKS] by rank, for a layer that is not drafted yet.

        The mean is over the gaps that were observed at this depth (from 1).
        """
        key = int(TEMPERATURE_EDGES.searchsorted(temperature)), min(depth, DEPTHS) - 1
        if key not in self._expected:
            self._expected[key] = self.gap_weights(*key) @ self.layer_table(*key).T
        return self._expected[key]

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
        tree, chosen = record.tree, record.chosen
        if not tree.size:
            return
        if tree.depth:
            self._observe_gaps(record)
        if len(chosen):
            accepted = np.zeros(tree.size + 1, np.bool_)
            accepted[chosen] = record.accepted
            accepted[-1] = True  # read for children of the root, since ROOT = -1
            judged = chosen[accepted[tree.parents[chosen]]]
            self._learn(record.batch, tree, judged, accepted[judged], float(tree.survival[chosen].sum()))
        self._observed += 1
        if self._observed <= EXPECTED_AT_FIRST or self._observed % EXPECTED_EVERY == 0:
            self._expected.clear()
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
        self._expected.clear()
        self._recalled = None

    def _learn(self, batch: Batch, tree: DraftTree, judged: Ints, accepted: Bools, predicted_tokens: float) -> None:
        entries = self._entries(batch, tree, judged)
        expected = probabilities_of(self._log_odds, entries)
        self._calibration.add(expected, accepted, predicted_tokens, int(accepted.sum()))
        learn(self._log_odds, self._information, self._max_information, entries, accepted, expected, NONE)

    def _observe_gaps(self, record: StepRecord) -> None:
        """Add the gap of each sibling group to the distribution, weighted by the survival of the group's parent."""
        tree = record.tree
        groups = np.flatnonzero(tree.ranks == 0)
        parents = tree.parents[groups]
        weights = np.where(parents == ROOT, 1.0, tree.survival[parents])
        classes = TEMPERATURE_EDGES.searchsorted(record.batch.temperatures)[tree.rows[groups]]
        depths = np.minimum(tree.depths[groups], DEPTHS) - 1
        index = (classes * DEPTHS + depths) * GAPS + GAP_EDGES.searchsorted(tree.gaps[groups])
        counts = np.bincount(index, weights, self._siblings.size)
        self._siblings *= SIBLINGS_DECAY
        self._siblings += MIN_WEIGHT
        self._siblings += counts.reshape(self._siblings.shape)

    def _entries(self, batch: Batch, tree: DraftTree, nodes: slice | Ints) -> Ints:
        """Table entries [FACTORS, k] whose sum is the log-odds of each node."""
        if batch is not self._batch:
            classes = TEMPERATURE_EDGES.searchsorted(batch.temperatures)
            self._batch, self._row_entries = batch, _row_entries(classes, batch.lengths, batch.samples)
            _reset_new_samples(batch.samples, self._owners, self._log_odds, self._information)
        rows, ranks, gaps, depths = tree.rows[nodes], tree.ranks[nodes], tree.gaps[nodes], tree.depths[nodes]
        return _node_entries(self._row_entries, rows, ranks, gaps, depths, tree.matches[nodes])


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
