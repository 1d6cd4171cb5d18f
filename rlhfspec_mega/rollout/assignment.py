"""Assignment of a rollout's samples to engines, their state as the driver knows it, and recovery of lost samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.shared_queue import SharedQueue
from rlhfspec_mega.types import EngineReport, GenerationRequest, GenerationResult


def spare_samples(slots: int, ended: int = 0) -> int:
    """Samples beyond its slots that an engine has while others wait in the shared queue, to fill the slots that become
    free between two of its reports.

    Args:
        ended: samples that have ended between its last two reports.
    """
    return max(1, slots // 4, ended)


def assign(requests: Sequence[GenerationRequest], engines: int) -> list[list[GenerationRequest]]:
    """Split requests among engines: each group, whose members share a prompt's KV, goes to the least loaded engine.

    Returns:
        one list of requests per engine; the same for the same arguments.
    """
    shares: list[list[GenerationRequest]] = [[] for _ in range(engines)]
    for group in _groups(requests):
        min(shares, key=len).extend(group)
    return shares


def _groups(requests: Sequence[GenerationRequest]) -> list[list[GenerationRequest]]:
    groups: dict[str, list[GenerationRequest]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    return list(groups.values())


class Assignment:
    """Assigns the samples of one rollout to its engines.

    A share is the list of samples that is queued for an engine together. With `deterministic`, an engine gets its next
    share only when it has no samples left, so that the batches, and with them the last bits of every result, do not
    depend on when an engine died. Otherwise shares join the samples that the engine already decodes.

    Args:
        engines: number of engines of the run; with `deterministic` samples are always split into this many shares,
            however many engines serve.
        serving: ranks that take work now.
        deterministic: see above; samples of a dead engine are then decoded again from the prompt.
        slots: samples that an engine decodes at once. It is given a few more (`spare_samples`), fewer when few are
            left; the others wait in one shared queue, from which each engine takes as its samples end. Those of a dead
            engine are handed out at once, whatever the others have. None: all samples are assigned at the beginning.

    Attributes:
        results: finished samples by id.
        known: the last reported state of every sample, by id.
        custody: the part of the ledger that knows which engine has which sample.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        engines: int,
        serving: Sequence[int],
        ledger: Ledger,
        *,
        deterministic: bool,
        slots: int | None = None,
    ) -> None:
        self.results: dict[str, GenerationResult] = {}
        self.known: dict[str, SampleSnapshot] = {}
        self.custody = ledger.custody
        self._engines, self._deterministic, self._slots = engines, deterministic, slots
        self._shared_queue = SharedQueue[str]()  # with `slots`: ids of samples for the next engine with room
        self._ended: dict[int, int] = {}  # samples that have ended between the last two reports, by rank
        self._queues: dict[int, deque[list[str]]] = {}  # shares not yet given to their engine, by rank
        self._share: dict[int, list[str]] = {}  # with `deterministic`: all samples of the share an engine works on
        self.add(requests, serving)

    def add(self, requests: Sequence[GenerationRequest], serving: Sequence[int]) -> None:
        """Assign more samples. Raises RunError for a sample that was added before."""
        for request in requests:
            if request.sample_id in self.known:
                raise RunError(f"Sample {request.sample_id} was added to the rollout twice.")
            self.known[request.sample_id] = SampleSnapshot(request, [], [], [])
        if self._slots is not None:
            self._deal(requests, serving, self._slots + spare_samples(self._slots))
            return
        homes = list(range(self._engines)) if self._deterministic or not serving else list(serving)
        for rank, share in zip(homes, assign(requests, len(homes)), strict=True):
            self._enqueue(rank, [request.sample_id for request in share])

    def _deal(self, requests: Sequence[GenerationRequest], serving: Sequence[int], most: int) -> None:
        """Give each engine groups up to the `most` samples that it may have, evenly; the others wait."""
        loads = {rank: self._load(rank) for rank in serving}
        for group in _groups(requests):
            ids = [request.sample_id for request in group]
            rank = min(loads, key=lambda one: loads[one], default=None)
            if rank is None or self._shared_queue or loads[rank] + len(ids) > most:
                self._shared_queue.extend(group[0].group_id, ids)
            else:
                self._enqueue(rank, ids)
                loads[rank] += len(ids)

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.known)

    @property
    def waiting(self) -> bool:
        """Whether samples wait that no engine has room for."""
        return bool(self._shared_queue)

    def holders(self) -> list[int]:
        """Ranks of engines that have samples, have a queue, or are the destination of a migration."""
        return [rank for rank in range(self._engines) if self._load(rank) or self.custody.expected(rank)]

    def has_work(self, rank: int) -> bool:
        """Whether an engine has samples, or there are samples that it can get."""
        return bool(self._load(rank) or self._shared_queue or self.custody.expected(rank))

    def owners(self) -> dict[str, int]:
        """The rank of the engine that owns each unfinished sample, by sample id; without samples still in a queue."""
        owned = ((sample_id, self.custody.owner(sample_id)) for sample_id in self.known)
        return {sample_id: rank for sample_id, rank in owned if rank is not None}

    def take(self, rank: int) -> list[SampleSnapshot]:
        """Take from the queues the samples that an engine gets now; it owns them from here on."""
        queue, ids = self._queues.get(rank, deque()), list[str]()
        held = self.custody.held(rank)
        while queue and not (self._deterministic and (held or ids)):
            self._share[rank] = queue.popleft()
            ids += self._share[rank]
        for _ in range(self._room(rank, held + len(ids))):
            ids.append(self._shared_queue.take(rank))
        self.custody.give(rank, ids, repeat=self._deterministic)
        return [self.known[sample_id] for sample_id in ids]

    def _room(self, rank: int, held: int) -> int:
        """Samples of the shared queue that an engine takes now, which has `held` already.

        It fills its slots. Beyond them it takes at most its part of half of what is left, so that the engines run out
        of samples at about the same time (factoring, Hummel et al. 1992).
        """
        waiting, slots = len(self._shared_queue), self._slots or 0
        filling = min(max(0, slots - held), waiting)
        spare = slots + spare_samples(slots, self._ended.get(rank, 0)) - (held + filling)
        part = (waiting - filling) // (2 * self._engines)
        return filling + max(0, min(spare, part))

    def report(self, rank: int, report: EngineReport, serving: Sequence[int]) -> None:
        """Process the report of an engine.

        Raises RunError if it returned a sample twice or one that it was not given, or if it has lost a sample.
        """
        for arrived in report.migration.arrived:
            if self.custody.arrived(rank, arrived.sample_id):
                self.known[arrived.sample_id] = SampleSnapshot(
                    self.known[arrived.sample_id].request, arrived.tokens, arrived.logprobs, arrived.versions
                )
        for result in report.finished:
            if self.custody.finished(rank, result.sample_id):
                self.results[result.sample_id] = result
        for sample_id in report.migration.departed:
            if self.custody.departed(rank, sample_id):
                self._hand_out([sample_id], serving, rank)
        for sample_id in report.migration.kept:
            self.custody.kept(sample_id)
        self.custody.called_off(report.migration.called_off)
        self.custody.balance(rank, report.unfinished)
        self._ended[rank] = len(report.finished)
        if not self._deterministic:
            for gain in report.progress:
                if self.custody.owner(gain.sample_id) == rank:
                    known = self.known[gain.sample_id]
                    known.tokens += gain.tokens
                    known.logprobs += gain.logprobs
                    known.versions += gain.versions

    def sources_drained(self, rank: int, sources: Sequence[int], serving: Sequence[int]) -> None:
        """Assign again what dead engines did not manage to send: `rank` has taken all samples that had reached it."""
        for source in sources:
            self._hand_out(self.custody.cut(source, rank), serving, rank)

    def lose(self, rank: int, serving: Sequence[int]) -> None:
        """An engine died: assign its samples to the serving engines, or to its own queue if none serves."""
        shares, holding = list(self._queues.pop(rank, ())), self.custody.held(rank)
        lost = self.custody.lose(rank)
        if not self._deterministic:
            self._hand_out([*lost, *(sample_id for share in shares for sample_id in share)], serving, rank)
            return
        for share in [*([self._share[rank]] if holding else []), *shares]:
            self._enqueue(min(serving or [rank], key=self._load), share)

    def _hand_out(self, ids: Sequence[str], serving: Sequence[int], otherwise: int) -> None:
        """Queue samples for the serving engines, or for the engine `otherwise` if none serves."""
        homes = list(serving) or [otherwise]
        for home, part in zip(homes, assign([self.known[i].request for i in ids], len(homes)), strict=True):
            self._enqueue(home, [request.sample_id for request in part])

    def _enqueue(self, rank: int, share: list[str]) -> None:
        if share:
            self._queues.setdefault(rank, deque()).append(share)

    def _load(self, rank: int) -> int:
        return self.custody.held(rank) + sum(len(share) for share in self._queues.get(rank, ()))
