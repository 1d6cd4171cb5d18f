"""Launchers: the same behaviour of local processes and of actors on a Ray cluster of two nodes; then what Ray adds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.liveness import WorkerState
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.meeting_point import MeetingPoint
from rlhfspec_mega.cluster.ray_instance import RayInstance
from rlhfspec_mega.cluster.ray_launcher import RayCluster
from rlhfspec_mega.cluster.ray_placement import Reservation, nodes_in_words, roles_sharing_devices
from rlhfspec_mega.cluster.ray_transport import ObjectStoreHost
from rlhfspec_mega.cluster.supervised import Group, SupervisedCluster
from rlhfspec_mega.errors import RunError, UserError, WorkerDied
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.resharding.buckets import Bucket, checksum
from tests.echo import content
from tests.ray.two_nodes import two_nodes

REPOSITORY = Path(__file__).resolve().parents[2]
LIMITS = {"call_timeout": 60.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 2}
CPUS = 4  # of each node; with two threads a worker, two bundles fill a node
BUCKETS = [Bucket(number, 0, (), 1 << 20) for number in range(5)]
SILENCE = 10.0  # of a stopped worker until it is given up; the limit elsewhere is for a machine that is loaded
DEADLINE = 2.0  # of transports that wait in vain


def spec(**arguments: Any) -> WorkerSpec:
    return WorkerSpec("tests.echo.Echo", arguments)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes(CPUS) as made:
        yield made


@pytest.fixture(scope="module")
def ray_actors(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Three workers of two CPUs do not fit on one node."""
    made = RayCluster(
        tmp_path_factory.mktemp("ray") / "logs",
        threads=2,
        use_gpus=False,
        places={"echo": [(0,), (1,), (2,)], "vital": [(3,)]},
        address=address,
        **LIMITS,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def local_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path_factory.mktemp("local") / "logs", threads=2, use_gpus=False, **LIMITS)
    yield made
    made.close()


def ended(cluster: SupervisedCluster) -> None:
    """As new: each test launches its own workers."""
    for role in ("echo", "vital"):
        cluster.end(role)
    cluster._replaceable.clear()
    cluster.progressed()


