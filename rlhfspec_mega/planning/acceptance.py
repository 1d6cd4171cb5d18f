"""How probable it is that a draft token is accepted once its parent was: calibrated on line, and how well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfspec_mega.planning.tree import ROOT, Batch, Bools, DraftTree, Floats, Ints, StepRecord

TEMPERATURE_EDGES = np.array([0.0, 0.4, 0.8])  # classes: greedy, up to 0.4, up to 0.8, above
GAP_EDGES = np.array([0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.5, 7.0])
GAP_MIDDLES = np.array([0.05, 0.17, 0.37, 0.62, 0.87, 1.25, 1.75, 2.5, 3.7, 5.5, 9.0])
CLASSES, GAPS = len(TEMPERATURE_EDGES) + 1, len(GAP_EDGES) + 1
RANKS = 8  # the last stands for itself and all beyond, as do those below
DEPTHS = 16
POSITIONS = 20  # sample lengths by powers of two
CELLS = CLASSES * RANKS * GAPS
SAMPLES = 1024  # remembered one by one, the latest to come; of more at once some share a place and are forgotten
# Depth, position and sample shift the best child and its siblings apart: where the best fails more often, the others
# gain.
SHARED = CELLS + 2 * DEPTHS + 2 * POSITIONS  # entries that all samples share; their own come behind
LEVELS = SHARED + 2 * SAMPLES
REST = np.array([[0, DEPTHS], [0, POSITIONS], [0, SAMPLES]])  # added to such entries of best children, of the rest
FACTORS = 4  # a probability's log-odds is a cell's plus a depth's plus a position's plus a sample's
SURE = 1e-3  # probabilities stay this far from 0 and 1
MOST_ODDS = 8.0  # of an entry: one that is never wrong stays near enough to notice when it begins to be

# Of a cell; of a depth or position; of a sample. A cell follows the data sooner than a depth; a sample differs from
# the others by about half a unit of log-odds.
PRIOR_INFORMATION = (1.0, 8.0, 4.0)
MOST_INFORMATION = (40.0, 120.0, 12.0)  # about 250, 800 and 80 outcomes: older ones are forgotten
SIBLINGS_KEPT = 0.99  # of the weight of earlier groups of siblings, per step, in the distribution of gaps
LEAST_WEIGHT = 1e-9
# Steps with drafting after which expected layers are worked out anew: each of the first ones, then every eighth.
EXPECTED_AT_FIRST, EXPECTED_EVERY = 64, 8

BINS = 10  # of probability, of equal width
RECENT = 0.99  # share of a step's weight that the next step leaves
RECENT_NODES = 0.999  # the same in the bins of nodes


@dataclass(frozen=True)
class CalibrationReport:
    """Attributes:
    observations: nodes whose parent was accepted, so far.
    calibration_error: expected calibration error: the mean over such nodes of about the last 1000 steps of |predicted -
        observed frequency| of the node's probability bin, 0 to 1.
    predicted, realised: accepted draft tokens per step with drafting, mean over all such steps.
    recent_predicted, recent_realised: the same with forgetting, over about the last 100 steps.
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
        self._bins = np.zeros((3, BINS))  # observations, sum of predictions, accepted, with forgetting
        self._steps = np.zeros(3)  # steps, predicted, realised accepted tokens
        self._recent = np.zeros(3)

    def add(self, conditional: Floats, accepted: Bools, predicted_tokens: float, accepted_tokens: int) -> None:
        """One step: probabilities and outcomes of nodes whose parent was accepted, and the accepted tokens."""
        bins = np.minimum((conditional * BINS).astype(np.int64), BINS - 1)
        self._observations += len(bins)
        self._bins *= RECENT_NODES
        self._bins[0] += np.bincount(bins, minlength=BINS)
        self._bins[1] += np.bincount(bins, conditional, BINS)
        self._bins[2] += np.bincount(bins, accepted, BINS)
        step = (1.0, predicted_tokens, float(accepted_tokens))
        self._steps += step
        self._recent *= RECENT
        self._recent += step

    def report(self) -> CalibrationReport:
        """Where it stands; zeros before the first step."""
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


