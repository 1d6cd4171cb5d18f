"""The job scripts in slurm/ on a cluster of two nodes: real Slurm, real Ray, a small model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.e2e.chaos import differences, steps_done
from tests.e2e.conftest import REPOSITORY, make_model, small_run
from tests.slurm.cluster import SILENT_SECONDS, SlurmCluster, slurm_cluster

pytestmark = pytest.mark.timeout(900)
STEPS = 12
START_SECONDS, RUN_SECONDS = 180.0, 240.0  # longest waits: for the first step of an attempt, and for a job's end
NODE_SECONDS = 60  # the job's own wait for its nodes


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    mark = uuid4().hex
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), mark) as cluster:
        cluster.environment |= {
            "CLUSTER": "local",
            "GPU_MEMORY_GIB": "0",
            "OBJECT_STORE_GIB": "0.25",
            "NODE_SECONDS": str(NODE_SECONDS),
            "PYTHON": os.environ.get("PYTHON", str(REPOSITORY / ".venv/bin/python")),
            "REPO": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }
        yield cluster


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def options(output: Path) -> list[str]:
    """A deterministic run of a few seconds after its start; the job names it and says how many nodes it has."""
    given = small_run(make_model(output / "model"), output, "none", "trainer.deterministic=true")
    changed = [f"trainer.steps={STEPS}", "trainer.checkpoint_every=2", "trainer.eval_every=0"]
    changed += ["trainer.prompts_per_step=12", "cluster.devices_per_node=1"]
    names = {option.split("=")[0] for option in changed} | {"name", "trainer.eval_prompts"}
    return [option for option in given if option.split("=")[0] not in names] + changed


class Job:
    """A submitted job and what it printed."""

    def __init__(self, slurm: SlurmCluster, directory: Path, *command: str) -> None:
        self._slurm, self._file = slurm, directory / f"{uuid4().hex[:8]}.out"
        self.id = slurm.run("sbatch", "--parsable", f"--output={self._file}", "--time=20", *command).split(";")[0]

    @property
    def text(self) -> str:
        return self._file.read_text() if self._file.exists() else ""

    def wait_for(self, *states: str, seconds: float = RUN_SECONDS) -> None:
        try:
            ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
            self._slurm.wait(
                lambda: self._slurm.state(self.id) in (*states, *ended), f"{self.id} to be {states}", seconds
            )
            assert self._slurm.state(self.id) in states
        finally:
            print(self.text)  # shown if the test fails

    def wait_for_text(self, text: str, seconds: float = START_SECONDS) -> None:
        try:
            self._slurm.wait(lambda: text in self.text, f"{text!r} in the output of job {self.id}", seconds)
        except AssertionError:
            print(self.text)
            raise


def slowly(options: list[str]) -> list[str]:
    """The same run with steps of a second at least, so that it goes on while a test disturbs it."""
    fast = "reward.function=tests.e2e.rewards.evenness"
    assert fast in options
    return [option.replace(fast, "reward.function=tests.e2e.rewards.slow_evenness") for option in options]


def script(name: str) -> str:
    return str(REPOSITORY / "slurm" / name)


NO_GPUS = "--gpus-per-node=0"


@pytest.fixture(scope="module")
def undisturbed(slurm: SlurmCluster, output: Path, options: list[str]) -> Path:
    """The directory of a run over both nodes that nobody disturbed."""
    job = Job(slurm, output, NO_GPUS, "--nodes=2", script("colocated.sbatch"), "name=undisturbed", *options)
    job.wait_for("COMPLETED")
    assert "Ray runs on n1,n2" in job.text and "2 node x 1" in job.text and "done" in job.text
    attempt = output / "undisturbed.slurm" / "attempt-1"
    assert "step 12/12" in (attempt / "train.log").read_text()
    return output / "undisturbed"


def test_a_run_that_is_signalled_and_pre_empted_has_the_bits_of_an_undisturbed_one(
    slurm: SlurmCluster, output: Path, options: list[str], undisturbed: Path
) -> None:
    """First SIGUSR1, as ahead of the time limit; then Slurm pre-empts it for a job of a higher partition."""
    job = Job(slurm, output, NO_GPUS, "--nodes=2", script("colocated.sbatch"), "name=disturbed", *slowly(options))
    job.wait_for_text("step 2/")
    slurm.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_text("requeued; the next attempt", 60)
    job.wait_for_text("attempt 2 of job", 60)
    slurm.wait(lambda: steps_done(output / "disturbed") > first_step(output, 2), "a step of attempt 2", START_SECONDS)
    other = slurm.run(
        "sbatch", "--parsable", "--partition=high", "--exclusive", "--nodes=2", "--wrap=sleep 1", "--output=/dev/null"
    )
    slurm.wait(lambda: slurm.state(other) == "COMPLETED", "the job of the higher partition", 90)
    job.wait_for("COMPLETED")
    assert job.text.count("requeued; the next attempt goes on from step") == 2
    assert "SIGUSR1: the run finishes this step" in job.text and "SIGTERM: the run finishes this step" in job.text
    assert "attempt 3 of job" in job.text
    assert differences(undisturbed, output / "disturbed") == []


def first_step(output: Path, attempt: int) -> int:
    """Steps that had been done when this attempt began; more than there are while it has not."""
    log = output / "disturbed.slurm" / f"attempt-{attempt}" / "train.log"
    lines = log.read_text().splitlines() if log.exists() else []
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step ")]
    return steps[0] - 1 if steps else STEPS


def test_an_array_runs_each_line_of_a_file(slurm: SlurmCluster, output: Path, options: list[str]) -> None:
    lines = output / "lines.txt"
    lines.write_text("# name, and what differs\nname=a0 seed=0\n\nname=a1 seed=1 'trainer.steps=2'\nname=a2 seed=2\n")
    command = (NO_GPUS, "--array=1-3", "--cpus-per-task=2", "--oversubscribe", script("array.sbatch"), str(lines))
    short = [option for option in slowly(options) if not option.startswith("trainer.steps")]
    job = Job(slurm, output, *command, *short, "trainer.steps=6")
    # The last task has the id of the whole array, too: only it may come back.
    slurm.wait(lambda: steps_done(output / "a2") >= 1, "a step of the last task", START_SECONDS)
    slurm.run("scancel", "--signal=USR1", "--batch", f"{job.id}_3")
    slurm.wait(lambda: not slurm.run("squeue", "-h", f"--jobs={job.id}"), "the array to end", RUN_SECONDS)
    for name, attempts, steps in (("a0", 1, 6), ("a1", 1, 2), ("a2", 2, 6)):
        assert json.loads((output / name / "summary.json").read_text())["steps"] == steps, job.text
        assert len(list((output / f"{name}.slurm").glob("attempt-*"))) == attempts, job.text


def test_a_heterogeneous_job_trains_on_its_first_nodes_and_generates_on_the_others(
    slurm: SlurmCluster, output: Path, options: list[str]
) -> None:
    components = (NO_GPUS, "--nodes=1", ":", NO_GPUS, "--nodes=1")
    job = Job(slurm, output, *components, script("separate.sbatch"), "name=separate", *options)
    job.wait_for_text("step 1/")
    assert {role: node_of(output / "separate" / "logs" / f"{role}-0.log") for role in ("actor", "engine")} == {
        "actor": "n1",
        "engine": "n2",
    }
    job.wait_for("COMPLETED")
    assert json.loads((output / "separate" / "summary.json").read_text())["steps"] == STEPS


def node_of(log: Path) -> str:
    """The node of the worker that writes this log."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == str(log):
                variables = (descriptor.parents[1] / "environ").read_bytes().split(b"\0")
                return next(one.decode().split("=")[1] for one in variables if one.startswith(b"SLURMD_NODENAME="))
    raise AssertionError(f"nobody writes {log}")


