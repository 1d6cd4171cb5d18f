"""Makes a schedule from due dates: a device that is free computes, of its tasks that are ready first, the most urgent.

Each stage takes micro-batches in one order, forward and backward alike, so that a device has at most two candidates of
a pipeline: its next forward and its next backward. This is list scheduling (Graham 1966) with limits of live
micro-batches and of activation memory.

Here a node is a stage of a pipeline; V counts the nodes of all pipelines, L pipelines, D devices, and M the
micro-batches of the pipeline that has most of them. Rows 2v and 2v + 1 of an array [2V, M] are the forwards and the
backwards of node v. A place is an index into the order in which a pipeline takes its micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.pipeline.problem import Doubles, Problem
from rlhfspec_mega.planning.pipeline.schedule import Schedule, Task, timed

Ints = NDArray[np.int64]


class Arrays(NamedTuple):
    """A problem as arrays.

    Attributes:
        first: [L + 1] the first node of each pipeline; its nodes follow each other.
        counts: [V] micro-batches.
        device_of: [V].
        hosted: [D, H] nodes of each device; -1 where there is none.
        durations: [2V, M] seconds.
        activation: [V, M] bytes.
        tails: [V, M] seconds of the backwards that must follow that of a node.
        chains: [V, M] least seconds from the start of a node's forward to the start of its backward.
        work: [D] seconds of all tasks of a device.
        around: [2, D] least seconds that must pass before the first task of a device, and after its last.
    """

    first: Ints
    counts: Ints
    device_of: Ints
    hosted: Ints
    durations: Doubles
    activation: Doubles
    tails: Doubles
    chains: Doubles
    work: Doubles
    around: Doubles


def as_arrays(problem: Problem) -> Arrays:
    """The problem's numbers for the compiled functions."""
    pipelines = problem.pipelines
    first = np.concatenate([[0], np.cumsum([one.stages for one in pipelines])])
    nodes, most = int(first[-1]), max(one.micro_batches for one in pipelines)
    durations, activation = np.zeros((2 * nodes, most)), np.zeros((nodes, most))
    heads, tails, chains = np.zeros((3, nodes, most))
    for begin, end, one in zip(first[:-1], first[1:], pipelines, strict=True):
        here = (slice(begin, end), slice(one.micro_batches))
        durations[2 * begin : 2 * end : 2, : one.micro_batches] = one.forward
        durations[2 * begin + 1 : 2 * end : 2, : one.micro_batches] = one.backward
        activation[here] = one.activation
        heads[here] = np.cumsum(one.forward, axis=0) - one.forward
        tails[here] = np.cumsum(one.backward, axis=0) - one.backward
        chains[here] = (one.forward + one.backward)[::-1].cumsum(axis=0)[::-1] - one.backward
    counts = np.repeat([one.micro_batches for one in pipelines], [one.stages for one in pipelines])
    on_device = [[int(first[line]) + stage for line, stage in found] for found in problem.hosted]
    hosted = np.full((problem.devices, max(map(len, on_device))), -1, np.int64)
    for device, found in enumerate(on_device):
        hosted[device, : len(found)] = found
    return Arrays(
        first,
        counts,
        np.concatenate([one.devices for one in pipelines]),
        hosted,
        durations,
        activation,
        tails,
        chains,
        np.array([sum(durations[2 * v : 2 * v + 2].sum() for v in found) for found in on_device]),
        np.array([[min(x[v, : counts[v]].min() for v in found) for found in on_device] for x in (heads, tails)]),
    )


@compiled
def placed(arrays: Arrays, orders: Ints) -> tuple[Doubles, Doubles]:
    """Durations [2V, M] and activation bytes [V, M] by place, of micro-batches in these orders [L, M]."""
    seconds, size = np.zeros(arrays.durations.shape), np.zeros(arrays.activation.shape)
    for line in range(len(arrays.first) - 1):
        for node in range(arrays.first[line], arrays.first[line + 1]):
            for place in range(arrays.counts[node]):
                batch = orders[line, place]
                seconds[2 * node, place] = arrays.durations[2 * node, batch]
                seconds[2 * node + 1, place] = arrays.durations[2 * node + 1, batch]
                size[node, place] = arrays.activation[node, batch]
    return seconds, size


@compiled
def _neighbours(first: Ints, nodes: int) -> Ints:
    """[2, V] the node before and the node behind each node of a pipeline; -1 at its ends."""
    beside = np.empty((2, nodes), np.int64)
    beside[0], beside[1] = np.arange(nodes) - 1, np.arange(nodes) + 1
    for line in range(len(first) - 1):
        beside[0, first[line]], beside[1, first[line + 1] - 1] = -1, -1
    return beside


