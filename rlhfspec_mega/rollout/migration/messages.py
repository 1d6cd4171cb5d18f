"""Messages about migrating samples, between engines and between engines and the driver."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.rollout.migration.staging import Handle, Layout
from rlhfspec_mega.rollout.migration.wire import Address
from rlhfspec_mega.rollout.protocol import SampleSnapshot


class PeerInfo(NamedTuple):
    """What an engine tells the driver about itself before a rollout in which samples may migrate.

    Attributes:
        address: where it receives samples from other engines.
        throughput: how fast it decodes.
        slots: samples it decodes at once.
        kv_tokens: tokens whose KV it has room for, over all samples.
        prefill_seconds: average time to prefill one token; infinite before the first prefill.
        copy_seconds: time to copy one token's KV, which source and destination each spend.
    """

    address: Address
    throughput: Throughput
    slots: int
    kv_tokens: int
    prefill_seconds: float
    copy_seconds: float


class MigrationOrder(NamedTuple):
    """The driver's order to send one sample to another engine.

    Attributes:
        number: tells it from all other orders of the run.
        prefill_seconds: time in which the destination prefills one token; if that is less than the time to copy the
            token's KV, the sample migrates without KV.
    """

    number: int
    sample_id: str
    destination: Address
    prefill_seconds: float = math.inf


@dataclass
class MigrationOrders:
    """All that the driver tells an engine about migrations in one call of `advance`.

    Attributes:
        moves: samples to send away; an order is ignored if its sample has ended.
        dead_sources: names of dead engines: the engine takes the samples that they had already sent, and ignores what
            comes from them later.
        expected: numbers of the orders by which samples are on their way to this engine: it waits for them when idle.
    """

    moves: list[MigrationOrder] = field(default_factory=list)
    dead_sources: list[str] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)


class Moves(NamedTuple):
    """The driver's orders to an engine that is decoding, which begins to carry them out at the next step boundary.

    Attributes:
        rollout: the engine's number of the rollout that they belong to.
    """

    rollout: int
    orders: list[MigrationOrder]


class ReportNow(NamedTuple):
    """The driver asks an engine that is decoding to answer at the next step boundary.

    Attributes:
        rollout: the engine's number of the current rollout.
    """

    rollout: int


class CalledOff(NamedTuple):
    """Tells the receiver that the sample of an order stays where it is, so that nobody waits for it.

    Attributes:
        rollout: the receiver's number of the rollout that the order belongs to.
        order: its number.
    """

    rollout: int
    order: int


class KvPiece(NamedTuple):
    """Committed KV for a staging buffer of the receiver; payload: contiguous [layers, 2, kv_heads, rows, head_dim].

    Attributes:
        staging: number of the staging buffer, unique per source.
        layout: layout of the whole buffer.
        part: "target" or "draft".
        first, rows: first position, and number of positions.
    """

    staging: int
    layout: Layout
    part: str
    first: int
    rows: int


class Arrival(NamedTuple):
    """Hands a sample over to the receiver, who must acknowledge it.

    Attributes:
        transfer: number of the hand-over, unique per source; the receiver acknowledges it.
        order: number of the driver's order.
        rollout: the receiver's number of the rollout that the sample belongs to.
        snapshot: the sample without KV; its draft state has features only.
        staging: number of the staging buffer with the sample's KV; None: the receiver prefills the sample again.
        rows: number of valid positions in that buffer, by part.
        prompt: number of the buffer with the KV of the group's prompt, which supplies the first positions, or None.
        prompt_rows: number of positions to take from the prompt's buffer, by part.
        handles: shared-memory handles of these buffers by number; empty if the KV came in messages.
        departed: time.time() at the end of the sample's last decode step at the source.
        settled_bytes, delta_bytes: bytes copied in stage one, while the sample was decoded, and in stage two, after it.
    """

    transfer: int
    order: int
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


class FreeStaging(NamedTuple):
    """Tells the receiver to free the staging buffer of this number."""

    staging: int
