"""A reward service over HTTP, for reward.remote.url, with a reward function of yours; a model for services of your own.

    python -m tools.reward_server --function rlhfspec_mega.reward.math_answer.reward --port 8000
    python train.py reward.function=null reward.remote.url=http://localhost:8000/score

A request is POST /score with {"samples": [{"id", "prompt", "response", "answer"}]}, its answer {"rewards": [...]}: a
number for each sample in this order, or null for one that could not be scored. GET / answers as long as it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.reward.score import RewardScore
from rlhfspec_mega.types import Prompt, Sample
from tools.command import exit_status

FIELDS = ("id", "prompt", "response", "answer")


class RewardServer(ThreadingHTTPServer):
    """Scores the samples of one request at a time.

    Raises UserError if it cannot listen there.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, runner: RewardRunner) -> None:
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(f"{host}:{port} cannot be listened to ({error.strerror}): use another --port.") from None
        self._runner, self._lock = runner, threading.Lock()

    def rewards(self, samples: list[dict[str, Any]]) -> list[float | None]:
        """The reward of each sample, None where the function failed, which is said on the console."""
        made = [
            Sample(str(one["id"]), 0, Prompt(0, one["prompt"], one["answer"], ()), 0, response=one["response"])
            for one in samples
        ]
        with self._lock:
            results = self._runner.score(made)
        for sample, result in zip(made, results, strict=True):
            if not isinstance(result, RewardScore):
                print(f"Sample {sample.sample_id}: the function {result.message}.", file=sys.stderr, flush=True)
        return [result.value if isinstance(result, RewardScore) else None for result in results]


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(HTTPStatus.OK, {"scores": self.server._runner.path})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            samples = json.loads(body)["samples"]
            wrong = not all(isinstance(one[name], str) for one in samples for name in FIELDS)
        except (ValueError, KeyError, TypeError):
            wrong = True
        if wrong:
            text = 'expected {"samples": [{"id", "prompt", "response", "answer"}, ...]}, all of them text'
            self._answer(HTTPStatus.BAD_REQUEST, {"error": text})
        else:
            self._answer(HTTPStatus.OK, {"rewards": self.server.rewards(samples)})

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--function", default="rlhfspec_mega.reward.chain_sums.reward", help="package.module.function of the reward"
    )
    parser.add_argument("--arguments", default="{}", help="its keyword arguments, as JSON")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for one sample")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()

    def work() -> None:
        try:
            keywords = json.loads(arguments.arguments)
        except ValueError as error:
            raise UserError(f"--arguments={arguments.arguments} is no JSON ({error}).") from None
        with (
            RewardRunner(arguments.function, arguments.time_limit, keywords) as runner,
            RewardServer(arguments.host, arguments.port, runner) as server,
        ):
            print(f"Scoring with {runner.path} at http://{arguments.host}:{server.server_port}/score", flush=True)
            server.serve_forever()

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
