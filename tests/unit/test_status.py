"""tools.status: what the files of a run say of it, at every stage of its life."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.observe.progress import read_progress, write_progress
from tools.status import in_words, status

START = 1_000_000.0  # seconds since the epoch at the end of the first step


def make_run(root: Path, done: int, steps: int = 20, **options: Any) -> Path:
    """The files of a run whose steps took 4 s each, 3 s of them generation, and that evaluates at the end."""
    run = root / "run"
    run.mkdir(parents=True)
    trainer = {"steps": steps, "checkpoint_every": 5} | options
    (run / "config.yaml").write_text(json.dumps({"trainer": trainer}))
    timing = {"timing_s/generate": 3.0, "timing_s/update": 0.9, "timing_s/score": 0.1}
    same = timing | {"rollout/reward_mean": 0.5, "perf/generation_tokens_per_second": 800.0}
    rows = [{"step": step, "time": START + 4.0 * step} | same for step in range(done)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in range(5, done + 1, 5):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
        os.utime(run / "checkpoints" / f"step_{step}", (START + 4.0 * step, START + 4.0 * step))
    return run


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=12)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "ti')  # being written
    with (run / "run.lock").open("w") as lock:
        lock.write("process 17 on node3")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = status(run, now=START + 4.0 * 11 + 1.0)
        assert (found.state, found.process, found.phase) == ("runs", "process 17 on node3", "starting")
        write_progress(run, "generate")
        progress = read_progress(run)
        assert progress is not None
        found = status(run, now=progress.since + 2.0)
        late = status(run, now=progress.since + 20.0)
    assert (found.step, found.steps, found.phase) == (12, 20, "generate")
    assert found.phase_seconds == pytest.approx(2.0, abs=0.01) and not found.notes
    assert (found.step_seconds, found.seconds_left, found.tokens_per_second) == (4.0, 32.0, 800.0)
    assert found.checkpoint == 10 and list(found.phases) == ["generate", "update", "score"]
    assert sum(found.phases.values()) == pytest.approx(1.0) and found.phases["generate"] == pytest.approx(0.75)
    assert "generate has lasted 20 s, and usually takes 3.0 s" in late.notes[0]
    text = in_words(run, found)
    assert "12 of 20 (60%), now: generate for 2.0 s" in text and "generate 75%, update 2" in text


def test_a_run_that_was_killed_says_how_to_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=7)
    (run / "run.lock").write_text("process 17 on node3")  # the kernel has let go of it
    write_progress(run, "update")
    (run / "logs").mkdir()
    (run / "logs" / "stacks-1.txt").touch()
    found = status(run, now=START + 1000.0)
    assert (found.state, found.phase, found.seconds_left, found.process) == ("stopped", None, None, None)
    assert found.checkpoint == 5 and found.checkpoint_age == pytest.approx(980.0)
    assert "stacks-1.txt" in found.notes[0] and "trainer.resume=true goes on after step 5" in found.notes[1]


def test_a_run_that_has_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=21)  # the last row is the evaluation at the end
    (run / "summary.json").write_text("{}")
    found = status(run, now=START + 100.0)
    assert (found.state, found.step, found.seconds_left, found.notes) == ("finished", 20, None, [])


def test_a_finished_run_that_was_lengthened_and_died_has_not_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=12)
    (run / "summary.json").write_text("{}")
    assert status(run, now=START + 100.0).state == "stopped"


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    found = status(make_run(tmp_path, done=0), now=START)
    assert (found.step, found.step_seconds, found.checkpoint, found.phases) == (0, None, None, {})
    assert "from the beginning" in found.notes[0] and "0 of 20" in in_words(tmp_path, found)


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=12)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for strange in (None, "x", [1], float("nan")):
        bad = dict.fromkeys([*rows[0], "actor/skipped_updates"], strange)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:11], bad]))
        found = status(run, now=START + 100.0)
        assert (found.step, found.step_seconds, found.tokens_per_second, found.reward) == (12, 4.0, 800.0, 0.5)
        (run / "metrics.jsonl").write_text((json.dumps(bad) + "\n") * 12)
        nothing = status(run, now=START + 100.0)
        assert (nothing.step, nothing.reward, nothing.phases) == (12, None, {}) and in_words(run, nothing)


def test_bad_directories_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no directory"):
        status(tmp_path / "nowhere", now=START)
    for content in (b"", b"a: [", b"trainer: 3", b"trainer: {steps: many}", b"trainer: {steps: .inf}", b"\xff\xfe\x00"):
        (tmp_path / "config.yaml").write_bytes(content)
        with pytest.raises(UserError, match="holds no run"):
            status(tmp_path, now=START)


def test_the_command(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=3)
    command = [sys.executable, "-m", "tools.status"]
    done = subprocess.run([*command, str(run), "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["step"] == 3
    bad = subprocess.run([*command, str(tmp_path / "nowhere")], capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and len(bad.stderr.splitlines()) == 1