def test_a_node_that_hangs_is_named_at_the_deadline(slurm: SlurmCluster, output: Path, options: list[str]) -> None:
    python = output / "python"
    hangs = "[ $SLURMD_NODENAME = n2 ] && case $1 in *ray_node.py) sleep 1000;; esac"
    python.write_text(f'#!/bin/sh\n{hangs}\nexec {slurm.environment["PYTHON"]} "$@"\n')
    python.chmod(0o755)
    exports = f"--export=ALL,PYTHON={python},NODE_SECONDS=20"
    job = Job(slurm, output, NO_GPUS, exports, "--nodes=2", script("colocated.sbatch"), "name=hangs", *options)
    job.wait_for("FAILED")
    assert "the nodes are not ready after 2" in job.text and "these nodes have not joined: n2." in job.text
    assert "the job is not requeued" in job.text


def test_a_node_whose_daemon_is_silent_is_named(slurm: SlurmCluster, output: Path, options: list[str]) -> None:
    slurm.pause_node("n2", signal.SIGSTOP)
    try:
        job = Job(slurm, output, NO_GPUS, "--nodes=2", script("colocated.sbatch"), "name=alone", *options)
        job.wait_for_text("the job is not requeued", NODE_SECONDS + 60)
        assert "these nodes have not joined: n2." in job.text
    finally:
        slurm.pause_node("n2", signal.SIGCONT)
    slurm.wait(lambda: slurm.state(job.id) == "FAILED", "the job to end", 90)
    slurm.wait(lambda: slurm.run("sinfo", "-h", "-o", "%T %D") == "idle 2", "both nodes to be idle", 90)


