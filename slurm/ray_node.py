"""One node of a job's Ray cluster: checks it, starts Ray, and ends Ray again. `srun` starts this once per node.

It works in a directory of this attempt that all nodes share and slurm/job.sh reads:

  canary            a word that only the job knows; a node that does not read it does not see the job's files
  nodes/NAME.json   the node has passed its checks; what it found
  head              address of Ray's head, "host:port"
  ready             every node has joined
  ray-NAME.log      output of `ray start`

Slurm sends SIGTERM to every process of a job that it pre-empts, and the run has to save before its workers end. So
SIGTERM and SIGUSR1 are blocked here and, by inheritance, in all processes of Ray. SIGUSR2 ends Ray.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rlhfspec_mega.cluster.sweeper import Sweeper, processes_using, sweep

REFUSED = 2  # exit status: this node cannot take part, and another attempt would not mend it
_POLL_SECONDS = 0.5
_ASK_SECONDS = 60.0  # longest wait for Ray's answer to one question
_FIXED_PORTS = (
    "port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
_SPARE_PORTS = 64  # for Ray's own workers, besides one for each CPU
_STALE_SECONDS = 600.0  # a directory without users is left over after so long
_FIRST_PORT = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # the kernel gives these to any connection


class NodeError(Exception):
    """This node cannot take part; the message says why and what to do."""

    status = REFUSED


class RayEndedError(NodeError):
    """Ray ended by itself, which another attempt may mend."""

    status = 1


def main() -> None:
    given = arguments()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
    try:
        check_shared(given.directory, given.canary)
        gpus = check_gpus(given.gpus, given.gpu_memory_gib)
        if given.only_check:
            return
        temporary = own_directory(given)
        sweeper = Sweeper(temporary)  # also if this process is killed
        try:
            run_ray(given, gpus, temporary)
        finally:
            sweeper.close()
    except NodeError as error:
        print(f"{given.node}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.status)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="of this attempt, shared by all nodes")
    parser.add_argument("--canary", required=True, help="the word in its file canary")
    parser.add_argument("--job", required=True, help="id of the job; ports and temporary files are its own")
    parser.add_argument("--nodes", required=True, help="names of all nodes, by commas; the first one is Ray's head")
    parser.add_argument("--cpus", type=int, required=True, help="that Ray may give to workers of this node")
    parser.add_argument("--gpus", type=int, required=True, help="the same for GPUs")
    parser.add_argument("--gpu-memory-gib", type=float, default=0.0, help="least memory of each GPU")
    parser.add_argument("--object-store-gib", type=float, required=True, help="memory of Ray's object store")
    parser.add_argument("--interface", default="", help="network interface; else the one that leads to other nodes")
    parser.add_argument("--training", default="", help="nodes that train, by commas; the others generate")
    parser.add_argument("--seconds", type=float, required=True, help="longest wait for the other nodes")
    parser.add_argument("--only-check", action="store_true", help="start no Ray")
    given = parser.parse_args()
    given.node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    given.names = given.nodes.split(",")
    return given


def check_shared(directory: Path, canary: str) -> None:
    """Raises NodeError unless this node reads the word that the first node wrote."""
    end = time.monotonic() + 10.0  # a network file system shows a new file late
    while True:
        with suppress(OSError):
            if (directory / "canary").read_text() == canary:
                return
        if time.monotonic() > end:
            raise NodeError(
                f"this node does not see {directory}, which the job's first node has written: put output_dir= on a "
                "file system that all nodes share."
            )
        time.sleep(_POLL_SECONDS)


def check_gpus(count: int, least_gib: float) -> list[dict[str, float]]:
    """The node's GPUs: total and used memory in MiB. Raises NodeError unless all are there, as large, and unused."""
    if not count:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    if mine := os.environ.get("CUDA_VISIBLE_DEVICES"):  # Slurm sets it; other jobs may use the node's other GPUs
        query.append(f"--id={mine}")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeError(f"nvidia-smi does not answer ({error}): drain this node.") from None
    if answer.returncode:
        raise NodeError(f"nvidia-smi fails ({answer.stdout.strip() or answer.stderr.strip()}): drain this node.")
    rows = [[float(cell) for cell in line.split(",")] for line in answer.stdout.splitlines()]
    gpus = [{"total": total, "used": used} for total, used in rows]
    if len(gpus) < count:
        raise NodeError(f"it has {len(gpus)} GPUs of the {count} that the job asked for: drain it, or exclude it.")
    for index, gpu in enumerate(gpus):
        if gpu["total"] < least_gib * 1024:
            raise NodeError(f"GPU {index} has {gpu['total'] / 1024:.0f} GiB, not {least_gib:g}: exclude this node.")
        if gpu["used"] > max(1024.0, 0.03 * gpu["total"]):  # drivers and persistence take some hundred MiB
            raise NodeError(
                f"GPU {index} holds {gpu['used'] / 1024:.1f} GiB of another process{_users_of_gpus()}: end it, or "
                "exclude this node."
            )
    return gpus


