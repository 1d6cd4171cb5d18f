"""Whole runs through the command line: two actors, two engines, real processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlhfspec_mega.observe.metrics import known
from rlhfspec_mega.simulate.step_calibrate import measured_costs
from tests.e2e.conftest import left_behind, marked, small_run, start, train
from tools.status import status


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_summary_and_files(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 4
    for name in ("reward_first", "reward_last", "eval_exact_first", "eval_exact_last", "generation_tokens_per_second"):
        assert summary[name] is not None, name
    assert {"generate", "score", "reference", "logprobs", "update", "reshard", "evaluate"} <= set(
        summary["phase_seconds"]
    )
    assert 0 < summary["logprob_difference_mean"] < 1e-4
    assert status(finished, time.time()).state == "finished"
    assert (finished / "config.yaml").is_file() and (finished / "curves.png").stat().st_size > 1000


def test_costs_of_a_run_predict_its_step(finished: Path) -> None:
    costs = measured_costs(finished)
    assert costs.source["steps"] == 3 and costs.engine.plain.seconds[0] > 0
    assert costs.update > 0 and costs.reshard > 0


def test_every_metric_is_in_the_table(finished: Path) -> None:
    logged = {name for row in rows(finished) for name in row} - {"step", "time"}
    assert len(logged) > 30 and [name for name in logged if not known(name)] == []


def test_every_sample_is_trained_once_and_recorded(finished: Path) -> None:
    samples = [json.loads(line) for line in (finished / "rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == len({sample["sample_id"] for sample in samples}) == 4 * 3 * 2
    assert {sample["state"] for sample in samples} == {"trained"}
    for sample in samples:
        # Synchronous: a sample of step s was sampled by the policy after s updates.
        assert set(sample["policy_versions"]) == {sample["step"]}
        assert len(sample["old_logprobs"]) == len(sample["reference_logprobs"]) == len(sample["response_tokens"])


def test_a_reference_over_both_engines_devices_is_the_start_model(finished: Path, model: Path) -> None:
    """Its log-probs of an ordinary rollout are those of transformers."""
    start = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for line in (finished / "rollouts.jsonl").read_text().splitlines():
        sample = json.loads(line)
        tokens = torch.tensor([[*sample["prompt_tokens"], *sample["response_tokens"]]])
        with torch.no_grad():
            logprobs = start(tokens).logits[0, :-1].log_softmax(-1)
        alone = logprobs.gather(1, tokens[0, 1:, None])[len(sample["prompt_tokens"]) - 1 :, 0]
        assert sample["reference_logprobs"] == pytest.approx(alone.tolist(), abs=1e-4)


def test_exported_model_is_the_trained_one(finished: Path, model: Path) -> None:
    before, after = load_file(model / "model.safetensors"), load_file(finished / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    exported = transformers.AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished / "model")
    assert exported(**tokenizer("1+2=", return_tensors="pt")).logits.isfinite().all()


def test_a_finished_run_is_neither_begun_anew_nor_shortened(finished: Path, model: Path) -> None:
    """That a resumed run is the undisturbed one is shown where runs are stopped: test_supervision, test_checkpoints."""
    options = small_run(model, finished.parent, finished.name, "trainer.checkpoint_every=2")
    before = rows(finished)
    refused = train(*options)
    assert refused.returncode == 2 and "trainer.resume=true" in refused.stderr
    fewer = train(*options, "trainer.resume=true", "trainer.steps=3")
    assert fewer.returncode == 2 and "trainer.steps=4 or more" in fewer.stderr
    assert rows(finished) == before


@pytest.fixture
def long_run(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of a thousand steps that has finished its first; its processes carry the mark str(tmp_path)."""
    process = start(*small_run(model, tmp_path, "long", "trainer.steps=1000"), mark=f"{tmp_path}")
    try:
        for _ in range(300):
            if (tmp_path / "long" / "metrics.jsonl").exists():
                break
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        assert len(marked(f"{tmp_path}")) >= 5, "driver, two actor ranks, two engines"
        yield process
    finally:
        process.kill()
        process.wait()


def test_two_runs_at_once_and_an_export_that_fails(model: Path, tmp_path: Path) -> None:
    """One run's weights are on their way when its directory turns out not to be writable: it goes on, as the other."""
    failing = ("trainer.steps=3", "trainer.export_every=1", "resharding.bucket_mib=0.01", "trainer.export=false")
    blocked = start(*small_run(model, tmp_path, "blocked", *failing), mark=f"{tmp_path}")
    other = start(*small_run(model, tmp_path, "other", "trainer.steps=1", "trainer.export=false"), mark=f"{tmp_path}")
    while not (tmp_path / "blocked" / "logs").exists() and blocked.poll() is None:
        time.sleep(0.01)
    (tmp_path / "blocked" / "exports").write_text("a file where the directory should be")
    output, errors = blocked.communicate(timeout=200)
    assert blocked.returncode == 0, errors
    assert "step_1 was not written" in output + errors and "3 steps in" in output
    _, errors = other.communicate(timeout=200)
    assert other.returncode == 0, errors
    assert left_behind(f"{tmp_path}") == []


def test_a_killed_driver_takes_its_workers_with_it(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    long_run.kill()
    long_run.wait()
    for _ in range(100):
        if not marked(f"{tmp_path}"):
            break
        time.sleep(0.2)
    assert left_behind(f"{tmp_path}") == []
