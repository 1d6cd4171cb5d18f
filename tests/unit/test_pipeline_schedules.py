"""Fused pipeline schedules: the published instances, bounds, memory, proofs of small ones, and deadlocks."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.pipeline import dispatch as kernel
from rlhfspec_mega.planning.pipeline import due_dates, justification, solver
from rlhfspec_mega.planning.pipeline import greedy as greedy_module
from rlhfspec_mega.planning.pipeline.baselines import in_turn, one_after_the_other, rising_then_falling, serial
from rlhfspec_mega.planning.pipeline.bounds import lower_bound
from rlhfspec_mega.planning.pipeline.channels import find_deadlock, pair_model_direction
from rlhfspec_mega.planning.pipeline.greedy import greedy
from rlhfspec_mega.planning.pipeline.notation import labels
from rlhfspec_mega.planning.pipeline.problem import Problem
from rlhfspec_mega.planning.pipeline.schedule import timed
from rlhfspec_mega.planning.pipeline.solver import solve
from tests.pipeline_problems import checked_makespan, equal_problem, needs, random_orders, unequal_problem

# Stages, micro-batches, forward times, lower bound, serial 1F1B and the latency found: RLHFuse (arXiv 2409.13221).
PUBLISHED = [
    ((8, 4), (32, 16), (5, 4), 708, 813, 708),
    ((8, 4), (8, 4), (5, 4), 225, 309, 225),
    ((8, 8), (32, 32), (5, 2), 702, 819, 702),
    ((8, 8), (16, 16), (5, 2), 366, 483, 366),
    ((16, 8), (64, 32), (2, 2), 618, 708, 618),
    ((16, 8), (16, 8), (2, 2), 186, 276, 186),
    ((16, 16), (64, 64), (2, 1), 606, 711, 613),
    ((16, 16), (16, 16), (2, 1), 186, 279, 186),
]
SHAPES = [((2, 2), (4, 4)), ((4, 2), (6, 3)), ((4, 4), (4, 6)), ((4, 1), (5, 2)), ((3, 3), (1, 2)), ((6, 2), (6, 2))]


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_the_published_instances(published: tuple) -> None:
    stages, micro_batches, forward, bound, one_by_one, latency = published
    problem = equal_problem(stages, micro_batches, forward)
    found = solve(problem)
    assert checked_makespan(problem, labels(problem, found.schedule)) == (
        found.schedule.makespan,
        found.schedule.peak_memory,
    )
    assert found.bound == bound == lower_bound(problem)
    assert sum(one.makespan for one in serial(problem)) == one_by_one
    assert found.schedule.makespan <= latency


@given(st.sampled_from(SHAPES), st.sampled_from([0.0, 0.3, 0.8]), st.integers(0, 1000), st.floats(0.2, 1.0))
@settings(max_examples=60, deadline=None)
def test_never_below_the_bound_nor_above_simple_schedules(shape: tuple, sigma: float, seed: int, ratio: float) -> None:
    problem = unequal_problem(*shape, (1.0, ratio), sigma, seed)
    found = solve(problem, tasks=20_000, seed=seed)
    makespan, peak = checked_makespan(problem, labels(problem, found.schedule))
    assert makespan == pytest.approx(found.schedule.makespan) and peak == pytest.approx(found.schedule.peak_memory)
    assert makespan >= found.bound * (1 - 1e-9)
    quick = greedy(problem)
    assert quick is not None and makespan <= min(quick.makespan, in_turn(problem).makespan) * (1 + 1e-9)
    assert makespan <= sum(one.makespan for one in serial(problem)) * (1 + 1e-9)
    assert find_deadlock(problem, found.schedule.orders) is None


@given(st.sampled_from(SHAPES), st.integers(0, 1000), st.floats(1.0, 3.0))
@settings(max_examples=40, deadline=None)
def test_activations_stay_within_the_memory(shape: tuple, seed: int, times: float) -> None:
    free = unequal_problem(*shape, (1.0, 1.0), 0.5, seed)
    largest = max(one.activation.max() for one in free.pipelines)
    problem = Problem(free.pipelines, times * largest)
    found = solve(problem, tasks=20_000, seed=seed)
    _, peak = checked_makespan(problem, labels(problem, found.schedule))
    assert peak <= problem.memory * (1 + 1e-9)
    with pytest.raises(UserError, match="allow more, or make micro-batches smaller"):
        solve(Problem(free.pipelines, 0.99 * largest))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_schedules_of_small_problems_are_found(seed: int) -> None:
    """Proved by ortools' CP-SAT, which is free to take micro-batches in any order on any stage."""
    draw = random.Random(seed)
    stages, counts = draw.choice([((2, 2), (3, 3)), ((2, 1), (3, 2)), ((4, 2), (2, 2)), ((3, 3), (2, 2))])
    problem = equal_problem(stages, counts, (draw.randint(1, 4), draw.randint(1, 4)))
    if seed % 2:
        for one in problem.pipelines:
            lengths = np.array([draw.randint(1, 5) for _ in range(one.micro_batches)], float)
            one.forward[:], one.backward[:] = lengths, 2 * lengths
    proved = proved_makespan(problem)
    found = solve(problem, tasks=400_000).schedule.makespan
    assert lower_bound(problem) <= proved <= found
    assert found == proved


