"""A directory that several processes want at once is made by one of them, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlhfspec_mega.bootstrap.cache import made_once

SLOW = """
import os, sys, time
from functools import partial
from pathlib import Path
from rlhfspec_mega.bootstrap.cache import made_once

def make(path):
    path.mkdir()
    (path / str(os.getpid())).touch()
    Path(sys.argv[2]).touch()
    time.sleep(float(sys.argv[3]))

made_once(Path(sys.argv[1]), make, partial(print, flush=True))
"""


def maker(path: Path, sign: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, str(path), str(sign), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def begun(sign: Path) -> None:
    end = time.monotonic() + 60
    while not sign.exists():
        assert time.monotonic() < end, "nobody has begun"
        time.sleep(0.01)


def test_one_makes_it_and_the_others_wait(tmp_path: Path) -> None:
    path, sign = tmp_path / "models" / "tiny", tmp_path / "sign"
    first = maker(path, sign, 2.0)
    begun(sign)
    others = [maker(path, sign, 0.0) for _ in range(2)]
    outputs = [process.communicate()[0] for process in (first, *others)]
    assert [process.returncode for process in (first, *others)] == [0, 0, 0]
    assert [file.name for file in path.iterdir()] == [str(first.pid)]
    assert outputs[0] == "" and all(f"is making {path}: this one waits" in output for output in outputs[1:])
    made_once(path, lambda partial: partial.mkdir())
    assert [file.name for file in path.iterdir()] == [str(first.pid)], "what is there stays"


def test_a_maker_that_is_killed_leaves_it_to_the_next(tmp_path: Path) -> None:
    path, sign = tmp_path / "tiny", tmp_path / "sign"
    first = maker(path, sign, 60.0)
    begun(sign)
    second = maker(path, sign, 0.0)
    assert second.stdout is not None and "this one waits" in second.stdout.readline()
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    second.communicate()
    assert second.returncode == 0
    assert [file.name for file in path.iterdir()] == [str(second.pid)]
