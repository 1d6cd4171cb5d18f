"""Finished samples scored by a frozen model on the engines' devices: beside generation, and the rest after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from rlhfspec_mega.rollout.fusion import ScoreReport, ScoringQueue, ScoringTask
from rlhfspec_mega.types import GenerationRequest, GenerationResult


class Replicas(Protocol):
    """A frozen model, replicated over the engines' devices; workers.scorer_group.ScorerGroup is one."""

    devices: int  # of one replica

    def serving(self) -> list[int]:
        """Replicas that may be given work."""

    def engines(self, replica: int) -> Collection[int]:
        """Ranks of the engines whose devices a replica lies on."""

    def start(self, replica: int, tasks: Sequence[ScoringTask]) -> list[Any]:
        """Begin to score a batch: a call on each rank of the replica."""

    def report(self, replica: int, tasks: Sequence[ScoringTask], answers: Sequence[Any]) -> ScoreReport:
        """What the ranks' answers say of a batch."""

    def revive(self) -> None:
        """Wait until a replica serves. Raises RunError when none is left."""


class Scoring:
    """The scoring of one rollout's samples: each by one replica, in batches, whoever dies.

    Args:
        max_tokens: of a batch, at most, prompts included; a longer sample is a batch of its own.

    Attributes:
        queue: what waits, what was given to whom, and what has come back.
    """

    def __init__(self, replicas: Replicas, max_tokens: int) -> None:
        self._replicas, self._max_tokens = replicas, max_tokens
        self.queue = ScoringQueue()
        self._flights: dict[int, _Flight] = {}  # by replica

    @property
    def done(self) -> bool:
        """Whether every sample added so far is scored."""
        return self.queue.done

    @property
    def seconds_per_token(self) -> float:
        """Of one device; 0 before the first batch."""
        return self._replicas.devices * self.queue.seconds / max(self.queue.scored_tokens, 1)

    def add(self, request: GenerationRequest, result: GenerationResult) -> None:
        """A sample has finished."""
        self.queue.add(request, result)

    def start(self, busy: Collection[int] = ()) -> None:
        """Give work to every idle replica none of whose engines is `busy` with samples."""
        for replica in self._replicas.serving():
            if replica in self._flights or not set(busy).isdisjoint(self._replicas.engines(replica)):
                continue
            if batch := self.queue.take(replica, self._max_tokens):
                self._flights[replica] = _Flight(batch, self._replicas.start(replica, batch))

    def calls(self) -> list[Any]:
        """In flight."""
        return [call for flight in self._flights.values() for call in flight.open]

    def heard(self, call: Any) -> ScoreReport | None:
        """File an answer, or a replica's death; what the replica says of its batch once all its ranks have answered.

        Raises RunError where a rank failed, or scored something else than it was given.
        """
        found = next((item for item in self._flights.items() if call in item[1].open), None)
        if found is None:
            return None  # of a batch that a peer's death has ended
        replica, flight = found
        if any(one.dead for one in flight.open):  # then the others may have failed for want of it
            del self._flights[replica]
            self.queue.lose(replica)
            return None
        flight.open.remove(call)
        flight.answers.append(call.result())
        if flight.open:
            return None
        del self._flights[replica]
        report = self._replicas.report(replica, flight.batch, flight.answers)
        self.queue.report(report)
        return report

    def go_on(self) -> None:
        """With all engines free, have something in flight. Raises RunError when no replica is left."""
        self.start()
        if not self._flights and not self.done:
            self._replicas.revive()


class _Flight:
    """A batch on its way through a replica: calls that are open, and answers so far."""

    def __init__(self, batch: list[ScoringTask], calls: list[Any]) -> None:
        self.batch, self.open, self.answers = batch, calls, list[Any]()
