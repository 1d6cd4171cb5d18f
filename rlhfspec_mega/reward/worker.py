"""The process that runs a user's reward function; started and, when it hangs, killed by runner.RewardRunner.

Run as `python -m rlhfspec_mega.reward.worker FD`, FD being one end of a socket. Messages in: first (import path,
arguments), then lists of (prompt, response, answer). Messages out: ("ready", "") or ("failed", why), then for every
sample of a list, in order, a RewardScore or a RewardFailure.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rlhfspec_mega.config.import_path import BadImportPath, load_function
from rlhfspec_mega.reward.score import FailureKind, RewardFailure, RewardScore


class _BadReward(Exception):
    """A sentence fragment that says what is wrong with a reward function's result."""


def _watch_parent(connection: Connection) -> None:
    """Fork a process that ends this process group when the parent is gone (its end of our standard input closes).

    It must be a process: a thread would never run while the reward function holds the interpreter lock.
    """
    if os.fork():
        return
    connection.close()  # else the parent could not see the worker's own end
    os.closerange(1, 3)
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _checked(result: Any) -> RewardScore:
    """Convert a reward function's result to a RewardScore; a plain number of at least 1 counts as an exact answer."""
    if isinstance(result, tuple) and len(result) == 2:
        value, exact = result
    else:
        value, exact = result, None
    try:
        value = float(value)
    except (TypeError, ValueError):
        raise _BadReward(f"returned {result!r}, not a number or a RewardScore") from None
    if not math.isfinite(value):
        raise _BadReward(f"returned {value}")
    return RewardScore(value, value >= 1.0 if exact is None else bool(exact))


def _score(
    function: Callable[..., Any], sample: tuple[str, str, str], arguments: dict[str, Any]
) -> RewardScore | RewardFailure:
    try:
        return _checked(function(*sample, **arguments))
    except _BadReward as error:
        return RewardFailure(FailureKind.BAD_VALUE, str(error))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        message = f"raised {type(error).__name__}: {error} ({where})"
        return RewardFailure(FailureKind.EXCEPTION, message, traceback.format_exc())


def main() -> None:
    # A batch system may signal every process: the driver decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    _watch_parent(connection)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a reward function prints goes to the log
    path, arguments = connection.recv()
    try:
        function = load_function(path)
    except BadImportPath as error:
        connection.send(("failed", str(error)))
        return
    connection.send(("ready", ""))
    while True:
        try:
            samples = connection.recv()
        except EOFError:
            return
        for sample in samples:
            connection.send(_score(function, sample, arguments))


if __name__ == "__main__":
    main()
