"""Rewards from several sources: weights, failures that are counted and bounded, and a service that comes and goes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhfspec_mega.config.schema.reward import RemoteRewardConfig, RewardConfig, RewardModelConfig
from rlhfspec_mega.errors import RewardServiceAway, UserError
from rlhfspec_mega.reward.remote import RemoteReward
from rlhfspec_mega.reward.rewards import FAILURE_FILE, Rewards
from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.reward.score import FailureKind, RewardScore
from rlhfspec_mega.types import Prompt, Sample
from tools.reward_server import RewardServer

calls: list[str] = []


def length(prompt: str, response: str, answer: str) -> float:
    if response == "bad":
        raise ValueError("no length")
    return float(len(response))


def samples(*responses: str) -> list[Sample]:
    return [Sample(f"s{i}", 0, Prompt(i, "p", "abc", ()), 0, response=text) for i, text in enumerate(responses)]


@contextmanager
def serving(answer: Callable[[list[dict[str, str]]], tuple[int, Any]], port: int = 0) -> Iterator[str]:
    """A service whose answers (status, content) are a function of the samples; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
            status, content = answer(given)
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lengths(given: list[dict[str, str]]) -> tuple[int, Any]:
    return 200, {"rewards": [len(one["response"]) for one in given]}


def remote(url: str, batch_size: int = 64, timeout: float = 5.0, deadline: float = 5.0) -> RemoteReward:
    return RemoteReward(url, batch_size, timeout, deadline)


def results(source: RemoteReward, *responses: str) -> list[Any]:
    return [future.result(timeout=30) for future in source.submit(samples(*responses))]


def test_the_reward_is_the_weighted_sum_of_all_sources(tmp_path: Path) -> None:
    with serving(lengths) as url:
        config = RewardConfig(
            function=f"{__name__}.length",
            weight=0.5,
            remote=RemoteRewardConfig(url, weight=2.0),
            model=RewardModelConfig("unused", weight=10.0),
        )
        with Rewards(config, tmp_path) as rewards:
            made = samples("a", "abc")
            pending = rewards.begin()
            pending.add(made[1])
            metrics = pending.finish(made, {"s0": 1.0, "s1": -1.0})
    assert [sample.reward for sample in made] == [0.5 + 2.0 + 10.0, 1.5 + 6.0 - 10.0]
    assert [sample.exact for sample in made] == [True, True], "the function decides: 1 and more is exact"
    assert metrics == {"reward/function_mean": 2.0, "reward/remote_mean": 2.0, "reward/model_mean": 0.0}


def test_failures_are_left_out_counted_and_the_first_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Rewards(RewardConfig(function=f"{__name__}.length", max_failures=0.5), tmp_path) as rewards:
        made = samples("ab", "bad", "abc", "bad")
        assert rewards.begin().finish(made) == {"reward/failures_exception": 2.0}
        assert [(one.reward, one.exact, one.failure) for one in made] == [
            (2.0, True, ""),
            (0.0, False, "exception"),
            (3.0, True, ""),
            (0.0, False, "exception"),
        ]
        assert "2 of 4 samples have no reward (exception 2). The first, s1: The reward function" in caplog.text
        text = (tmp_path / FAILURE_FILE).read_text()
        assert "sample: s1" in text and "response: bad" in text and 'raise ValueError("no length")' in text
        with pytest.raises(UserError, match=r"2 of 3 samples .* More than reward\.max_failures=0\.5 of a step failed"):
            rewards.begin().finish(samples("bad", "bad", "ab"))


def test_in_order_functions_see_the_samples_in_the_order_of_the_step(tmp_path: Path) -> None:
    with Rewards(RewardConfig(function=f"{__name__}.numbered"), tmp_path, in_order=True) as rewards:
        made = samples("a", "b", "c")
        pending = rewards.begin()
        for sample in reversed(made):
            pending.add(sample)
        pending.finish(made)
    assert [sample.reward for sample in made] == [1.0, 2.0, 3.0]


def numbered(prompt: str, response: str, answer: str) -> float:
    calls.append(response)
    return float(len(calls))