@pytest.fixture(params=["local_processes", "ray_actors"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SupervisedCluster]:
    made = request.getfixturevalue(request.param)
    yield made
    ended(made)


@pytest.fixture
def ray_cluster(ray_actors: RayCluster) -> Iterator[RayCluster]:
    yield ray_actors
    ended(ray_actors)


def launched(cluster: SupervisedCluster, count: int, replaceable: bool = False) -> Group:
    group = cluster.launch("echo", [spec() for _ in range(count)], replaceable=replaceable)
    cluster.wait_started()
    return group


def how(cluster: SupervisedCluster) -> str:
    """The words for a process killed with -9."""
    return "exit status -9" if isinstance(cluster, LocalCluster) else "Ray's SYSTEM_ERROR: Worker unexpectedly exits"


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while psutil.pid_exists(pid):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# The contract of every launcher


def test_calls_failures_and_deaths(cluster: SupervisedCluster) -> None:
    group = launched(cluster, 2)
    assert group.scatter("greet", [("x",), ("y",)], "test") == ["Hello x", "Hello y"]
    assert group.call("environment", "OMP_NUM_THREADS", phase="test") == ["2", "2"]
    assert group.call("environment", "CUDA_VISIBLE_DEVICES", phase="test") == ["", ""]
    data = torch.arange(300_000)
    assert torch.equal(group.call("double", data, phase="test", ranks=[1])[0], 2 * data)

    slow, quick = group.start(0, "sleep", 1.0), group.start(1, "sleep", 0.0)
    assert cluster.wait([slow, quick], "test", first=True) == [quick]
    with pytest.raises(RunError, match="busy with sleep"):
        group.start(0, "greet", "you")
    cluster.wait([slow], "test")
    assert slow.result() == 1.0

    with pytest.raises(RunError, match=r"phase 'scoring', echo rank 0 failed with ValueError: deliberate.*echo-0\.log"):
        group.call("fail", phase="scoring", ranks=[0])
    assert "deliberate" in (cluster.log_dir / "echo-0.log").read_text()
    with pytest.raises(UserError, match="Wrong input"):
        group.call("complain", phase="scoring")
    for pid in group.call("pid", phase="test"):  # what a batch system sends to all of a job
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert group.call("greet", "you", phase="test", ranks=[0]) == ["Hello you"]

    calls = [group.start(0, "fail"), group.start(1, "die")]
    with pytest.raises(WorkerDied, match=f"phase 'update', echo rank 1 died with {how(cluster)}"):
        cluster.wait(calls, "update")


def test_a_refusal_at_the_start_is_the_users(cluster: SupervisedCluster) -> None:
    cluster.launch("echo", [spec(), spec(refuse=True)])
    with pytest.raises(UserError, match="refuses"):
        cluster.wait_started()


def test_a_stopped_worker_is_silent_and_shows_its_stacks(
    cluster: SupervisedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = launched(cluster, 2)
    pids = group.call("pid", phase="test")
    monkeypatch.setattr(cluster.liveness, "_dead_seconds", SILENCE)
    monkeypatch.setattr(cluster.liveness, "_suspect_seconds", SILENCE / 3)
    if isinstance(cluster, RayCluster):
        time.sleep(1.2 * SILENCE)  # the driver was busy and did not ask: that is no silence
    assert group.call("greet", "you", phase="test") == ["Hello you"] * 2
    calls = [group.start(rank, "sleep", 60) for rank in (0, 1)]
    with suppress(RunError):  # takes note of signs of life once more
        cluster.wait(calls, "first", seconds=1.0)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(RunError, match="phase 'update', no sign of life from echo rank 1"):
        cluster.wait(calls, "update")
    report = sorted(cluster.log_dir.glob("stacks-*.txt"), key=os.path.getmtime)[-1].read_text()
    assert report.count("in sleep") == 2 and "echo rank 1: dead; sleep since" in report
    os.kill(pids[0], signal.SIGSTOP)
    cluster.end("echo")
    assert all(gone(pid) for pid in pids)


def test_a_replaceable_worker_is_started_again(cluster: SupervisedCluster) -> None:
    group = launched(cluster, 2, replaceable=True)
    child = group.call("leave_a_child", phase="test", ranks=[1])[0]
    group.call("pid", phase="test")
    cluster.publish(7)
    for rank in (0, 1):
        group.confirm(rank, 7)
    calls = [group.start(0, "sleep", 0.3), group.start(1, "die")]
    cluster.wait(calls, "generate", check=False)
    assert calls[0].result() == 0.3 and calls[1].dead
    cluster.wait_started()
    assert group.ranks(WorkerState.SERVING) == [0] and group.ranks(WorkerState.REJOINING) == [1]
    assert group.call("greet", "you", phase="test") == ["Hello you"] * 2
    assert gone(child)


def test_a_dead_worker_that_cannot_be_replaced_ends_any_wait(cluster: SupervisedCluster) -> None:
    vital = cluster.launch("vital", [spec()])
    group = launched(cluster, 1, replaceable=True)
    pid = vital.call("pid", phase="test")[0]
    call = group.start(0, "sleep", 60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=f"phase 'generate', vital rank 0 died with {how(cluster)}"):
        cluster.wait([call], "generate", check=False)
    cluster.end("vital")
    vital = cluster.launch("vital", [spec()])
    cluster.settle("echo", 0.1)
    assert call.dead
    cluster.wait_started()
    assert vital.call("greet", "you", phase="test") == group.call("greet", "you", phase="test") == ["Hello you"]


# What Ray adds


def test_two_nodes_meet_and_hand_over_weights(ray_cluster: RayCluster) -> None:
    cluster = ray_cluster
    group = launched(cluster, 3)
    nodes = group.call("node", phase="test")
    assert len(set(nodes)) == 2
    assert nodes == sorted(nodes), "neighbouring devices share a node"

    point = MeetingPoint(cluster.host_address, 60.0)
    port = int(point.address.rsplit(":", 1)[1].split("/")[0])
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == port]
    assert set(listening) == {"127.0.0.1"}
    sums = group.scatter(
        "all_reduce", [(Rendezvous(point.address, rank, 3, 60.0), 10.0**rank) for rank in range(3)], "t"
    )
    assert sums == [111.0] * 3
    point.close()

    host = ObjectStoreHost(2, 60.0)
    calls = [
        group.start(0, "send", host.address, BUCKETS),
        group.start(1, "receive", host.address, 0, BUCKETS),
        group.start(2, "receive", host.address, 1, BUCKETS, 0.05),  # a slow engine, on the other node
    ]
    cluster.wait(calls, "reshard")
    expected = [checksum(content(bucket)) for bucket in BUCKETS]
    assert calls[1].result() == calls[2].result() == expected
    host.close()
    assert "Warning" not in (cluster.log_dir / "echo-1.log").read_text()


def test_transports_that_wait_in_vain(ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ray_cluster
    monkeypatch.setattr(cluster, "grace_seconds", 0.2)  # nobody dies here
    group = launched(cluster, 2)
    host = ObjectStoreHost(2, DEADLINE)
    with pytest.raises(RunError, match=r"Bucket 2 found no room, engines \[0, 1\] did not take .* within 2 s"):
        group.call("send", host.address, BUCKETS, phase="reshard", ranks=[0])
    assert group.call("receive", host.address, 0, BUCKETS[:2], phase="reshard", ranks=[1])[0] == [
        checksum(content(bucket)) for bucket in BUCKETS[:2]
    ]
    with pytest.raises(RunError, match=r"engines \[1\] did not take"):
        group.call("send", host.address, BUCKETS[2:3], phase="reshard", ranks=[0])
    host.drop(1)
    group.call("send", host.address, BUCKETS[2:4], phase="reshard", ranks=[0])
    host.close()

    host = ObjectStoreHost(1, DEADLINE)
    with pytest.raises(RunError, match="Engine 0 did not get bucket 0 within 2 s"):
        group.call("receive", host.address, 0, BUCKETS, phase="reshard", ranks=[1])
    group.call("send", host.address, BUCKETS[1:2], phase="reshard", ranks=[0])
    with pytest.raises(RunError, match="Engine 0 got bucket 1 instead of 0"):
        group.call("receive", host.address, 0, BUCKETS, phase="reshard", ranks=[1])
    host.close()

    host = ObjectStoreHost(1, 60.0)
    waiting = group.start(1, "receive", host.address, 0, BUCKETS)
    cluster.wait([group.start(0, "sleep", 0.5)], "reshard")
    assert not waiting.done
    host.close()
    with pytest.raises(RunError, match=r"Engine 0 did not get bucket 0: its sender or .* mailbox has ended"):
        cluster.wait([waiting], "reshard")


def test_roles_that_share_devices_share_a_group() -> None:
    assert roles_sharing_devices({"a": [0, 1], "b": [2, 3], "c": [4]}) == [["a"], ["b"], ["c"]]
    shared = roles_sharing_devices({"a": [0, 1], "b": [2, 3], "c": [1], "d": [3, 1]})
    assert [sorted(roles) for roles in shared] == [["a", "b", "c", "d"]]


def test_what_a_cluster_does_not_have_is_refused(ray_cluster: RayCluster) -> None:
    def reserve(devices: int, threads: int, gpus: bool = False) -> None:
        places = {"engine": [(device,) for device in range(devices)]}
        Reservation(places, threads=threads, use_gpus=gpus, training_devices=None, seconds=1.0, where="here")

    with pytest.raises(UserError, match="asks for 9 CPUs and 0 GPUs and the cluster has 8 CPUs and 0 GPUs"):
        reserve(9, 1)
    with pytest.raises(UserError, match=r"wants 1 GPUs, and Ray at .* sees 0: 1 node with 0 each"):
        reserve(1, 1, gpus=True)
    with pytest.raises(UserError, match=r"No node .* has 5 CPUs and 0 GPUs"):
        reserve(1, 5)
    with pytest.raises(UserError, match=r"no room .* within 1 s: it asks for 2 x \(3 CPUs and 0 GPUs\)"):
        reserve(2, 3)  # the module's cluster holds all
    assert ray.cluster_resources()["CPU"] == 2 * CPUS
    places = {"actor": [(0,)], "engine": [(1,)]}
    with pytest.raises(UserError, match="offers the resource generation or training, which"):
        Reservation(places, threads=1, use_gpus=False, training_devices=1, seconds=1.0, where="here")


def test_the_nodes_that_lack_gpus_are_named() -> None:
    def node(number: int, gpus: int, alive: bool = True) -> dict[str, Any]:
        return {"NodeManagerHostname": f"node-{number}", "Alive": alive, "Resources": {"GPU": gpus} if gpus else {}}

    eight = [node(number, 8) for number in range(7)]
    assert nodes_in_words(eight) == "7 nodes with 8 each"
    assert nodes_in_words([*eight, node(7, 0)]) == "node-7 has 0"
    assert nodes_in_words([*eight, node(7, 8, alive=False), node(8, 4)]) == "node-7 has 0, node-8 has 4"
    assert nodes_in_words([node(7, 8, alive=False), *eight, node(7, 8)]) == "8 nodes with 8 each", "it came back"


def test_addresses_that_cannot_be_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
        server.close()
        for wrong, words in (
            (f"127.0.0.1:{silent.getsockname()[1]}", "No Ray cluster answers"),
            (f"127.0.0.1:{free}", "No Ray cluster answers"),
            ("ray://10.0.0.1:10001", "ray job submit"),
            ("somewhere", "not host:port"),
        ):
            with pytest.raises(UserError, match=words):
                RayInstance(wrong, cpus=1, gpus=0)


def test_without_ray_the_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import rlhfspec_mega.cluster.ray_launcher"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert "UserError: launcher=ray needs Ray: pip install 'rlhfspec-mega[ray]'" in result.stderr


OWN = """
import sys
from pathlib import Path
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.ray_launcher import RayCluster
limits = {"call_timeout": 60.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 0}
cluster = RayCluster(Path(sys.argv[1]), threads=1, use_gpus=False, places={"echo": [(0,)]}, address=None, **limits)
group = cluster.launch("echo", [WorkerSpec("tests.echo.Echo")])
cluster.wait_started()
print(*group.call("pid", phase="test"), flush=True)
sys.stdin.read()
group.call("greet", "you", phase="test")
cluster.close()
cluster.close()
"""


def test_two_own_instances_at_once_leave_nothing(tmp_path: Path) -> None:
    """One is closed, after signals of a batch system; the driver of the other is killed while its worker is stopped."""
    temporary = tempfile.mkdtemp(dir="/tmp")  # short: Ray makes sockets in it
    environment = os.environ | {"TMPDIR": temporary, "HOME": temporary}
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", OWN, str(tmp_path / name)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    workers = [int(driver.stdout.readline()) for driver in drivers]
    assert [psutil.Process(pid).nice() for pid in workers] == [psutil.Process().nice()] * 2, "they starve otherwise"
    trees = [psutil.Process(driver.pid).children(recursive=True) for driver in drivers]
    for tree in trees:
        for process in tree:
            listeners = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert {c.laddr.ip.removeprefix("::ffff:") for c in listeners} <= {"127.0.0.1"}, process
    for process in trees[0]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            process.send_signal(number)
    time.sleep(2.0)
    drivers[0].stdin.close()
    assert drivers[0].wait(60) == 0
    assert not [process for process in trees[0] if not gone(process.pid, 0.0)], "close waits for all"
    os.kill(workers[1], signal.SIGSTOP)
    drivers[1].kill()
    drivers[1].wait()
    assert all(gone(process.pid, 20.0) for process in trees[1])
    drivers[1].stdin.close()
    for driver in drivers:
        driver.stdout.close()
    end = time.monotonic() + 20.0
    # The directory of a killed driver goes a moment after its processes.
    while os.listdir(temporary) and time.monotonic() < end:
        time.sleep(0.1)
    os.rmdir(temporary)  # nothing is left in it
