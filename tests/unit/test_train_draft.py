"""The tool that makes a draft: from a model's directory to one that a run takes, and refusals before any work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rlhfspec_mega.bootstrap import first_draft
from rlhfspec_mega.draft.directory import check_draft, load_target_ids
from tests.e2e.conftest import SHAPE, make_model
from tests.unit.test_draft_training import one_thread  # noqa: F401
from tools.train_draft import main

TINY_BUDGET = ("--samples=6", "--max-new-tokens=8", "--steps=2")


def run_tool(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train_draft", *arguments])
    return main()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "toy")


def test_the_tool_makes_a_draft_that_fits_its_model(model, tmp_path, monkeypatch):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "made" / "draft"
    long = '{"question": "' + 40 * "a" + '"}\n'
    prompts.write_text('{"question": "1+1?"}\n{"question": "what?"}\n' + long)
    arguments = [f"--model={model}", f"--out={out}", f"--prompts={prompts}", "--max-prompt-tokens=20"]
    assert run_tool(monkeypatch, *arguments, *TINY_BUDGET, "--draft-vocab=32", "--ffn-size=20") == 0
    shape = check_draft(out, SHAPE)
    assert shape.ffn_size == 20 and shape.vocab_size == 32 and len(load_target_ids(out, shape)) == 32
    before = (out / "model.safetensors").read_bytes()
    assert run_tool(monkeypatch, *arguments, *TINY_BUDGET, "--learning-rate=0.1", "--draft-vocab=32") == 0
    assert (out / "model.safetensors").read_bytes() != before  # replaced


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps=0"], "--steps must be above 0"),
        (["--draft-vocab=1"], "--draft-vocab must be at least 2"),
        (["--ffn-size=0"], "--ffn-size must be at least 1"),
        (["--max-prompt-tokens=0"], "--max-prompt-tokens must be above 0"),
        (["--device=gpu"], "--device gpu is not known: use cpu or cuda"),
        (["--device=cuda"], "torch finds no NVIDIA GPU on this machine: use --device cpu"),
        (["--out={taken}"], "exists and holds no draft: move it away"),
        (["--out={file}/draft"], "cannot be made (File exists): choose another place"),
    ],
)
def test_bad_arguments_end_in_one_sentence_before_any_work(model, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(first_draft, "make_draft", None)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    places = {"taken": tmp_path / "taken", "file": tmp_path / "file"}
    given = [argument.format(**places) for argument in arguments]
    assert run_tool(monkeypatch, f"--model={model}", f"--out={tmp_path}/draft", *TINY_BUDGET, *given) == 2
    sentence = capsys.readouterr().err
    assert words in sentence and len(sentence.splitlines()) == 1