class AcceptanceModel:
    """P(child accepted | parent accepted) from temperature class, rank, gap, depth, sample length and sample.

    Log-odds are a sum of four table entries: cell (temperature class, rank, gap bin), depth, position and the sample's
    own, which begins at 0, the latter three apart for best children and the rest. Every step is one step of Newton's
    method per entry on the log-likelihood, with an entry's information (the sum of p (1 - p) of its outcomes) as
    curvature and a quarter of the way each, which no batch can make overshoot (the curvature of a sum of four is at
    most four times the diagonal's). Information is capped: an entry forgets at the pace at which it sees outcomes, and
    one that sees none keeps what it knows.
    After counting in bins (EAGLE-2 calibrates nothing; arXiv 2406.16858) and on-line Bayesian logistic regression
    (Graepel et al., ICML 2010).

    Prior: with shared noise the best child fails where the target's scores differ by more than the gap.
    """

    def __init__(self) -> None:
        sizes = CELLS, SHARED - CELLS, LEVELS - SHARED
        self._odds = np.concatenate((_prior_odds().ravel(), np.zeros(LEVELS - CELLS)))
        self._information = np.repeat(PRIOR_INFORMATION, sizes)
        self._most = np.repeat(MOST_INFORMATION, sizes)
        self._owners = np.full(SAMPLES, -1)  # the sample whose own entry this is
        # Sibling groups by temperature class, depth and gap, each weighted by its parent's survival.
        self._siblings = np.ones((CLASSES, DEPTHS, GAPS)) / GAPS
        self._calibration = Calibration()
        self._batch: Batch | None = None  # whose `_row_entries` were computed last: the same one all through a step
        self._row_entries = np.zeros((FACTORS, 0), np.int64)
        self._expected: dict[tuple[int, int], Floats] = {}
        self._observed = 0

    def conditional(self, batch: Batch, tree: DraftTree, nodes: slice | Ints) -> Floats:
        """Probability [k] that each of these nodes is accepted if its parent is."""
        cells, depths, positions, samples = self._odds[self._entries(batch, tree, nodes)]
        return _probability(cells + depths + positions + samples)

    def expected_layer(self, depth: int, temperature: float) -> Floats:
        """Mean conditional acceptance [RANKS] by rank of the children at this depth of an average parent.

        Averages over the gaps seen at this depth; for a layer that is not drafted yet.
        """
        key = int(TEMPERATURE_EDGES.searchsorted(temperature)), min(depth, DEPTHS) - 1
        if key not in self._expected:
            self._expected[key] = self.gap_weights(*key) @ self.layer_table(*key).T
        return self._expected[key]

    def layer_table(self, temperature_class: int, depth_index: int) -> Floats:
        """Conditional acceptance [RANKS, GAPS] at this depth (from 0); positions and samples count nothing."""
        cells = self._odds[:CELLS].reshape(CLASSES, RANKS, GAPS)[temperature_class]
        best, rest = self._odds[CELLS + depth_index], self._odds[CELLS + DEPTHS + depth_index]
        return _probability(cells + np.where(np.arange(RANKS) == 0, best, rest)[:, None])

    def gap_weights(self, temperature_class: int, depth_index: int) -> Floats:
        """Shares [GAPS] of the gaps among sibling groups at this depth (from 0)."""
        weights = self._siblings[temperature_class, depth_index]
        return weights / weights.sum()

    def observe(self, record: StepRecord) -> None:
        """Learn from one step: of the verified nodes those whose parent is the root or was accepted."""
        tree, chosen = record.tree, record.chosen
        if not tree.size:
            return
        self._observe_gaps(record)
        if len(chosen):
            accepted = np.zeros(tree.size + 1, np.bool_)
            accepted[chosen] = record.accepted
            accepted[-1] = True  # ROOT = -1 reads this entry
            judged = chosen[accepted[tree.parents[chosen]]]
            self._learn(record.batch, tree, judged, accepted[judged], float(tree.survival[chosen].sum()))
        self._observed += 1
        if self._observed <= EXPECTED_AT_FIRST or self._observed % EXPECTED_EVERY == 0:
            self._expected.clear()

    def report(self) -> CalibrationReport:
        """Calibration error so far."""
        return self._calibration.report()

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt but for single samples, as plain data for JSON."""
        return {
            "odds": self._odds[:SHARED].tolist(),
            "information": self._information[:SHARED].tolist(),
            "siblings": self._siblings.tolist(),
            "calibration": self._calibration.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._odds[:SHARED], self._information[:SHARED] = state["odds"], state["information"]
        self._owners[:] = -1
        self._siblings = np.array(state["siblings"])
        self._calibration.load_state_dict(state["calibration"])
        self._expected.clear()

    def _learn(self, batch: Batch, tree: DraftTree, judged: Ints, accepted: Bools, predicted_tokens: float) -> None:
        entries = self._entries(batch, tree, judged)
        chances = _probability(self._odds[entries].sum(axis=0))
        self._calibration.add(chances, accepted, predicted_tokens, int(accepted.sum()))
        flat = entries.ravel()
        surprise = np.bincount(flat, np.concatenate((accepted - chances,) * FACTORS), LEVELS)
        curvature = np.bincount(flat, np.concatenate((chances * (1.0 - chances),) * FACTORS), LEVELS)
        self._odds += surprise / (self._information + FACTORS * curvature)
        np.clip(self._odds, -MOST_ODDS, MOST_ODDS, out=self._odds)
        self._information += curvature
        np.minimum(self._information, self._most, out=self._information)

    def _observe_gaps(self, record: StepRecord) -> None:
        """Count the gaps of sibling groups, one per group, as often as the group's parent is accepted."""
        tree = record.tree
        groups = np.flatnonzero(tree.ranks == 0)
        parents = tree.parents[groups]
        weights = np.where(parents == ROOT, 1.0, tree.survival[parents])
        classes = TEMPERATURE_EDGES.searchsorted(record.batch.temperatures)[tree.rows[groups]]
        depths = np.minimum(tree.depths[groups], DEPTHS) - 1
        index = (classes * DEPTHS + depths) * GAPS + GAP_EDGES.searchsorted(tree.gaps[groups])
        counts = np.bincount(index, weights, self._siblings.size)
        self._siblings *= SIBLINGS_KEPT
        self._siblings += LEAST_WEIGHT
        self._siblings += counts.reshape(self._siblings.shape)

    def _entries(self, batch: Batch, tree: DraftTree, nodes: slice | Ints) -> Ints:
        """Table entries [FACTORS, k] whose sum is the log-odds of each node."""
        if batch is not self._batch:
            self._batch, self._row_entries = batch, _row_entries(batch)
            self._welcome(batch.samples)
        ranks = np.minimum(tree.ranks[nodes], RANKS - 1)
        entries = self._row_entries[:, tree.rows[nodes]]
        entries[0] += ranks * GAPS + GAP_EDGES.searchsorted(tree.gaps[nodes])
        entries[1] += np.minimum(tree.depths[nodes], DEPTHS)
        entries[1:] += REST[:, np.minimum(ranks, 1)]
        return entries

    def _welcome(self, samples: Ints) -> None:
        """Samples that were not met before begin with entries that say nothing."""
        places = samples % SAMPLES
        new = places[self._owners[places] != samples]
        if len(new):
            self._owners[places] = samples
            own = SHARED + np.concatenate((new, new + SAMPLES))
            self._odds[own], self._information[own] = 0.0, PRIOR_INFORMATION[2]


