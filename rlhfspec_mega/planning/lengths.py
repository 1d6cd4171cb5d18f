"""How many response tokens are still to come: from the group, the prompt's earlier epochs and all lengths so far."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from rlhfspec_mega.planning.rollout_state import Floats, Ints

BINS = 64  # of length, of equal width in log tokens
LEVELS = np.linspace(-3.0, 3.0, 13)  # of a group, in standard deviations: long answers or short ones
DENSITY = np.exp(-0.5 * LEVELS**2)
# Lognormal lengths, one of which stands in where none is known: medians as shares of the limit, spread in log tokens.
GUESSED_MEDIANS, GUESSED_SPREAD = (0.25, 0.5, 1.0, 0.125, 0.0625, 0.03125, 0.015625), 1.0
GUESS_SAMPLES = 2.0  # that the guess counts as, in each bin
KEPT = 0.5  # of the weight of earlier rollouts and epochs, at each new one
FIRST_CORRELATION, CORRELATION_GAIN = 0.5, 0.3  # of the members of a group; weight of the newest rollout in it
LEAST_CORRELATION, MOST_CORRELATION = 0.02, 0.9
EPOCHS_CORRELATION = 0.9  # of a prompt's level now and an epoch ago
PROMPTS_KEPT = 65536
LEAST_CHANCE = 1e-9
# The normal distribution's upper tail: straight lines between these points err by less than 2e-7.
_GRID = np.linspace(-8.0, 8.0, 8193)
_TAILS = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) for x in _GRID.tolist()])


class LengthPredictor:
    """Predicts the remaining response tokens of unfinished samples; learns from those that end.

    * All lengths together follow a life table over bins of log length, the Kaplan-Meier estimate for grouped data: of
      the samples that reached a bin, what share ended in it. Unfinished samples count for the bins they have passed,
      those of earlier rollouts less and less. Where there are none, the likeliest of a few guesses stands in.
    * The table turns a length into a normal score (a Gaussian copula). A group has a level u, and scores of its
      members are sqrt(rho) u + sqrt(1 - rho) noise, rho the correlation found in earlier rollouts.
    * Bayes' rule on a grid of levels weighs a group's evidence: members that ended say where, unfinished ones (the
      predicted sample too) that they have outlived what they have, the prompt's earlier epochs shift the prior.

    So the three sources are shrunk to each other by what each of them knows. The prediction is the mean remaining
    length given that the sample has outlived its tokens; nothing outlives the limit.

    Args:
        limit: response tokens at which any sample ends.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._edges = np.geomspace(
            1.0, max(limit, 2), BINS + 1
        )  # a sample in bin b has edges[b] .. edges[b + 1] tokens
        self._edges[0] = 0.0
        self._guesses = np.array([_lognormal(self._edges, share * limit) for share in GUESSED_MEDIANS])
        self._past = np.zeros(BINS)  # samples of earlier rollouts that ended in each bin, by their weight now
        self._correlation = FIRST_CORRELATION
        self._history: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by prompt: mean score, samples
        self.begin()

    def begin(self, prompts: Sequence[str] = ()) -> None:
        """A new rollout begins, with these groups; see `add`."""
        self._prompts: tuple[str, ...] = ()
        self._ended = np.zeros((0, BINS))  # samples by group and bin
        self.add(prompts)

    def add(self, prompts: Sequence[str]) -> None:
        """The rollout has these groups, too.

        Args:
            prompts: a key of each group's prompt, the same in every epoch; groups are numbered in this order.
        """
        self._prompts = (*self._prompts, *prompts)
        self._ended = np.concatenate([self._ended, np.zeros((len(prompts), BINS))])
        self._prior = self._levels_before()

    def finished(self, group: int, length: int) -> None:
        """A sample of a group ended with so many response tokens, by itself or at the limit."""
        self._ended[group, self._bins(np.array([length]))[0]] += 1.0

    def predict(self, groups: Ints, generated: Ints) -> Floats:
        """Response tokens still to come [N], from 1 to what the limit leaves.

        Args:
            groups, generated: of all unfinished samples of this rollout [N]: what they have outlived counts.
        """
        bins = self._bins(generated)
        reached = np.zeros((len(self._prompts), BINS))
        np.add.at(reached, (groups, bins), 1.0)
        survival = self._survival(self._ended.sum(axis=0), reached.sum(axis=0))
        given_level = _given_level(_scores(survival), self._correlation)  # [levels, BINS + 1]
        logs = np.log(np.maximum(given_level, LEAST_CHANCE))
        ends_here = np.log(np.maximum(given_level[:, :-1] - given_level[:, 1:], LEAST_CHANCE))
        evidence = self._prior + self._ended @ ends_here.T + reached @ logs[:, :-1].T
        weights = np.exp(evidence - evidence.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        table = weights @ _mean_remaining(given_level, self._edges)  # [groups, BINS + 1]
        low, high = self._edges[bins], self._edges[bins + 1]
        share = np.clip((generated - low) / (high - low), 0.0, 1.0)
        expected = (1.0 - share) * table[groups, bins] + share * table[groups, bins + 1]
        return np.maximum(np.minimum(expected, self._limit - generated), 1.0)

    def end(self) -> None:
        """All samples of the rollout have ended: keep what it says of lengths, of correlation, and of its prompts."""
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
                weight *= KEPT
                self._history[prompt] = (old * weight + mean * count) / (weight + count), weight + count
        while len(self._history) > PROMPTS_KEPT:
            self._history.popitem(last=False)
        self._past = KEPT * (self._past + totals)
        self.begin(())

    def state_dict(self) -> dict[str, Any]:
        """What earlier rollouts have taught, as plain data for JSON; the rollout under way is not part of it."""
        return {
            "limit": self._limit,
            "past": self._past.tolist(),
            "correlation": self._correlation,
            "history": {prompt: list(known) for prompt, known in self._history.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`, between two rollouts.

        Under another limit only prompts and correlation are kept: they are relative.
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
        """Share of samples [BINS + 1] that outlive each edge."""
        ended = ended + self._past
        later = (ended + reached)[::-1].cumsum()[::-1]
        exposed = later - 0.5 * reached  # an unfinished sample has passed half its bin (the actuarial estimate)
        survival = np.maximum(self._guesses, LEAST_CHANCE)
        likelihood = np.log(survival[:, :-1]) @ reached
        likelihood += np.log(np.maximum(survival[:, :-1] - survival[:, 1:], LEAST_CHANCE)) @ ended
        guess = survival[likelihood.argmax()]
        hazard = (ended + GUESS_SAMPLES * (1.0 - guess[1:] / guess[:-1])) / (exposed + GUESS_SAMPLES)
        return np.append(1.0, np.cumprod(1.0 - hazard))

    def _levels_before(self) -> Floats:
        """Log weights [groups, levels] of a group's level before any of its samples is seen in this rollout."""
        means, variances = np.zeros(len(self._prompts)), np.ones(len(self._prompts))
        information = self._correlation / (1.0 - self._correlation)  # of one sample's score about its group's level
        for i, prompt in enumerate(self._prompts):
            if prompt in self._history:
                mean, count = self._history[prompt]
                variance = 1.0 / (1.0 + count * information)
                level = variance * count * information / math.sqrt(self._correlation) * mean
                means[i] = EPOCHS_CORRELATION * level
                variances[i] = 1.0 - EPOCHS_CORRELATION**2 * (1.0 - variance)
        return -0.5 * (LEVELS - means[:, None]) ** 2 / variances[:, None]

    def _learn_correlation(self, scores: Floats, counts: Floats) -> None:
        """One-way analysis of variance over groups of more than one sample."""
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
            self._correlation = min(max(mixed, LEAST_CORRELATION), MOST_CORRELATION)


def _lognormal(edges: Floats, median: float) -> Floats:
    """Share [BINS + 1] that outlives each edge."""
    logs = np.log(np.maximum(edges, 1e-3) / median) / GUESSED_SPREAD
    return _tail(logs)


def _tail(x: Floats) -> Floats:
    """P(a standard normal variable > x), for arrays of any shape; read from a table, as plans are made often."""
    return np.interp(x, _GRID, _TAILS)


def _scores(survival: Floats) -> Floats:
    """Normal scores [BINS + 1] of the edges, between -4 and 4."""
    normal = NormalDist()
    return np.array([-normal.inv_cdf(share) for share in np.clip(survival, 3e-5, 1.0 - 3e-5).tolist()])


def _given_level(scores: Floats, correlation: float) -> Floats:
    """Chance [levels, BINS + 1] of outliving each edge, for a sample of a group at each level."""
    distance = (scores - math.sqrt(correlation) * LEVELS[:, None]) / math.sqrt(1.0 - correlation)
    chances = _tail(distance)
    chances[:, 0] = 1.0
    return chances


def _mean_remaining(survival: Floats, edges: Floats) -> Floats:
    """Mean tokens to come [levels, BINS + 1] for those who have outlived each edge: area under the curve beyond."""
    areas = 0.5 * (survival[:, :-1] + survival[:, 1:]) * np.diff(edges)
    beyond = np.append(areas[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((len(survival), 1)), axis=1)
    return beyond / np.maximum(survival, LEAST_CHANCE)
