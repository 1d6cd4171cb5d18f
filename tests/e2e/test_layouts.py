"""The same saved rollout, replayed under every parallel layout: the same log-probs, gradient norm and weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import REPOSITORY

LAYOUTS = {
    "tp2": ["actor.tensor_parallel=2"],
    "pp2": ["actor.tensor_parallel=1", "actor.pipeline_parallel=2"],
    "dp2": ["actor.tensor_parallel=1", "actor.data_parallel=2"],
    "one": ["actor.tensor_parallel=1", "actor.data_parallel=1"],
}


def replay(finished: Path, model: Path, out: Path, *options: str) -> None:
    result = subprocess.run(
        [
            *[sys.executable, "-m", "tools.replay", str(finished / "rollouts.jsonl"), "--step", "0", "--out", str(out)],
            *[f"model.path={model}", "trainer.max_tokens_per_microbatch=128", "rollout.max_new_tokens=24"],
            # A large eps makes AdamW's first step proportional to the gradient instead of its sign.
            *["rollout.max_prompt_tokens=40", "actor.optimizer.lr=0.1", "actor.optimizer.eps=0.1", *options],
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def reference(finished: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replays") / "one"
    replay(finished, model, out, *LAYOUTS["one"])
    return out


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_layouts_agree(layout: str, reference: Path, finished: Path, model: Path) -> None:
    out = reference.parent / layout
    replay(finished, model, out, *LAYOUTS[layout])
    want, got = (json.loads((path / "replay.json").read_text()) for path in (reference, out))
    assert got["logprobs"].keys() == want["logprobs"].keys()
    for sample, logprobs in want["logprobs"].items():
        assert got["logprobs"][sample] == pytest.approx(logprobs, abs=1e-4)
    for name in ("actor/grad_norm", "actor/loss", "actor/kl", "actor/entropy"):
        assert got["metrics"][name] == pytest.approx(want["metrics"][name], rel=1e-4, abs=1e-6), name
    weights, start = (load_file(path / "model.safetensors") for path in (reference / "model", model))
    for name, tensor in load_file(out / "model" / "model.safetensors").items():
        wanted = weights[name] - start[name]
        assert wanted.abs().max() > 1e-6, f"{name} was not trained"
        assert (tensor - weights[name]).abs().max() < 1e-4
        assert (tensor - start[name] - wanted).abs().max() < 1e-2 * wanted.abs().max(), name


def test_a_replay_is_the_run(reference: Path, finished: Path) -> None:
    """The run's own first step (TP2) had these log-probs and this gradient norm."""
    result = json.loads((reference / "replay.json").read_text())
    first = json.loads((finished / "metrics.jsonl").read_text().splitlines()[0])
    assert result["metrics"]["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=1e-4)
    for line in (finished / "rollouts.jsonl").read_text().splitlines():
        sample = json.loads(line)
        if sample["step"] == 0:
            assert result["logprobs"][sample["sample_id"]] == pytest.approx(sample["old_logprobs"], abs=1e-4)
