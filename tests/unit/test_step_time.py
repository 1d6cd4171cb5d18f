"""Predicted times of a step: from a data sheet, and from the files of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlhfspec_mega.config.compose import load_config, saved_config
from rlhfspec_mega.config.describe import plain
from rlhfspec_mega.config.dry_run import dry_run, plan_of
from rlhfspec_mega.config.sizes import shape_and_sizes
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.pipeline.fusion import MIN_GAIN
from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve, MigrationTimes
from rlhfspec_mega.simulate.step import StepForecast, forecast_run, forecast_step
from rlhfspec_mega.simulate.step_calibrate import measured_costs
from rlhfspec_mega.simulate.step_costs import SHARED, MeasuredLengths, StepCosts, read_costs, setting, write_costs
from tools.command import exit_status

REPOSITORY = Path(__file__).resolve().parents[2]
PER_TOKEN, PREFILL = 0.1, 0.01
ENGINE = CostCurves(
    name="made up",
    source={},
    slots=64,
    kv_tokens=10**6,
    plain=DecodeCurve((1,), (PER_TOKEN,), (0.0,)),
    drafting=None,
    prefill_seconds=PREFILL,
    scoring_seconds=0.001,
    scoring_start=0.0,
    migration=MigrationTimes(0.0, 0.0, 0.0),
)
COSTS = StepCosts(
    engine=ENGINE,
    lengths=MeasuredLengths([5], [[20, 20]], 64),
    rollout_start=0.5,
    stretch=1.0,
    scoring_stretch=1.0,
    reward=0.001,
    reference=0.0,
    logprobs=0.002,
    values=0.0,
    update=0.004,
    optimizer=0.25,
    reshard=0.125,
)
RUN = ["trainer.prompts_per_step=4", "trainer.samples_per_prompt=2", "reallocation=off", "algorithm.kl_coef=0"]


def forecast(options: list[str], costs: StepCosts | None = None) -> StepForecast:
    config = load_config(options)
    shape, sizes = shape_and_sizes(config)
    found = forecast_step(config, sizes, costs) if costs else forecast_run(config, shape, sizes)
    assert found is not None
    return found


def test_a_step_is_the_sum_of_its_parts() -> None:
    """Two engines decode four samples of 20 tokens each; the decode curve does not depend on the batch."""
    found = forecast([*RUN, "speculation=off", "trainer.mini_batch_size=4"], COSTS)
    prompts = 4 * 5  # tokens that each engine prefills
    assert found.seconds["generate"] == pytest.approx(0.5 + 20 * PER_TOKEN + prompts * PREFILL, rel=0.1)
    assert found.tokens == 8 * 25
    assert found.seconds["score"] == pytest.approx(8 * 0.001)
    assert found.seconds["logprobs"] == pytest.approx(200 * 0.002)  # one replica of two ranks
    assert found.seconds["update"] == pytest.approx(200 * 0.004 + 2 * 0.25)
    assert found.seconds["reshard"] == 0.125
    assert "reference" not in found.seconds and "draft" not in found.seconds
    assert found.step_seconds == pytest.approx(sum(found.seconds.values()))


def test_the_longest_sample_is_drawn_as_often_as_it_came() -> None:
    known = MeasuredLengths([5, 6, 7], [[1, 2], [3, 64], [4, 5]], 64)
    rollouts = known.draw(3, 2)
    assert len(rollouts) == 48
    for drawn in rollouts:
        assert sorted(drawn.lengths.tolist()) == [1, 2, 3, 4, 5, 64], "no group and no sample twice"
    assert [len(drawn.lengths) for drawn in known.draw(5, 3)] == [15] * 48
    many = MeasuredLengths([5] * 40, [[length, 64] for length in range(40)], 64).draw(4, 1)
    of_each = np.bincount(np.concatenate([drawn.lengths for drawn in many]))[:40]
    assert of_each.sum() > 80 and of_each.max() <= 5, "each group about equally often"


def test_replicas_share_the_tokens() -> None:
    off = [*RUN, "speculation=off", "algorithm.ppo_epochs=2"]
    one, two = forecast(off, COSTS), forecast([*off, "actor.tensor_parallel=1"], COSTS)
    assert two.seconds["logprobs"] == pytest.approx(one.seconds["logprobs"] / 2)
    refreshed = forecast([*RUN, "speculation.refresh_every=5", "speculation.refresh_seconds=2"], COSTS)
    assert refreshed.seconds["draft"] == pytest.approx(0.4)


def test_the_roofline_follows_the_hardware_and_the_work() -> None:
    run = ["model=70b", "cluster=8n8g"]
    base = forecast(run)
    assert set(base.seconds) == {"generate", "reference", "update", "reshard"}
    again = forecast([*run, "algorithm.ppo_epochs=2"])
    assert set(again.seconds) == {*base.seconds, "logprobs"}, "a single update has its own"
    assert base.bound_by["generate"] == "memory bandwidth" and base.bound_by["reshard"] == "network"
    longer = forecast([*run, "rollout.max_new_tokens=6000"])
    assert longer.seconds["generate"] > 1.3 * base.seconds["generate"]
    assert longer.seconds["update"] > base.seconds["update"]
    faster = forecast([*run, "cluster/gpu=h200"])
    assert faster.seconds["generate"] < base.seconds["generate"], "more memory bandwidth"
    assert faster.seconds["update"] == pytest.approx(base.seconds["update"], rel=0.01), "the same compute"
    kept = forecast([*run, "actor.recompute=false"])
    assert kept.seconds["update"] < base.seconds["update"]


def test_fused_updates_are_predicted_as_such() -> None:
    run = ["model=70b", "cluster=8n8g", "algorithm=ppo"]
    apart, fused = (forecast([*run, f"placement.fuse={fuse}"]).seconds for fuse in ("off", "auto"))
    assert 0.5 * apart["update"] < fused.pop("update") < apart.pop("update") / MIN_GAIN
    assert fused == apart
    short = [*run, "trainer.max_tokens_per_microbatch=2048"]  # many micro-batches: hardly a bubble to fill
    assert forecast(short).seconds == forecast([*short, "placement.fuse=off"]).seconds


def test_the_plan_says_where_its_times_come_from() -> None:
    config = load_config(["model=8b", "cluster=1n8g", "dry_run=json"])
    plan = plan_of(config)
    assert plan["step_seconds"] == pytest.approx(sum(plan["phase_seconds"].values()))
    assert plan["time_source"]["kind"] == "roofline" and plan["time_source"]["device"]["name"] == "H100 SXM"
    text, _ = dry_run(load_config(["model=8b", "cluster=1n8g", "dry_run=true"]))
    assert "Estimated seconds of a step, from a roofline of the H100 SXM's data sheet" in text
    alone = plan_of(load_config([]))
    assert alone["step_seconds"] is None and alone["phase_seconds"] == {}
    assert "tools.calibrate" in dry_run(load_config(["dry_run=true"]))[0]


# Costs from the files of a run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run whose costs are known: 4 samples of 3 prompt and 10 response tokens in each of 5 steps."""
    sizes = ["trainer.prompts_per_step=2", "trainer.samples_per_prompt=2", "speculation=off"]
    config = load_config([*sizes, "algorithm.kl_in=reward"])
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    events: list[dict[str, Any]] = []

    def span(process: int, number: int, name: str, start: float, seconds: float, **arguments: int) -> None:
        place = {"pid": process, "tid": process * 100_000 + number}
        times = {"ts": round(start * 1e6), "dur": round(seconds * 1e6)}
        events.append({"ph": "X", "name": name, "args": arguments} | place | times)

    metrics, rollouts = [], []
    for step in range(5):
        now = 100.0 * step
        span(1, 0, "generate", now, 3.0)
        span(1, 0, "score", now + 3.0, 0.04)
        for engine in (0, 1):
            span(4 + engine, 0, "prefill", now + 0.5, 0.06, steps=1, tokens=6)
            span(4 + engine, 0, "decode", now + 0.56, 2.0, batch=2, steps=10, tokens=20, draft_tokens=0, kv_tokens=160)
        for rank in (0, 1):
            span(2, rank, "actor optimizer step", now + 10, 0.1)
            span(3, rank, "score", now + 4, 0.13, samples=2, tokens=26)
        timing = {"generate": 3.0, "score": 0.04, "logprobs": 0.52, "update": 1.14, "reshard": 0.2}
        metrics.append({"step": step, **{f"timing_s/{phase}": seconds for phase, seconds in timing.items()}})
        for sample in range(4):
            tokens = {"prompt_tokens": [1, 2, 3], "response_tokens": [7] * 10}
            rollouts.append({"step": step, "prompt_index": 2 * step + sample // 2, "member": sample % 2, **tokens})
    events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": 100_000, "args": {"name": "phases"}})
    (directory / "timeline.json").write_text(json.dumps(events))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (directory / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    return directory


def test_costs_are_read_out_of_a_runs_files(run: Path, tmp_path: Path) -> None:
    costs = measured_costs(run)
    assert costs.engine.prefill_seconds == pytest.approx(0.01)
    assert costs.engine.plain.throughput(20).seconds[-1] == pytest.approx(0.2)
    assert costs.engine.scoring_seconds == pytest.approx(0.005)
    assert costs.rollout_start == pytest.approx(3.0 - 2.06)
    assert costs.reward == pytest.approx(0.01)
    assert costs.logprobs == pytest.approx(0.52 / 52)
    assert costs.optimizer == pytest.approx(0.1)
    assert costs.update == pytest.approx((1.14 - 0.1) / 52)
    assert costs.reshard == pytest.approx(0.2)
    assert costs.lengths == MeasuredLengths([3] * 8, [[10, 10]] * 8, 320)
    saved = run / "config.yaml"
    saved.write_text(saved.read_text().replace("kl_in: reward", "kl_in: loss"))
    assert measured_costs(run).logprobs == pytest.approx(costs.update / 3), "such a run has no pass of its own"
    file = tmp_path / "costs.json"
    write_costs(costs, file)
    assert read_costs(file) == replace(costs, bounds={}, source=dict(costs.source), settings=dict(costs.settings))


def test_the_tool_writes_what_a_plan_reads(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    command = [sys.executable, "-m", "tools.calibrate", str(run), "--out", str(file)]
    assert subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True).returncode == 0
    run_options = ["trainer.prompts_per_step=2", "trainer.samples_per_prompt=2", "speculation=off", "dry_run=json"]
    plan = plan_of(load_config([*run_options, f"cluster.costs={file}"]))
    assert plan["time_source"]["kind"] == "measured"
    assert plan["phase_seconds"]["generate"] == pytest.approx(3.0, rel=0.05)
    assert plan["phase_seconds"]["update"] == pytest.approx(1.14, rel=0.05)
    with pytest.raises(UserError, match=r"measured with actor.tensor_parallel=2, and this run has 1"):
        plan_of(load_config([*run_options, f"cluster.costs={file}", "actor.tensor_parallel=1"]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "not a JSON file"),
        ("{}", "lacks rollout_start"),
        ("[]", "is invalid"),
        ({"update": -1.0}, "0 or more"),
        ({"lengths": {"prompts": [3], "responses": [[]], "limit": 4}}, "none of them empty"),
        ({"engine": {}}, "lacks name"),
        ({"lengths": {"prompts": ["a"], "responses": [["b"]], "limit": 4}}, "must be whole numbers of tokens"),
        ({"lengths": {"prompts": [-4], "responses": [[-4]], "limit": 4}}, "must be whole numbers of tokens"),
        ({"lengths": {"prompts": [3], "responses": [[5]], "limit": 4}}, "longer than the limit of 4"),
        ({"lengths": {"prompts": [3], "responses": [[3]], "limit": "x"}}, "limit of lengths"),
        ({"lengths": {"prompts": 3, "responses": [[3]], "limit": 4}}, "is invalid"),
        ({"settings": {"foo.bar": 1}}, "its settings name foo.bar"),
        ({"settings": {}}, "do not say with which model.name"),
        ({"source": {}}, "lacks kind"),
        ({"update": 10**400}, "is invalid"),
        ({"update": None}, "is invalid"),
    ],
)
def test_bad_costs_are_refused(run: Path, tmp_path: Path, text: Any, words: str) -> None:
    file = tmp_path / "costs.json"
    if isinstance(text, dict):
        write_costs(measured_costs(run), file)
        file.write_text(json.dumps(json.loads(file.read_text()) | text))
    elif text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=words) as found:
        read_costs(file).check_for(saved_config(run / "config.yaml"), str(file))
    assert "\n" not in str(found.value) and str(found.value).endswith(".")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"null", b"5"])