def test_batches_are_bounded_and_answers_find_their_samples() -> None:
    sizes: list[int] = []

    def answer(given: list[dict[str, str]]) -> tuple[int, Any]:
        sizes.append(len(given))
        return lengths(given)

    with serving(answer) as url:
        source = remote(url, batch_size=3)
        assert results(source, *("x" * n for n in range(10))) == [(float(n), n >= 1) for n in range(10)]
        source.close()
    assert sum(sizes) == 10 and max(sizes) <= 3


@pytest.mark.parametrize(
    ("status", "content", "kind", "message"),
    [
        (404, b"no such model", FailureKind.REFUSED, "answered with status 404 (no such model)"),
        (200, b"<html>", FailureKind.REFUSED, "did not answer with"),
        (200, {"rewards": [1.0, 2.0]}, FailureKind.REFUSED, 'did not answer with {"rewards": [1 numbers]} but'),
        (200, {"rewards": [None]}, FailureKind.REFUSED, "did not score it"),
        (200, {"rewards": [True]}, FailureKind.BAD_VALUE, "returned True, which is no finite number"),
        (200, b'{"rewards": [NaN]}', FailureKind.BAD_VALUE, "returned nan, which is no finite number"),
        (200, b'{"rewards": [1%s]}' % (b"0" * 400), FailureKind.BAD_VALUE, "returned 1000"),
    ],
)
def test_an_answer_that_is_no_reward_is_a_failure(status: int, content: Any, kind: FailureKind, message: str) -> None:
    with serving(lambda given: (status, content) if given else lengths(given)) as url:
        source = remote(url)
        (failure,) = results(source, "x")
        source.close()
    assert failure.kind is kind and failure.message.startswith(message)


@pytest.mark.parametrize(("status", "content"), [(404, b""), (401, b"who?"), (200, b"<html>"), (200, {"scores": []})])
def test_another_service_is_refused_at_the_start(status: int, content: Any) -> None:
    with (
        serving(lambda given: (status, content)) as url,
        pytest.raises(UserError, match=r"(answered with status|did not answer with).*: correct reward\.remote\.url\.$"),
    ):
        remote(url)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b"what is this?\r\n\r\n"])
def test_an_answer_that_breaks_off_is_asked_for_again(head: bytes) -> None:
    broken = iter([head + b'{"rewards":'])

    class Breaking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
            body = json.dumps({"rewards": [len(one["response"]) for one in given]}).encode()
            whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            self.wfile.write(next(broken, whole) if given else whole)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        source = remote(f"http://127.0.0.1:{server.server_port}/score")
        assert results(source, "abc") == [(3.0, True)]
        source.close()
        server.shutdown()
        thread.join()


def test_a_service_that_is_busy_for_a_while_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([(503, b"busy"), (429, b"slower"), (500, b"")])
    with serving(lambda given: next(answers, lengths(given)) if given else lengths(given)) as url:
        source = remote(url)
        assert results(source, "abc") == [(3.0, True)]
        source.close()
    assert "answers with status 503 (busy); it is asked again for up to 5 s." in caplog.text


def test_a_service_that_goes_away_is_waited_for_and_then_given_up() -> None:
    with serving(lengths) as url:
        source = remote(url, deadline=20.0)
        assert results(source, "ab") == [(2.0, True)]
    futures = source.submit(samples("abc"))
    with serving(lengths, int(url.split(":")[2].split("/")[0])):
        assert futures[0].result(timeout=30) == (3.0, True)
    source.close()

    with serving(lengths) as url:
        impatient = remote(url, deadline=0.3)
    with pytest.raises(RewardServiceAway, match=r"^The reward service .* does not answer \(.*refused.*\), for \d+ s"):
        results(impatient, "abc")
    impatient.close()
    with pytest.raises(UserError, match=r"Start it, or correct reward\.remote\.url"):
        remote(url, deadline=0.3)


def test_the_reference_server_speaks_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    with RewardRunner(f"{__name__}.length") as runner, RewardServer("127.0.0.1", 0, runner) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        source = remote(f"http://127.0.0.1:{server.server_port}/score")
        first, failure = results(source, "abc", "bad")
        source.close()
        server.shutdown()
        thread.join()
    assert first == RewardScore(3.0, True) and failure.kind is FailureKind.REFUSED
    assert "Sample s1: the function raised ValueError: no length" in capsys.readouterr().err
