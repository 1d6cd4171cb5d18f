"""What is read of Slurm, what a node checks, what a job decides; make test-slurm runs whole jobs."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rlhfspec_mega.config.schema.system import ClusterConfig
from rlhfspec_mega.config.slurm import SlurmNodes, gpus_of, lacking, slurm_line, slurm_nodes
from tests.e2e.conftest import REPOSITORY

TABLE = """\
debug*|idle|1|(null)
gpu|idle|4|gpu:h100:8(S:0-1)
gpu|mix|2|gpu:h100:8(S:0-1),nvme:1
gpu|idle~|1|gpu:h100:4
gpu|down*|1|gpu:h100:8
gpu|mix-|1|gpu:h100:8
gpu|drain|1|gpu:h100:2
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a program before all others that prints a text."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(name: str, text: str) -> None:
        (tmp_path / f"{name}.txt").write_text(text)
        (tmp_path / name).write_text(f"#!/bin/sh\ncat {tmp_path / name}.txt\n")
        (tmp_path / name).chmod(0o755)

    return make


@pytest.fixture(scope="module")
def ray_node() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_node", REPOSITORY / "slurm/ray_node.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "gpus"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:h100:8(S:0-1)", 8), ("nvme:2,gpu:a:2,gpu:b:1", 3), ("mygpu:4", 0)],
)
def test_gpus_of_generic_resources(text: str, gpus: int) -> None:
    assert gpus_of(text) == gpus


def test_a_partition_counts_nodes_in_service(program: Callable[[str, str], None]) -> None:
    program("sinfo", TABLE)
    assert slurm_nodes({}) == SlurmNodes("partition debug", False, 1, 1, 0)
    gpu = slurm_nodes({"SBATCH_PARTITION": "gpu"})
    assert gpu == SlurmNodes("partition gpu", True, nodes=8, free=5, gpus=4)
    assert slurm_nodes({"SBATCH_PARTITION": "debug,gpu"}) == gpu
    program("sinfo", "gpu|idle|2|gpu:8\n")
    assert slurm_nodes({}) is None, "there is no default partition"


