"""What a simulated rollout came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.planning.rollout_state import Floats, Ints


class LiveCounts:
    """Live samples of each engine over time, as changes in order of time."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self._changes: list[tuple[float, int, int]] = []
        self._now = [0] * engines

    def note(self, now: float, engine: int, live: int) -> None:
        """An engine has so many live samples from now on."""
        if live != self._now[engine]:
            self._now[engine] = live
            self._changes.append((now, engine, live))

    def at(self, times: Sequence[float]) -> Ints:
        """Live samples [times, engines] after all changes up to each of these ascending times."""
        counts = np.zeros((len(times), self.engines), np.int64)
        current = np.zeros(self.engines, np.int64)
        changes = iter([*self._changes, (np.inf, 0, 0)])
        change = next(changes)
        for row, moment in enumerate(times):
            while change[0] <= moment:
                current[change[1]] = change[2]
                change = next(changes)
            counts[row] = current
        return counts


@dataclass(frozen=True)
class SimulatedRollout:
    """One simulated rollout and the scoring of its samples.

    Attributes:
        makespan: seconds until the last sample ended.
        makespan_with_scoring: seconds until the reference had scored all samples.
        freed_device_seconds: from each engine's last sample to the end of the rollout, added up.
        used_device_seconds: spent on inference tasks before the rollout ended, also beside samples that came meanwhile.
        fused_tasks: inference tasks begun before the rollout ended.
        migrations: samples that went on at another engine after a copy; `overtaken` ended before theirs was done.
        handed_over: moves of samples that had not begun, which cost nothing.
        refused: moves asked for that cannot be made (to a freed engine, of a sample under way, to where it is).
        finished_at, ended_on: seconds and engine, [samples].
        decoded: tokens gained on all engines.
        kv_peak: most tokens in one engine's KV cache. Engines are not stopped at their room: compare the two.
    """

    makespan: float
    makespan_with_scoring: float
    freed_device_seconds: float
    used_device_seconds: float
    fused_tasks: int
    migrations: int
    overtaken: int
    handed_over: int
    refused: int
    finished_at: Floats
    ended_on: Ints
    decoded: float
    kv_peak: float
    live: LiveCounts
