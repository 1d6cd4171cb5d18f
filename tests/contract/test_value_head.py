"""Critics and reward models: values and gradients against transformers' classifiers, for every parallel layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.megatron.value_head import initial_value_head
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights, write_directory
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import MicroBatch, Shard
from rlhfspec_mega.rl.objectives import value_objective
from tests.contract.test_megatron_parity import LAYOUTS, SIZES, make_models, make_sequences, relative_error
from tests.megatron_probe import start_probes

KINDS = {
    "llama": (transformers.LlamaForSequenceClassification, transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2ForSequenceClassification, transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3ForSequenceClassification, transformers.Qwen3Config, {"head_dim": 16}),
}
VALUES_OF = {"one", "tp2", "tp2_sequence", "pp2", "pp2_interleaved", "tp2_pp2"} & LAYOUTS.keys()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("classifiers")
    torch.manual_seed(0)
    for name, (kind, settings, more) in KINDS.items():
        model = kind(settings(**SIZES, **more, num_labels=1, pad_token_id=0))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(directory / name)
    return {name: directory / name for name in KINDS}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, object]]:
    started = {n: start_probes(tmp_path_factory.mktemp(f"probes{n}"), n) for n in (1, 2, 4)}
    yield {n: group for n, (_, group) in started.items()}
    for cluster, _ in started.values():
        cluster.close()


def samples() -> Experience:
    sequences = make_sequences()
    made = Experience.of(
        [one.tokens[: one.prompt_length] for one in sequences], [one.tokens[one.prompt_length :] for one in sequences]
    )
    count = int(made.response_offsets[-1])
    generator = torch.Generator().manual_seed(2)
    made.columns |= {"values": torch.zeros(count).numpy(), "returns": torch.randn(count, generator=generator).numpy()}
    return made


def batches(made: Experience, packed: bool = True) -> list[MicroBatch]:
    return Shard.cut(made, [[0, 1], [2, 3], [], [4]], 2, packed=packed).batches()


def reference(model: Path, made: Experience) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Values of the states before the response tokens, and gradients of half their mean squared error."""
    net = transformers.AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    found = []
    for sample in range(len(made)):
        first, last, prompt = *made.offsets[sample : sample + 2].tolist(), int(made.prompt_lengths[sample])
        tokens = torch.tensor(made.tokens[first:last][None], dtype=torch.int64)
        hidden = net.model(input_ids=tokens).last_hidden_state
        found.append(net.score(hidden)[0, prompt - 1 : -1, 0])
    values = torch.cat(found)
    ((values - torch.from_numpy(made.columns["returns"])).square() / 2).mean().backward()
    return values.detach(), {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("architecture", list(KINDS))
@pytest.mark.parametrize("layout", sorted(VALUES_OF))
def test_values_and_gradients(layout: str, architecture: str, models: dict, probes: dict) -> None:
    config, made = LAYOUTS[layout], samples()
    group = probes[config.tensor_parallel * config.pipeline_parallel]
    want_values, want = reference(models[architecture], made)
    group.call("build", config, models[architecture], 0.3, phase="build")
    loss = partial(value_objective, clip=None)
    for packed in (False, True):
        made_up = batches(made, packed)
        found = [answer for answer in group.call("call", "columns", made_up, phase="values") if answer is not None]
        assert len(found) == 1 and torch.allclose(found[0][0], want_values, atol=1e-4, rtol=1e-4), (
            "whatever the temperature"
        )
        parts = [part for part in group.call("gradients", made_up, loss, phase="gradients") if part is not None]
        gradients = {name: tensor for part in parts for name, tensor in part.items()}
        assert gradients.keys() == want.keys()
        for name, expected in want.items():
            assert relative_error(gradients[name], expected) < 1e-4, (name, packed)


def test_the_score_of_a_sample_is_at_its_last_token(models: dict, probes: dict) -> None:
    """As transformers reads it: with one more token behind it, the state before that token is the score."""
    made = samples()
    sequences = [made.tokens[first:last].tolist() for first, last in zip(made.offsets, made.offsets[1:], strict=False)]
    net = transformers.AutoModelForSequenceClassification.from_pretrained(models["llama"], dtype=torch.float32)
    with torch.no_grad():
        want = torch.cat([net(input_ids=torch.tensor([tokens])).logits[0] for tokens in sequences])
    asked = Experience.of(sequences, [[0]] * len(sequences))
    group = probes[1]
    group.call("build", LAYOUTS["one"], models["llama"], phase="build")
    found = group.call("call", "columns", batches(asked), phase="score")[0]
    assert torch.allclose(found[0], want, atol=1e-4)


def test_a_language_model_gets_a_new_head(tmp_path: Path, probes: dict) -> None:
    """And training moves it: it is in the optimizer, its schedule, the gradient's norm, and the checkpoint."""
    path = make_models(tmp_path)["llama_tied"]
    shape, language = read_shape(path).with_value_head(), HfWeights(path)
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    head = initial_value_head(shape.hidden_size)
    assert head.std() == pytest.approx((shape.hidden_size + 1) ** -0.5, rel=0.4)
    critic = tmp_path / "critic"
    write_directory(
        critic, shape, ((one.name, head if one.name == "score.weight" else language.get(one.name)) for one in tensors)
    )
    assert read_shape(critic) == shape
    loaded, report = transformers.AutoModelForSequenceClassification.from_pretrained(critic, output_loading_info=True)
    assert not report["missing_keys"] and torch.equal(loaded.score.weight.detach(), head)

    made, loss = samples(), partial(value_objective, clip=None)
    for layout in ("one", "tp2_sequence", "pp2"):
        config = LAYOUTS[layout]
        group = probes[config.tensor_parallel * config.pipeline_parallel]
        group.call("build", config, critic, phase="build")
        before = weights(group)
        gradients = group.call("gradients", batches(made), loss, phase="gradients")
        of_each = [tensor.norm().item() for part in gradients if part is not None for tensor in part.values()]
        first = group.call("update", [batches(made)], loss, (), phase="update")[0]
        after = weights(group)
        assert first["grad_norm"] == pytest.approx(math.hypot(*of_each), rel=1e-4), "the norm is that of head and body"
        assert first["lr"] > 0 and not torch.equal(before["score.weight"], after["score.weight"])
        saved = tmp_path / layout
        saved.mkdir()
        group.call("save", saved, phase="save")
        group.call("update", [batches(made)], loss, (), phase="update")
        group.call("call", "load", saved, phase="load")
        assert all(torch.equal(after[name], tensor) for name, tensor in weights(group).items())


def weights(group: object) -> dict[str, torch.Tensor]:
    parts = [part for part in group.call("weights", phase="weights") if part is not None]  # type: ignore[attr-defined]
    return {name: tensor.clone() for part in parts for name, tensor in part.items()}


def test_a_classifier_of_several_classes_is_refused(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SIZES, num_labels=3, architectures=["LlamaForSequenceClassification"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(UserError, match="a classifier of 3 classes: a reward model has one"):
        read_shape(tmp_path)
