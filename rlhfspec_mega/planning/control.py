"""What speculation gains, measured while it runs: now and then steps decode plainly and are compared with drafts."""

from __future__ import annotations

from rlhfspec_mega.planning.tree import StepRecord
from rlhfspec_mega.types import DraftingTally

EVERY = 128  # steps from one control to the next: they cost about 5% of what speculation gains
# Plain steps of a control. A machine takes a tenth longer for the first ones after other steps than for the rest:
# the last one counts.
LENGTH = 6


class PlainControl:
    """Pairs the last step of every control with the step before it, if that had the same samples."""

    def __init__(self) -> None:
        self._steps = 0
        self._before: StepRecord | None = None
        self._place = 0  # of the step that is taken in its control, from 1

    def is_due(self) -> bool:
        """Whether the next step is to decode plainly; asked once a step."""
        self._steps += 1
        place = self._steps % EVERY
        self._place = place + 1 if self._steps >= EVERY and place < LENGTH else 0
        return self._place > 0

    def observe(self, record: StepRecord, tally: DraftingTally) -> None:
        """Note a step; if it ends a control, add the pair to the tally."""
        before = self._before
        if self._place == 0:
            self._before = record
        elif self._place == LENGTH and before is not None and before.batch.size == record.batch.size:
            tally.paired_seconds += _seconds(before)
            tokens = before.batch.size + int(before.accepted.sum())
            tally.paired_plain_seconds += tokens * _seconds(record) / record.batch.size


def _seconds(record: StepRecord) -> float:
    return record.draft_seconds + record.verify_seconds
