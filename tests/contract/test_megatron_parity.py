"""Megatron's log-probs and gradients against transformers', for every parallel layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import MicroBatch, Shard
from tests.megatron_probe import start_probes

LAYOUTS = {
    "one": ActorConfig(tensor_parallel=1),
    "tp2": ActorConfig(tensor_parallel=2),
    "tp2_sequence": ActorConfig(tensor_parallel=2, sequence_parallel=True),
    "tp2_recompute": ActorConfig(tensor_parallel=2, recompute=True),
    "pp2": ActorConfig(tensor_parallel=1, pipeline_parallel=2),
    "pp2_interleaved": ActorConfig(tensor_parallel=1, pipeline_parallel=2, virtual_pipeline=2),
    "tp2_pp2": ActorConfig(tensor_parallel=2, pipeline_parallel=2),
}
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "use_cache": False,
}
TEMPERATURE = 0.8


def make_models(directory: Path) -> dict[str, Path]:
    torch.manual_seed(0)
    models = {
        "llama_tied": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "qwen2": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "qwen3": transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)
        ),
    }
    for name, model in models.items():
        for parameter in model.parameters():  # norms and biases away from their trivial initial values
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(directory / name)
    return {name: directory / name for name in models}


@dataclass
class OneSample:
    """Prompt and response."""

    tokens: list[int]
    prompt_length: int


def collated(
    sequences: list[OneSample], plan: list[list[int]], multiple: int = 1, packed: bool = False
) -> list[MicroBatch]:
    """Micro-batches of these samples."""
    prompts = [one.tokens[: one.prompt_length] for one in sequences]
    samples = Experience.of(prompts, [one.tokens[one.prompt_length :] for one in sequences])
    return Shard.cut(samples, plan, multiple, packed=packed).batches()


def make_sequences() -> list[OneSample]:
    generator = torch.Generator().manual_seed(1)
    lengths = [(3, 9), (1, 4), (5, 12), (2, 3), (4, 20)]
    return [
        OneSample(torch.randint(0, 101, (prompt + response,), generator=generator).tolist(), prompt)
        for prompt, response in lengths
    ]


def make_batches(sequences: list[OneSample], packed: bool = False) -> list[MicroBatch]:
    """Two real micro-batches of different shapes, one of padding and a last real one: four, even for interleaving."""
    return collated(sequences, [[0, 1], [2, 3], [], [4]], multiple=2, packed=packed)


def reference(model: Path, sequences: list[OneSample]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Response log-probs per sequence and the gradients of their mean negative, by transformers."""
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logprobs = []
    for sequence in sequences:
        tokens = torch.tensor([list(sequence.tokens)])
        logits = net(input_ids=tokens).logits[0, :-1] / TEMPERATURE
        picked = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        logprobs.append(picked[sequence.prompt_length - 1 :])
    (-torch.cat(logprobs).mean()).backward()
    return [x.detach() for x in logprobs], {n: p.grad for n, p in net.named_parameters()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, object]]:
    started = {n: start_probes(tmp_path_factory.mktemp(f"probes{n}"), n) for n in (1, 2, 4)}
    yield {n: group for n, (_, group) in started.items()}
    for cluster, _ in started.values():
        cluster.close()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-6))


@pytest.mark.parametrize("architecture", ["llama_tied", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_logprobs_and_gradients(layout: str, architecture: str, models: dict, probes: dict) -> None:
    config = LAYOUTS[layout]
    group = probes[config.tensor_parallel * config.pipeline_parallel]
    sequences = make_sequences()
    want_logprobs, want_gradients = reference(models[architecture], sequences)
    group.call("build", config, models[architecture], TEMPERATURE, phase="build")
    for packed in (False, True):
        batches = make_batches(sequences, packed)
        answers = group.call("call", "columns", batches, phase="logprobs")
        found = [answer for answer in answers if answer is not None]
        assert len(found) == 1, "exactly one rank of a data-parallel replica reports"
        assert torch.allclose(found[0][0], torch.cat(want_logprobs), atol=1e-4, rtol=1e-4), packed

        parts = [part for part in group.call("gradients", batches, phase="gradients") if part is not None]
        gradients = {name: tensor for part in parts for name, tensor in part.items()}
        assert gradients.keys() == want_gradients.keys()
        for name, want in want_gradients.items():
            assert relative_error(gradients[name], want) < 1e-4, (name, packed)
