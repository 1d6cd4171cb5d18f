"""Prediction of remaining response tokens: from the sample's group, the prompt's earlier epochs, and all lengths."""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from rlhfspec_mega.planning.rollout_state import Floats, Ints

BINS = 64  # of length, of equal width in log tokens
LEVELS = np.linspace(-3.0, 3.0, 13)  # grid of group levels, in standard deviations: from short to long responses
# Lognormal distributions, one of which is used until lengths are known: medians as shares of the limit, spread in log
# tokens.
GUESSED_MEDIANS, GUESSED_SPREAD = (0.25, 0.5, 1.0, 0.125, 0.0625, 0.03125, 0.015625), 1.0
GUESS_SAMPLES = 2.0  # number of samples that this distribution counts as, in each bin
EPOCH_DECAY = 0.5  # factor per rollout (for lengths) or epoch (for prompts) on the weight of earlier ones
# Correlation between the members of a group before it is known, and the weight of the newest rollout's estimate.
INITIAL_CORRELATION, CORRELATION_GAIN = 0.5, 0.3
MIN_CORRELATION, MAX_CORRELATION = 0.02, 0.9
EPOCHS_CORRELATION = 0.9  # correlation of a prompt's levels in two successive epochs
PROMPTS_KEPT = 65536
MIN_PROBABILITY = 1e-9
# Upper tail of the normal distribution; the error of linear interpolation between these points is below 2e-7.
_GRID = np.linspace(-8.0, 8.0, 8193)
_TAILS = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) for x in _GRID.tolist()])