def test_costs_that_are_no_object_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "costs.json").write_bytes(content)
    with pytest.raises(UserError, match=r"(is not a JSON file|is invalid)"):
        read_costs(tmp_path / "costs.json")


GPUS = ["model=8b", "cluster=1n8g", "cluster/gpu=h100"]


@pytest.mark.parametrize(
    "option",
    [
        "cluster/gpu=h200",
        "reallocation=queue",
        "actor.sequence_parallel=false",
        "actor.logprob_chunk=512",
        "rollout.max_prompt_tokens=2048",
        "rollout.temperature=0.5",
        "placement.reference_tensor_parallel=2",
        "trainer.deterministic=true",
        "algorithm.kl_coef=0",
        "launcher.kind=ray",
        "model.ffn_size=14464",
    ],
)
def test_costs_of_a_run_with_other_settings_are_refused(option: str) -> None:
    measured = load_config(GPUS)
    costs = replace(COSTS, settings={name: setting(measured, name) for name in SHARED})
    costs.check_for(measured, "costs.json")
    with pytest.raises(UserError, match=r"^The costs in costs.json were measured with .*=.*, and this run has "):
        costs.check_for(load_config([*GPUS, option]), "costs.json")


@pytest.mark.parametrize(
    "option", ["trainer.prompts_per_step=8", "trainer.samples_per_prompt=4", "algorithm.kl_coef=0.02", "seed=3"]
)
def test_costs_are_used_where_they_do_not_depend_on_what_differs(option: str) -> None:
    measured = load_config(GPUS)
    costs = replace(COSTS, settings={name: setting(measured, name) for name in SHARED})
    costs.check_for(load_config([*GPUS, option]), "costs.json")


