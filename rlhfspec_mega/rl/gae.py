"""Generalized advantage estimation (arXiv 1506.02438) over flat columns of response tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhfspec_mega.rl.experience import Integers

Doubles = NDArray[np.float64]
_LEAST_DEVIATION = 1e-8


def discounted_sums(values: Doubles, offsets: Integers, factor: ArrayLike) -> Doubles:
    """For each token, the sum over it and later tokens of its sample, each later one times `factor` once more.

    Args:
        values: [tokens].
        offsets: of each sample's values, [samples + 1].
        factor: one number, or one per sample [samples].

    Returns: [tokens]. Nothing passes from one sample to another.
    """
    lengths, sums = np.diff(offsets), values.astype(np.float64)
    order = np.argsort(-lengths, kind="stable")  # longest first: samples that still have tokens are a prefix
    ends, sizes = offsets[1:][order], lengths[order]
    factors = np.broadcast_to(np.asarray(factor, np.float64), lengths.shape)[order]
    for back in range(1, int(sizes[0]) if len(sizes) else 0):
        active = int(np.searchsorted(-sizes, -back, side="left"))
        here = ends[:active] - 1 - back
        sums[here] += factors[:active] * sums[here + 1]
    return sums


def advantages_and_returns(
    rewards: Doubles, values: Doubles, offsets: Integers, gamma: float, gae_lambda: ArrayLike
) -> tuple[Doubles, Doubles]:
    """Advantages and the returns (advantage plus value) that a critic learns; a response's end is worth 0.

    Args:
        rewards, values: of each response token, [tokens]; a value is of the state before its token.
        offsets: of each sample's tokens, [samples + 1].
        gae_lambda: one number, or one per sample [samples].
    """
    following = np.zeros_like(values, np.float64)
    following[:-1] = values[1:]
    ends = offsets[1:][np.diff(offsets) > 0]
    following[ends - 1] = 0.0
    errors = rewards + gamma * following - values
    found = discounted_sums(errors, offsets, gamma * np.asarray(gae_lambda, np.float64))
    return found, found + values


def length_adaptive_lambda(lengths: Integers, alpha: float) -> Doubles:
    """1 - 1 / (alpha x length) for each sample, at least 0 (VAPO, arXiv 2504.05118); [samples]."""
    return np.clip(1.0 - 1.0 / (alpha * np.maximum(lengths, 1)), 0.0, 1.0)


def whitened(values: Doubles, counted: NDArray[np.bool_]) -> Doubles:
    """Values with mean 0 and standard deviation 1 over the counted tokens of all samples; 0 at the others."""
    chosen = values[counted]
    result = np.zeros_like(values)
    if len(chosen):
        result[counted] = (chosen - chosen.mean()) / max(float(chosen.std()), _LEAST_DEVIATION)
    return result


def explained_variance(targets: Doubles, values: Doubles) -> float:
    """1 - variance(targets - values) / variance(targets); 0 for a constant guess, NaN where targets do not vary."""
    variance = float(targets.var()) if len(targets) else 0.0
    return 1.0 - float((targets - values).var()) / variance if variance > 0 else float("nan")
