"""The first draft of a model: from nothing but its directory and prompts to one that serving loads."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch

from rlhfspec_mega.bootstrap.first_draft import DraftRecipe, make_draft
from rlhfspec_mega.bootstrap.start import RECIPES, first_draft, start_draft
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import BYTE_VOCABULARY
from rlhfspec_mega.config.notes import notes
from rlhfspec_mega.draft.directory import load_draft, load_target_ids
from rlhfspec_mega.draft.distillation import Target, accepted_by_depth, initial_draft
from rlhfspec_mega.draft.examples import collect_examples
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.observe.console import Console
from tests.e2e.conftest import make_model as make_tokenized
from tests.unit.test_draft_training import one_thread  # noqa: F401

SHAPE = ModelShape("llama", 32, 4, 4, 2, 8, 48, 23, 64, 10000.0, 1e-5, True)
STOP = 22
RECIPE = DraftRecipe(members=4, max_new_tokens=24, steps=80, warmup_steps=5, batch_tokens=256, draft_vocab=15)


def make_model(path: Path) -> Transformer:
    generator = torch.Generator().manual_seed(0)
    model = Transformer(SHAPE, max_positions=64, dtype=torch.float32, device="cpu")
    for tensor in model.hf_tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + (tensor.dim() == 1))
    write_directory(path, SHAPE, model.hf_tensors().items())
    return model


def test_a_first_draft_is_better_than_a_random_one_and_knows_the_frequent_tokens(tmp_path):
    model = make_model(tmp_path / "model")
    prompts = [(1 + index % 20, 1 + index // 20, 3) for index in range(40)]
    console = Console(1, stream=io.StringIO())
    make_draft(tmp_path / "model", tmp_path / "draft", prompts, (STOP,), RECIPE, console)
    shape, tensors = load_draft(tmp_path / "draft", SHAPE)
    ids = load_target_ids(tmp_path / "draft", shape)
    assert ids is not None and shape.vocab_size == 15 and STOP in ids
    target = Target(model.embedding, model.head, ids, 1.0)
    sequences = [([*prompt, *range(5, 15)], 3) for prompt in prompts]
    examples = collect_examples(model, shape, sequences)
    random_draft = initial_draft(shape, target.draft_head, seed=0)
    before, after = (accepted_by_depth(shape, w, target, examples)[0] for w in (random_draft, tensors))
    assert after > before + 0.05


def test_a_model_from_elsewhere_has_no_draft_until_one_is_made_for_it(tmp_path):
    make_tokenized(tmp_path, SHAPE)
    config = load_config([f"model.path={tmp_path}"])
    assert start_draft(config, tmp_path, Console(1, stream=io.StringIO())) is None
    note = next(note for note in notes(config) if "has no draft" in note)
    assert f"python -m tools.train_draft --model {tmp_path} --out DIR, and add speculation.draft_model_path=DIR" in note
    given = load_config([f"model.path={tmp_path}", "speculation.draft_model_path=there"])
    assert start_draft(given, tmp_path, Console(1, stream=io.StringIO())) == Path("there")
    assert not any("has no draft" in note for note in notes(given))


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A configuration with an empty cache, and a model of the byte tokenizer's vocabulary."""
    tokenized = dataclasses.replace(SHAPE, vocab_size=BYTE_VOCABULARY, max_positions=512)
    monkeypatch.setitem(RECIPES, "tiny", DraftRecipe(prompts=2, members=1, max_new_tokens=4, steps=1))
    return load_config([f"model.cache_dir={tmp_path / 'cache'}"]), make_tokenized(tmp_path / "made", tokenized)


def test_a_first_draft_is_made_once(cached, monkeypatch):
    config, model = cached
    console = Console(1, stream=io.StringIO())
    directory = first_draft(config, model, console)
    made = (directory / "model.safetensors").read_bytes()
    assert made and [path.name for path in directory.parent.iterdir() if path.is_dir()] == [directory.name]
    monkeypatch.setattr("rlhfspec_mega.bootstrap.start.make_draft", None)
    assert first_draft(config, model, console) == directory
    assert (directory / "model.safetensors").read_bytes() == made


def test_of_two_first_runs_the_draft_of_the_quicker_stays(cached, monkeypatch):
    """The slower one takes it too: the other run may be reading it."""
    config, model = cached
    console = Console(1, stream=io.StringIO())

    def overtaken(_model, directory, *arguments):
        make_draft(_model, directory, *arguments)
        quicker = directory.with_suffix("")
        quicker.mkdir()
        (quicker / "config.json").write_text("quicker")

    monkeypatch.setattr("rlhfspec_mega.bootstrap.start.make_draft", overtaken)
    directory = first_draft(config, model, console)
    assert (directory / "config.json").read_text() == "quicker"
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == [directory.name]
