"""Which engine gets which samples: what is dealt at the start, and what waits in the shared queue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.rollout.assignment import Assignment, spare_samples
from rlhfspec_mega.rollout.shared_queue import SharedQueue
from rlhfspec_mega.types import EngineReport, GenerationRequest, GenerationResult, Prompt, Sample


def requests_of(groups: list[int]) -> list[GenerationRequest]:
    """Requests of groups of these sizes."""
    return [
        GenerationRequest(f"{group}-{member}", str(group), (1, 2), 0, 8)
        for group, size in enumerate(groups)
        for member in range(size)
    ]


def opened(requests: list[GenerationRequest]) -> Ledger:
    ledger, prompt = Ledger(), Prompt(0, "", "", (1, 2))
    ledger.open([Sample(request.sample_id, 0, prompt, 0) for request in requests], Purpose.TRAIN)
    return ledger


def result_of(request: GenerationRequest) -> GenerationResult:
    return GenerationResult(request.sample_id, [3], [-0.5], [0], "stop")


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    engines=st.integers(1, 4),
    slots=st.integers(1, 8),
    data=st.data(),
)
def test_each_engine_takes_what_it_has_room_for(
    groups: list[int], engines: int, slots: int, data: st.DataObject
) -> None:
    requests = requests_of(groups)
    by_id = {request.sample_id: request for request in requests}
    ranks = list(range(engines))
    work = Assignment(requests, engines, ranks, opened(requests), deterministic=False, slots=slots)
    held: dict[int, list[str]] = {rank: [] for rank in ranks}
    given_out: list[str] = []
    ended: dict[int, int] = {}
    while not work.done:
        rank = data.draw(st.sampled_from(ranks))
        taken = [snapshot.request.sample_id for snapshot in work.take(rank)]
        held[rank] += taken
        given_out += taken
        assert not taken or len(held[rank]) <= slots + spare_samples(slots, ended.get(rank, 0))
        assert len(held[rank]) >= slots or not work.waiting
        count = ended[rank] = data.draw(st.integers(min(1, len(held[rank])), len(held[rank])))
        finished, held[rank] = held[rank][:count], held[rank][count:]
        report = EngineReport([result_of(by_id[one]) for one in finished], [], len(held[rank]))
        work.report(rank, report, ranks)
    assert sorted(given_out) == sorted(by_id)


def test_an_engine_whose_samples_end_quickly_takes_more_ahead_but_leaves_half_of_the_rest() -> None:
    requests = requests_of([1] * 40)
    by_id = {request.sample_id: request for request in requests}
    work = Assignment(requests, 2, [0, 1], opened(requests), deterministic=False, slots=4)
    for rank in (0, 1):
        work.take(rank)
    taken = []
    for ended in (4, 4, 4, 4, 4, 4, 4):
        mine = [name for name, rank in work.owners().items() if rank == 0]
        report = EngineReport([result_of(by_id[name]) for name in mine[:ended]], [], len(mine[ended:]))
        work.report(0, report, [0, 1])
        taken.append(len(work.take(0)))
    assert taken == [7, 4, 4, 3, 3, 3, 3]


def test_samples_of_dead_engines_go_to_the_others_at_once() -> None:
    requests = requests_of([2, 2, 2])
    work = Assignment(requests, 2, [0, 1], opened(requests), deterministic=False, slots=1)
    assert len(work.take(0)) == len(work.take(1)) == 2 and work.waiting
    work.lose(0, [1])
    assert len(work.take(1)) == 2 and work.waiting  # the dead engine's, beyond the limit; the third group still waits


def test_members_of_a_group_stay_together_in_the_queue() -> None:
    queue = SharedQueue[int]()
    queue.extend("a", [1, 2, 3, 4]), queue.extend("b", [5, 6])
    assert [queue.take(0), queue.take(1), queue.take(0), queue.take(1)] == [1, 5, 2, 6]
    assert queue.take(1) == 3  # nothing is left of its own group, nor of a fresh one
    queue.extend("a", [7])
    assert [queue.take(0), queue.take(0)] == [4, 7] and not queue
    queue.extend("a", [8]), queue.extend("c", [9])
    assert [queue.take(1), queue.take(0)] == [8, 9] and not queue
    queue.extend("a", [10])
    assert queue.take(1) == 10  # by the engine that has begun the group; it is not fresh then for others
    queue.extend("d", [11])
    assert queue.take(0) == 11
    with pytest.raises(IndexError):
        queue.take(0)


def test_what_fits_is_dealt_evenly_by_groups() -> None:
    requests = requests_of([4] * 6)
    work = Assignment(requests, 2, [0, 1], opened(requests), deterministic=False, slots=16)
    shares = [{snapshot.request.group_id for snapshot in work.take(rank)} for rank in (0, 1)]
    assert shares == [{"0", "2", "4"}, {"1", "3", "5"}] and not work.waiting


def test_samples_added_later_go_where_there_is_room() -> None:
    first, later = requests_of([4, 4])[:4], requests_of([4, 4])[4:]
    work = Assignment(first, 2, [0, 1], opened([*first, *later]), deterministic=False, slots=3)
    assert len(work.take(0)) == 4 and not work.take(1)
    work.add(later, [0, 1])
    assert not work.take(0) and len(work.take(1)) == 4
