"""What speculation gains, measured while it runs: now and then a step decodes plainly and is compared with the last."""

from __future__ import annotations

from rlhfspec_mega.planning.tree import StepRecord
from rlhfspec_mega.types import DraftingTally

EVERY = 32  # steps between plain ones: they cost about 2% of what speculation gains


class PlainControl:
    """Pairs every control step with the step before it, which had the same samples but for those that ended."""

    def __init__(self) -> None:
        self._steps = 0
        self._before: StepRecord | None = None
        self._due = False

    def is_due(self) -> bool:
        """Whether the next step is to decode plainly; asked once a step."""
        self._steps += 1
        self._due = self._steps % EVERY == 0 and self._before is not None
        return self._due

    def observe(self, record: StepRecord, tally: DraftingTally) -> None:
        """Note a step; if it was a control, add the pair to the tally."""
        if self._due and self._before is not None and self._before.batch.size == record.batch.size:
            tally.paired_seconds += _seconds(self._before)
            tokens = self._before.batch.size + int(self._before.accepted.sum())
            tally.paired_plain_seconds += tokens * _seconds(record) / record.batch.size
        self._before = None if self._due else record


def _seconds(record: StepRecord) -> float:
    return record.draft_seconds + record.verify_seconds
