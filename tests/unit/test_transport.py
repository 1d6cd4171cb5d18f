"""Transports between real processes: two senders, three receivers, several updates, and waiting in vain."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from concurrent.futures import Future

import pytest
import torch

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.resharding.buckets import Bucket, checksum, plan_buckets
from rlhfspec_mega.resharding.collective import CollectiveHost
from rlhfspec_mega.resharding.shared_memory import SharedMemoryHost
from rlhfspec_mega.types import TensorInfo

OWNERS, RECEIVERS, UPDATES, SLOT, DEADLINE = 2, 3, 3, 4096, 60.0
NEVER = 3600.0  # a deadline that does not pass in a test: what ends before has been cancelled
# Stage 0 holds 3 buckets, stage 1 holds 2: an odd number, so that buckets change slots from update to update.
BUCKETS = plan_buckets([TensorInfo(f"t{i}", (700,), "float32") for i in range(5)], lambda name: int(name[1]) // 3, SLOT)

# Not fork: this process has threads (gloo, the store), and a child forked while one holds a lock hangs.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "rlhfspec_mega.resharding.collective"])


def content(update: int, bucket: Bucket) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * update + bucket.id)
    return torch.randint(0, 256, (bucket.bytes,), dtype=torch.uint8, generator=generator)


def sender_main(address, owner, turns, stay):
    sender = address.sender(owner)
    try:
        for update in range(UPDATES):
            for bucket in (bucket for bucket in BUCKETS if bucket.owner == owner):
                turns[owner].get(timeout=DEADLINE)  # stands for the controller, which has one bucket sent at a time
                sender.send(bucket, content(update, bucket))
                turns[BUCKETS[(bucket.id + 1) % len(BUCKETS)].owner].put(None)
        stay.get(timeout=DEADLINE)  # until the receivers are done
    finally:
        sender.close()


def receiver_main(address, index, results):
    receiver = address.receiver(index)
    try:
        sums = []
        for _ in range(UPDATES):
            for bucket in BUCKETS:
                data = receiver.receive(bucket)
                first = checksum(data)
                if index == 1:
                    signal.sigtimedwait([], 0.01)  # a slow engine: its slot must not be written meanwhile
                assert checksum(data) == first
                sums.append(first)
        results.put((index, sums))
    except BaseException:
        results.put((index, traceback.format_exc()))
    finally:
        receiver.close()


@pytest.mark.parametrize("kind", ["shared_memory", "collective"])
def test_buckets_of_every_owner_reach_every_receiver(kind):
    if kind == "shared_memory":
        host = SharedMemoryHost(SLOT, RECEIVERS, DEADLINE)
    else:
        host = CollectiveHost("127.0.0.1", OWNERS, RECEIVERS, SLOT, DEADLINE)
    results, stay, turns = CONTEXT.Queue(), CONTEXT.Queue(), [CONTEXT.Queue() for _ in range(OWNERS)]
    processes = [CONTEXT.Process(target=receiver_main, args=(host.address, i, results)) for i in range(RECEIVERS)]
    processes += [CONTEXT.Process(target=sender_main, args=(host.address, i, turns, stay)) for i in range(OWNERS)]
    for process in processes:
        process.start()
    turns[0].put(None)
    received = dict(results.get(timeout=DEADLINE) for _ in range(RECEIVERS))
    for _ in range(OWNERS):
        stay.put(None)
    for process in processes:
        process.join(DEADLINE)
    host.close()
    expected = [checksum(content(update, bucket)) for update in range(UPDATES) for bucket in BUCKETS]
    assert received == dict.fromkeys(range(RECEIVERS), expected)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def test_two_buckets_are_in_flight_and_the_third_waits():
    host = SharedMemoryHost(SLOT, 2, 0.2)
    sender, receivers = host.address.sender(0), [host.address.receiver(i) for i in range(2)]
    first, second, third = BUCKETS[:3]
    sender.send(first, content(0, first))
    sender.send(second, content(0, second))
    with pytest.raises(RunError, match=r"Bucket 2 found no free slot, engines \[0, 1\]"):
        sender.send(third, content(0, third))
    held = receivers[0].receive(first)
    receivers[0].receive(second)  # gives the first back
    receivers[1].receive(first)
    with pytest.raises(RunError, match=r"engines \[1\] did not take"):
        sender.send(third, content(0, third))
    receivers[1].close()
    sender.send(third, content(0, third))
    assert torch.equal(receivers[0].receive(third), content(0, third))
    assert torch.equal(held, content(0, third)[: held.numel()])  # the first bucket's slot


def beside(work, *args):
    """Run in a thread that does not keep a failed test from ending."""
    future = Future()

    def run():
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_closed_shared_memory_ends_the_waits_of_both_ends():
    host = SharedMemoryHost(SLOT, 2, NEVER)
    sender, receivers = host.address.sender(0), [host.address.receiver(i) for i in range(2)]
    for bucket in BUCKETS[:2]:
        sender.send(bucket, content(0, bucket))
        receivers[0].receive(bucket)
    waits = [
        beside(sender.send, BUCKETS[2], content(0, BUCKETS[2])),
        beside(receivers[0].receive, BUCKETS[2]),
    ]
    time.sleep(0.2)
    assert not any(wait.done() for wait in waits)
    for _ in range(2):
        host.close()
    with pytest.raises(RunError, match=r"Bucket 2 found no free slot, engines \[1\] did .*: the transport was closed"):
        waits[0].result(DEADLINE)
    with pytest.raises(RunError, match="Engine 0 did not get bucket 2: the transport was closed"):
        waits[1].result(DEADLINE)
    assert torch.equal(receivers[1].receive(BUCKETS[0]), content(0, BUCKETS[0]))  # what was sent is there still
    for receiver in receivers:
        receiver.close()
    host.drop(1)  # too late to matter


def test_nobody_waits_again_for_a_dropped_receiver():
    host = SharedMemoryHost(SLOT, 1, 1.0)
    sender, receiver = host.address.sender(0), host.address.receiver(0)
    host.drop(0)
    receiver.close()  # one that failed, and is still there
    for bucket in BUCKETS[:3]:
        sender.send(bucket, content(0, bucket))


def test_receiver_waits_until_the_deadline_and_refuses_another_plan():
    host = SharedMemoryHost(SLOT, 1, 0.1)
    sender, receiver = host.address.sender(0), host.address.receiver(0)
    with pytest.raises(RunError, match=r"Engine 0 did not get bucket 0 within 0\.1 s"):
        receiver.receive(BUCKETS[0])
    sender.send(BUCKETS[1], content(0, BUCKETS[1]))
    with pytest.raises(RunError, match="got bucket 1 instead of 0"):
        receiver.receive(BUCKETS[0])
    with pytest.raises(RunError, match="exceeds the slot"):
        sender.send(Bucket(9, 0, (), SLOT + 16), torch.zeros(SLOT + 16, dtype=torch.uint8))


def killed_host(addresses):
    host = SharedMemoryHost(SLOT, 1, 5.0)
    addresses.put(host.address)
    signal.pause()


def test_a_killed_host_leaves_nothing_and_open_ends_go_on():
    before = set(os.listdir("/dev/shm"))
    addresses = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=killed_host, args=(addresses,))
    process.start()
    address = addresses.get()
    sender, receiver = address.sender(0), address.receiver(0)
    process.kill()
    process.join()
    sender.send(BUCKETS[0], content(0, BUCKETS[0]))
    assert torch.equal(receiver.receive(BUCKETS[0]), content(0, BUCKETS[0]))
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "rlhfspec" in name}
    with pytest.raises(RunError, match="transport=collective"):
        address.receiver(0)


def test_memory_that_cannot_be_had_is_refused():
    with pytest.raises(UserError, match=r"lower resharding\.bucket_mib"):
        SharedMemoryHost(1 << 50, 1, 1.0)
    with pytest.raises(UserError, match="transport=collective"):
        SharedMemoryHost(SLOT, 10_000, 1.0)


def silent_sender(address, started):
    started.put(None)
    sender = address.sender(0)
    signal.pause()
    sender.close()


def test_collective_waits_until_the_deadline():
    host = CollectiveHost("127.0.0.1", 1, 1, SLOT, 3.0)
    started = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=silent_sender, args=(host.address, started))
    process.start()
    started.get()
    receiver = host.address.receiver(0)
    with pytest.raises(RunError, match="Bucket 0 of pipeline stage 0 was not broadcast within 3 s"):
        receiver.receive(BUCKETS[0])
    process.kill()
    process.join()


def test_collective_members_that_do_not_come_are_missed():
    host = CollectiveHost("127.0.0.1", 1, 2, SLOT, 1.0)
    with pytest.raises(RunError, match=r"pipeline stage 0 did not form within 1 s, 1 of 3 members came"):
        host.address.receiver(0)


@pytest.mark.parametrize("end", ["drop", "close"])
def test_collective_members_do_not_wait_for_one_that_will_not_come(end):
    host = CollectiveHost("127.0.0.1", OWNERS, 2, SLOT, NEVER)
    came = [beside(host.address.sender, 0), beside(host.address.sender, 1), beside(host.address.receiver, 0)]
    time.sleep(0.2)
    assert not any(member.done() for member in came)
    if end == "drop":
        host.drop(1)
        host.drop(1)
        came.append(beside(host.address.receiver, 1))  # slow rather than dead
        why = "engine 1 has died or failed"
    else:
        host.close()
        host.close()
        host.drop(1)
        came.append(beside(host.address.receiver, 1))
        why = "the transport .*was closed"
    for member in came:
        with pytest.raises(RunError, match=f"group of pipeline stage [01] did not form: {why}"):
            member.result(DEADLINE)


def waiting_receiver(address, said):
    receiver = address.receiver(0)
    said.put("connected")
    try:
        receiver.receive(BUCKETS[0])
    except RunError as error:
        said.put(str(error))
    receiver.close()


def test_a_broadcast_ends_with_its_host():
    host = CollectiveHost("127.0.0.1", 1, 1, SLOT, NEVER)
    said = CONTEXT.Queue()
    process = CONTEXT.Process(target=waiting_receiver, args=(host.address, said))
    process.start()
    sender = host.address.sender(0)  # which sends nothing
    assert said.get(timeout=DEADLINE) == "connected"
    host.close()
    assert said.get(timeout=DEADLINE).startswith("The broadcast of bucket 0 was cancelled: the transport was closed")
    sender.close()
    process.join(DEADLINE)
    assert process.exitcode == 0
