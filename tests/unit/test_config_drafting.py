"""The drafting options: combinations that cannot run, options that nothing reads, drafts of another model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhfspec_mega.config.checks import check_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.speculation import drafts, recalls, speculates, speculation_note
from rlhfspec_mega.draft.directory import write_draft
from rlhfspec_mega.draft.shape import draft_shape, draft_tensors
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rollout.sglang_engine.shapes import shape_of_history
from tests.e2e.conftest import SHAPE, make_model
from tests.unit.test_config import load, refusal


@pytest.fixture
def out(tmp_path: Path) -> str:
    return f"output_dir={tmp_path}/outputs"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "speculation=off speculation.topk=2",
            "speculation.topk=2 has no effect here: add speculation=adaptive, or set speculation.topk=4",
        ),
        (
            "speculation=fixed speculation.tail_weight=1",
            "speculation.tail_weight=1.0 has no effect here: add speculation=adaptive",
        ),
        ("speculation=adaptive speculation.refresh_steps=5", "no effect here: add trainer.deterministic=true"),
        (
            "speculation=adaptive speculation.refresh_every=0 speculation.refresh_seconds=9",
            "add speculation.refresh_every=4",
        ),
        (
            "speculation=adaptive speculation.draft_model_path=/no/draft",
            "holds no config.json: give the directory of a draft",
        ),
        ("speculation.policy=adaptve", "did you mean 'adaptive'"),
        ("speculation.buffer_tokens=575", "speculation.buffer_tokens=575 cannot hold the longest sample, 576 tokens"),
        ("speculation.refresh_seconds=600", "speculation.refresh_seconds=600 is not below launcher.call_timeout=600"),
    ],
)
def test_combinations_that_cannot_run(overrides: str, words: str, out: str) -> None:
    assert words in refusal(*overrides.split(), out)


def test_limits_of_a_refresh_count_only_where_there_is_one(out: str) -> None:
    for plain in ("speculation=off", "speculation.refresh_every=0"):
        assert check_config(load(out, plain, "rollout.max_new_tokens=700", "launcher.call_timeout=2")).engines == 2
    assert check_config(load(out, "trainer.deterministic=true", "launcher.call_timeout=2")).engines == 2
    assert check_config(load(out, "speculation.buffer_tokens=576", "launcher.call_timeout=2.1")).engines == 2


def test_a_draft_is_compared_with_the_model_before_anything_starts(out: str, tmp_path: Path) -> None:
    config = load(out, f"speculation.draft_model_path={tmp_path}/draft")
    shape = model_shape(config.model)
    write_random_draft(tmp_path / "draft", shape)
    assert check_config(config).draft_memory.engine > 0
    (tmp_path / "draft" / "model.safetensors").unlink()
    assert "no file model.safetensors" in refusal(out, f"speculation.draft_model_path={tmp_path}/draft")
    write_random_draft(tmp_path / "other", replace(shape, hidden_size=64))
    assert "its hidden_size is 64, this model needs 128" in refusal(
        out, f"speculation.draft_model_path={tmp_path}/other"
    )


def test_the_memory_of_the_draft_counts(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the run would just fit without one is too small with one."""
    config = load(out, "speculation.buffer_tokens=2000000")
    learning, plain = check_config(config).draft_memory, load(out, "speculation=off")
    assert learning.actor > 2**30
    for memory in range(1, 20):
        monkeypatch.setattr("rlhfspec_mega.config.machine.host_memory", lambda: memory * 2**30 // 2)  # noqa: B023
        try:
            check_config(plain)
        except UserError:
            continue
        break
    with pytest.raises(UserError, match=r"needs about .* for the draft [23]\.[0-9] on one actor rank"):
        check_config(config)


def test_a_gpu_on_which_the_draft_cannot_learn_says_so(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("machine", "hardware"):
        monkeypatch.setattr(f"rlhfspec_mega.config.{module}.gpu_memory", lambda: (2**30,) * 2)
    config = load(out, "cluster.device=cuda", "speculation.buffer_tokens=400000")
    with pytest.raises(UserError, match=r"GiB on each GPU and 1 GiB .* or set speculation\.refresh_every=0\.$"):
        check_config(config)
    config.speculation.refresh_every, config.speculation.buffer_tokens = 0, 65536
    assert check_config(config).draft_memory.actor > 0


def write_random_draft(path: Path, target: ModelShape) -> None:
    shape = draft_shape(target)
    write_draft(path, shape, {info.name: torch.zeros(info.shape) for info in draft_tensors(shape)})


def test_without_a_draft_its_options_have_no_effect(out: str, tmp_path: Path) -> None:
    """A policy may be chosen before there is a draft: that is noted, not refused."""
    model = f"model.path={make_model(tmp_path / 'model', replace(SHAPE, max_positions=1024))}"
    for policy in ("adaptive", "uniform", "fixed"):
        config = load(out, model, f"speculation={policy}", "speculation.sources=[draft]")
        assert check_config(config).draft_memory.engine == 0
        assert "this run decodes plainly" in (speculation_note(config) or "")
    for option in ("topk=2", "refresh_every=2", "buffer_tokens=9999", "collapse_ratio=0.4"):
        sentence = refusal(out, model, f"speculation.{option}")
        assert f"speculation.{option} has no effect here: add speculation.draft_model_path=DIR" in sentence
    assert "add speculation=fixed" in refusal(out, model, "speculation.num_draft_tokens=4")


def test_history_drafts_without_a_draft(out: str, tmp_path: Path) -> None:
    model = f"model.path={make_model(tmp_path / 'model', replace(SHAPE, max_positions=1024))}"
    config, more = load(out, model), load(out, model, "speculation.history_tokens=1262144")
    assert "this run drafts from its own samples alone" in (speculation_note(config) or "")
    few, many = (check_config(one).draft_memory for one in (config, more))
    assert few.actor == 0 < few.engine and many.engine - few.engine == 41 * 1_000_000
    assert speculation_note(load(out, model, "speculation.sources=[history]")) is None
    twice = check_config(load(out, model, "trainer.deterministic=true")).draft_memory
    assert twice.engine - few.engine == 41 * 262144, "a copy of what all shares are drafted from"
    unread = "speculation.sources=[draft]"
    assert "has no effect here: add" in refusal(out, model, unread, "speculation.history_tokens=2048")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("speculation.sources=[]", "must name draft, history or both"),
        ("speculation.sources=[draft,draft]", "must name draft, history or both"),
        ("speculation.sources=[memory]", "there is draft, history"),
        ("speculation=off speculation.sources=[draft]", "has no effect here: add speculation=adaptive"),
        ("speculation.sources=[history] speculation.refresh_every=2", "add speculation.sources=[draft]"),
        ("speculation.history_tokens=5", "speculation.history_tokens"),
        ("rollout=sglang speculation.sources=[history]", "add speculation=fixed"),
        ("rollout=sglang speculation=uniform speculation.sources=[history]", "add speculation=fixed"),
        ("rollout=sglang speculation=fixed speculation.num_draft_tokens=4", "has no effect here"),
        (
            "rollout=sglang speculation=fixed speculation.sources=[history] speculation.num_steps=3",
            "has no effect here: add rollout.engine=torch",
        ),
        (
            "rollout=sglang speculation.history_tokens=2048",
            "has no effect here: add speculation=fixed and speculation.sources=[history]",
        ),
    ],
)
def test_sources_that_cannot_be(overrides: str, words: str, out: str) -> None:
    assert words in refusal(*overrides.split(), out)


def test_sglang_drafts_from_history_alone(out: str, tmp_path: Path) -> None:
    """A fixed number of tokens, for a model without a draft; the note about one tells of it."""
    model = f"model.path={make_model(tmp_path / 'model', replace(SHAPE, max_positions=1024))}"
    recalling = ("rollout=sglang", "speculation=fixed", "speculation.sources=[history]")
    config = load(out, model, *recalling, "speculation.num_draft_tokens=4", "speculation.history_tokens=4096")
    assert recalls(config) and speculates(config) and not drafts(config)
    assert shape_of_history(config.speculation).counts == (4,)
    plain = load(out, model, "rollout=sglang")
    assert not speculates(plain)
    note = speculation_note(plain) or ""
    assert "decodes plainly" in note and "speculation=fixed and speculation.sources=[history]" in note
