"""Plain objects as messages: pickled, with arrays out of band so that they are not copied when sent."""

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
    """The packed object; its arrays share the parts' memory."""
    head, *buffers = parts
    return pickle.loads(head, buffers=buffers)
