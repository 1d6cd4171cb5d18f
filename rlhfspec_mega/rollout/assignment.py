"""Which engine decodes which sample of a rollout, what is known of each, and who takes over from a dead engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger import Ledger
from rlhfspec_mega.rollout.migration.travels import Travels
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.types import EngineReport, GenerationRequest, GenerationResult, SampleProgress, SampleState


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

    A sample that moves is held by its source until that reports it departed, and by its destination from the report
    of its arrival on: in between by both or by none, as reports come in any order. Its owner is one engine at a time.

    Args:
        engines: of the run; with `repeat` every rollout is cut into as many shares, however many serve.
        serving: ranks that take work now.
        at_once: samples an engine holds at most; the others wait here in one queue and follow as samples end. None:
            all samples are shared out at the beginning.

    Attributes:
        results: finished samples by id.
        known: what the driver knows of every sample.
        travels: samples under way between engines.
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
        self.travels = Travels()
        self._ledger, self._repeat, self._at_once = ledger, repeat, at_once
        self._common: deque[str] = deque()  # with `at_once`: samples for whichever engine has room first
        self._queues: dict[int, deque[list[str]]] = {}  # shares not yet handed over, by rank
        self._held: dict[int, dict[str, None]] = {}  # ids an engine has been given and not returned
        self._owner: dict[str, int] = {}  # the engine whose result counts
        self._given_back: set[tuple[int, str]] = set()  # to an engine that has still to report the departure
        self._share: dict[int, list[str]] = {}  # with repeat: the share an engine works on, as it was given
        self._engines = engines
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

    def give_up(self) -> None:
        """Nobody has any of the unfinished samples any more."""
        for rank in range(self._engines):
            self._ledger.release(_name(rank))

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.known)

    def holders(self) -> list[int]:
        """Ranks with samples, handed over or queued, or on their way to them."""
        return [rank for rank in {*self._queues, *self.travels.destinations()} if self.has_work(rank)]

    def has_work(self, rank: int) -> bool:
        return bool(self._held.get(rank) or self._queues.get(rank) or self._common or self.travels.leads_to(rank))

    def held(self, rank: int) -> int:
        """Samples that an engine has."""
        return len(self._held.get(rank, ()))

    def owners(self) -> dict[str, int]:
        """The engine of every unfinished sample that has been handed over."""
        return {sample_id: rank for sample_id, rank in self._owner.items() if sample_id not in self.results}

    def take(self, rank: int) -> list[SampleSnapshot]:
        """What to hand to an engine now; it owns these samples from here on."""
        queue, held = self._queues.setdefault(rank, deque()), self._held.setdefault(rank, {})
        ids: list[str] = []
        while queue and not (self._repeat and held):
            share = queue.popleft()
            self._given_back |= {(rank, sample_id) for sample_id in share if sample_id in held}
            held |= dict.fromkeys(share)
            self._share[rank] = share
            ids += share
        while self._common and len(held) < (self._at_once or 0):
            ids.append(self._common.popleft())
            held[ids[-1]] = None
        for sample_id in ids:
            self._owner[sample_id] = rank
            if sample_id not in self.results:
                self._ledger.assign(sample_id, _name(rank))
        return [self.known[sample_id] for sample_id in ids]

    def report(self, rank: int, report: EngineReport, serving: Sequence[int]) -> None:
        """File what an engine answered.

        Raises RunError when a sample came back twice or unasked, or when the engine does not know one it was given.
        """
        held = self._held.setdefault(rank, {})
        for arrived in report.migration.arrived:
            self._arrive(rank, arrived)
        for result in report.finished:
            self._finish(rank, result)
        for sample_id in report.migration.departed:
            if (rank, sample_id) not in self._given_back:
                del held[sample_id]
            if self.travels.departed(sample_id):
                self._hand_out([sample_id], serving, rank)
        for sample_id in report.migration.kept:
            self.travels.kept(sample_id)
        self._given_back -= {(rank, i) for i in (*report.migration.departed, *report.migration.kept)}
        if report.unfinished != len(held):
            raise RunError(
                f"Engine {rank} holds {report.unfinished} samples and was given {len(held)} that it has not returned, "
                f"among them {', '.join(list(held)[:5])}: it has lost samples."
            )
        if not self._repeat:
            for gain in report.progress:
                if self._owner[gain.sample_id] == rank:
                    known = self.known[gain.sample_id]
                    known.tokens += gain.tokens
                    known.logprobs += gain.logprobs
                    known.versions += gain.versions

    def cut(self, rank: int, sources: Sequence[int], serving: Sequence[int]) -> None:
        """An engine has taken all that these dead ones had sent it: what did not arrive is decoded elsewhere."""
        for source in sources:
            self._hand_out(self.travels.cut(source, rank), serving, rank)

    def lose(self, rank: int, serving: Sequence[int]) -> None:
        """An engine died: its samples go to those that serve, or back to its own queue while none does."""
        self._ledger.release(_name(rank))
        shares = list(self._queues.pop(rank, ()))
        held = self._held.pop(rank, {})
        if self._repeat:
            shares = [*([self._share[rank]] if held else []), *shares]
            for share in shares:
                self._enqueue(min(serving or [rank], key=self._load), share)
            return
        own = [sample_id for sample_id in held if self._owner[sample_id] == rank]
        self._given_back = {(other, sample_id) for other, sample_id in self._given_back if other != rank}
        lost = self.travels.lose(rank, own)
        self._hand_out([*lost, *(sample_id for share in shares for sample_id in share)], serving, rank)

    def _arrive(self, rank: int, arrived: SampleProgress) -> None:
        sample_id = arrived.sample_id
        self._held[rank][sample_id] = None
        if sample_id in self.results:
            return
        self._owner[sample_id] = rank
        self.known[sample_id] = SampleSnapshot(
            self.known[sample_id].request, list(arrived.tokens), list(arrived.logprobs), list(arrived.versions)
        )
        self._ledger.assign(sample_id, _name(rank))
        self.travels.arrived(sample_id)

    def _finish(self, rank: int, result: GenerationResult) -> None:
        sample_id, held = result.sample_id, self._held[rank]
        if sample_id not in held:
            what = "came back twice from" if sample_id in self.results else "was never given to"
            raise RunError(f"Sample {sample_id} {what} engine {rank}.")
        del held[sample_id]
        # A repeated share brings those again that were finished; a sample whose move failed halfway is with both
        # engines, and of these only its owner counts.
        if sample_id not in self.results and self._owner[sample_id] == rank:
            self.results[sample_id] = result
            self._ledger.advance([sample_id], SampleState.FINISHED, owner=_name(rank))
            self.travels.ended(sample_id, rank)

    def _hand_out(self, ids: Sequence[str], serving: Sequence[int], otherwise: int) -> None:
        """Queue samples at engines that serve, or at `otherwise`."""
        homes = list(serving) or [otherwise]
        for home, part in zip(homes, assign([self.known[i].request for i in ids], len(homes)), strict=True):
            self._enqueue(home, [request.sample_id for request in part])

    def _enqueue(self, rank: int, share: list[str]) -> None:
        queue = self._queues.setdefault(rank, deque())
        if share:
            queue.append(share)

    def _load(self, rank: int) -> int:
        return len(self._held.get(rank, ())) + sum(len(share) for share in self._queues.get(rank, ()))


def _name(rank: int) -> str:
    """An engine's name in the ledger."""
    return f"engine {rank}"
