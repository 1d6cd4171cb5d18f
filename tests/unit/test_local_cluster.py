"""The local launcher: results, failures, deaths and deadlines, with real processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.liveness import WorkerState
from rlhfspec_mega.cluster.local import LocalCluster, visible_devices
from rlhfspec_mega.cluster.stacks import write_report
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.errors import RunError, UserError, WorkerDied
from tests.clusters import local_cluster, worker_process


class Echo:
    """A worker for these tests."""

    def __init__(self, name: str, refuse: bool = False) -> None:
        if refuse:
            raise UserError("The worker refuses: give it another name.")
        self.name = name

    def greet(self, who: str) -> str:
        return f"{self.name} greets {who}"

    def sleep(self, seconds: float, file: str = "/dev/null") -> float:
        """The file says that it sleeps."""
        Path(file).touch()
        time.sleep(seconds)
        return seconds

    def fail(self) -> None:
        raise ValueError("deliberate")

    def complain(self) -> None:
        raise UserError("Wrong input: correct it.")

    def stop(self) -> None:
        raise RunError("The bucket is wrong.")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def size(self, data: bytes, file: str) -> int:
        """The length of a long message; the file says that it came."""
        Path(file).touch()
        return len(data)

    def wait_for(self, file: str) -> None:
        end = time.monotonic() + 10
        while not Path(file).exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert Path(file).exists()

    def repeat(self, data: bytes, times: int) -> bytes:
        return data * times

    def hold(self) -> int:
        """Have another process trace this one: when killed, it does not end before that process. -1: not allowed."""
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(os.getpid())], start_new_session=True, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        return holder.pid if holder.stdout.readline() == b"held\n" else -1


_HOLD = """
import ctypes, sys, time
libc, seize = ctypes.CDLL(None), 0x4206
if libc.ptrace(seize, int(sys.argv[1]), None, None) == 0:
    print("held", flush=True)
    time.sleep(60)
