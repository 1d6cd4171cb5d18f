"""Plain objects as messages: pickled, with arrays beside the pickle so that they are not copied on their way out."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any


def pack(value: Any) -> list[memoryview]:
    """The parts of a message: the pickle, then the memory of each array (pickle protocol 5's out-of-band buffers).

    Arrays must not change until the message is sent.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [memoryview(head), *(buffer.raw() for buffer in buffers)]


def unpack(parts: Sequence[bytearray]) -> Any:
    """What was packed; its arrays use the parts' memory."""
    head, *buffers = parts
    return pickle.loads(head, buffers=buffers)
