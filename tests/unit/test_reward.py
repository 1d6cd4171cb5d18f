"""Reward functions in their supervised process: limits that hold, faults that name the sample, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import psutil
import pytest

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.reward.math_answer import final_number, reward
from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.reward.score import FailureKind
from rlhfspec_mega.types import Prompt, Sample

FUNCTIONS = """
import ctypes, os, subprocess, time
from rlhfspec_mega.reward.score import RewardScore

def length(prompt, response, answer, scale=1.0):
    return RewardScore(len(response) * scale, response == answer)

def number(prompt, response, answer):
    return float(response)

def noisy(prompt, response, answer):
    print("printed by the reward", flush=True)
    return input() if response == "read" else 1

def hangs(prompt, response, answer):
    if response == "python":
        while True:
            pass
    if response == "c":  # holds the interpreter lock and never returns
        ctypes.PyDLL(None).pause()
    if response == "family":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    return os.getpid()

def fails(prompt, response, answer):
    if response == "raise":
        return 1 / 0
    if response == "exit":
        os._exit(7)
    if response == "segfault":
        ctypes.string_at(0)
    return {"nan": float("nan"), "none": None, "text": "high", "inf": float("-inf")}.get(response, 1.0)

not_callable = 3
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    directory = tmp_path_factory.mktemp("functions")
    (directory / "user_rewards.py").write_text(FUNCTIONS)
    (directory / "broken_rewards.py").write_text("raise RuntimeError('no licence')")
    (directory / "needy_rewards.py").write_text("import a_package_nobody_has")
    sys.path.insert(0, str(directory))
    yield "user_rewards"
    sys.path.remove(str(directory))


def samples(*responses, answer="abc"):
    return [
        Sample(f"s{i}", 0, Prompt(i, f"prompt {i}", answer, ()), 0, response=text) for i, text in enumerate(responses)
    ]


def group_members(group):
    """Living processes of a process group."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def wait_until_empty(group, seconds=20.0):
    deadline = time.monotonic() + seconds
    while members := group_members(group):
        assert time.monotonic() < deadline, f"processes {members} are left behind"
        time.sleep(0.05)


def test_scores_come_in_order_with_arguments(module):
    with RewardRunner(f"{module}.length", arguments={"scale": 0.5}) as runner:
        assert runner.score(samples("a", "abc", "")) == [(0.5, False), (1.5, True), (0.0, False)]
        assert runner.score([]) == []
        assert runner.score(samples("abcd")) == [(2.0, False)]


def test_a_plain_number_is_exact_from_one_upward(module):
    with RewardRunner(f"{module}.number") as runner:
        assert runner.score(samples("0.5", "1", "-3", "2")) == [(0.5, False), (1.0, True), (-3.0, False), (2.0, True)]


def test_a_printing_reading_reward_does_not_disturb_the_protocol(module):
    with RewardRunner(f"{module}.noisy") as runner:
        assert runner.score(samples("x", "y")) == [(1.0, True)] * 2
        (failure,) = runner.score(samples("read"))
        assert failure.kind is FailureKind.EXCEPTION and "EOFError" in failure.message


@pytest.mark.parametrize("how", ["python", "c", "family"])
def test_a_hanging_sample_fails_and_the_others_have_their_score(module, how):
    with RewardRunner(f"{module}.hangs", time_limit=0.5) as runner:
        first = int(runner.score(samples("x"))[0].value)
        scores = runner.score(samples("x", how, "y", "z"))
        assert scores[1] == (FailureKind.TIMEOUT, "took longer than 0.5 s (reward.time_limit)", "")
        assert scores[0].value == first and scores[2] == scores[3] and scores[2].value not in (0.0, first)
        wait_until_empty(first)


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        ("raise", "exception", r"raised ZeroDivisionError: division by zero \(user_rewards\.py:\d+\)"),
        ("exit", "crash", r"ended its process \(exit status 7\)"),
        ("segfault", "crash", r"ended its process \(signal SIGSEGV\)"),
        ("nan", "bad_value", "returned nan"),
        ("inf", "bad_value", "returned -inf"),
        ("none", "bad_value", "returned None, not a number or a RewardScore"),
        ("text", "bad_value", "returned 'high', not a number or a RewardScore"),
    ],
)
def test_a_failing_sample_has_a_reason_and_the_others_their_score(module, response, kind, message):
    with RewardRunner(f"{module}.fails") as runner:
        first, failure, last = runner.score(samples("fine", response, "fine"))
        assert first == last == (1.0, True)
        assert failure.kind == kind and re.fullmatch(message, failure.message)
        assert ("return 1 / 0" in failure.trace) == (response == "raise")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reward", "is not an import path"),
        ("no_such_module.reward", "there is no module no_such_module"),
        ("user_rewards.missing", "module user_rewards has no missing"),
        ("user_rewards.not_callable", "is not callable"),
        ("broken_rewards.reward", "RuntimeError: no licence"),
        ("needy_rewards.reward", "there is no module a_package_nobody_has"),
    ],
)
def test_a_path_that_does_not_load_is_named(module, path, message):
    with pytest.raises(UserError, match=rf"^The reward function {path} .*{message}.*reward\.function"):
        RewardRunner(path)


def test_a_time_limit_must_be_positive():
    with pytest.raises(UserError, match="time_limit"):
        RewardRunner("rlhfspec_mega.reward.math_answer.reward", time_limit=0)


def test_close_leaves_no_process(module):
    runner = RewardRunner(f"{module}.hangs")
    group = int(runner.score(samples("x"))[0].value)
    assert group in group_members(group)
    runner.close()
    wait_until_empty(group)
    runner.close()


PARENT = """
import sys
from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.reward.score import FailureKind
from rlhfspec_mega.types import Prompt, Sample
runner = RewardRunner("user_rewards.hangs", time_limit=600)
sample = Sample("s", 0, Prompt(0, "", "", ()), 0, response="x")
print(int(runner.score([sample])[0].value), flush=True)
sample.response = sys.argv[1]
runner.score([sample])
"""


@pytest.mark.parametrize("how", ["python", "c", "family"])
def test_a_killed_parent_leaves_no_process(module, how):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [Path.cwd(), *sys.path]))},
    )
    group = int(parent.stdout.readline())
    assert group_members(group)
    time.sleep(0.3)  # let the hanging call begin
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until_empty(group)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She has 48/2 = 24 clips.\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### -3.50 dollars, not 4", "-3.5"),
        ("it costs $1,000.25.", "1000.25"),
        ("loss of -$5", "-5"),
        ("so 5-3", "3"),
        ("x = -3", "-3"),
        ("first #### 1 then #### 2", "2"),
        ("12,34", "34"),
        ("about .5", "0.5"),
        ("007", "7"),
    ],
)
def test_final_number(text, expected):
    assert final_number(text) == Decimal(expected)


def test_math_reward_is_exact_and_refuses_an_answer_without_a_number():
    assert reward("", "the result is 72.0", "so\n#### 72") == (1.0, True)
    assert reward("", "72 or 73", "#### 72") == (0.0, False)
    assert reward("", "no idea", "#### 72") == (0.0, False)
    assert final_number("nothing here") is None
    with pytest.raises(ValueError, match="holds no number"):
        reward("", "72", "none")
