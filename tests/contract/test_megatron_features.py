"""The hidden states that the actor records for a draft against transformers', for every parallel layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.draft.examples import Example
from rlhfspec_mega.megatron.features import choose, recorded_features
from rlhfspec_mega.megatron.model import on_megatron
from rlhfspec_mega.megatron.weights import embedding_and_head
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.rl.microbatch import MicroBatch
from tests.clusters import local_cluster
from tests.contract.test_megatron_parity import OneSample, collated, make_batches, make_models, make_sequences
from tests.megatron_probe import Probe

LAYOUTS = {
    "one": ActorConfig(tensor_parallel=1),
    "tp2": ActorConfig(tensor_parallel=2),
    "tp2_sequence": ActorConfig(tensor_parallel=2, sequence_parallel=True),
    "tp2_recompute": ActorConfig(tensor_parallel=2, recompute=True),
    "pp2": ActorConfig(tensor_parallel=1, pipeline_parallel=2),
    "pp2_interleaved": ActorConfig(tensor_parallel=1, pipeline_parallel=2, virtual_pipeline=2),
    "dp2": ActorConfig(tensor_parallel=1),
}
OWNER = {"pp2": 1, "pp2_interleaved": 1}  # the rank that gets the states; elsewhere 0
TAPS = (0, 2, 2)
LARGE = 10_000


class FeatureProbe(Probe):
    """A Probe that also records."""

    @on_megatron
    def record(self, shards: list[list[MicroBatch]], most_tokens: int) -> list[Example]:
        batches = shards[self.actor.position.dp % len(shards)]
        with recorded_features(self.actor.chunks, self.actor.groups, batches, TAPS, most_tokens) as examples:
            self.actor.columns(batches)
        self.actor.columns(batches)  # nothing is recorded any more
        return examples

    @on_megatron
    def vocabulary(self) -> Any:
        return (
            embedding_and_head(self.actor.chunks, self.actor.shape, self.actor.groups)
            if self.actor.position.dp == 0
            else None
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Any]]:
    directory = tmp_path_factory.mktemp("probes")
    cluster = local_cluster(directory)
    groups = {}
    for size in (1, 2):
        arguments = {"world_size": size, "meeting_point": str(directory / f"meet{size}")}
        name = "tests.contract.test_megatron_features.FeatureProbe"
        specs = [WorkerSpec(name, {"rank": rank, **arguments}) for rank in range(size)]
        groups[size] = cluster.launch(f"probes{size}", specs)
    cluster.wait_started()
    yield groups
    cluster.close()


def wanted(model: Path, sequence: OneSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and final normed states by transformers, of all but the last token."""
    net = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        hidden = net(input_ids=torch.tensor([list(sequence.tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[tap + 1][0, :-1] for tap in TAPS], dim=-1), hidden[-1][0, :-1]


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("architecture", ["llama_tied", "qwen3"])
def test_states_and_vocabulary_weights(layout: str, architecture: str, models: dict, probes: dict) -> None:
    group, sequences = probes[1 if layout == "one" else 2], make_sequences()
    group.call("build", LAYOUTS[layout], models[architecture], phase="build")
    owner = OWNER.get(layout, 0)
    for packed in (False, True):
        shards = [make_batches(sequences, packed)]
        expected = [0, 1, 2, 3, 4]
        if layout == "dp2":  # every replica has its own share, and the first one's is recorded
            expected = [1, 3]
            shards = [collated(sequences, plan, packed=packed) for plan in ([[3, 1]], [[0, 2, 4]])]
        answers = group.call("record", shards, LARGE, phase="record")
        assert [len(answer) for answer in answers] == [len(expected) * (rank == owner) for rank in range(group.size)]
        for index, example in zip(expected, answers[owner], strict=True):
            sequence = sequences[index]
            assert example.tokens.tolist() == list(sequence.tokens) and example.prompt_length == sequence.prompt_length
            features, states = wanted(models[architecture], sequence)
            assert (example.features[:-1] - features).abs().max() < 1e-4
            assert (example.states[:-1] - states).abs().max() < 1e-4
            assert not example.features[-1].any() and not example.states[-1].any()

    weights = HfWeights(models[architecture])
    embedding = weights.get("model.embed_tokens.weight")
    head = weights.get("lm_head.weight") if architecture == "qwen3" else embedding
    found = group.call("vocabulary", phase="vocabulary")
    assert [answer is not None for answer in found] == [rank == owner for rank in range(group.size)]
    assert torch.equal(found[owner][0], embedding) and torch.equal(found[owner][1], head)


@pytest.mark.parametrize(("most_tokens", "expected"), [(73, [0, 1, 2, 3, 4]), (60, [0, 2, 4]), (30, [0, 3])])
def test_what_is_chosen_is_bounded_and_spread_over_the_step(most_tokens: int, expected: list[int]) -> None:
    sequences = make_sequences()  # of 12, 5, 17, 5 and 24 tokens: 63
    for packed in (False, True):
        places = choose(make_batches(sequences, packed), most_tokens)
        assert [place.tokens.tolist() for place in places] == [list(sequences[index].tokens) for index in expected]
        assert sum(len(place.tokens) for place in places) <= most_tokens