def _users_of_gpus() -> str:
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run(query, capture_output=True, text=True, timeout=60.0).stdout.split("\n")
        return f" ({'; '.join(line for line in found if line)})" if any(found) else ""
    return ""


def own_directory(given: argparse.Namespace) -> Path:
    """A new directory for Ray's files; those of earlier attempts, which a killed node left behind, are removed.

    Slurm may end a node's processes before they remove it: those of this job, and others that no process uses, are
    removed by the next job on the node. It is short and in /tmp: the kernel takes 107 characters for the name of a
    socket, and Ray adds 60.
    """
    prefix = f"rlhfspec.{given.job}.{given.names.index(given.node)}."
    for left in Path("/tmp").glob("rlhfspec.*"):
        with suppress(OSError, KeyError):  # it is being removed, or of a user without a name
            stale = time.time() - left.stat().st_mtime > _STALE_SECONDS and not processes_using(left)
            if left.owner() == getpass.getuser() and (stale or left.name.startswith(prefix)):
                sweep(left, os.getpid())
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))


def run_ray(given: argparse.Namespace, gpus: list[dict[str, float]], temporary: Path) -> None:
    """Start Ray, tell the job, and return when Ray has ended. Raises NodeError if that was not wanted."""
    own = addresses()
    nodes = given.directory / "nodes"
    nodes.mkdir(exist_ok=True)
    _write(nodes / f"{given.node}.json", json.dumps({"addresses": own, "gpus": gpus}))
    head = given.names[0] == given.node
    if head:
        wait_for({name: nodes / f"{name}.json" for name in given.names}, given.seconds)
        others = [json.loads((nodes / f"{name}.json").read_text())["addresses"] for name in given.names[1:]]
        ip = own_address(own, others, given.interface)
    else:
        wait_for({f"Ray's head on {given.names[0]}": given.directory / "head"}, given.seconds)
        ip = own_address(own, [{"": (given.directory / "head").read_text().split(":")[0]}], given.interface)
    ports, workers = free_ports(given.job, given.names.index(given.node), given.cpus)
    log = given.directory / f"ray-{given.node}.log"
    with log.open("wb") as output:
        ray = subprocess.Popen(
            ray_start(given, ip, ports, workers, temporary), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    if head:
        announce(given, ray, f"{ip}:{ports['port']}")
    ray.wait()
    lines = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise RayEndedError(f"Ray ended with status {ray.returncode}; the last lines of {log}: {' / '.join(lines)}")


def ray_start(given: argparse.Namespace, ip: str, ports: dict[str, int], workers: range, temporary: Path) -> list[str]:
    """The command: CPUs, GPUs and ports are told to Ray, which else would take what the machine has."""
    head = given.names[0] == given.node
    resources = {}
    if given.training:
        resources = {"training" if given.node in given.training.split(",") else "generation": 1}
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--block",
        f"--node-ip-address={ip}",
        f"--num-cpus={given.cpus}",
        f"--num-gpus={given.gpus}",
        f"--object-store-memory={int(given.object_store_gib * 2**30)}",
        f"--resources={json.dumps(resources)}",
        f"--temp-dir={temporary}",
        f"--min-worker-port={workers[0]}",
        f"--max-worker-port={workers[-1]}",
        "--disable-usage-stats",
    ]
    command += [f"--{name}={number}" for name, number in ports.items() if name != "port"]
    if head:
        return [*command, "--head", f"--port={ports['port']}", "--include-dashboard=false"]
    return [*command, f"--address={(given.directory / 'head').read_text()}"]


