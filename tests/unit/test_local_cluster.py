"""The local launcher: results, failures, deaths and deadlines, with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster, LocalGroup, visible_devices
from rlhfspec_mega.errors import RunError, UserError


class Echo:
    """A worker for these tests."""

    def __init__(self, name: str, refuse: bool = False) -> None:
        if refuse:
            raise UserError("The worker refuses: give it another name.")
        self.name = name

    def greet(self, who: str) -> str:
        return f"{self.name} greets {who}"

    def sleep(self, seconds: float) -> float:
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


def spec(name: str, **arguments: Any) -> WorkerSpec:
    return WorkerSpec("tests.unit.test_local_cluster.Echo", {"name": name, **arguments})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path / "logs", threads=1, deadline_seconds=20, start_seconds=30, use_gpus=False)
    yield made
    made.close()


@pytest.fixture
def group(cluster: LocalCluster) -> LocalGroup:
    made = cluster.launch("echo", [spec("a"), spec("b")])
    cluster.wait_started()
    return made


def test_calls_and_scatter(group: LocalGroup) -> None:
    assert group.call("greet", "you", phase="test") == ["a greets you", "b greets you"]
    assert group.call("greet", "you", phase="test", ranks=[1]) == ["b greets you"]
    assert group.scatter("greet", [("x",), ("y",)], "test") == ["a greets x", "b greets y"]


def test_first_of_several(cluster: LocalCluster, group: LocalGroup) -> None:
    slow, quick = group.start(0, "sleep", 1.5), group.start(1, "sleep", 0.0)
    assert cluster.wait([slow, quick], "test", first=True) == [quick]
    assert not slow.done
    cluster.wait([slow], "test")
    assert slow.result() == 1.5


def test_a_busy_worker_takes_no_second_call(cluster: LocalCluster, group: LocalGroup) -> None:
    call = group.start(0, "sleep", 0.5)
    with pytest.raises(RunError, match="busy with sleep"):
        group.start(0, "greet", "you")
    cluster.wait([call], "test")


def test_failures_name_phase_rank_and_log(group: LocalGroup, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"phase 'scoring', echo rank 0 failed with ValueError: deliberate.*echo-0\.log"):
        group.call("fail", phase="scoring", ranks=[0])
    assert "deliberate" in (tmp_path / "logs" / "echo-0.log").read_text()
    with pytest.raises(UserError, match="Wrong input"):
        group.call("complain", phase="scoring")


def test_death_is_named_before_the_failures_it_causes(cluster: LocalCluster, group: LocalGroup) -> None:
    calls = [group.start(0, "fail"), group.start(1, "die")]
    with pytest.raises(RunError, match="echo rank 1 died with exit status -9"):
        cluster.wait(calls, "update")


def test_deadline_names_the_silent_and_collects_stacks(
    cluster: LocalCluster, group: LocalGroup, tmp_path: Path
) -> None:
    calls = [group.start(0, "sleep", 30), group.start(1, "greet", "you")]
    with pytest.raises(RunError, match=r"phase 'reshard', no answer within 0\.5 s from echo rank 0 \(sleep\)"):
        cluster.wait(calls, "reshard", seconds=0.5)
    assert "in sleep" in (tmp_path / "logs" / "echo-0.log").read_text()


def test_a_refusal_at_the_start_is_the_users(cluster: LocalCluster) -> None:
    cluster.launch("echo", [spec("a"), spec("b", refuse=True)])
    with pytest.raises(UserError, match="refuses"):
        cluster.wait_started()


def test_threads_and_devices(cluster: LocalCluster, group: LocalGroup) -> None:
    assert group.call("environment", "OMP_NUM_THREADS", phase="test") == ["1", "1"]
    assert group.call("environment", "CUDA_VISIBLE_DEVICES", phase="test") == ["", ""]


def test_close_leaves_no_process(cluster: LocalCluster, group: LocalGroup) -> None:
    children = psutil.Process().children(recursive=True)
    assert len(children) >= 2
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


def test_a_workers_own_sentence_is_passed_on(group: LocalGroup) -> None:
    with pytest.raises(RunError, match="rank 0 failed with The bucket is wrong"):
        group.call("stop", phase="test", ranks=[0])