@compiled
def _choose(
    nodes: Ints,
    counts: Ints,
    beside: Ints,
    most_live: Ints,
    room: float,
    free: float,
    patience: float,
    done: Ints,
    ends: Doubles,
    size: Doubles,
    due: Doubles,
    ready: Doubles,
) -> tuple[float, int]:
    """(start, row) of the task that a device with these nodes computes next; start is infinite if none is known.

    Args:
        room: bytes of memory that are left.
        free: when the device has ended its last task.
        done: [2V] tasks that have been given a time.
        ready: [2H] a buffer.
    """
    before, behind, soonest = beside[0], beside[1], np.inf
    for slot, node in enumerate(nodes):
        ready[2 * slot], ready[2 * slot + 1] = np.inf, np.inf
        if node < 0:
            continue
        forwards, backwards = done[2 * node], done[2 * node + 1]
        if forwards < counts[node] and forwards - backwards < most_live[node] and size[node, forwards] <= room:
            if before[node] < 0:
                ready[2 * slot] = free
            elif done[2 * before[node]] > forwards:
                ready[2 * slot] = max(free, ends[2 * before[node], forwards])
        if backwards < forwards:
            if behind[node] < 0:
                ready[2 * slot + 1] = max(free, ends[2 * node, backwards])
            elif done[2 * behind[node] + 1] > backwards:
                ready[2 * slot + 1] = max(free, ends[2 * behind[node] + 1, backwards])
        soonest = min(soonest, ready[2 * slot], ready[2 * slot + 1])
    start, row, urgency = np.inf, -1, np.inf
    if soonest < np.inf:
        for one in range(len(ready)):
            if ready[one] <= soonest + patience:
                task = 2 * nodes[one // 2] + one % 2
                if due[task, done[task]] < urgency:
                    start, row, urgency = ready[one], task, due[task, done[task]]
    return start, row


@compiled
def dispatch(
    arrays: Arrays,
    seconds: Doubles,
    size: Doubles,
    due: Doubles,
    followed: Doubles,
    most_live: Ints,
    memory: Doubles,
    patience: float,
    limit: float,
    starts: Doubles,
) -> tuple[float, float, int]:
    """(makespan, peak of activation bytes on any device, tasks simulated) of the schedule with these due dates.

    Args:
        seconds, size: see `placed`.
        due: [2V, M] by place: of tasks that are ready at once, the one with the least comes first.
        followed: [D] least seconds that must pass after the last task of a device.
        most_live: [V] most micro-batches between their forward and their backward.
        memory: [D] most bytes of activations on each device.
        patience: seconds that a device may wait for a more urgent task whose start is known.
        limit: a schedule that cannot stay below it is given up: (infinity, 0, tasks), as one in which memory runs out.
        starts: [2V, M] the result, by place.
    """
    counts, device_of, hosted = arrays.counts, arrays.device_of, arrays.hosted
    devices = len(hosted)
    beside = _neighbours(arrays.first, len(counts))
    ends, done = np.zeros(seconds.shape), np.zeros(len(seconds), np.int64)
    free, live, at = np.zeros(devices), np.zeros(devices), np.full(devices, np.inf)
    chosen, ready = np.zeros(devices, np.int64), np.empty(2 * hosted.shape[1])
    left = arrays.work + followed  # seconds that each device needs at least from now on
    stale, stale_count = np.arange(devices), devices  # devices that may choose another task now
    makespan, peak, total = 0.0, 0.0, 2 * counts.sum()
    for simulated in range(total):
        for number in range(stale_count):
            one = stale[number]
            room = memory[one] - live[one]
            at[one], chosen[one] = _choose(
                hosted[one], counts, beside, most_live, room, free[one], patience, done, ends, size, due, ready
            )
        device = np.argmin(at)
        now, row = at[device], chosen[device]
        if now == np.inf:
            return np.inf, 0.0, simulated
        node, place = row // 2, done[row]
        end = now + seconds[row, place]
        left[device] -= seconds[row, place]
        if end + left[device] >= limit:
            return np.inf, 0.0, simulated
        starts[row, place], ends[row, place], done[row] = now, end, place + 1
        free[device], makespan = end, max(makespan, end)
        forward = row % 2 == 0
        live[device] += size[node, place] if forward else -size[node, place]
        peak = max(peak, live[device])
        reached = beside[1 if forward else 0, node]
        stale[0], stale_count = device, 1
        if reached >= 0:
            stale[1], stale_count = device_of[reached], 2
    return makespan, peak, total


def schedule_of(problem: Problem, orders: Ints, starts: Doubles) -> Schedule:
    """The schedule with these start times; see dispatch."""
    found: list[list[tuple[float, bool, Task]]] = [[] for _ in range(problem.devices)]
    node = 0
    for line, one in enumerate(problem.pipelines):
        for stage, device in enumerate(one.devices):
            for place in range(one.micro_batches):
                for way in (0, 1):
                    task = Task(line, stage, int(orders[line, place]), bool(way))
                    found[device].append((float(starts[2 * node + way, place]), bool(way), task))
            node += 1
    return timed(problem, [[task for _, _, task in sorted(tasks)] for tasks in found])