def _row_entries(batch: Batch) -> Ints:
    """First table entries [FACTORS, B] of the nodes of each sample: rank, gap and depth come on top."""
    cells = TEMPERATURE_EDGES.searchsorted(batch.temperatures) * (RANKS * GAPS)
    positions = CELLS + 2 * DEPTHS + np.minimum(np.frexp(batch.lengths)[1], POSITIONS - 1)
    return np.stack((cells, np.full(len(cells), CELLS - 1), positions, SHARED + batch.samples % SAMPLES))


def _probability(odds: Floats) -> Floats:
    """The probability of log-odds, kept `SURE` away from certainty."""
    chances = 1.0 / (1.0 + np.exp(-odds))
    np.maximum(chances, SURE, out=chances)
    return np.minimum(chances, 1.0 - SURE, out=chances)


def _prior_odds() -> Floats:
    """Log-odds [CLASSES, RANKS, GAPS] before any data: a middling draft whose misses go to the next ranks."""
    best = 0.45 + 0.5 * (1.0 - np.exp(-GAP_MIDDLES))
    chances = np.empty((RANKS, GAPS))
    chances[0] = best
    for rank in range(1, RANKS):
        chances[rank] = 0.7 * (1.0 - best) * 0.5**rank
    odds = np.log(chances / (1.0 - chances))
    return np.broadcast_to(odds, (CLASSES, RANKS, GAPS))
