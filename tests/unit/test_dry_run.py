"""dry_run=: the plan of a run for hardware that is not here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlhfspec_mega.config.checks import check_config
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.dry_run import dry_run, plan_of
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout, parameters_per_rank

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        (["model=70b", "cluster=8n8g"], (8, 4)),
        (["model=70b", "cluster=4n8g"], (8, 4)),
        (["model=70b", "cluster=4n8g", "cluster/gpu=h200"], (8, 4)),
        (["model=32b", "cluster=8n8g"], (8, 2)),
        (["model=8b", "cluster=1n8g"], (4, 1)),
    ],
)
def test_large_runs_are_planned_without_their_hardware(run: list[str], layout: tuple[int, int]) -> None:
    config = load_config([*run])
    plan = plan_of(config)
    assert plan["fits"] and not plan["suggestion"]
    stages = parameters_per_rank(model_shape(config.model), ParallelLayout(*layout))
    count = config.cluster.nodes * config.cluster.devices_per_node
    assert Counter(plan["parameters"]["actor"]) == Counter({n: count * stages.count(n) // layout[1] for n in stages})
    assert [(one["node"], one["index"]) for one in plan["devices"]] == [
        divmod(device, config.cluster.devices_per_node) for device in range(count)
    ]
    most = max(sum(loads.values()) for one in plan["devices"] for loads in one["bytes"].values())
    assert plan["bound_by"]["bytes"] == most < 0.9 * plan["devices"][0]["capacity"]
    assert sorted(one["ranks"]["actor"] for one in plan["devices"]) == list(range(count))
    assert config.rollout.engine == "sglang"
    assert config.launcher.kind == ("ray" if config.cluster.nodes > 1 else "local")
    assert plan["resharding"]["transport"] == ("collective" if config.cluster.nodes > 1 else "shared_memory")


def test_the_map_has_a_line_for_nodes_that_are_alike() -> None:
    text, fits = dry_run(load_config(["model=70b", "cluster=8n8g", "cluster.nodes=64", "dry_run=true"]))
    assert fits and text.endswith("It fits.")
    assert [line.strip().split(":")[0] for line in text.splitlines() if line.startswith("  node ")] == [
        "node 0-15",
        "node 16-31",
        "node 32-47",
        "node 48-63",
    ]


@pytest.mark.parametrize(
    "run",
    [
        ["model=70b", "cluster=8n8g", "actor.tensor_parallel=2"],
        ["model=70b", "cluster=8n8g", "actor.recompute=false", "trainer.max_tokens_per_microbatch=65536"],
        ["model=32b", "cluster=4n8g", "actor.pipeline_parallel=1", "rollout.sglang.mem_fraction_static=0.7"],
        ["model=8b", "cluster=1n8g", "actor.tensor_parallel=1", "actor.sequence_parallel=false"],
    ],
)
def test_what_does_not_fit_is_answered_with_what_does(run: list[str]) -> None:
    refused = plan_of(load_config([*run]))
    assert not refused["fits"] and refused["suggestion"]
    given = {word.split("=")[0] for word in refused["suggestion"]}
    rest = [word for word in run if word.split("=")[0] not in given]
    assert plan_of(load_config([*rest, *refused["suggestion"]]))["fits"]


def test_a_run_on_a_cpu_has_a_plan_too() -> None:
    plan = plan_of(load_config([]))
    assert plan["fits"] and len(plan["devices"]) == 2
    assert set(plan["devices"][0]["bytes"]["generate"]) == {"actor", "draft", "engine", "reference"}


def test_bad_options_are_refused_as_in_a_run() -> None:
    with pytest.raises(UserError, match="layers"):
        plan_of(load_config(["model=70b", "cluster=8n8g", "actor.pipeline_parallel=3"]))


def test_the_command_starts_nothing(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "train.py", *words, f"output_dir={tmp_path / 'out'}"]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    done = run("model=8b", "cluster=1n8g", "dry_run=json")
    assert done.returncode == 0 and json.loads(done.stdout)["fits"]
    done = run("model=8b", "cluster=1n8g", "rollout.sglang.mem_fraction_static=0.8", "dry_run=true")
    assert done.returncode == 2 and "It does not fit" in done.stdout and not done.stderr
    done = run("model=70b", "cluster=1n8g", "dry_run=json")
    plan = json.loads(done.stdout)
    assert done.returncode == 2 and not plan["fits"] and plan["suggestion"][0] == "cluster=4n8g"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("run", "option"),
    [
        (["model=70b", "cluster=8n8g", "actor.recompute=false"], "trainer.max_tokens_per_microbatch"),
        (["model=70b", "cluster=8n8g", "rollout.sglang.mem_fraction_static=0.6"], "rollout.sglang.mem_fraction_static"),
        (["model=8b", "cluster=1n8g", "trainer.max_tokens_per_microbatch=131072"], "trainer.max_tokens_per_microbatch"),
    ],
)
def test_the_nearest_settings_change_one_option_where_that_is_enough(run: list[str], option: str) -> None:
    plan = plan_of(load_config(run))
    assert not plan["fits"]
    assert [word.split("=")[0] for word in plan["suggestion"]] == [option]


def test_a_real_run_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfspec_mega.config.machine.host_memory", lambda: 3 * 2**30)
    with pytest.raises(UserError, match=r"can be used .*; the nearest that fits is rollout.max_running_requests=\d+"):
        check_config(load_config(["rollout.max_running_requests=4096"]))