def test_a_job_is_its_own_nodes_and_without_slurm_there_are_none(program: Callable[[str, str], None]) -> None:
    job = slurm_nodes({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"})
    assert job == SlurmNodes("job 17", True, 2, 2, 8)
    assert slurm_nodes({}) is None
    parts = {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "6"}
    whole = slurm_nodes({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"} | parts)
    assert whole == SlurmNodes("job 17", True, 8, 8, None), "a shell of salloc does not know the GPUs"
    assert not lacking(whole, ClusterConfig(device="cuda", nodes=8, devices_per_node=8))


def test_the_line_says_whether_a_job_could_start() -> None:
    run = ClusterConfig(device="cuda", nodes=4, devices_per_node=8)
    free = SlurmNodes("partition gpu", True, nodes=8, free=6, gpus=8)
    assert "6 of the 8 nodes in Slurm's partition gpu are free: a job of 4 nodes could start" in slurm_line(free, run)
    busy = SlurmNodes("partition gpu", True, nodes=8, free=3, gpus=8)
    assert "has to wait" in slurm_line(busy, run) and not lacking(busy, run)
    small = SlurmNodes("partition gpu", True, nodes=3, free=3, gpus=8)
    assert "cannot hold it: 4 nodes are asked for and 3 are in service" in slurm_line(small, run)
    poor = SlurmNodes("partition debug", False, nodes=8, free=8, gpus=0)
    assert "set SBATCH_PARTITION" in slurm_line(poor, run)
    assert "job 17 holds it" in slurm_line(SlurmNodes("job 17", True, 4, 4, 8), run)


def test_gpus_that_are_missing_small_or_used_refuse_the_node(
    ray_node: ModuleType, program: Callable[[str, str], None]
) -> None:
    program("nvidia-smi", "81559, 4\n81559, 4\n")
    assert [gpu["total"] for gpu in ray_node.check_gpus(2, 70.0)] == [81559.0, 81559.0]
    with pytest.raises(ray_node.NodeError, match="2 GPUs of the 8"):
        ray_node.check_gpus(8, 70.0)
    with pytest.raises(ray_node.NodeError, match="80 GiB, not 100"):
        ray_node.check_gpus(2, 100.0)
    program("nvidia-smi", "81559, 4\n81559, 20480\n")
    with pytest.raises(ray_node.NodeError, match=r"GPU 1 holds 20\.0 GiB of another process"):
        ray_node.check_gpus(2, 70.0)


def test_a_node_without_nvidia_smi_is_refused(ray_node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert ray_node.check_gpus(0, 70.0) == []
    with pytest.raises(ray_node.NodeError, match="nvidia-smi does not answer"):
        ray_node.check_gpus(1, 70.0)


def test_ports_are_outside_the_ephemeral_range_and_skip_used_blocks(ray_node: ModuleType) -> None:
    low, high = (int(number) for number in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports, workers = ray_node.free_ports("17", 0, cpus=192)
    used = {*ports.values(), *workers}
    assert len(used) == len(ports) + len(workers) and len(workers) > 192
    assert all(not low <= port <= high and 1024 < port < 65_536 for port in used)
    with socket.socket() as user:
        user.bind(("", ports["node-manager-port"]))
        assert used.isdisjoint(ray_node.free_ports("17", 0, cpus=192)[0].values())
    for job, node in (("17", 1), ("18", 0)):
        others, theirs = ray_node.free_ports(job, node, cpus=192)
        assert used.isdisjoint({*others.values(), *theirs})


def test_a_node_whose_ports_are_all_ephemeral_is_refused(
    ray_node: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ray_node, "_EPHEMERAL", tmp_path / "range")
    with pytest.raises(ray_node.NodeError, match="ip_local_port_range"):
        ray_node.free_ports("17", 0, cpus=8)


def test_the_address_is_that_of_the_named_interface_or_of_the_route(ray_node: ModuleType) -> None:
    own = {"lo": "127.0.0.1", "ib0": "10.1.0.5"}
    assert ray_node.own_address(own, [], "ib0") == "10.1.0.5"
    with pytest.raises(ray_node.NodeError, match="INTERFACE=ib1"):
        ray_node.own_address(own, [], "ib1")
    assert ray_node.own_address({"lo": "127.0.0.1"}, [{"lo": "127.0.0.1"}], "") == "127.0.0.1"
    bridges = {"docker0": "172.17.0.1", "usb0": "169.254.3.1"}
    assert ray_node.own_address(own | bridges, [bridges], "") == "10.1.0.5", "they lead to no other node"
    found = ray_node.addresses()
    assert ray_node.own_address(found, [found], "") in found.values()


def bash(code: str, *arguments: str) -> str:
    """What code prints that has job.sh's functions and these arguments."""
    command = ["bash", "-c", f"source slurm/job.sh; {code}", "bash", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_failures_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    """Attempts that a signal has stopped are none, and another job begins to count anew."""
    (tmp_path / "run.slurm").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    latest = tmp_path / "run" / "checkpoints" / "latest"

    def may_come_back(status: int, job: int = 7) -> bool:
        settings = f"RUN_DIR={tmp_path}/run JOB={job} MAX_ATTEMPTS=3"
        return bash(f"{settings}; attempts_left {status} && echo yes || echo no") == "yes\n"

    assert [may_come_back(1), may_come_back(75), may_come_back(143), may_come_back(137)] == [True] * 4
    assert not may_come_back(1)
    assert may_come_back(1, job=8)
    latest.write_text("step_40\n")
    assert [may_come_back(1, job=8) for _ in range(3)] == [True, True, False]
    latest.write_text("step_60\n")
    assert may_come_back(1, job=8)


def test_names_come_from_the_overrides_or_the_job(tmp_path: Path) -> None:
    job = f"SLURM_JOB_NAME=rl JOB=17_2 REPO={tmp_path}; "
    shown = (
        'read_arguments "$@"; echo "$RUN_DIR"; printf "%s;" "${ARGUMENTS[@]}"; if is_given name; then echo given; fi'
    )
    assert bash(job + shown, "seed=3").splitlines() == [f"{tmp_path}/outputs/rl-17_2", "seed=3;"]
    (tmp_path / "link").symlink_to(tmp_path / "real")
    given = ("name=mine", "data.train=[a b.jsonl]", f"output_dir={tmp_path}/link")
    assert bash(job + shown, *given).splitlines() == [f"{tmp_path}/real/mine", "name=mine;data.train=[a b.jsonl];given"]


def test_a_task_of_an_array_gets_its_line(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("# a comment\nseed=1\n\nseed=2 'data.train=[a b]'\nname=it's\n")
    show = "run_job() { printf '%s;' \"$@\"; }; "
    assert (
        bash(f'{show} SLURM_ARRAY_TASK_ID=2 run_job_of_line "$@"', str(lines), "x=1") == "x=1;seed=2;data.train=[a b];"
    )
    for task, words in (
        ("", "submit with --array=1-N"),
        ("4", "has no line 4"),
        ("3", "a quote without its other one"),
    ):
        said = bash(f'{show} SLURM_ARRAY_TASK_ID={task}; (run_job_of_line "$@") || echo $?', str(lines))
        assert words in said and said.endswith("2\n")


def test_the_cause_is_shown_and_not_what_ends_with_it(tmp_path: Path) -> None:
    log = tmp_path / "nodes.log"
    cause = (
        "slurmstepd: error: pyxis: failed to import docker image\nsrun: error: Unable to create step: More processors\n"
    )
    log.write_text(
        f"{cause}srun: error: n1: task 0: Killed\nslurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 1 ***\n"
    )
    shown = bash(f"show_end {log}")
    assert [line.strip() for line in shown.splitlines()[1:]] == cause.splitlines()
    log.write_text("srun: error: n1: task 0: Killed\n")
    assert bash(f"show_end {log}") == ""
