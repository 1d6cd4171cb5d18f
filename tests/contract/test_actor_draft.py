"""The draft beside a Megatron actor: it learns on one rank, and comes back from a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.draft.directory import write_draft
from rlhfspec_mega.draft.distillation import initial_draft
from rlhfspec_mega.draft.refresh import DraftLearning, RefreshReport
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.megatron.checkpoint_files import FileSum, sum_file
from rlhfspec_mega.megatron.draft import CHECKPOINT_FILE, ActorDraft
from rlhfspec_mega.megatron.model import on_megatron
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.rl.microbatch import MicroBatch
from tests.clusters import local_cluster
from tests.contract.test_megatron_parity import make_batches, make_models, make_sequences
from tests.megatron_probe import Probe

TP2 = ActorConfig(tensor_parallel=2)
PP2 = ActorConfig(tensor_parallel=1, pipeline_parallel=2)
LEARNING = DraftLearning(buffer_tokens=1000, learning_rate=1e-3, temperature=1.0, seed=0, recent_only=False)
Held = dict[str, torch.Tensor]


class DraftProbe(Probe):
    """A Probe with a draft."""

    def start_draft(self, path: Path, learning: DraftLearning | None) -> None:
        self.draft = ActorDraft(self.actor, path, learning)

    @on_megatron
    def learn(self, batches: list[MicroBatch], follows: list[bool], steps: int) -> RefreshReport | None:
        for refresh_follows in follows:
            with self.draft.learning_from(batches, refresh_follows):
                self.actor.columns(batches)
        return self.draft.refresh(steps, None)

    def weights_of_draft(self) -> Held:
        return {name: tensor.clone() for name, tensor in self.draft.weights().items()}

    def save_draft(self, directory: Path) -> dict[str, FileSum]:
        part = self.draft.write(self.draft.stage(copy=True), directory)
        assert part.failure is None
        return part.files

    def save_without_memory(self, directory: Path) -> str:
        def no_memory() -> Held:
            raise MemoryError("no memory for a copy")

        if self.draft._refresher is not None:
            self.draft._refresher.state_dict = no_memory
        return self.draft.write(self.draft.stage(copy=True), directory).failure or "written"

    def load_draft(self, directory: Path) -> None:
        self.draft.load(directory)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("probes")
    cluster = local_cluster(directory)
    arguments = {"world_size": 2, "meeting_point": str(directory / "meet")}
    name = "tests.contract.test_actor_draft.DraftProbe"
    started = cluster.launch("probe", [WorkerSpec(name, {"rank": rank, **arguments}) for rank in range(2)])
    cluster.wait_started()
    yield started
    cluster.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))["qwen3"]


def make_draft(
    model: Path, path: Path, vocabulary: int | None, first: int = 0, taps: tuple[int, int, int] | None = None
) -> Held:
    """A random draft of the model, of its whole vocabulary or of every second token from `first` on."""
    shape = draft_shape(read_shape(model), vocabulary)
    shape = shape if taps is None else replace(shape, taps=taps)
    ids = None if vocabulary is None else first + 2 * torch.arange(vocabulary)
    head = HfWeights(model).get("lm_head.weight")
    weights = initial_draft(shape, head if ids is None else head[ids], seed=2)
    write_draft(path, shape, weights, ids)
    return weights


def same(found: Held, wanted: Held) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("vocabulary", [None, 50])
def test_it_learns_and_is_saved_under_one_layout_and_goes_on_under_another(
    vocabulary: int | None, group: Any, model: Path, tmp_path: Path
) -> None:
    start = make_draft(model, tmp_path / "draft", vocabulary)
    batches = make_batches(make_sequences())
    group.call("build", TP2, model, phase="build")
    group.call("start_draft", tmp_path / "draft", LEARNING, phase="draft")
    reports = group.call("learn", batches, [True, False], 8, phase="draft")
    assert reports[1] is None and (reports[0].steps, reports[0].examples) == (8, 10)
    assert reports[0].kept, reports[0]
    held = group.call("weights_of_draft", phase="draft")
    assert held[1] == {} and held[0].keys() == start.keys() and not same(held[0], start)
    files = group.call("save_draft", tmp_path, phase="draft")
    assert files == [{CHECKPOINT_FILE: sum_file(tmp_path / CHECKPOINT_FILE)}, {}]

    group.call("build", PP2, model, phase="build")
    group.call("start_draft", tmp_path / "draft", LEARNING, phase="draft")
    group.call("load_draft", tmp_path / "draft", phase="draft")  # where there is no checkpoint of a draft
    assert same(group.call("weights_of_draft", phase="draft")[1], start)
    group.call("load_draft", tmp_path, phase="draft")
    assert same(group.call("weights_of_draft", phase="draft")[1], held[0])
    (tmp_path / "again").mkdir()
    group.call("save_draft", tmp_path / "again", phase="draft")
    assert same(load_file(tmp_path / "again" / CHECKPOINT_FILE), load_file(tmp_path / CHECKPOINT_FILE))
    assert group.call("learn", batches, [True, True], 1, phase="draft")[1].steps == 1


def test_a_draft_that_no_longer_learns_goes_on_as_it_was(group: Any, model: Path, tmp_path: Path) -> None:
    start = make_draft(model, tmp_path / "draft", None)
    group.call("build", PP2, model, phase="build")
    group.call("start_draft", tmp_path / "draft", LEARNING, phase="draft")
    assert group.call("learn", make_batches(make_sequences()), [True], 8, phase="draft")[1].kept
    learnt = group.call("weights_of_draft", phase="draft")[1]
    group.call("save_draft", tmp_path, phase="draft")
    (tmp_path / "again").mkdir()
    for learning, source in ((None, tmp_path), (LEARNING, tmp_path / "again")):
        group.call("start_draft", tmp_path / "draft", learning, phase="draft")
        held = group.call("weights_of_draft", phase="draft")
        assert held[0] == {} and same(held[1], start)
        group.call("load_draft", source, phase="draft")
        assert same(group.call("weights_of_draft", phase="draft")[1], learnt)
        group.call("save_draft", tmp_path / "again", phase="draft")


def test_samples_that_no_refresh_would_see_are_not_kept(group: Any, model: Path, tmp_path: Path) -> None:
    make_draft(model, tmp_path / "draft", None)
    group.call("build", TP2, model, phase="build")
    group.call("start_draft", tmp_path / "draft", replace(LEARNING, recent_only=True), phase="draft")
    batches = make_batches(make_sequences())
    assert group.call("learn", batches, [False], 1, phase="draft")[0].examples == 0
    assert group.call("learn", batches, [True], 1, phase="draft")[0].examples == 5
    assert group.call("learn", batches, [True, True], 1, phase="draft")[0].examples == 5


def test_a_state_that_cannot_be_made_fails_on_every_rank(group: Any, model: Path, tmp_path: Path) -> None:
    make_draft(model, tmp_path / "draft", None)
    group.call("build", TP2, model, phase="build")
    group.call("start_draft", tmp_path / "draft", LEARNING, phase="draft")
    found = group.call("save_without_memory", tmp_path, phase="draft")
    assert found == ["actor rank 0: MemoryError: no memory for a copy"] * 2


@pytest.mark.parametrize("learning", [LEARNING, None])
@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ({"vocabulary": None}, "sizes"),
        ({"vocabulary": 50, "first": 1}, "layers or tokens"),
        ({"vocabulary": 50, "taps": (0, 0, 1)}, "layers or tokens"),
    ],
)
def test_another_draft_is_refused_in_a_sentence(
    kind: dict[str, Any], difference: str, learning: DraftLearning | None, group: Any, model: Path, tmp_path: Path
) -> None:
    make_draft(model, tmp_path / "draft", **kind)
    make_draft(model, tmp_path / "other", 50)
    group.call("build", TP2, model, phase="build")
    group.call("start_draft", tmp_path / "other", learning, phase="draft")
    group.call("save_draft", tmp_path, phase="draft")
    group.call("load_draft", tmp_path, phase="draft")
    group.call("start_draft", tmp_path / "draft", learning, phase="draft")
    with pytest.raises(UserError, match=rf"has other {difference} than .* speculation\.draft_model_path"):
        group.call("load_draft", tmp_path, phase="draft")
