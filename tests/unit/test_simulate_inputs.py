"""Cost curves of the simulation, from measurements, rooflines and files, and the command that simulates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.simulate.calibrate import DecodeSample, Measurements, calibrate, decode_samples
from rlhfspec_mega.simulate.curves import DecodeCurve, MigrationTimes, read_curves
from rlhfspec_mega.simulate.roofline import CURVES, roofline
from rlhfspec_mega.simulate.workload import LENGTH_DISTRIBUTIONS, LengthDistribution, draw_workload
from rlhfspec_mega.types import Span
from tools import simulate


def measured(curve: DecodeCurve, gain: float = 1.0) -> list[DecodeSample]:
    """What an engine of this curve would report; with drafts, a step brings `gain` tokens to a sample."""
    found = []
    for batch, steps, kv in ((1, 200, 90.0), (1, 100, 400.0), (2, 50, 700.0), (4, 80, 900.0), (4, 40, 1800.0)):
        point = curve.batches.index(batch)
        seconds = steps * gain * (curve.seconds[point] + curve.kv_seconds[point] * kv)
        found.append(DecodeSample(batch, kv, steps, seconds, round(batch * steps * gain)))
    return found


RUN = Measurements("here", 4, 4096, [], [], 1000, 2.0, 500, 0.5, 0.3, 100, 0.2, [0.1, 0.2, 0.9], 0.92)


def test_calibration_finds_the_curve_that_was_measured() -> None:
    plain = DecodeCurve((1, 2, 4), (0.01, 0.012, 0.02), (1e-5,) * 3)
    drafting = DecodeCurve((1, 2, 4), (0.005, 0.006, 0.015), (4e-6,) * 3)
    found = calibrate(replace(RUN, plain=measured(plain), drafting=measured(drafting, 2.5)))
    assert found.drafting is not None
    for fitted, truth in ((found.plain, plain), (found.drafting, drafting)):
        assert fitted.batches == truth.batches
        assert fitted.seconds == pytest.approx(truth.seconds)
        assert fitted.kv_seconds == pytest.approx(truth.kv_seconds)
    assert (found.prefill_seconds, found.scoring_seconds) == pytest.approx((0.002, 0.001))
    assert found.migration == MigrationTimes(0.2, 0.002, pytest.approx(0.08))


def test_a_calibrated_curve_never_falls_with_the_batch() -> None:
    steps = [DecodeSample(b, 10.0 * b, 100, s, b * 100) for b, s in ((2, 1.0), (3, 2.0), (4, 1.5), (6, 3.0))]
    curve = calibrate(replace(RUN, plain=steps)).plain
    assert curve.batches == (1, 2, 3, 4, 6)
    assert curve.seconds == pytest.approx((0.01, 0.01, 0.0175, 0.0175, 0.03))


def test_stretches_of_decoding_are_read_from_an_engines_spans() -> None:
    def decode(start: float, seconds: float, steps: int) -> Span:
        return Span(
            "decode", start, seconds, {"batch": 2, "steps": steps, "tokens": 2 * steps, "kv_tokens": 90 * steps}
        )

    spans = [
        Span("prefill", 0.0, 1.0, {"steps": 1, "tokens": 50}),
        decode(1.0, 0.5, 10),
        decode(1.51, 0.5, 10),  # after a short pause, which the engine needed to report
        decode(9.0, 0.2, 4),  # after a long one, in which there was nothing to do
    ]
    found = decode_samples(spans)
    assert [sample.seconds for sample in found] == pytest.approx([0.51, 0.5, 0.2])
    assert [(sample.batch, sample.kv_tokens, sample.steps, sample.tokens) for sample in found] == [
        (2, 90.0, 10, 20),
        (2, 90.0, 10, 20),
        (2, 90.0, 4, 8),
    ]


def test_a_calibration_without_decoding_is_refused() -> None:
    with pytest.raises(UserError, match="needs decode steps"):
        calibrate(RUN)


@pytest.mark.parametrize("name", CURVES)
def test_a_roofline_is_saved_with_its_parameters_and_read_back(name: str, tmp_path: Path) -> None:
    costs = roofline(name)
    weights = {"8b": 8_030_261_248, "32b": 32_762_123_264}[name.partition("-")[2]]
    bandwidth = {"h100": 3.35e12, "h200": 4.8e12}[name.partition("-")[0]]
    assert costs.plain.seconds[0] == pytest.approx(1e-3 + 2 * weights / (bandwidth * 0.75))
    assert costs.plain.seconds[-1] == pytest.approx(1e-3 + 2 * weights * 256 / (9.89e14 * 0.6))
    assert costs.drafting is not None
    assert all(a <= b for a, b in zip(costs.drafting.seconds, costs.plain.seconds, strict=True))
    file = tmp_path / "curves.json"
    file.write_text(json.dumps(costs.as_json()))
    back = read_curves(file)
    assert replace(back, source={}) == replace(costs, source={})
    assert back.source["device"]["memory_bandwidth"] * 1e9 == bandwidth
    assert back.source["drafting"]["tokens_per_step"][0] == 1.75


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": 0}, "slots"),
        ({"plain": {"batches": [1, 1], "seconds": [1, 1], "kv_seconds": [0, 0]}}, "ascend"),
        ({"plain": {"batches": [1], "seconds": [0], "kv_seconds": [0]}}, "above 0"),
        ({"plain": {"batches": [1], "seconds": [1]}}, "lack kv_seconds"),
        ({"migration": {"downtime": 1}}, "migration|copy_seconds"),
        ({"scoring_start": -1}, "0 or more"),
    ],
)
def test_curves_of_no_use_end_in_a_sentence(change: dict[str, object], words: str, tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    file.write_text(json.dumps(roofline("h200-8b").as_json() | change))
    with pytest.raises(UserError, match=words):
        read_curves(file)


TINY = "--engines 2 --samples-per-engine 16 --scale 0.1 --seeds 2"


def test_the_command_writes_figures_that_say_they_are_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main([*TINY.split(), "--lengths", "chat", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["simulated"] * 8 and len(lines) == 3 + 8 + 1
    found = json.loads((tmp_path / "simulated.json").read_text())
    assert found["simulated"] is True and found["curves"]["source"]["kind"] == "roofline"
    assert len(found["runs"]) == 16 and found["medians"][0]["makespan_over_static"] == 1.0
    assert (tmp_path / "simulated.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words",
    [
        "--engines 0",
        "--engines many",
        "--lengths poems",
        "--mechanisms magic",
        "--curve nowhere.json",
        "--samples-per-engine 7 --members 5",
        "--scale -1",
        "--plan-seconds nan",
        "--seeds 0",
        "--unknown",
    ],
)
def test_a_wrong_argument_ends_in_one_sentence(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--out", str(tmp_path), *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.err.endswith(".\n")


@pytest.mark.parametrize("name", ["chat", "reasoning", "short"])
def test_lengths_follow_their_law(name: str) -> None:
    law = LENGTH_DISTRIBUTIONS[name]
    logs = np.log(law.draw(4000, 8, np.random.default_rng(0)).reshape(4000, 8))
    assert np.exp(np.median(logs)) == pytest.approx(law.median, rel=0.05)
    assert logs.std() == pytest.approx(law.sigma, rel=0.03, abs=1e-9)
    assert np.exp(logs.max()) <= law.limit + 0.5
    if law.sigma:
        pairs = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
        assert pairs == pytest.approx(law.correlation, abs=0.05)


def test_lengths_are_cut_at_the_limit_and_repeat_by_seed() -> None:
    law = LengthDistribution(median=50, sigma=2.0, correlation=0.3, limit=100, prompt=8)
    once, again, other = (draw_workload(law, 96, 8, seed).lengths for seed in (3, 3, 4))
    assert once.max() == 100 and once.min() >= 1 and (once == again).all() and (once != other).any()
