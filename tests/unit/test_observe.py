"""What a run writes and shows, read back by independent means."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.config.schema.system import LoggerConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.observe.figures import drafting_metrics
from rlhfspec_mega.observe.json_lines import keep_steps_before, read_lines
from rlhfspec_mega.observe.plot import plot_curves
from rlhfspec_mega.observe.rollouts import read_rollouts, write_rollouts
from rlhfspec_mega.observe.run_log import METRICS_FILE, TENSORBOARD_DIR, RunLog
from rlhfspec_mega.observe.spans import PhaseTimer
from rlhfspec_mega.observe.summary import summarize, summary_in_words, write_summary
from rlhfspec_mega.types import DraftingTally, FinishReason, Prompt, Sample, SampleState


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_charge_each_second_once() -> None:
    clock, entered = Clock(), list[str]()
    phases = PhaseTimer(entered.append, clock)
    clock.now += 5  # outside every phase: nobody's
    with phases.measure("generate"):
        clock.now += 2
        with phases.measure("score"):
            clock.now += 3
        clock.now += 1
    with phases.measure("update"):
        clock.now += 4
    assert phases.take_step() == {"generate": 3, "score": 3, "update": 4}
    assert phases.take_step() == {}
    with phases.measure("update"):
        clock.now += 1
    assert phases.take_step() == {"update": 1}
    assert phases.totals == {"generate": 3, "score": 3, "update": 5}
    assert entered == ["generate", "score", "update", "update"]


def logged(directory: Path) -> list[int]:
    return [line["step"] for line in read_lines(directory / METRICS_FILE)]


def test_metrics_are_one_json_object_per_step_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path, LoggerConfig(tensorboard=False), "run")
    assert not list(tmp_path.iterdir())
    log.log(1, {"reward": 0.5, "kl": float("nan"), "entropy": float("inf")})
    # Before the file is closed: what a crash would leave.
    line = json.loads((tmp_path / METRICS_FILE).read_text())
    assert (line["step"], line["reward"], line["kl"], line["entropy"]) == (1, 0.5, None, None)
    log.log(2, {"reward": 0.75})
    log.close()
    log.close()
    assert logged(tmp_path) == [1, 2]


def test_a_resumed_run_overwrites_the_steps_it_does_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path, LoggerConfig(tensorboard=False), "run")
    for step in range(1, 6):
        log.log(step, {"reward": float(step)})
    log.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "rew')  # killed while writing
    log = RunLog(tmp_path, LoggerConfig(tensorboard=False), "run", first_step=4)
    log.log(4, {"reward": 44.0})
    log.close()
    assert [(line["step"], line["reward"]) for line in read_lines(tmp_path / METRICS_FILE)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 44.0),
    ]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, LoggerConfig(tensorboard=True), "run")
    for step, reward in ((1, 0.25), (2, 0.5)):
        log.log(step, {"reward": reward, "seconds/generate": 3.0, "kl": float("nan")})
    log.close()
    events = EventAccumulator(str(tmp_path / TENSORBOARD_DIR)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward", "seconds/generate"]
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]


TEXTS = st.text(max_size=20)
NUMBERS = st.floats(allow_nan=False)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 5))
    per_token = st.lists(NUMBERS, min_size=length, max_size=length)
    return Sample(
        sample_id=draw(TEXTS),
        step=draw(st.integers(0, 3)),
        prompt=Prompt(draw(st.integers(0, 99)), draw(TEXTS), draw(TEXTS), tuple(draw(st.lists(st.integers(0, 9))))),
        member=draw(st.integers(0, 7)),
        state=draw(st.sampled_from(SampleState)),
        response_tokens=draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)),
        response=draw(TEXTS),
        engine_logprobs=draw(per_token),
        policy_versions=draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)),
        finish_reason=draw(st.one_of(st.none(), st.sampled_from(FinishReason))),
        reward=draw(NUMBERS),
        exact=draw(st.booleans()),
        advantage=draw(NUMBERS),
        old_logprobs=draw(st.one_of(st.just([]), per_token)),
        reference_logprobs=draw(st.one_of(st.just([]), per_token)),
    )


@given(written=st.lists(samples(), min_size=1, max_size=5))
def test_rollouts_come_back_bit_by_bit(tmp_path_factory: pytest.TempPathFactory, written: list[Sample]) -> None:
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    write_rollouts(path, written[:1])
    write_rollouts(path, written[1:])
    for step in {sample.step for sample in written}:
        assert read_rollouts(path, step) == [sample for sample in written if sample.step == step]


def sample(step: int = 1) -> Sample:
    return Sample(
        f"{step}.7.0",
        step,
        Prompt(7, "1+2=", "3;3", (49, 43, 50, 61)),
        0,
        response_tokens=[51],
        response="+2=3\u2028;3",
        engine_logprobs=[-0.1],
    )


def test_a_line_begins_with_what_a_person_reads(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [sample(), sample(), sample()], limit=2)
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3 and lines[0].startswith('{"step": 1, "sample_id": "1.7.0", "reward": 0.0, "exact": false')
    assert lines[0].index('"prompt": "1+2="') < lines[0].index("prompt_tokens")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: line[:20], "line 2 is not a sample"),
        (lambda line: "[]", "line 2 is not a sample"),
        (lambda line: line.replace('"prompt_index"', '"index"'), "field 'prompt_index'"),
        (lambda line: line.replace('"member": 0, ', ""), "line 2 is not a sample"),
        (lambda line: line.replace('"reward": 0.0, ', ""), "fields are missing"),
        (lambda line: line.replace('"state": "pending"', '"state": "lost"'), "'lost' is not a valid SampleState"),
        (lambda line: line.replace("[-0.1]", "[-0.1, -0.2]"), "engine_logprobs has 2 entries for 1 response tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [sample(), sample()])
    first, second = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    changed = change(second)
    assert changed != second
    path.write_text(f"{first}\n{changed}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"rollouts\.jsonl, line 2") as caught:
        read_rollouts(path, 1)
    assert words in str(caught.value)


def test_a_missing_step_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with pytest.raises(UserError, match="cannot be read"):
        read_rollouts(path, 1)
    write_rollouts(path, [sample(2), sample(4)])
    with pytest.raises(UserError, match="no sample of step 3: it holds steps 2 to 4"):
        read_rollouts(path, 3)


def test_steps_cut_from_rollouts_keep_unescaped_separators(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [sample(1), sample(2), sample(3)])
    keep_steps_before(path, 2)
    assert read_rollouts(path, 1) == [sample(1)]
    assert len(path.read_text(encoding="utf-8").rstrip("\n").split("\n")) == 1


def rows(steps: int) -> list[dict[str, float | None]]:
    before: dict[str, float | None] = {"step": 0, "val/exact_mean": 0.3, "timing_s/evaluate": 1.0}
    return [
        before,
        *(
            {
                "step": i,
                "rollout/reward_mean": i / 10,
                "rollout/exact_mean": i / 20,
                "rollout/generated_tokens": 100.0,
                "timing_s/generate": 2.0,
                "rollout/logprob_diff_mean": None if i == 2 else 1e-5,
                **({"val/exact_mean": 0.5} if i == steps else {}),
            }
            for i in range(1, steps + 1)
        ),
    ]


def test_summary_of_a_run(tmp_path: Path) -> None:
    summary = summarize(rows(20), wall_seconds=83.0)
    assert summary["reward_first"] == pytest.approx(0.55) and summary["reward_last"] == pytest.approx(1.55)
    # Ten values a tenth apart vary by 0.0917; two means of ten are compared.
    assert summary["reward_rise_error"] == pytest.approx((2 * 0.09166667 / 10) ** 0.5)
    assert (summary["eval_exact_first"], summary["eval_exact_last"], summary["steps"]) == (0.3, 0.5, 20)
    assert summary["generation_tokens_per_second"] == pytest.approx(50.0)
    assert summary["logprob_difference_mean"] == pytest.approx(1e-5)
    assert summary["phase_seconds"] == {"evaluate": 1.0, "generate": 40.0}
    assert json.loads(write_summary(tmp_path, summary).read_text()) == summary
    words = summary_in_words(summary)
    assert "20 steps in 1 min 23 s." in words and "rose from 0.550 to 1.550, by +1.000 with" in words
    assert "held-out prompts rose from 0.300 to 0.500" in words and "generate 98%" in words


DRAFTED = drafting_metrics(
    [
        DraftingTally(
            sample_steps=100,
            drafted_sample_steps=80,
            verified=400,
            accepted=160,
            sample_steps_by_verified=[20, 0, 0, 0, 80, 0, 0],
            calibration_error=0.0214,
        )
    ]
)


def test_speculation_in_words() -> None:
    words = summary_in_words(summarize([row | DRAFTED for row in rows(3)[1:]], 1.0))
    assert "2.60 tokens per sample (2.00 draft tokens accepted where any were verified, 2.5 verified for each)" in words
    assert "predicted acceptance was off by 0.021" in words


def test_the_live_panel_shows_how_many_draft_tokens_were_verified() -> None:
    stream = Terminal()
    with Console(9, stream=stream) as console:
        console.step(3, METRICS)
    assert "draft tokens" not in stream.getvalue()
    with Console(9, stream=stream) as console:
        console.step(3, METRICS | DRAFTED)
    assert "draft tokens per sample and step  0: 20%  5-8: 80%" in stream.getvalue()


@pytest.mark.parametrize("steps", [0, 1])
def test_summary_of_next_to_nothing(steps: int) -> None:
    summary = summarize(rows(steps), wall_seconds=1.0)
    assert summary["steps"] == steps
    assert summary["reward_first"] == summary["reward_last"] == (0.1 if steps else None)
    assert f"{steps} step" in summary_in_words(summary)
    assert summary_in_words(summarize([], 0.0)) == "0 steps in 0.0 s."


def test_plot_is_a_picture_with_the_curves(tmp_path: Path) -> None:
    empty = plot_curves(tmp_path, []).read_bytes()
    full = plot_curves(tmp_path, rows(10)).read_bytes()
    assert full.startswith(b"\x89PNG\r\n\x1a\n") and full != empty


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {
    "rollout/reward_mean": 0.25,
    "rollout/response_length_max": 300.0,
    "actor/entropy": 1.5,
    "timing_s/generate": 2.0,
}


def test_console_writes_one_plain_line_per_step_elsewhere() -> None:
    stream = io.StringIO()
    with Console(9, stream=stream) as console:
        console.table("Sizes", [("engines", "2", "torch")])
        console.phase("generate")
        console.step(1, METRICS)
        console.step(2, METRICS | {"val/exact_mean": 0.5})
        console.note("[not] markup")
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "engines" in stream.getvalue()
    assert lines[-3:] == [
        "step 1/9  reward 0.250  length max 300  generate 2.0s",
        "step 2/9  reward 0.250  held-out exact 0.500  length max 300  generate 2.0s",
        "[not] markup",
    ]


def test_console_shows_a_live_panel_on_a_terminal() -> None:
    stream = Terminal()
    with Console(9, stream=stream) as console:
        console.phase("update")
        console.step(3, METRICS)
        console.note("a note above")
    text = stream.getvalue()
    assert "3/9" in text and "update" in text and "entropy" in text and "a note above" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def test_a_quiet_console_is_silent() -> None:
    stream = Terminal()
    with Console(9, enabled=False, stream=stream) as console:
        console.table("Sizes", [("engines", "2")])
        console.step(1, METRICS)
    assert stream.getvalue() == ""