class LengthPredictor:
    """Predicts the remaining response tokens of unfinished samples, and learns from finished ones.

    * The distribution of all lengths is a life table over bins of log length: the Kaplan-Meier estimate for grouped
      data, which gives the share of the samples reaching a bin that end in it. Unfinished samples count in the bins
      that they have passed, and earlier rollouts count with decaying weight. Where data is missing, the likeliest of a
      few guessed distributions is used.
    * The table turns a length into a normal score (a Gaussian copula). A group has a level u, and the scores of its
      members are sqrt(rho) u + sqrt(1 - rho) noise, where rho is the correlation found in earlier rollouts.
    * The posterior of a group's level is computed on a grid by Bayes' rule. Finished members contribute their lengths,
      unfinished ones (including the predicted sample) the fact that they are longer than now, and the prompt's earlier
      epochs the prior.

    So each of the three sources counts as much as it is informative. The prediction is the expected remaining length of
    a sample, given the tokens that it has; no sample gets longer than the limit.

    Args:
        limit: response tokens at which every sample ends.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # A sample in bin b has edges[b] .. edges[b + 1] tokens.
        self._edges = np.geomspace(1.0, max(limit, 2), BINS + 1)
        self._edges[0] = 0.0
        self._edge_list: list[float] = self._edges.tolist()
        self._guesses = np.array([_lognormal(self._edges, share * limit) for share in GUESSED_MEDIANS])
        self._past = np.zeros(BINS)  # decayed number of samples of earlier rollouts that ended in each bin
        self._correlation = INITIAL_CORRELATION
        self._history: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by prompt: mean score, decayed samples
        self.begin()

    def begin(self, prompts: Sequence[str] = ()) -> None:
        """Start a new rollout with the groups of these prompts; see `add`."""
        self._prompts: tuple[str, ...] = ()
        self._ended = np.zeros((0, BINS))  # number of finished samples, by group and bin
        self.add(prompts)

    def add(self, prompts: Sequence[str]) -> None:
        """Add groups to the rollout.

        Args:
            prompts: one key per group, which identifies its prompt in all epochs. Groups are numbered in this order.
        """
        self._prompts = (*self._prompts, *prompts)
        self._ended = np.concatenate([self._ended, np.zeros((len(prompts), BINS))])
        self._prior = self._level_prior()

    def finished(self, group: int, length: int) -> None:
        """Learn that a sample of a group has ended with `length` response tokens, by itself or at the limit."""
        place = bisect.bisect_right(self._edge_list, length) - 1  # for one length quicker than `_bins`
        self._ended[group, min(max(place, 0), BINS - 1)] += 1.0

    def predict(self, groups: Ints, generated: Ints) -> Floats:
        """Predicted remaining response tokens [N]: at least 1, and at most what the limit leaves.

        Args:
            groups, generated: [N] group and response tokens so far, of all unfinished samples of this rollout: their
                current lengths are evidence too.
        """
        bins = self._bins(generated)
        reached = np.zeros((len(self._prompts), BINS))
        np.add.at(reached, (groups, bins), 1.0)
        survival = self._survival(self._ended.sum(axis=0), reached.sum(axis=0))
        given_level = _survival_given_level(_scores(survival), self._correlation)  # [levels, BINS + 1]
        logs = np.log(np.maximum(given_level, MIN_PROBABILITY))
        ends_here = np.log(np.maximum(given_level[:, :-1] - given_level[:, 1:], MIN_PROBABILITY))
        evidence = self._prior + self._ended @ ends_here.T + reached @ logs[:, :-1].T
        weights = np.exp(evidence - evidence.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        table = weights @ _mean_remaining(given_level, self._edges)  # [groups, BINS + 1]
        low, high = self._edges[bins], self._edges[bins + 1]
        share = np.clip((generated - low) / (high - low), 0.0, 1.0)
        expected = (1.0 - share) * table[groups, bins] + share * table[groups, bins + 1]
        return np.maximum(np.minimum(expected, self._limit - generated), 1.0)

    def end(self) -> None:
        """Learn lengths, correlation and prompt levels from the rollout, all of whose samples have finished."""
        counts, totals = self._ended.sum(axis=1), self._ended.sum(axis=0)
        if not totals.any():
            return
        survival = self._survival(totals, np.zeros(BINS))
        scores = _scores(survival)
        middles = 0.5 * (scores[:-1] + scores[1:])
        self._learn_correlation(middles, counts)
        means = self._ended @ middles / np.maximum(counts, 1.0)
        for prompt, mean, count in zip(self._prompts, means.tolist(), counts.tolist(), strict=True):
            if count:
                old, weight = self._history.pop(prompt, (0.0, 0.0))
                weight *= EPOCH_DECAY
                self._history[prompt] = (old * weight + mean * count) / (weight + count), weight + count
        while len(self._history) > PROMPTS_KEPT:
            self._history.popitem(last=False)
        self._past = EPOCH_DECAY * (self._past + totals)
        self.begin(())

    def state_dict(self) -> dict[str, Any]:
        """What was learnt from earlier rollouts, as plain data for JSON; the current rollout is not included."""
        return {
            "limit": self._limit,
            "past": self._past.tolist(),
            "correlation": self._correlation,
            "history": {prompt: list(known) for prompt, known in self._history.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, between two rollouts.

        With another limit, only correlation and prompt levels are kept, which are relative to it.
        """
        if state["limit"] == self._limit:
            self._past = np.array(state["past"], np.float64)
        self._correlation = float(state["correlation"])
        known = state["history"].items()
        self._history = OrderedDict((prompt, (float(mean), float(count))) for prompt, (mean, count) in known)
        self.begin(())

    def _bins(self, lengths: Ints) -> Ints:
        return np.clip(np.searchsorted(self._edges, lengths, side="right") - 1, 0, BINS - 1)

    def _survival(self, ended: Floats, reached: Floats) -> Floats:
        """Share [BINS + 1] of samples that are longer than each edge."""
        ended = ended + self._past
        later = (ended + reached)[::-1].cumsum()[::-1]
        exposed = later - 0.5 * reached  # an unfinished sample counts for half of its bin (the actuarial estimate)
        survival = np.maximum(self._guesses, MIN_PROBABILITY)
        likelihood = np.log(survival[:, :-1]) @ reached
        likelihood += np.log(np.maximum(survival[:, :-1] - survival[:, 1:], MIN_PROBABILITY)) @ ended
        guess = survival[likelihood.argmax()]
        hazard = (ended + GUESS_SAMPLES * (1.0 - guess[1:] / guess[:-1])) / (exposed + GUESS_SAMPLES)
        return np.append(1.0, np.cumprod(1.0 - hazard))

    def _level_prior(self) -> Floats:
        """Log weights [groups, levels] of each group's level before any of its samples in this rollout is known."""
        means, variances = np.zeros(len(self._prompts)), np.ones(len(self._prompts))
        information = self._correlation / (1.0 - self._correlation)  # that one sample's score gives about the level
        for i, prompt in enumerate(self._prompts):
            if prompt in self._history:
                mean, count = self._history[prompt]
                variance = 1.0 / (1.0 + count * information)
                level = variance * count * information / math.sqrt(self._correlation) * mean
                means[i] = EPOCHS_CORRELATION * level
                variances[i] = 1.0 - EPOCHS_CORRELATION**2 * (1.0 - variance)
        return -0.5 * (LEVELS - means[:, None]) ** 2 / variances[:, None]

    def _learn_correlation(self, scores: Floats, counts: Floats) -> None:
        """Update the correlation by a one-way analysis of variance over groups with more than one finished sample."""
        several = counts > 1
        ended, counts = self._ended[several], counts[several]
        if len(counts) < 2:
            return
        means = ended @ scores / counts
        within = float((ended @ scores**2 - counts * means**2).sum() / (counts - 1.0).sum())
        between = float(np.average((means - np.average(means, weights=counts)) ** 2, weights=counts))
        size = float(counts.mean())
        between = max(between * len(counts) / (len(counts) - 1.0) - within / size, 0.0)
        if within + between > 0.0:
            found = between / (within + between)
            mixed = (1.0 - CORRELATION_GAIN) * self._correlation + CORRELATION_GAIN * found
            self._correlation = min(max(mixed, MIN_CORRELATION), MAX_CORRELATION)


