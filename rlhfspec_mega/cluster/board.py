"""Memory shared by a local worker and the driver: the worker's last heartbeat, and its Python stacks on request."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

_BEAT = struct.Struct("d")  # seconds of CLOCK_MONOTONIC, which all processes of a host share
BEAT_SECONDS = 1.0


class Board:
    """A worker's heartbeat and stacks, in memory shared with the driver; this is the driver's end.

    `descriptor` is the file descriptor that the worker inherits.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("rlhfspec_mega.worker")
        os.pwrite(self.descriptor, _BEAT.pack(time.monotonic()), 0)
        self._asked_at = _BEAT.size  # where the stacks of the last request begin
        self._last_beat = 0.0  # kept after the board is closed

    def last_beat(self) -> float:
        if self.descriptor < 0:
            return self._last_beat
        return float(_BEAT.unpack(os.pread(self.descriptor, _BEAT.size, 0))[0])

    def expect_stacks(self) -> None:
        """Stacks written from now on belong to the current request."""
        if self.descriptor >= 0:
            self._asked_at = os.fstat(self.descriptor).st_size

    def stacks(self) -> str:
        if self.descriptor < 0:
            return ""
        size = os.fstat(self.descriptor).st_size - self._asked_at
        return os.pread(self.descriptor, size, self._asked_at).decode(errors="replace")

    def close(self) -> None:
        """Release the memory; the last heartbeat stays readable, stacks do not. Safe to call twice."""
        if self.descriptor >= 0:
            self._last_beat = self.last_beat()
            os.close(self.descriptor)
            self.descriptor = -1


def start_beating(descriptor: int) -> None:
    """The worker's end: a thread writes a heartbeat once a second as long as the interpreter runs.

    A stopped or frozen process falls silent. One that waits in a collective does not; deadlines cover that case.
    """
    os.lseek(descriptor, _BEAT.size, os.SEEK_SET)  # faulthandler writes at the descriptor's position
    page = mmap.mmap(descriptor, _BEAT.size)

    def beat() -> None:
        while True:
            _BEAT.pack_into(page, 0, time.monotonic())
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, name="beat", daemon=True).start()
