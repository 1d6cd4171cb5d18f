"""What engines tell each other, and what the driver tells them and learns, of migrating samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.rollout.migration.staging import Handle, Layout
from rlhfspec_mega.rollout.migration.wire import Address
from rlhfspec_mega.rollout.protocol import SampleSnapshot


class Meeting(NamedTuple):
    """What an engine tells before a rollout in which samples may move.

    Attributes:
        address: where it takes samples from other engines.
        throughput: how fast it decodes.
        slots: samples it decodes at once.
        kv_tokens: room for all its samples.
        prefill_seconds: of one token on average; infinite before the first.
        copy_seconds: of one token's KV, at the source and at the destination each.
    """

    address: Address
    throughput: Throughput
    slots: int
    kv_tokens: int
    prefill_seconds: float
    copy_seconds: float


class MigrationOrder(NamedTuple):
    """The driver's wish that a sample goes elsewhere.

    Attributes:
        prefill_seconds: that the destination would take to prefill one token again: where that is less than copying
            its KV takes, the sample goes without.
    """

    sample_id: str
    destination: Address
    prefill_seconds: float = math.inf


@dataclass
class Orders:
    """What the driver asks of an engine, beside decoding.

    Attributes:
        moves: samples to be sent away; of samples that ended meanwhile nothing happens.
        cut: names of dead engines: what they have sent is taken, nothing afterwards.
        expects: samples may be on their way here: an idle engine waits for them.
    """

    moves: list[MigrationOrder] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    expects: bool = False


class Piece(NamedTuple):
    """Settled KV for memory of the receiver; the payload is [layers, 2, kv_heads, rows, head_dim] in order.

    Attributes:
        staging: number of the memory, unique per source.
        layout: of that memory.
        first, rows: positions.
    """

    staging: int
    layout: Layout
    part: str
    first: int
    rows: int


class Arrival(NamedTuple):
    """A sample comes: from this message on it belongs to the receiver.

    Attributes:
        transfer: number, unique per source, to be acknowledged.
        rollout: the receiver's number of the rollout that the sample belongs to.
        snapshot: without KV; its draft part has features only.
        staging: number of the memory with its KV, or None: prefill it again.
        rows: positions in it by part.
        prompt: number of the memory with the KV of its group's prompt, which the first positions come from, or None.
        prompt_rows: positions taken from there by part.
        handles: of these memories, by number, where they are shared.
        departed: time.time() when its last step at the source had ended.
        settled_bytes, delta_bytes: copied while it decoded, and afterwards.
    """

    transfer: int
    rollout: int
    snapshot: SampleSnapshot
    staging: int | None
    rows: dict[str, int]
    prompt: int | None
    prompt_rows: dict[str, int]
    handles: dict[int, Handle]
    departed: float
    settled_bytes: int
    delta_bytes: int


class Dropped(NamedTuple):
    """The memory of this number is of no further use."""

    staging: int
