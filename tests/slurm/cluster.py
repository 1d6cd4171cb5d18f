"""A Slurm cluster of two nodes on this machine, with daemons, ports, keys and files of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rlhfspec_mega.cluster.child import die_with_parent
from tests.e2e.conftest import MARK, marked

NODES = ("n1", "n2")
CPUS = 8  # of a node, more than there are: Slurm hands them out, and the kernel shares the real ones
GRACE_SECONDS = 60  # from pre-emption to the end of a job
SILENT_SECONDS = 20  # until a node without its daemon is down
# A node that Slurm does not hear of is down after SlurmdTimeout. A requeued job waits until its old credential has
# expired. `low` is pre-empted by `high`, whose jobs want whole nodes.
CONFIGURATION = """
ClusterName=rlhfspec
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=10
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={silent}
KillWait=5
FirstJobId={first_job}
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=8000
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    """Its daemons, and commands of Slurm that reach them. Every process that they start carries `mark`."""

    def __init__(self, directory: Path, mark: str) -> None:
        self.mark, self._directory = mark, directory
        self._configuration = directory / "slurm.conf"
        self.first_job = random.SystemRandom().randrange(1, 50_000)  # two clusters at a time do not meet
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {
            "SLURM_CONF": str(self._configuration),
            MARK: mark,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def start(self) -> None:
        directory = self._directory
        directory.chmod(0o755)
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "munged.seed"
        named = [f"--{name}={directory / file}" for name, file in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *named)
        self.wait((directory / "munge.socket").exists, "munged to start", 30)
        (directory / "state").mkdir()
        text = CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            ports=_free_ports(3),
            directory=directory,
            user=getpass.getuser(),
            cpus=CPUS,
            grace=GRACE_SECONDS,
            silent=SILENT_SECONDS,
            first_job=self.first_job,
        )
        self._configuration.write_text(text)
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self._configuration))
        for node in NODES:
            self.start_node(node)
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%T %D") == f"idle {len(NODES)}", "nodes to be idle", 60)

    def start_node(self, node: str, *within: str) -> None:
        """Start a node's daemon, by another command if one is given."""
        self._start(node, *within, "slurmd", "-D", "-N", node, "-f", str(self._configuration))

    def stop_node(self, node: str) -> None:
        """End a node's daemon alone; its jobs go on."""
        self._end(node)

    def pause_node(self, node: str, number: signal.Signals) -> None:
        self._daemons[node].send_signal(number)

    def kill_node(self, node: str) -> None:
        """What a power failure does: the daemon and every process of its jobs are gone at once."""
        self._daemons[node].kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                stepd = "slurmstepd" in process.name() and f"spool-{node}" in " ".join(map(_target, _files(process)))
                if environment.get(MARK) == self.mark and (environment.get("SLURMD_NODENAME") == node or stepd):
                    process.kill()

    def close(self) -> None:
        """End all jobs, then the daemons."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.run("scancel", "--user", getpass.getuser())
            self.wait(lambda: not self.run("squeue", "-h"), "jobs to end", 30)
        while self._daemons:
            self._end(next(reversed(self._daemons)))
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, *command: str) -> str:
        """Output of a command of Slurm. Raises CalledProcessError, whose text is printed."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            print(done.stdout, done.stderr)
            done.check_returncode()
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Of a job, such as RUNNING; of a heterogeneous one, of its first component."""
        text = self.run("scontrol", "show", "job", job, "--oneliner")
        return re.findall(r"JobState=(\S+)", text)[0]

    def wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
            time.sleep(0.2)

    def _start(self, name: str, *command: str) -> None:
        """Start a daemon as a child of this process, with which it ends."""
        log = self._directory / f"{name}.out"
        with log.open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(os.getppid()),
            )

    def _end(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


@contextmanager
def slurm_cluster(directory: Path, mark: str) -> Iterator[SlurmCluster]:
    """A cluster of which nothing is left behind: no process, mount, port or file (checked)."""
    cluster = SlurmCluster(directory, mark)
    try:
        cluster.start()
        yield cluster
    finally:
        ports = _listening(marked(mark))
        cluster.close()
    end = time.monotonic() + 20
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, [psutil.Process(pid).cmdline() for pid in left]
    assert not [line for line in _mounts() if str(directory.parent) in line]
    assert not ports & _listening(psutil.pids())
    jobs = range(cluster.first_job, cluster.first_job + 100)
    assert not [left for job in jobs for left in Path("/tmp").glob(f"rlhfspec.{job}.*")]
    assert not directory.exists()


def _files(process: psutil.Process) -> list[Path]:
    return list(Path(f"/proc/{process.pid}/fd").iterdir())


def _target(file: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(file)
    return ""


def _mounts() -> set[str]:
    """Those of all mount namespaces that a process is in."""
    found: set[str] = set()
    for file in Path("/proc").glob("[0-9]*/mounts"):
        with contextlib.suppress(OSError):
            found.update(file.read_text().splitlines())
    return found


def _listening(pids: list[int]) -> set[int]:
    """Ports that these processes listen at."""
    found = psutil.net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN and one.pid in pids}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_until_all_are_found:
        sockets = [open_until_all_are_found.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