"""


def spec(name: str, **arguments: Any) -> WorkerSpec:
    return WorkerSpec("tests.unit.test_local_cluster.Echo", {"name": name, **arguments})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = local_cluster(tmp_path, call_timeout=20)
    yield made
    made.close()


@pytest.fixture
def group(cluster: LocalCluster) -> Group:
    made = cluster.launch("echo", [spec("a"), spec("b")])
    cluster.wait_started()
    return made


def test_calls_and_scatter(group: Group) -> None:
    assert group.call("greet", "you", phase="test") == ["a greets you", "b greets you"]
    assert group.call("greet", "you", phase="test", ranks=[1]) == ["b greets you"]
    assert group.scatter("greet", [("x",), ("y",)], "test") == ["a greets x", "b greets y"]


def test_first_of_several(cluster: LocalCluster, group: Group) -> None:
    slow, quick = group.start(0, "sleep", 1.5), group.start(1, "sleep", 0.0)
    assert cluster.wait([slow, quick], "test", first=True) == [quick]
    assert not slow.done
    cluster.wait([slow], "test")
    assert slow.result() == 1.5


def test_a_busy_worker_takes_no_second_call(cluster: LocalCluster, group: Group) -> None:
    call = group.start(0, "sleep", 0.5)
    with pytest.raises(RunError, match="busy with sleep"):
        group.start(0, "greet", "you")
    cluster.wait([call], "test")


def test_failures_name_phase_rank_and_log(group: Group, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"phase 'scoring', echo rank 0 failed with ValueError: deliberate.*echo-0\.log"):
        group.call("fail", phase="scoring", ranks=[0])
    assert "deliberate" in (tmp_path / "logs" / "echo-0.log").read_text()
    with pytest.raises(UserError, match="Wrong input"):
        group.call("complain", phase="scoring")


def test_death_is_named_before_the_failures_it_causes(cluster: LocalCluster, group: Group) -> None:
    calls = [group.start(0, "fail"), group.start(1, "die")]
    with pytest.raises(WorkerDied, match="phase 'update', echo rank 1 died with exit status -9"):
        cluster.wait(calls, "update")


def test_an_answer_that_nobody_read_until_after_the_deadline_counts(cluster: LocalCluster, group: Group) -> None:
    short, long = group.start(0, "sleep", 0.1), group.start(1, "repeat", b"long", 8_000_000)
    time.sleep(1.0)
    assert cluster.wait([short, long], "late", seconds=0.5) == [short, long]
    assert (short.result(), len(long.result())) == (0.1, 32_000_000)


def test_deadline_names_the_silent_and_collects_stacks(cluster: LocalCluster, group: Group, tmp_path: Path) -> None:
    calls = [group.start(0, "sleep", 30), group.start(1, "greet", "you")]
    with pytest.raises(
        RunError, match=r"phase 'reshard', no answer within 0\.5 s from echo rank 0 \(sleep since [0-9.]+ s"
    ):
        cluster.wait(calls, "reshard", seconds=0.5)
    report = (tmp_path / "logs" / "stacks-1.txt").read_text()
    assert "echo rank 0: serving; sleep since" in report and "in sleep" in report
    assert "echo rank 1: serving; idle since greet" in report and "in serve" in report
    assert "== driver" in report and "test_deadline_names_the_silent" in report


def pid(rank: int, role: str = "echo") -> int:
    worker = worker_process(f"{role}-{rank}")
    assert worker is not None
    return worker.pid


def test_a_stopped_worker_ends_the_wait_with_its_stacks(tmp_path: Path) -> None:
    """It falls silent long before the deadline, and is woken to show where it stood."""
    cluster = local_cluster(tmp_path, heartbeat_timeout=3.0)
    try:
        group = cluster.launch("echo", [spec("a"), spec("b")])
        cluster.wait_started()
        asleep = tmp_path / "asleep"
        calls = [group.start(0, "wait_for", str(asleep)), group.start(1, "sleep", 30, str(asleep))]
        cluster.wait(calls[:1], "test")
        calls[0] = group.start(0, "sleep", 30)
        os.kill(pid(1), signal.SIGSTOP)
        with pytest.raises(RunError, match="phase 'update', no sign of life from echo rank 1") as raised:
            cluster.wait(calls, "update")
        assert not isinstance(raised.value, WorkerDied)
        report = (tmp_path / "logs" / "stacks-1.txt").read_text()
        assert "echo rank 1: dead; sleep since" in report
        assert report.count("in sleep") == 2
    finally:
        cluster.close()
    assert worker_process("echo-0") is None and worker_process("echo-1") is None


def test_a_dead_worker_that_cannot_be_replaced_ends_any_wait(cluster: LocalCluster) -> None:
    vital = cluster.launch("vital", [spec("a")])
    other = cluster.launch("other", [spec("b")], replaceable=True)
    cluster.wait_started()
    call = other.start(0, "sleep", 30)
    os.kill(pid(0, "vital"), signal.SIGKILL)
    with pytest.raises(WorkerDied, match="phase 'generate', vital rank 0 died with exit status -9"):
        cluster.wait([call], "generate", check=False)
    cluster.end("vital")
    vital = cluster.launch("vital", [spec("again")])
    cluster.settle("other", 0.1)  # still asleep: given up, and replaced
    assert call.dead
    cluster.wait_started()
    assert vital.call("greet", "you", phase="test") == ["again greets you"]
    assert other.call("greet", "you", phase="test") == ["b greets you"]


def test_a_replaceable_worker_is_started_again_and_needs_weights(cluster: LocalCluster) -> None:
    group = cluster.launch("echo", [spec("a"), spec("b")], replaceable=True)
    cluster.wait_started()
    cluster.publish(7)
    assert group.serving() == []
    for rank in (0, 1):
        group.confirm(rank, 7)
    assert group.serving() == [0, 1]
    calls = [group.start(0, "sleep", 0.3), group.start(1, "die")]
    cluster.wait(calls, "generate", check=False)
    assert calls[0].result() == 0.3 and calls[1].dead
    assert group.serving() == [0] and group.launches(1) == 2
    cluster.wait_started()
    assert group.ranks(WorkerState.REJOINING) == [1]
    group.confirm(1, 6)
    assert group.serving() == [0], "old weights"
    group.confirm(1, 7)
    assert group.serving() == [0, 1]
    assert group.call("greet", "you", phase="test") == ["a greets you", "b greets you"]


def test_restarts_are_bounded_between_steps(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path, max_restarts=1)
    try:
        group = cluster.launch("echo", [spec("a")], replaceable=True)
        cluster.wait_started()
        for expected in (1, 0):
            cluster.wait([group.start(0, "die")], "generate", check=False)
            cluster.wait_started()
            assert len(group.ranks(WorkerState.REJOINING)) == expected
        call = group.start(0, "greet", "you")
        cluster.wait([call], "test", check=False)
        assert call.dead, "a call to a worker that stays down is answered at once"
        assert cluster.may_restart("vital") and not cluster.may_restart("vital")
        cluster.progressed()
        assert cluster.may_restart("vital")
    finally:
        cluster.close()


def test_a_replaceable_worker_that_hangs_is_given_up(cluster: LocalCluster) -> None:
    group = cluster.launch("echo", [spec("a")], replaceable=True)
    cluster.wait_started()
    call = group.start(0, "sleep", 30)
    cluster.wait([call], "generate", seconds=0.5, check=False)
    with pytest.raises(WorkerDied, match=r"died with no answer within 0\.5 s"):
        call.result()
    cluster.wait_started()
    assert group.call("greet", "you", phase="test") == ["a greets you"]


def test_a_refusal_at_the_start_is_the_users(cluster: LocalCluster) -> None:
    cluster.launch("echo", [spec("a"), spec("b", refuse=True)])
    with pytest.raises(UserError, match="refuses"):
        cluster.wait_started()


def test_threads_and_devices(cluster: LocalCluster, group: Group) -> None:
    assert group.call("environment", "OMP_NUM_THREADS", phase="test") == ["1", "1"]
    assert group.call("environment", "CUDA_VISIBLE_DEVICES", phase="test") == ["", ""]


def test_close_leaves_no_process(cluster: LocalCluster, group: Group) -> None:
    children = [psutil.Process(pid(rank)) for rank in (0, 1)]
    group.start(0, "sleep", 60)
    cluster.close()
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    cluster.close()


@pytest.mark.parametrize(
    ("given", "devices", "seen"),
    [(None, (2,), "2"), ("4,5", (1,), "5"), ("GPU-a,GPU-b,GPU-c", (0, 2), "GPU-a,GPU-c"), ("", (0,), "0")],
)
def test_devices_count_among_those_the_driver_was_given(given: str | None, devices: tuple[int, ...], seen: str) -> None:
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_devices(devices, environment) == seen


def test_a_workers_own_sentence_is_passed_on(group: Group) -> None:
    with pytest.raises(RunError, match="rank 0 failed with The bucket is wrong"):
        group.call("stop", phase="test", ranks=[0])


LONG = 5_000_000  # bytes; far more than a socket holds


def test_long_messages_arrive_whole_both_ways(group: Group, tmp_path: Path) -> None:
    data = os.urandom(LONG)
    assert group.call("size", data, str(tmp_path / "came"), phase="test") == [LONG, LONG]
    assert group.call("repeat", data, 3, phase="test") == [data * 3] * 2


def test_a_long_message_to_a_stopped_worker_does_not_stop_the_driver(cluster: LocalCluster, group: Group) -> None:
    os.kill(pid(0), signal.SIGSTOP)
    call = group.start(0, "size", b"x" * LONG, "/dev/null")
    with pytest.raises(RunError, match=r"no answer within 1 s from echo rank 0 \(size since"):
        cluster.wait([call], "update", seconds=1.0)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_lost_in_the_middle_of_its_answer(cluster: LocalCluster, group: Group, number: int) -> None:
    call = group.start(0, "repeat", b"x", 10 * LONG)
    descriptor = cluster.process("echo", 0).channel.fileno()  # type: ignore[attr-defined]
    with socket.socket(fileno=os.dup(descriptor)) as peeking:
        assert select.select([peeking], [], [], 10)[0]
        while 0 < len(peeking.recv(50_000, socket.MSG_PEEK)) < 50_000:
            pass  # until the answer is well under way
    os.kill(pid(0), number)
    expected = "died with exit status -9" if number == signal.SIGKILL else "no answer within 1 s from echo rank 0"
    with pytest.raises(RunError, match=expected):
        cluster.wait([call], "update", seconds=1.0 if number == signal.SIGSTOP else 20.0)


def test_a_message_is_sent_on_while_another_worker_is_waited_for(
    cluster: LocalCluster, group: Group, tmp_path: Path
) -> None:
    came = str(tmp_path / "came")
    long = group.start(0, "size", b"x" * LONG, came)
    cluster.wait([other := group.start(1, "wait_for", came)], "test")
    other.result()
    cluster.wait([long], "test")
    assert long.result() == LONG


def test_a_report_with_a_worker_that_stays_down(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path, max_restarts=0)
    try:
        group = cluster.launch("echo", [spec("a"), spec("b")], replaceable=True)
        cluster.wait_started()
        cluster.wait([group.start(0, "die")], "generate", check=False)
        down = cluster.process("echo", 0)
        beat = down.last_beat()
        call = group.start(1, "sleep", 30)
        cluster.wait([call], "generate", seconds=0.5, check=False)
        assert call.dead
        report = (tmp_path / "logs" / "stacks-1.txt").read_text()
        assert "echo rank 0: dead" in report and "no stacks: it ended with exit status -9" in report
        assert "in sleep" in report
        down.ask_stacks()
        down.post(("greet", ("you",)))
        assert down.stacks() == "" and down.last_beat() == beat and down.exit_reason() == "exit status -9"
    finally:
        cluster.close()


def test_a_report_does_not_kill_workers_that_are_starting(cluster: LocalCluster) -> None:
    group = cluster.launch("echo", [spec("a"), spec("b")])
    write_report(cluster.log_dir, [cluster.process("echo", rank) for rank in (0, 1)], cluster.liveness)
    cluster.wait_started()
    assert group.call("greet", "you", phase="test") == ["a greets you", "b greets you"]


def test_the_end_does_not_wait_for_a_process_that_cannot_end(
    cluster: LocalCluster, group: Group, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhfspec_mega.cluster.local._KILL_SECONDS", 2.0)
    holder, other = group.call("hold", phase="test", ranks=[0])[0], pid(1)
    if holder < 0:
        pytest.skip("this system does not allow a process to trace another")
    held = pid(0)
    try:
        cluster.close()
        assert f"echo rank 0 (process {held}) was killed but has not ended" in caplog.text
        assert "rank 1" not in caplog.text and not psutil.pid_exists(other)
    finally:
        os.kill(holder, signal.SIGKILL)


def test_workers_of_a_replica_live_and_die_together(cluster: LocalCluster) -> None:
    specs = [spec(name) for name in "abcd"]
    group = cluster.launch("pair", specs, replaceable=True, needs_weights=False, together=2)
    cluster.wait_started()
    assert group.serving() == [0, 1, 2, 3], "nobody brings them weights"
    calls = [group.start(0, "sleep", 0.3), group.start(2, "sleep", 30), group.start(3, "die")]
    cluster.wait(calls, "reference", check=False)
    assert [call.dead for call in calls] == [False, True, True], "the sleeper was ended with its peer"
    assert [group.launches(rank) for rank in range(4)] == [1, 1, 2, 2]
    cluster.wait_started()
    assert group.serving() == [0, 1, 2, 3]
    assert group.call("greet", "you", phase="test") == [f"{name} greets you" for name in "abcd"]


def test_a_worker_can_be_told_how_often_it_was_started(cluster: LocalCluster) -> None:
    numbered = WorkerSpec("tests.echo.Numbered", numbered=True)
    group = cluster.launch("echo", [numbered], replaceable=True, needs_weights=False)
    cluster.wait_started()
    assert group.call("which", phase="test") == [1]
    cluster.wait([group.start(0, "die")], "test", check=False)
    cluster.wait_started()
    assert group.call("which", phase="test") == [2]
