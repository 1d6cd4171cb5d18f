"""The draft beside a Megatron actor: it learns on one rank, and comes back from a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhfspec_mega.actor.actor import on_megatron
from rlhfspec_mega.actor.checkpoint_files import FileSum, sum_file
from rlhfspec_mega.actor.draft import CHECKPOINT_FILE, ActorDraft
from rlhfspec_mega.actor.draft_learning import DraftLearning
from rlhfspec_mega.algorithm.microbatch import MicroBatch
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.config.schema import ActorConfig
from rlhfspec_mega.drafting.initialize import initial_draft
from rlhfspec_mega.drafting.trainer import RefreshReport
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.draft_directory import write_draft
from rlhfspec_mega.models.draft_shape import draft_shape
from rlhfspec_mega.models.hf_directory import HfWeights, read_shape
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
        self.draft = ActorDraft(self.actor.chunks, self.actor.shape, path, learning, self.actor.device)

    @on_megatron
    def learn(self, batches: list[MicroBatch], passes: int, steps: int) -> RefreshReport | None:
        for _ in range(passes):
            with self.draft.learning_from(batches):
                self.actor.logprobs(batches, False)
        return self.draft.refresh(steps, None)

    def weights_of_draft(self) -> Held:
        return {name: tensor.clone() for name, tensor in self.draft.weights().items()}

    def save_draft(self, directory: Path) -> dict[str, FileSum]:
        return self.draft.save(directory)

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


def make_draft(model: Path, path: Path, vocabulary: int | None) -> Held:
    """A random draft of the model, of its whole vocabulary or of every second token."""
    shape = draft_shape(read_shape(model), vocabulary)
    ids = None if vocabulary is None else 2 * torch.arange(vocabulary)
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
    reports = group.call("learn", batches, 2, 8, phase="draft")  # ten examples, of which one is held out
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
    assert group.call("learn", batches, 2, 1, phase="draft")[1].steps == 1


def test_what_does_not_learn_is_held_and_never_saved(group: Any, model: Path, tmp_path: Path) -> None:
    start = make_draft(model, tmp_path / "draft", None)
    group.call("build", PP2, model, phase="build")
    group.call("start_draft", tmp_path / "draft", None, phase="draft")
    held = group.call("weights_of_draft", phase="draft")
    assert held[0] == {} and same(held[1], start)
    assert group.call("save_draft", tmp_path, phase="draft") == [{}, {}]


def test_a_draft_of_other_sizes_is_refused_in_a_sentence(group: Any, model: Path, tmp_path: Path) -> None:
    make_draft(model, tmp_path / "draft", None)
    make_draft(model, tmp_path / "other", 50)
    group.call("build", TP2, model, phase="build")
    group.call("start_draft", tmp_path / "other", LEARNING, phase="draft")
    group.call("save_draft", tmp_path, phase="draft")
    group.call("start_draft", tmp_path / "draft", LEARNING, phase="draft")
    with pytest.raises(UserError, match=r"has other sizes .* drafting\.path"):
        group.call("load_draft", tmp_path, phase="draft")
