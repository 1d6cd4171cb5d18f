"""Which engine decodes which sample of a rollout, what is known of each, and who takes over from a dead engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.types import EngineReport, GenerationRequest, GenerationResult


def held_at_once(slots: int) -> int:
    """Samples of an engine under queue dispatch: a few more than its slots, to fill those that fall free between two
    of its answers."""
    return slots + max(1, slots // 4)


def assign(requests: Sequence[GenerationRequest], engines: int) -> list[list[GenerationRequest]]:
    """Whole groups (they share a prompt's KV) to the engine with the fewest samples so far; deterministic."""
    groups: dict[str, list[GenerationRequest]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    shares: list[list[GenerationRequest]] = [[] for _ in range(engines)]
    for group in groups.values():
        min(shares, key=len).extend(group)
    return shares


class Assignment:
    """The samples of one rollout among its engines.

    A share is what an engine is given at once. Without `repeat`, shares join the samples an engine already decodes;
    with it, an engine begins its next share only when it holds none, so that the batches, and with them the last bits
    of every result, do not depend on when an engine died.

    Args:
        engines: of the run; with `repeat` every rollout is cut into as many shares, however many serve.
        serving: ranks that take work now.
        at_once: samples an engine holds at most; the others wait here in one queue and follow as samples end. None:
            all samples are shared out at the beginning.

    Attributes:
        results: finished samples by id.
        known: what the driver knows of every sample.
        custody: which engine has which sample.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        engines: int,
        serving: Sequence[int],
        ledger: Ledger,
        *,
        repeat: bool,
        at_once: int | None = None,
    ) -> None:
        self.results: dict[str, GenerationResult] = {}
        self.known: dict[str, SampleSnapshot] = {}
        self.custody = ledger.custody
        self._engines, self._repeat, self._at_once = engines, repeat, at_once
        self._common: deque[str] = deque()  # with `at_once`: samples for whichever engine has room first
        self._queues: dict[int, deque[list[str]]] = {}  # shares not yet handed over, by rank
        self._share: dict[int, list[str]] = {}  # with repeat: the share an engine works on, as it was given
        self.add(requests, serving)

    def add(self, requests: Sequence[GenerationRequest], serving: Sequence[int]) -> None:
        """Share these samples out, too. Raises RunError for one that is known."""
        for request in requests:
            if request.sample_id in self.known:
                raise RunError(f"Sample {request.sample_id} was given to the engines twice.")
            self.known[request.sample_id] = SampleSnapshot(request, [], [], [])
        if self._at_once is not None:
            self._common.extend(request.sample_id for request in requests)
            return
        homes = list(range(self._engines)) if self._repeat or not serving else list(serving)
        for rank, share in zip(homes, assign(requests, len(homes)), strict=True):
            self._enqueue(rank, [request.sample_id for request in share])

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.known)

    def holders(self) -> list[int]:
        """Ranks with samples of their own: handed over, queued, or on their way to them."""
        return [rank for rank in range(self._engines) if self._load(rank) or self.custody.leads_to(rank)]

    def has_work(self, rank: int) -> bool:
        """Whether there are samples at an engine or for it."""
        return bool(self._load(rank) or self._common or self.custody.leads_to(rank))

    def owners(self) -> dict[str, int]:
        """The engine of every unfinished sample that has been handed over."""
        owned = ((sample_id, self.custody.owner(sample_id)) for sample_id in self.known)
        return {sample_id: rank for sample_id, rank in owned if rank is not None}

    def take(self, rank: int) -> list[SampleSnapshot]:
        """What to hand to an engine now; it owns these samples from here on."""
        queue, ids = self._queues.get(rank, deque()), list[str]()
        held = self.custody.held(rank)
        while queue and not (self._repeat and (held or ids)):
            self._share[rank] = queue.popleft()
            ids += self._share[rank]
        while self._common and held + len(ids) < (self._at_once or 0):
            ids.append(self._common.popleft())
        self.custody.give(rank, ids, repeat=self._repeat)
        return [self.known[sample_id] for sample_id in ids]

    def report(self, rank: int, report: EngineReport, serving: Sequence[int]) -> None:
        """File what an engine answered.

        Raises RunError when a sample came back twice or unasked, or when the engine does not know one it was given.
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
        self.custody.balance(rank, report.unfinished)
        if not self._repeat:
            for gain in report.progress:
                if self.custody.owner(gain.sample_id) == rank:
                    known = self.known[gain.sample_id]
                    known.tokens += gain.tokens
                    known.logprobs += gain.logprobs
                    known.versions += gain.versions

    def cut(self, rank: int, sources: Sequence[int], serving: Sequence[int]) -> None:
        """An engine has taken all that these dead ones had sent it: what did not arrive is decoded elsewhere."""
        for source in sources:
            self._hand_out(self.custody.cut(source, rank), serving, rank)

    def lose(self, rank: int, serving: Sequence[int]) -> None:
        """An engine died: its samples go to those that serve, or back to its own queue while none does."""
        shares, holding = list(self._queues.pop(rank, ())), self.custody.held(rank)
        lost = self.custody.lose(rank)
        if not self._repeat:
            self._hand_out([*lost, *(sample_id for share in shares for sample_id in share)], serving, rank)
            return
        for share in [*([self._share[rank]] if holding else []), *shares]:
            self._enqueue(min(serving or [rank], key=self._load), share)

    def _hand_out(self, ids: Sequence[str], serving: Sequence[int], otherwise: int) -> None:
        """Queue samples at engines that serve, or at `otherwise`."""
        homes = list(serving) or [otherwise]
        for home, part in zip(homes, assign([self.known[i].request for i in ids], len(homes)), strict=True):
            self._enqueue(home, [request.sample_id for request in part])

    def _enqueue(self, rank: int, share: list[str]) -> None:
        if share:
            self._queues.setdefault(rank, deque()).append(share)

    def _load(self, rank: int) -> int:
        return self.custody.held(rank) + sum(len(share) for share in self._queues.get(rank, ()))