def test_a_directory_that_is_not_shared_is_named(slurm: SlurmCluster, output: Path, options: list[str]) -> None:
    if subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("a mount namespace of one's own needs root")
    slurm.stop_node("n2")
    hidden = f'mount -t tmpfs none {output} && exec "$@"'
    slurm.start_node("n2", "unshare", "--mount", "sh", "-c", hidden, "sh")
    try:
        job = Job(slurm, output, NO_GPUS, "--nodes=2", script("colocated.sbatch"), "name=hidden", *options)
        job.wait_for("FAILED")
        assert f"n2: this node does not see {output}/hidden.slurm/attempt-1" in job.text
        assert "the job is not requeued" in job.text
    finally:
        slurm.stop_node("n2")
        slurm.start_node("n2")


def test_a_run_on_a_killed_node_comes_back(
    slurm: SlurmCluster, output: Path, options: list[str], undisturbed: Path
) -> None:
    job = Job(slurm, output, NO_GPUS, "--nodes=2", script("colocated.sbatch"), "name=killed", *slowly(options))
    job.wait_for_text("step 3/")
    slurm.kill_node("n2")
    job.wait_for_text("attempt failed", SILENT_SECONDS + 90)
    job.wait_for_text("requeued; the next attempt", 30)
    slurm.start_node("n2")
    job.wait_for("COMPLETED")
    assert "attempt 2 of job" in job.text
    assert differences(undisturbed, output / "killed") == []


def test_bad_configuration_is_not_requeued(slurm: SlurmCluster, output: Path, options: list[str]) -> None:
    job = Job(slurm, output, NO_GPUS, script("one_node.sbatch"), "name=bad", *options, "trainer.stepz=1")
    job.wait_for("FAILED")
    assert "There is no option 'trainer.stepz'" in job.text
    assert "another attempt would not mend this: the job is not requeued" in job.text
    assert not (output / "bad").exists()


def test_the_plan_knows_the_partition(slurm: SlurmCluster, options: list[str]) -> None:
    """slurm/check.sh, which sbatch and train.py would both refuse or take."""
    command = (str(REPOSITORY / "slurm/check.sh"), NO_GPUS, "--nodes=2", "--partition=high", script("colocated.sbatch"))
    answer = slurm.run(*command, *[option for option in options if not option.startswith("output_dir")])
    assert "2 of the 2 nodes in Slurm's partition high are free: a job of 2 nodes could start now." in answer
    with pytest.raises(subprocess.CalledProcessError) as refused:
        slurm.run(str(REPOSITORY / "slurm/check.sh"), NO_GPUS, "--nodes=3", script("colocated.sbatch"), *options)
    assert "sbatch refuses the job" in refused.value.output
