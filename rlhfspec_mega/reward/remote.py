"""A remote HTTP service as a source of rewards; `python -m tools.reward_server` is one."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from rlhfspec_mega.errors import RewardServiceAway, UserError
from rlhfspec_mega.reward.score import FailureKind, RewardFailure, RewardScore
from rlhfspec_mega.types import Sample

_CONNECTIONS = 2  # requests at a time: the service scores one batch while the next is on its way
_LINGER_SECONDS = 0.05  # wait for more samples of a batch
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts
_START_SECONDS = 30.0  # longest wait for the service when a run starts
_TRY_AGAIN = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

logger = logging.getLogger(__name__)
Result = RewardScore | RewardFailure


class _Away(Exception):
    """A sentence fragment that says why the service has not answered; it may do so later."""


class _Refused(Exception):
    """A sentence fragment that says why the service has not scored a request; it would not do so later either."""


class RemoteReward:
    """Implements rewards.Source: samples are sent in batches as they end.

    A request is {"samples": [{"id", "prompt", "response", "answer"}]}, its answer {"rewards": [...]} with a number for
    each sample in this order, or null for one that cannot be scored.

    Args:
        batch_size: most samples of a request.
        timeout: seconds until a request without an answer is repeated.
        deadline: seconds for which a service that does not answer is asked again.

    Raises UserError if the service does not answer at the start.
    """

    def __init__(self, url: str, batch_size: int, timeout: float, deadline: float) -> None:
        self.name = f"The reward service {url}"
        self._url, self._batch_size, self._timeout, self._deadline = url, batch_size, timeout, deadline
        self._queue: queue.Queue[tuple[Sample, Future[Result]] | None] = queue.Queue()
        self._closed = threading.Event()
        self._check()
        self._threads = [
            threading.Thread(target=self._serve, name="reward service", daemon=True) for _ in range(_CONNECTIONS)
        ]
        for thread in self._threads:
            thread.start()

    def _check(self) -> None:
        """Ask without samples. Raises UserError unless a service of rewards answers."""
        try:
            self._ask_until_answered([], min(self._deadline, _START_SECONDS))
        except RewardServiceAway as error:
            raise UserError(f"{error} Start it, or correct reward.remote.url.") from None
        except _Refused as refusal:
            raise UserError(f"{self.name} {refusal}: correct reward.remote.url.") from None

    def submit(self, samples: Sequence[Sample]) -> list[Future[Result]]:
        """Futures of the samples' scores; they raise RewardServiceAway if the service stays away."""
        futures: list[Future[Result]] = [Future() for _ in samples]
        for item in zip(samples, futures, strict=True):
            self._queue.put(item)
        return futures

    def close(self) -> None:
        """Give up what has not been scored. A request in flight ends with this process, which does not wait for it."""
        self._closed.set()
        for _ in self._threads:
            self._queue.put(None)

    def _serve(self) -> None:
        while batch := self._next_batch():
            futures = [future for _, future in batch]
            try:
                results = self._ask_until_answered([sample for sample, _ in batch], self._deadline)
            except _Refused as refusal:
                results = [RewardFailure(FailureKind.REFUSED, str(refusal))] * len(batch)
            except Exception as error:  # whatever it is, somebody waits for the futures
                for future in futures:
                    future.set_exception(error)
                continue
            for future, result in zip(futures, results, strict=True):
                future.set_result(result)

    def _next_batch(self) -> list[tuple[Sample, Future[Result]]]:
        """Samples of the next request; [] when this source is closed."""
        first = self._queue.get()
        batch = [first] if first is not None else []
        while batch and len(batch) < self._batch_size:
            try:
                item = self._queue.get(timeout=_LINGER_SECONDS)
            except queue.Empty:
                break
            if item is None:
                self._queue.put(None)
                break
            batch.append(item)
        return [] if self._closed.is_set() else batch

    def _ask_until_answered(self, samples: Sequence[Sample], deadline: float) -> list[Result]:
        """Repeat a request until it is answered.

        Raises RewardServiceAway after so many seconds, or when closed; _Refused if the answer has no rewards.
        """
        begin, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return self._ask(samples)
            except _Away as reason:
                waited = time.monotonic() - begin
                if waited >= deadline or self._closed.is_set():
                    raise RewardServiceAway(f"{self.name} {reason}, for {waited:.0f} s.") from None
                if pause == _FIRST_PAUSE:
                    logger.warning("%s %s; it is asked again for up to %g s.", self.name, reason, deadline)
            self._closed.wait(min(pause, deadline))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _ask(self, samples: Sequence[Sample]) -> list[Result]:
        """One request. Raises _Away where a repetition may help, else _Refused."""
        wanted = [
            {"id": one.sample_id, "prompt": one.prompt.text, "response": one.response, "answer": one.prompt.answer}
            for one in samples
        ]
        body = json.dumps({"samples": wanted}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return _parsed(answer.read(), len(samples))
        except urllib.error.HTTPError as error:
            text = error.read(200).decode(errors="replace").strip()
            if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code in _TRY_AGAIN:
                raise _Away(f"answers with status {error.code} ({text or error.reason})") from None
            raise _Refused(f"answered with status {error.code} ({text or error.reason})") from None
        except (OSError, HTTPException) as error:  # HTTPException: an answer that broke off, or is none of HTTP
            reason = getattr(error, "reason", None) or error
            raise _Away(f"does not answer ({reason})") from None


def _parsed(body: bytes, count: int) -> list[Result]:
    """The rewards in an answer. Raises _Refused if it has another form."""
    try:
        rewards: Any = json.loads(body)["rewards"]
        if len(rewards) != count:
            raise TypeError
    except (ValueError, KeyError, TypeError):
        start = body[:80].decode(errors="replace")
        raise _Refused(f'did not answer with {{"rewards": [{count} numbers]}} but {start!r}') from None
    return [_result(reward) for reward in rewards]


def _result(reward: Any) -> Result:
    if isinstance(reward, (int, float)) and not isinstance(reward, bool) and abs(reward) <= sys.float_info.max:
        return RewardScore(float(reward), reward >= 1.0)
    if reward is None:
        return RewardFailure(FailureKind.REFUSED, "did not score it")
    return RewardFailure(FailureKind.BAD_VALUE, f"returned {reward!r}, which is no finite number")
