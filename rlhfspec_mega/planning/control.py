"""What speculation gains, measured while it runs: now and then steps decode plainly and are compared with drafts."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.tree import Batch, StepRecord
from rlhfspec_mega.types import DraftingTally

FIRST, EVERY = 32, 128  # steps before the first control, and from one to the next: 3% of what speculation gains
# Plain steps of a control. The first ones after drafted steps take longer than the rest (on a CPU, in batches of up to
# eight, about a tenth): the last one counts.
LENGTH = 4
SHARED = 7 / 8  # of the samples, at least, are in both steps of a pair


class PlainControl:
    """Pairs the last step of every control with the step before the control, if hardly any sample came or went."""

    def __init__(self) -> None:
        self._steps = 0
        self._before: StepRecord | None = None
        self._place = 0  # of the step that is taken in its control, from 1

    def is_due(self) -> bool:
        """Whether the next step is to decode plainly; asked once a step."""
        place = (self._steps - FIRST) % EVERY
        self._place = place + 1 if self._steps >= FIRST and place < LENGTH else 0
        self._steps += 1
        return self._place > 0

    def observe(self, record: StepRecord, tally: DraftingTally) -> None:
        """Note a step; if it ends a control, add the pair to the tally."""
        before = self._before
        if self._place == 0:
            self._before = record
        elif self._place == LENGTH and before is not None and _comparable(before.batch, record.batch):
            tally.paired_seconds += _seconds(before)
            tokens = before.batch.size + int(before.accepted.sum())
            tally.paired_plain_seconds += tokens * _seconds(record) / record.batch.size


def _comparable(one: Batch, other: Batch) -> bool:
    return len(np.intersect1d(one.samples, other.samples)) >= SHARED * max(one.size, other.size)


def _seconds(record: StepRecord) -> float:
    return record.draft_seconds + record.verify_seconds
