"""One row of the ledger: a sample's state, and the errors for changes that are not allowed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.types import Sample, SampleState


class Purpose(StrEnum):
    """What samples are generated for."""

    TRAIN = "train"
    EVALUATE = "evaluate"


LAST_STATE = {Purpose.TRAIN: SampleState.TRAINED, Purpose.EVALUATE: SampleState.SCORED}
STATE_BEFORE = {
    SampleState.FINISHED: SampleState.GENERATING,
    SampleState.SCORED: SampleState.FINISHED,
    SampleState.TRAINED: SampleState.SCORED,
}


class Reference(StrEnum):
    """Stage of a finished sample in scoring by the reference beside generation."""

    NOT_ASKED = "not asked"
    WAITING = "waiting"
    READING = "reading"
    SCORED = "scored"


@dataclass(slots=True)
class Transfer:
    """The migration of a sample from one engine to another.

    Attributes:
        number: of the driver's order.
        source: None once it has reported the departure.
        destination: None once it is dead: then only the source can still hold the sample.
        called_off: the destination knows that the sample does not come; the source's report is still to come.
        arrived: the destination has reported the sample; the source's report is still to come.
        orphaned: the source is dead, and the destination may or may not hold the sample.
        returned: the source was given the sample again before it had reported the departure.
    """

    number: int
    source: int | None
    destination: int | None
    called_off: bool = False
    arrived: bool = False
    orphaned: bool = False
    returned: bool = False


@dataclass(slots=True)
class Entry:
    """One open sample.

    Attributes:
        born: step in which it was opened.
        step: step with which it is settled.
        owner: rank of the engine whose result counts; None unless it is GENERATING.
        uses_left: updates that it is still to be part of; 0 for evaluation.
        transfer: None unless it is migrating between two engines.
        replica: replica of the reference that is reading it; None if none is.
        dropped: the reason why no update will use it; "" unless it is DROPPED.
    """

    id: str
    born: int
    purpose: Purpose
    prompt: int
    step: int
    uses_left: int = 1
    state: SampleState = SampleState.PENDING
    owner: int | None = None
    transfer: Transfer | None = None
    reference: Reference = Reference.NOT_ASKED
    replica: int | None = None
    dropped: str = ""
    sample: Sample | None = None

    def move(self, state: SampleState) -> None:
        """Set the state, of the Sample object too."""
        self.state = state
        if self.sample is not None:
            self.sample.state = state

    @property
    def group(self) -> str:
        """See Sample.group_id."""
        return f"{self.born}.{self.prompt}"

    @property
    def done(self) -> bool:
        """Whether the sample has reached its last state."""
        return self.state in (LAST_STATE[self.purpose], SampleState.DROPPED)

    def __str__(self) -> str:
        where = self.state if self.owner is None else f"{self.state}, engine {self.owner}"
        return f"{self.id} ({where})"


def find(entries: Mapping[str, Entry], sample_id: str) -> Entry:
    """The entry of an open sample. Raises RunError for any other."""
    if sample_id not in entries:
        raise RunError(f"Sample {sample_id} is not open: it is settled or was never opened.")
    return entries[sample_id]


def refuse(names: Sequence[str], why: str) -> None:
    """Raises RunError if there are any ids."""
    if names:
        raise RunError(f"Samples {first_five(names)} {why}.")


def first_five(names: Iterable[str]) -> str:
    """The first five ids, for messages."""
    first = list(itertools.islice(names, 6))
    return ", ".join(first[:5]) + (" and more" if len(first) > 5 else "")