def proved_makespan(problem: Problem) -> int:
    model, horizon = cp_model.CpModel(), int(sum(one.forward.sum() + one.backward.sum() for one in problem.pipelines))
    end = model.new_int_var(0, horizon, "end")
    on_device: list[list[cp_model.IntervalVar]] = [[] for _ in range(problem.devices)]
    starts, ends = {}, {}
    for line, one in enumerate(problem.pipelines):
        for stage, device in enumerate(one.devices):
            for batch in range(one.micro_batches):
                for backward in (False, True):
                    key = (line, stage, batch, backward)
                    took = int((one.backward if backward else one.forward)[stage, batch])
                    starts[key] = model.new_int_var(0, horizon, str(key))
                    ends[key] = starts[key] + took
                    on_device[device].append(model.new_fixed_size_interval_var(starts[key], took, str(key)))
                    model.add(end >= ends[key])
    for intervals in on_device:
        model.add_no_overlap(intervals)
    for key, start in starts.items():
        line, stage, batch, backward = key
        last = problem.pipelines[line].stages - 1
        if not backward and stage:
            model.add(start >= ends[line, stage - 1, batch, False])
        if backward:
            model.add(start >= ends[(line, stage + 1, batch, True) if stage < last else (line, stage, batch, False)])
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return int(solver.objective_value)


@pytest.mark.skipif(not hasattr(kernel.dispatch, "py_func"), reason="numba is not installed")
def test_the_same_schedule_with_and_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = unequal_problem((4, 2), (4, 2), (1.0, 0.6), 0.5, 3)
    compiled = solve(problem, tasks=10_000).schedule
    for module in (kernel, justification, due_dates, greedy_module, solver):
        for name, value in list(vars(module).items()):
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)
    assert solve(problem, tasks=10_000).schedule == compiled


@pytest.mark.parametrize("shape", [((4, 2), (8, 4)), ((4, 4), (8, 8)), ((8, 8), (16, 16))], ids=str)
def test_justification_makes_schedules_shorter(shape: tuple) -> None:
    ratios = []
    for seed in range(20):
        problem = unequal_problem(*shape, (1.0, 0.6), 0.77, seed)
        arrays = kernel.as_arrays(problem)
        dates = due_dates.Lots(problem, arrays, seed).draw()
        seconds, size = kernel.placed(arrays, dates.orders)
        starts, found, still = np.zeros((3, *seconds.shape))
        no_limit = np.full(len(arrays.counts), arrays.activation.shape[1])
        due, limits = due_dates.due_dates(arrays, dates), (no_limit, problem.capacities, 0.0, np.inf)
        before, _, _ = kernel.dispatch(arrays, seconds, size, due, arrays.around[1], *limits, starts)
        makespan, peak, _ = justification.justified(arrays, dates.orders, starts, still, *limits, found)
        schedule = kernel.schedule_of(problem, dates.orders, found)
        assert checked_makespan(problem, labels(problem, schedule)) == pytest.approx((makespan, peak))
        ratios.append(makespan / before)
    assert np.mean(ratios) < 0.98


def test_the_same_effort_gives_the_same_schedule() -> None:
    problem = unequal_problem((4, 4), (6, 6), (1.0, 0.6), 0.5, 3)
    first, second = (solve(problem, tasks=50_000, seed=1) for _ in range(2))
    assert first.schedule == second.schedule


def test_memory_is_saved_where_time_allows() -> None:
    problem = equal_problem((8, 4), (32, 16), (5, 4))
    short, long = solve(problem, tasks=50_000), solve(problem, tasks=2_000_000)
    assert short.schedule.makespan == long.schedule.makespan == 708
    assert long.schedule.peak_memory < short.schedule.peak_memory


def test_which_communicators_deadlock() -> None:
    """As channels of NCCL do: 60 random schedules, by what has a communicator of its own."""
    channels = {
        "pair, model, direction": pair_model_direction,
        "model, direction": lambda one: (one.model, one.task.backward),
        "pair, direction": lambda one: (*one.pair, one.task.backward),
        "pair, model": lambda one: (*one.pair, one.model),
    }
    stuck = dict.fromkeys(channels, 0)
    for seed in range(60):
        shape = random.Random(seed).choice([((4, 4), (4, 4)), ((4, 2), (4, 2)), ((2, 2), (4, 4)), ((4, 1), (4, 2))])
        problem = equal_problem(*shape, (1, 1))
        orders = random_orders(problem, seed)
        assert timed(problem, orders).makespan < np.inf
        for name, channel in channels.items():
            found = [find_deadlock(problem, orders, channel, ahead) for ahead in (0, 1, 2)]
            stuck[name] += any(found)
            assert all(one is None or one.startswith("These devices wait for ever: ") for one in found)
    assert stuck["pair, model, direction"] == 0
    assert all(stuck[name] > 0 for name in channels if name != "pair, model, direction"), stuck


def test_one_after_the_other_is_megatrons_1f1b() -> None:
    problem = equal_problem((4,), (6,), (1,))
    orders = one_after_the_other(problem)
    assert [(task.micro_batch, task.backward) for task in orders[2]][:5] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]
    assert timed(problem, orders).peak_memory == 4 and timed(problem, orders).makespan == (6 + 4 - 1) * 3


def test_orders_that_are_not_a_schedule() -> None:
    problem = equal_problem((2, 2), (2, 2), (1, 1))
    orders = random_orders(problem, 0)
    with pytest.raises(ValueError, match="other tasks"):
        timed(problem, [orders[0][:-1], orders[1]])
    backwards_first = [list(reversed(order)) for order in orders]
    with pytest.raises(ValueError, match="wait for each other"):
        timed(problem, backwards_first)
    assert all(needs(problem, task) is not None for task in orders[0])


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_rising_then_falling(lengths: list[float]) -> None:
    order = rising_then_falling(lengths)
    assert sorted(order) == list(range(len(lengths)))
    steps = np.diff([lengths[place] for place in order])
    falls = np.flatnonzero(steps < 0)
    assert len(set(lengths)) == 1 or not len(falls) or (steps[falls[0] :] <= 0).all()
