"""A time that no rollout of a workload can stay below, whatever decides about its samples."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.rollout_state import Floats
from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve
from rlhfspec_mega.simulate.workload import Workload


def lower_bound(workload: Workload, engines: int, curves: CostCurves, curve: DecodeCurve) -> float:
    """Seconds that a rollout of this workload takes at least; the larger of two bounds.

    * The longest sample: its prompt is read, and each of its tokens takes at least a step with no KV cache but its own,
      at the batch size that is fastest for that.
    * All work: a step of B samples costs `seconds / B + kv_seconds * context` for each of them. Every token is decoded
      at the batch size for which this is least, each group's prompt is read once, and all engines are always busy.

    Args:
        curve: the decode curve of the engines, one of those in `curves`.
    """
    seconds, kv_seconds = (np.array(table[1:])[:, None] for table in curve.tables(curves.slots))
    batches = np.arange(1, curves.slots + 1)[:, None]
    contexts = np.arange(int(workload.totals.max()))[None, :]
    alone = _sums((seconds + kv_seconds * contexts).min(axis=0))
    shared = _sums((seconds / batches + kv_seconds * contexts).min(axis=0))
    totals = workload.totals.astype(np.int64)
    reading = workload.prompts * curves.prefill_seconds
    longest = float((reading + alone[totals] - alone[workload.prompts]).max())
    of_groups = np.zeros(int(workload.groups.max()) + 1)
    np.maximum.at(of_groups, workload.groups, reading)
    work = float((shared[totals] - shared[workload.prompts]).sum() + of_groups.sum())
    return max(longest, work / engines)


def _sums(of: Floats) -> Floats:
    """The sum of the first n values, for each n from 0."""
    return np.concatenate([[0.0], np.cumsum(of)])
