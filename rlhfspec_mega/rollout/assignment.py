"""Which engine decodes which sample of a rollout, what is known of each, and who takes over from a dead engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger import Ledger
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.types import EngineReport, GenerationRequest, GenerationResult, SampleState


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

    Attributes:
        results: finished samples by id.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        engines: int,
        serving: Sequence[int],
        ledger: Ledger,
        *,
        repeat: bool,
    ) -> None:
        self.results: dict[str, GenerationResult] = {}
        self._known = {request.sample_id: SampleSnapshot(request, [], [], []) for request in requests}
        self._ledger, self._repeat = ledger, repeat
        self._queues: dict[int, deque[list[str]]] = {}  # shares not yet handed over, by rank
        self._held: dict[int, dict[str, None]] = {}  # ids an engine has been given and not returned
        self._share: dict[int, list[str]] = {}  # with repeat: the share an engine works on, as it was given
        homes = list(range(engines)) if repeat or not serving else list(serving)
        for rank, share in zip(homes, assign(requests, len(homes)), strict=True):
            self._enqueue(rank, [request.sample_id for request in share])

    @property
    def done(self) -> bool:
        return len(self.results) == len(self._known)

    def holders(self) -> list[int]:
        """Ranks with samples, handed over or queued."""
        return [rank for rank in self._queues if self.has_work(rank)]

    def has_work(self, rank: int) -> bool:
        return bool(self._held.get(rank) or self._queues.get(rank))

    def take(self, rank: int) -> list[SampleSnapshot]:
        """What to hand to an engine now; it owns these samples from here on."""
        queue, held = self._queues[rank], self._held.setdefault(rank, {})
        ids: list[str] = []
        while queue and not (self._repeat and held):
            share = queue.popleft()
            held |= dict.fromkeys(share)
            self._share[rank] = share
            ids += share
        for sample_id in ids:
            if sample_id not in self.results:
                self._ledger.assign(sample_id, _owner(rank))
        return [self._known[sample_id] for sample_id in ids]

    def report(self, rank: int, report: EngineReport) -> None:
        """File what an engine answered.

        Raises RunError when a sample came back twice or unasked, or when the engine does not know one it was given.
        """
        held = self._held.setdefault(rank, {})
        for result in report.finished:
            if result.sample_id not in held:
                what = "came back twice from" if result.sample_id in self.results else "was never given to"
                raise RunError(f"Sample {result.sample_id} {what} engine {rank}.")
            del held[result.sample_id]
            if result.sample_id not in self.results:  # a repeated share brings those again that were finished
                self.results[result.sample_id] = result
                self._ledger.advance([result.sample_id], SampleState.FINISHED, owner=_owner(rank))
        if report.unfinished != len(held):
            raise RunError(
                f"Engine {rank} holds {report.unfinished} samples and was given {len(held)} that it has not returned, "
                f"among them {', '.join(list(held)[:5])}: it has lost samples."
            )
        if not self._repeat:
            for gain in report.progress:
                known = self._known[gain.sample_id]
                known.tokens += gain.tokens
                known.logprobs += gain.logprobs
                known.versions += gain.versions

    def lose(self, rank: int, serving: Sequence[int]) -> None:
        """An engine died: its samples go to those that serve, or back to its own queue while none does."""
        self._ledger.release(_owner(rank))
        shares = list(self._queues.pop(rank, ()))
        held = self._held.pop(rank, {})
        if self._repeat:
            shares = [*([self._share[rank]] if held else []), *shares]
            for share in shares:
                self._enqueue(min(serving or [rank], key=self._load), share)
            return
        ids = [*held, *(sample_id for share in shares for sample_id in share)]
        homes = list(serving) or [rank]
        for home, part in zip(homes, assign([self._known[i].request for i in ids], len(homes)), strict=True):
            self._enqueue(home, [request.sample_id for request in part])

    def _enqueue(self, rank: int, share: list[str]) -> None:
        queue = self._queues.setdefault(rank, deque())
        if share:
            queue.append(share)

    def _load(self, rank: int) -> int:
        return len(self._held.get(rank, ())) + sum(len(share) for share in self._queues.get(rank, ()))


def _owner(rank: int) -> str:
    """An engine's name in the ledger."""
    return f"engine {rank}"
