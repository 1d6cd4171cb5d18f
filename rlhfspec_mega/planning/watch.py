"""Watches whether the draft still fits its target after each weight update, and stops drafting when it does not."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.tree import StepRecord

LEAST = 200  # first draft tokens that are judged at once
PROBE_EVERY = 16  # steps, while drafting is stopped
FORGET = 0.8  # share of the usual rate that a further window leaves


class CollapseWatch:
    """Follows how often the draft's best first token is accepted: unlike accepted length, no policy's choice moves it.

    A rate below `ratio` of the usual one is a collapse: a broken weight sync, or a policy that has moved away. Drafting
    then stops but for probes, until the rate is back above.

    Attributes:
        collapsed: drafting is stopped.
        rate: of the last full window, None before it.
        usual: of the windows before, None before the first.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.collapsed = False
        self.rate: float | None = None
        self.usual: float | None = None
        self._judged = self._accepted = self._steps = 0

    def weights_changed(self) -> None:
        """Begin a new window: what was seen before an update says nothing of the time after it."""
        self._judged = self._accepted = 0

    def may_draft(self) -> bool:
        """Asked once a step."""
        self._steps += 1
        return not self.collapsed or self._steps % PROBE_EVERY == 0

    def observe(self, record: StepRecord) -> None:
        """Count the verified best first tokens of a step; judge when there are enough."""
        tree = record.tree
        first = (tree.depths[record.chosen] == 1) & (tree.ranks[record.chosen] == 0)
        self._judged += int(np.count_nonzero(first))
        self._accepted += int(np.count_nonzero(record.accepted[first]))
        if self._judged < LEAST:
            return
        self.rate = self._accepted / self._judged
        self.collapsed = self.usual is not None and self.rate < self._ratio * self.usual
        if not self.collapsed:
            self.usual = self.rate if self.usual is None else FORGET * self.usual + (1 - FORGET) * self.rate
        self._judged = self._accepted = 0