def announce(given: argparse.Namespace, ray: subprocess.Popen[bytes], address: str) -> None:
    """Tell the other nodes where the head is, and the job when all have joined. Raises NodeError after the deadline."""
    end = time.monotonic() + given.seconds
    host, _, port = address.rpartition(":")
    while not _listens(host, int(port)):
        if ray.poll() is not None or time.monotonic() > end:
            return
        time.sleep(_POLL_SECONDS)
    _write(given.directory / "head", address)
    joined = 0
    while joined < len(given.names):
        if ray.poll() is not None:
            return
        if time.monotonic() > end:
            raise NodeError(f"{joined} of {len(given.names)} nodes have joined Ray within {given.seconds:g} s.")
        joined = _alive(address)
    _write(given.directory / "ready", address)


def _alive(address: str) -> int:
    """Nodes that Ray has, 0 if it does not say. In a process of its own: a driver would hold Ray's ports and files."""
    code = (
        f"import ray; ray.init({address!r}, log_to_driver=False, logging_level='error'); "
        "print(sum(node['Alive'] for node in ray.nodes()))"
    )
    try:
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_ASK_SECONDS)
    except subprocess.TimeoutExpired:
        return 0
    return int(asked.stdout.split()[-1]) if asked.returncode == 0 else 0


def wait_for(files: dict[str, Path], seconds: float) -> None:
    """Wait for files that others write. Raises NodeError, after so many seconds, with the names of those missing."""
    end = time.monotonic() + seconds
    while missing := [name for name, file in files.items() if not file.exists()]:
        if time.monotonic() > end:
            raise NodeError(f"not ready within {seconds:g} s: {', '.join(missing)}.")
        time.sleep(_POLL_SECONDS)


def addresses() -> dict[str, str]:
    """IPv4 address of each interface that is up, loopback included."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET
    }


def own_address(own: dict[str, str], others: list[dict[str, str]], interface: str) -> str:
    """The address of the named interface, else the one from which the kernel would reach another node.

    Another node is one at an address that this node does not have: bridges of containers have the same on all nodes.

    Raises NodeError for an interface that this node does not have.
    """
    if interface:
        if interface not in own:
            raise NodeError(f"INTERFACE={interface} is not one of this node's: {', '.join(sorted(own))}")
        return own[interface]
    mine = set(own.values())
    outside = [address for found in others for address in found.values() if address not in mine and _routed(address)]
    for address in outside:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((address, 1))  # sends nothing: it asks the routing table
            return str(probe.getsockname()[0])
    return next((address for address in own.values() if _routed(address)), "127.0.0.1")


def _routed(address: str) -> bool:
    return not address.startswith(("127.", "169.254."))  # loopback, and links that lead nowhere else


def free_ports(job: str, node: int, cpus: int) -> tuple[dict[str, int], range]:
    """Ports of this node, outside the kernel's ephemeral ones: Ray's fixed ports by name, and those of its workers.

    A job's nodes and jobs that share a node begin to look at different blocks; one that others use is skipped.

    Raises NodeError if there is no free block.
    """
    low, high = (int(number) for number in _EPHEMERAL.read_text().split())
    size = len(_FIXED_PORTS) + cpus + _SPARE_PORTS
    first, last = max((_FIRST_PORT, low), (high + 1, 65_536), key=lambda ends: ends[1] - ends[0])
    blocks = max(0, last - first) // size
    for step in range(blocks):
        start = first + (31 * int(job) + node + step) % blocks * size
        ports = {name: start + at for at, name in enumerate(_FIXED_PORTS)}
        if all(_is_free(number) for number in ports.values()):
            return ports, range(start + len(_FIXED_PORTS), start + size)
    raise NodeError(
        f"no {size} ports in a row are free between {first} and {last}: end other programs on this node, or narrow "
        "net.ipv4.ip_local_port_range."
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def _listens(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), timeout=2.0).close()
        return True
    return False


def _write(file: Path, text: str) -> None:
    """Whole or not at all: others read it as soon as it exists."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text)
    os.replace(partial, file)


if __name__ == "__main__":
    main()
