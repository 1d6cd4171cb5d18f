"""The driver's connection to Ray: a running cluster, or an instance of its own that listens on loopback only."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlhfspec_mega.cluster.environment import LOOPBACK
from rlhfspec_mega.cluster.sweeper import Sweeper
from rlhfspec_mega.errors import UserError

try:
    import grpc  # comes with ray[default]
    import ray
    from ray._private import ray_constants
    from ray._private import worker as ray_driver
except ModuleNotFoundError:
    raise UserError("launcher=ray needs Ray: pip install 'rlhfspec-mega[ray]'.") from None

_REACH_SECONDS = 5.0  # longest wait for a cluster's port to answer
_LONGEST_DIRECTORY = 40  # characters; Ray's sockets lie 60 deeper, and the kernel takes 107


class RayInstance:
    """A connection to Ray; one per process at a time. `close` ends it, and an own instance with it.

    Attributes:
        name: its address, for messages.
        own: whether the instance was started here and ends with this object.
        host_address: an address of this machine at which all workers reach the driver.
    """

    def __init__(self, address: str | None, *, cpus: int, gpus: int) -> None:
        """Join the cluster at `address`, or at RAY_ADDRESS, which `ray job submit` sets; else start an instance.

        Args:
            address: "host:port" or "auto" (the one that runs on this machine).
            cpus, gpus: what an own instance offers.

        Raises:
            UserError: no cluster answers there, or it refuses this driver.
        """
        address = address or os.environ.get("RAY_ADDRESS")
        self.own, self.name = address is None, address or "this machine"
        self._sweeper: Sweeper | None = None
        with _signal_handlers_kept():
            if address is None:
                self._start(cpus, gpus)
            else:
                _join(address)
        self.host_address = LOOPBACK if self.own else ray.util.get_node_ip_address()

    def _start(self, cpus: int, gpus: int) -> None:
        # Ray asks for a token on every connection. Without this it would leave one in the home directory.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # With Ray's default, 15, anything else that computes leaves workers a thirtieth of a CPU.
        os.environ.setdefault("RAY_worker_niceness", "0")
        temporary = tempfile.gettempdir()
        base = temporary if len(temporary) <= _LONGEST_DIRECTORY else "/tmp"
        directory = tempfile.mkdtemp(prefix="rlhfspec.", dir=base)
        self._sweeper = Sweeper(Path(directory))
        try:
            with _loopback(), _stop_signals_blocked():
                _init("local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, _temp_dir=directory)
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            self.close()
            raise UserError(f"Ray did not start on this machine: {_first_line(error)}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect; end the processes of an own instance and remove its files. Safe to call twice."""
        ray.shutdown()
        if self._sweeper is not None:
            self._sweeper.close()
            self._sweeper = None


def _join(address: str) -> None:
    if "://" in address:
        raise UserError(
            f"launcher.address={address} is a Ray Client address: run on a node of the cluster with "
            "launcher.address=auto, or submit the run with `ray job submit`."
        )
    try:
        with _loopback() if _on_loopback_only(address) else nullcontext():
            _init(address)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise UserError(
            f"The Ray cluster at {address} cannot be joined: {_first_line(error).rstrip('.')}. Check `ray status` on "
            "this machine, which must be one of its nodes, or set launcher.address=null for an own instance."
        ) from error


def _on_loopback_only(address: str) -> bool:
    """Whether the cluster answers at 127.0.0.1 alone. Raises UserError when none answers; Ray would try for minutes."""
    if address == "auto":
        return False
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"launcher.address={address} is not host:port, such as 10.0.0.1:6379, or auto.")
    hosts = {ray.util.get_node_ip_address(), LOOPBACK} if host in (LOOPBACK, "localhost") else {host}
    answering = [name for name in hosts if _answers(f"{name}:{port}")]
    if not answering:
        raise UserError(
            f"No Ray cluster answers at {address}: start one with `ray start --head`, whose port is 6379 unless told "
            "otherwise, correct launcher.address, or set it to null for an own instance."
        )
    return answering == [LOOPBACK]


def _answers(target: str) -> bool:
    """Whether a gRPC server, as Ray's is, answers there."""
    if os.environ.get("RAY_USE_TLS") == "1":
        return True  # only Ray knows the certificates
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()
        with grpc.insecure_channel(target) as channel:
            grpc.channel_ready_future(channel).result(timeout=_REACH_SECONDS)
    except (OSError, grpc.FutureTimeoutError):
        return False
    return True


def _init(address: str, **settings: Any) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray_driver._worker_logs_enabled = False  # a death is reported once, by the supervision, and not into the console
    ray.init(
        address=address,
        namespace=f"rlhfspec_mega.{uuid4().hex}",
        log_to_driver=False,  # workers have log files of their own
        logging_level=logging.ERROR,
        **settings,
    )


@contextmanager
def _loopback() -> Iterator[None]:
    """Have Ray take 127.0.0.1 as this node's address, which it does by itself only where clusters are not supported.

    All its servers then listen there alone; `_node_ip_address` cannot say so, since Ray replaces a loopback address.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray sets its own handler of SIGTERM; how a run reacts to signals is decided elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Ray's processes inherit the mask: a batch system signals all processes of a job, and the driver is to decide."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