def test_costs_are_written_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "costs.json"
    write_costs(COSTS, file)
    before = file.read_bytes()
    write = Path.write_text

    def full(self: Path, text: str, **options: Any) -> int:
        write(self, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert exit_status(lambda: write_costs(replace(COSTS, update=1.0), file)) == 1
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError, match="No space"):
        write_costs(COSTS, tmp_path / "other.json")
    assert list(tmp_path.iterdir()) == [file]


def test_costs_replace_what_a_link_names_and_no_device(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "costs.json")
    write_costs(COSTS, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "costs.json").is_file()
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        write_costs(COSTS, tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo() and os.read(descriptor, 1 << 16).startswith(b"{")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.yaml", None, "holds no run"),
        ("config.yaml", "a: [", "damaged"),
        ("timeline.json", None, "wrote no timeline"),
        ("timeline.json", "[", "damaged"),
        ("timeline.json", "[]", "no decode steps"),
        ("rollouts.jsonl", "", "0 steps after its first one"),
        ("metrics.jsonl", "x", "line 1 is not a JSON object"),
        ("config.yaml", b"\xff\xfe\x00", "damaged"),
        ("timeline.json", b"\xff\xfe\x00", "damaged"),
        ("timeline.json", "[1]", "damaged"),
        ("timeline.json", "5", "damaged"),
        ("timeline.json", '[{"ph": "X", "pid": "a", "tid": 1, "name": "x", "ts": 1, "dur": 1, "args": {}}]', "damaged"),
        (
            "timeline.json",
            '[{"ph": "X", "pid": 1, "tid": 1, "name": "x", "ts": null, "dur": 1, "args": {}}]',
            "damaged",
        ),
        ("rollouts.jsonl", '{"step": 1}', "line 1 is no sample"),
        ("rollouts.jsonl", b"\xff\xfe\x00", "line 1 is not a JSON object"),
        ("metrics.jsonl", '{"timing_s/generate": 3.0}', "line 1 has no step"),
        ("metrics.jsonl", '{"step": null}', "line 1 has no step"),
        ("metrics.jsonl", '{"step": 1, "timing_s/generate": null}', "line 1 has no step, or a timing"),
        ("metrics.jsonl", '{"step": 1, "timing_s/generate": NaN}', "line 1 has no step, or a timing"),
    ],
)
def test_runs_without_what_is_needed_are_refused(run: Path, file: str, text: str | bytes | None, words: str) -> None:
    if text is None:
        (run / file).unlink()
    else:
        (run / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=words) as found:
        measured_costs(run)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("batch", None), ("tokens", "x")])
def test_spans_with_impossible_arguments_are_refused(run: Path, name: str, value: Any) -> None:
    events = json.loads((run / "timeline.json").read_text())
    for event in events:
        if event["name"] == "decode":
            event["args"][name] = value
    (run / "timeline.json").write_text(json.dumps(events))
    with pytest.raises(UserError, match=r"timeline.json is damaged"):
        measured_costs(run)
