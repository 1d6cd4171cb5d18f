"""Starts local workers by fork from a process that has imported their code once, which spares each its own import.

The idea of Python's multiprocessing.forkserver, without what that adds: it imports the driver's main module in every
child and does not let a daemon have children. `ForkServer` and `ForkedProcess` are the driver's end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from rlhfspec_mega.cluster.child import die_with_parent, run

_MAX_REQUEST = 1 << 20  # bytes of one request; almost all of it is the environment
_DESCRIPTORS = 4  # of a request to start a process: its socket, its board, its log, and where its status is written


class ForkedProcess:
    """A process that the server has been asked to start; the counterpart of subprocess.Popen."""

    def __init__(self, server: ForkServer, number: int, status: int) -> None:
        self._server, self._number, self._status = server, number, status
        self._text = b""  # what the server has written: the process's number, later its exit status
        self._ended = False

    def pid(self) -> int | None:
        """None if the server has not started it yet."""
        self._read(0.0)
        return int(self._text.split(b"\n")[0]) if b"\n" in self._text else None

    def poll(self) -> int | None:
        """The exit status as subprocess has it, None while the process runs; -9 if the server died, and it with it."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> int | None:
        """The exit status, after waiting for it for so long; None if the process has not ended."""
        end = time.monotonic() + seconds
        while not self._ended:
            if not self._read(max(0.0, end - time.monotonic())):
                return None
        lines = self._text.split(b"\n")
        return int(lines[1]) if len(lines) > 2 else -signal.SIGKILL

    def signal(self, number: signal.Signals, group: bool = False) -> None:
        """Send a signal to the process, or to its whole group; nothing if it has ended."""
        self._server.request({"number": self._number, "signum": number, "group": group})

    def _read(self, seconds: float) -> bool:
        if self._ended or not select.select([self._status], [], [], seconds)[0]:
            return False
        text = os.read(self._status, 64)
        self._text += text
        if not text:
            self._ended = True
            os.close(self._status)
        return True


class ForkServer:
    """The driver's end of a server, which ends when this process ends in any way."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: variables that libraries read when they are loaded, before the first worker's are known."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
        command = [sys.executable, "-m", "rlhfspec_mega.cluster.fork_server", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._started = 0

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self, name: str, module: str | None, environment: Mapping[str, str], connection: int, board: int, log: int
    ) -> ForkedProcess:
        """Start a worker in a process group of its own, without waiting for it.

        Args:
            name: shown by `ps -o comm` and `top`.
            module: imported before the fork, for this worker and all later ones; None: no module.
            environment: all its variables; PYTHONPATH is where modules are looked for.
            connection, board, log: descriptors of its socket, of its Board, and of the file for its output.
        """
        status, theirs = os.pipe()
        self._started += 1
        request = {
            "name": name,
            "module": module,
            "environment": dict(environment),
            "directory": os.getcwd(),
            "number": self._started,
        }
        self.request(request, connection, board, log, theirs)
        os.close(theirs)
        return ForkedProcess(self, self._started, status)

    def import_ahead(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Import modules that workers will need, without waiting for it; a fault is reported by the workers."""
        self.request({"modules": list(modules), "environment": dict(environment)})

    def request(self, message: Mapping[str, Any], *descriptors: int) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # a dead server's processes are found to have ended
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)


_servers: dict[tuple[int, bool], ForkServer] = {}  # of this process, by threads and whether workers see GPUs


def fork_server(threads: int, environment: Mapping[str, str]) -> ForkServer:
    """The server of this process whose libraries are loaded for so many threads; clusters share it.

    Workers that see GPUs have one of their own: what others import may look for GPUs, after which no process that is
    forked can use one.
    """
    key = threads, bool(environment.get("CUDA_VISIBLE_DEVICES"))
    server = _servers.get(key)
    if server is None or not server.alive:
        server = _servers[key] = ForkServer(environment)
    return server


class _Server:
    """The side that runs in the server process: it forks workers when asked to.

    It has one thread and no state but the processes it has started.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pids: dict[int, int] = {}  # by the number that the driver gave a process, ended ones included
        self._reports: dict[int, int] = {}  # running process -> where its exit status is written

    def serve(self) -> None:
        """Execute the driver's requests, and report processes that end, until the driver closes the connection."""
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select.select([woken, self._connection.fileno()], [], [])
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if self._connection.fileno() in ready:
                text, descriptors, _, _ = socket.recv_fds(self._connection, _MAX_REQUEST, _DESCRIPTORS)
                if not text:
                    return
                request = json.loads(text)
                if "modules" in request:
                    self._import_ahead(**request)
                elif descriptors:
                    self._start(request, *descriptors)
                else:
                    self._signal(**request)

    def _import_ahead(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._take(environment)
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)

    @staticmethod
    def _take(environment: Mapping[str, str]) -> None:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)

    def _start(self, request: Mapping[str, Any], connection: int, board: int, log: int, report: int) -> None:
        self._take(request["environment"])
        if request["module"] is not None:
            self._import(request["module"], log)
        pid = os.fork()
        if pid == 0:
            os.close(report)
            self._become_worker(request, connection, board, log)
        self._pids[request["number"]], self._reports[pid] = pid, report
        for descriptor in (connection, board, log):
            os.close(descriptor)
        os.write(report, b"%d\n" % pid)

    @staticmethod
    def _import(module: str, log: int) -> None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(log, sys.stderr.fileno())
            with suppress(Exception):  # the worker meets the same error and reports it
                importlib.import_module(module)
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
        gc.freeze()  # the collector does not touch, and so does not copy, the memory shared with the workers

    def _become_worker(self, request: Mapping[str, Any], connection: int, board: int, log: int) -> NoReturn:
        server = os.getppid()
        gc.enable()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._connection.close()
        for report in self._reports.values():
            os.close(report)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log, stream.fileno())
        os.close(log)
        os.chdir(request["directory"])
        run(request["name"], connection, server, board)

    def _signal(self, number: int, signum: int, group: bool) -> None:
        pid = self._pids[number]
        with suppress(ProcessLookupError):
            if pid in self._reports:
                os.kill(pid, signum)
            if group:
                os.killpg(pid, signum)

    def _reap(self) -> None:
        for pid in list(self._reports):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                report = self._reports.pop(pid)
                with suppress(BrokenPipeError):
                    os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
                os.close(report)


def main() -> None:
    gc.disable()  # modules are no garbage, and the collector looks at them again and again while they are imported
    descriptor, parent = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent)
    # Ctrl-C and a batch system's SIGTERM may reach every process: the driver decides, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # until a worker has its handler
    _Server(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    main()