def _lognormal(edges: Floats, median: float) -> Floats:
    """Share [BINS + 1] of a lognormal distribution that is longer than each edge."""
    logs = np.log(np.maximum(edges, 1e-3) / median) / GUESSED_SPREAD
    return _normal_tail(logs)


def _normal_tail(x: Floats) -> Floats:
    """P(a standard normal variable > x), elementwise; interpolated in a table, because plans are made often."""
    return np.interp(x, _GRID, _TAILS)


def _scores(survival: Floats) -> Floats:
    """Normal scores [BINS + 1] of the edges, between -4 and 4."""
    normal = NormalDist()
    return np.array([-normal.inv_cdf(share) for share in np.clip(survival, 3e-5, 1.0 - 3e-5).tolist()])


def _survival_given_level(scores: Floats, correlation: float) -> Floats:
    """Return P(length > bin edge), [levels, BINS + 1], for each level of a prompt's latent length factor.

    Args:
        scores: normal scores of the bin edges.
        correlation: correlation of lengths within a group.
    """
    distance = (scores - math.sqrt(correlation) * LEVELS[:, None]) / math.sqrt(1.0 - correlation)
    probabilities = _normal_tail(distance)
    probabilities[:, 0] = 1.0
    return probabilities


def _mean_remaining(survival: Floats, edges: Floats) -> Floats:
    """Expected remaining tokens [levels, BINS + 1] at each edge: the area under the survival curve beyond it."""
    areas = 0.5 * (survival[:, :-1] + survival[:, 1:]) * np.diff(edges)
    beyond = np.append(areas[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((len(survival), 1)), axis=1)
    return beyond / np.maximum(survival, MIN_PROBABILITY)
