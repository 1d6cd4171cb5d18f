"""Hands samples to engines, collects them as they finish, and accounts for every one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.types import EngineLoad, GenerationRequest, GenerationResult

Progress = Callable[[int, int], None]


class PendingCall(Protocol):
    """A call in flight on one engine."""

    rank: int

    def result(self) -> Any: ...


class EnginePool(Protocol):
    """The engines as the manager sees them; cluster.interface.WorkerGroup is one."""

    size: int

    def start(self, rank: int, method: str, *args: Any) -> Any: ...


class Wait(Protocol):
    """Waits for the first of several calls; cluster.interface.Cluster.wait is one."""

    def __call__(self, calls: Sequence[Any], phase: str, *, first: bool = False) -> Sequence[Any]: ...


def assign(requests: Sequence[GenerationRequest], engines: int) -> list[list[GenerationRequest]]:
    """Whole groups (they share a prompt's KV) to the engine with the fewest samples so far; deterministic."""
    groups: dict[str, list[GenerationRequest]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    shares: list[list[GenerationRequest]] = [[] for _ in range(engines)]
    for group in groups.values():
        min(shares, key=len).extend(group)
    return shares


class RolloutManager:
    """Drives all engines through one rollout at a time.

    Args:
        poll_seconds: longest time an engine decodes before it answers.
    """

    def __init__(self, engines: EnginePool, wait: Wait, poll_seconds: float) -> None:
        self._engines, self._wait, self._poll_seconds = engines, wait, poll_seconds

    def generate(
        self, requests: Sequence[GenerationRequest], phase: str, progress: Progress | None = None
    ) -> dict[str, GenerationResult]:
        """Decode all requests; results by sample id.

        Raises:
            RunError: an engine failed or went silent (from the wait), or a sample came back twice or unasked.
        """
        shares = assign(requests, self._engines.size)
        remaining = [len(share) for share in shares]
        submits = [self._engines.start(rank, "submit", share) for rank, share in enumerate(shares)]
        self._wait(submits, phase)
        results: dict[str, GenerationResult] = {}
        expected = {request.sample_id for request in requests}
        polls = [self._poll(rank) for rank in range(self._engines.size) if remaining[rank]]
        while polls:
            finished = self._wait(polls, phase, first=True)
            polls = [call for call in polls if call not in finished]
            for call in finished:
                finished_now = call.result()
                for result in finished_now:
                    self._account(result, expected, results)
                    remaining[call.rank] -= 1
                if remaining[call.rank] and not finished_now:
                    self._check_busy(call.rank, shares[call.rank], results, phase)
                if remaining[call.rank]:
                    polls.append(self._poll(call.rank))
            if progress:
                progress(len(results), len(requests))
        return results

    def _poll(self, rank: int) -> Any:
        return self._engines.start(rank, "poll", self._poll_seconds)

    def _check_busy(
        self,
        rank: int,
        share: Sequence[GenerationRequest],
        results: Mapping[str, GenerationResult],
        phase: str,
    ) -> None:
        """Raise RunError when an engine has nothing left to do but owes samples: polling it would never end."""
        call = self._engines.start(rank, "load")
        self._wait([call], phase)
        load: EngineLoad = call.result()
        if not load.running and not load.waiting:
            lost = [request.sample_id for request in share if request.sample_id not in results]
            raise RunError(f"In phase '{phase}', engine {rank} lost samples: {', '.join(lost[:5])}.")

    @staticmethod
    def _account(result: GenerationResult, expected: set[str], results: dict[str, GenerationResult]) -> None:
        if result.sample_id not in expected:
            raise RunError(f"An engine returned sample {result.sample_id}, which this rollout did not ask for.")
        if result.sample_id in results:
            raise RunError(f"Sample {result.sample_id} came back twice from the engines.")
        results[result.sample_id] = result
