"""Which updates are fused, by which costs; the options; the chart and the tool."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhfspec_mega.config.checks import check_composition
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.megatron.description import ParallelSizes
from rlhfspec_mega.megatron.groups import placed, positions
from rlhfspec_mega.planning.pipeline.fused_model import FusedModel
from rlhfspec_mega.planning.pipeline.fusion import FusionPlanner
from rlhfspec_mega.planning.pipeline.task_costs import TaskCosts
from tests.pipeline_problems import checked_makespan, equal_problem, unequal_problem
from tools import pipeline


def planner(stages: tuple[int, int], always: bool = False, fixed: bool = True) -> FusionPlanner:
    models = [FusedModel(name, size, [1e6] * size, [100.0] * size) for name, size in zip("ab", stages, strict=True)]
    return FusionPlanner(*models, always=always, fixed_costs=fixed)


def test_a_plan_has_every_task_of_every_rank() -> None:
    tokens = {"a": [[30, 10, 20], [5, 5, 5]], "b": [[9, 9], [8, 7], [1, 2], [3, 4]]}
    plan = planner((4, 2), always=True).plan(tokens)
    assert plan is not None and len(plan.tasks) == 2 and all(len(stages) == 4 for stages in plan.tasks)
    for stages in plan.tasks:
        for tasks in stages:
            assert sorted(tasks) == sorted(
                (name, batch, backward) for name, count in (("a", 3), ("b", 2)) for batch in range(count)
                for backward in (False, True)
            )  # fmt: skip
    assert plan.gain == pytest.approx(plan.serial / plan.makespan) and plan.gain > 1


def test_without_a_gain_nothing_is_fused() -> None:
    many = {"a": [[10] * 200], "b": [[10] * 200]}  # hardly a bubble to fill
    assert planner((2, 2)).plan(many) is None
    assert planner((2, 2), always=True).plan(many) is not None
    assert planner((2, 2)).plan({"a": [[10] * 2], "b": [[10] * 2]}) is not None


def test_costs_are_a_line_that_is_learnt() -> None:
    costs = TaskCosts({"a": [2e6, 1e6]}, fixed=False)
    tokens = np.array([10.0, 20.0, 40.0])
    before = costs.seconds("a", False, tokens)
    assert before.shape == (2, 3) and (before[0] == 2 * before[1]).all()
    assert (costs.seconds("a", True, tokens) == 2 * before).all()
    for _ in range(3):
        costs.learn("a", 1, False, tokens, 0.5 + 0.01 * tokens)
    assert costs.seconds("a", False, np.array([0.0, 100.0]))[1] == pytest.approx([0.5, 1.5])
    assert (costs.seconds("a", False, tokens)[0] == before[0]).all()
    costs.learn("a", 0, False, tokens, 1.0 / tokens)  # the longer, the faster: noise, which must not go below zero
    assert (costs.seconds("a", False, np.array([1.0, 1000.0])) > 0).all()
    fixed = TaskCosts({"a": [2e6, 1e6]}, fixed=True)
    fixed.learn("a", 0, False, tokens, tokens)
    assert (fixed.seconds("a", False, tokens) == before).all()


def test_opposed_pipelines_lie_on_the_same_ranks() -> None:
    actor = positions(ParallelSizes(tensor=2, pipeline=4, data=2))
    critic = positions(ParallelSizes(tensor=2, pipeline=2, data=4, opposed_to=4))
    assert len(set(critic)) == len(actor) == len(critic) == 16
    for one, other in zip(actor, critic, strict=True):
        assert one.tp == other.tp and other.pp == 1 - one.pp % 2 and other.dp == one.dp * 2 + one.pp // 2
    problem = equal_problem((4, 2), (2, 2), (1, 1))
    for rank, (one, other) in enumerate(zip(actor, critic, strict=True)):
        if one.tp == one.dp == 0:
            assert problem.pipelines[1 + other.dp].devices[other.pp] == one.pp, rank


def test_ranks_keep_their_order_where_torch_would_sort_them() -> None:
    ranks = placed([3, 1, 2])
    assert sorted(ranks) == [3, 1, 2] and 3 in ranks and dict.fromkeys(ranks, 0) == {1: 0, 2: 0, 3: 0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["actor.tensor_parallel=2"], "one pipeline stage, set actor.pipeline_parallel=2"),
        (["actor.tensor_parallel=1", "actor.pipeline_parallel=2", "critic.tensor_parallel=2",
          "critic.pipeline_parallel=1"], "set critic.tensor_parallel=1"),
        (["actor.tensor_parallel=1", "actor.pipeline_parallel=2", "actor.virtual_pipeline=2"], "interleaved"),
        (["actor.tensor_parallel=1", "actor.pipeline_parallel=2", "critic.pipeline_parallel=4",
          "cluster.devices_per_node=4"], "do not divide the actor's 2, set critic.pipeline_parallel=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_fused_is_refused(options: list[str], said: str) -> None:
    with pytest.raises(UserError, match="is not possible: ") as refused:
        check_composition(load_config(["algorithm=ppo", "placement.fuse=always", *options]))
    assert said in str(refused.value) and "placement.fuse=auto" in str(refused.value)
    check_composition(load_config(["algorithm=ppo", *options]))


def test_fusion_without_a_critic_is_refused() -> None:
    with pytest.raises(UserError, match="has no effect here: add algorithm=ppo"):
        check_composition(load_config(["placement.fuse=always"]))


def test_the_tool_solves_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "chart.png"
    words = ["--p", "4,2", "--m", "6,3", "--f", "1,2", "--seconds", "0.2"]
    assert pipeline.main([*words, "--json", "--out", str(chart)]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {"makespan", "lower_bound", "serial", "greedy", "peak_memory", "serial_peak_memory", "seconds", "schedule"}
    assert found.keys() == names and chart.read_bytes().startswith(b"\x89PNG")
    makespan, peak = checked_makespan(equal_problem((4, 2), (6, 3), (1, 2)), found["schedule"])
    assert (makespan, peak) == (found["makespan"], found["peak_memory"])
    assert found["lower_bound"] <= makespan <= min(found["greedy"], found["serial"])
    assert pipeline.main([*words, "--out", str(chart)]) == 0
    assert "device 3: 1F0" in capsys.readouterr().out


def test_the_tool_reads_unequal_durations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = unequal_problem((4, 2), (4, 2), (1.0, 0.5), 0.5, 1)
    first, *replicas = problem.pipelines
    file = tmp_path / "durations.json"
    of_replicas = {
        way: np.concatenate([getattr(one, way) for one in replicas], axis=1).tolist() for way in ("forward", "backward")
    }
    of_models = [{"forward": first.forward.tolist(), "backward": first.backward.tolist()}, of_replicas]
    file.write_text(json.dumps(of_models))
    words = ["--p", "4,2", "--m", "4,2", "--durations", str(file), "--seconds", "0.2", "--json"]
    assert pipeline.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert checked_makespan(problem, found["schedule"])[0] == pytest.approx(found["makespan"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--p", "4,3", "--m", "8,8", "--f", "1,1"], "3 stages of model 1 do not divide the 4 of model 0"),
        (["--p", "4,2", "--m", "8", "--f", "1,1"], "--m has 1 numbers, and --p 2"),
        (["--p", "4,2", "--m", "8,x", "--f", "1,1"], "'8,x' is not one number from 1 to 1024 for each model"),
        (["--p", "4,2", "--m", "8,0", "--f", "1,1"], "'8,0' is not one number"),
        (["--p", "4,2", "--m", "99999999999,1", "--f", "1,1"], "'99999999999,1' is not one number"),
        (["--p", "99999999999999999999,1", "--m", "1,1", "--f", "1,1"], "is not one number"),
        (["--p", "4,2", "--m", "8,4", "--f", "1e308,1e308"], "is not one number"),
        (["--p", "4,2", "--m", "8,4", "--f", "1,1", "--out", "x.svg"], "ends in .png"),
        (["--p", "4,2", "--m", "8,4", "--f", "1,1", "--out", "/tmp"], "ends in .png"),
        (["--p", "4,2", "--m", "8,4", "--f", "1,1", "--run", "outputs/x"], "--run takes the place of --p"),
        (["--p", "4,2", "--m", "8,4", "--f", "1,-1"], "'1,-1' is not one number"),
        (["--p", "4,2,1", "--m", "8,4,1", "--f", "1,1,1"], "one or two are possible"),
        (["--p", "4,2", "--f", "1,1"], "--m and --f are needed"),
        (["--p", "4,2", "--m", "8,4", "--f", "1,1", "--memory", "0.5"], "keeps up to 1 bytes"),
        (["--p", "4,2", "--m", "8,4", "--f", "1,1", "--durations", "x.json"], "leave those out"),
        (["--p", "4,2", "--durations", "/nowhere/x.json"], "No such file"),
        (["--m", "8,4"], "--p is needed, such as --p 4,4"),
        (["--run", "/nowhere"], "holds no run"),
    ],
)
def test_what_the_tool_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline.main([*words, "--json"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('[{"forward": [[1], ["1"]], "backward": [[1], [1]]}, {}]', "positive numbers"),
        ('[{"forward": [[1], [true]], "backward": [[1], [1]]}, {}]', "positive numbers"),
        ('[{"forward": [[1], [%s]], "backward": [[1], [1]]}, {}]' % ("9" * 400), "positive numbers"),
        ("[]", "a list of 2 objects"),
        ('[{"forward": [[1]]}, {}]', '"forward" has 1 stages, and --p says 2'),
        ('[{"forward": [[1], [1]]}, {}]', '"backward" must hold a list'),
        ('[{"forward": [[1], [0]], "backward": [[1], [1]]}, {}]', "positive numbers"),
        ('[{"forward": [[1, 2], [1]], "backward": [[1], [1]]}, {}]', "all of one length"),
        ('[{"forward": [[1], [1]], "backward": [[1, 2], [1, 2]]}, {}]', "1 forwards and 2 backwards"),
    ],
)
def test_bad_durations(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "durations.json"
    file.write_text(content)
    assert pipeline.main(["--p", "2,2", "--durations", str(file), "--json"]) == 2
    assert said in capsys.readouterr().err
