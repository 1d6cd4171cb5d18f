"""The plain-torch transformer and the torch engine against transformers' Llama, Qwen2 and Qwen3 with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer, sequence_logprobs
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, TensorInfo
from tests.near_tie import assert_same, perturbed_scores

VOCAB = 53
POSITIONS = 96
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
CASES = [
    ("llama", True, None),
    ("llama", False, LLAMA3_SCALING),
    ("qwen2", True, None),
    ("qwen2", False, None),
    ("qwen3", True, None),
    ("qwen3", False, None),
]


def make_shape(architecture: str, tie: bool, scaling: dict[str, float] | None) -> ModelShape:
    head_dim = 24 if architecture == "qwen3" else 16  # Qwen3 alone frees head_dim from hidden_size / heads
    return ModelShape(architecture, 64, 3, 4, 2, head_dim, 96, VOCAB, POSITIONS, 500.0, 1e-5, tie, scaling)


def make_reference(shape: ModelShape) -> PreTrainedModel:
    """A transformers model of this shape with weights that make peaked, context-dependent distributions."""
    config_class, model_class = CLASSES[shape.architecture]
    rope: dict[str, Any] = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    if shape.rope_scaling:
        rope |= {"rope_type": "llama3", **shape.rope_scaling}
    config = config_class(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=shape.tie_embeddings,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.25 if parameter.dim() == 2 else 0.2)
            if "norm" in name:
                parameter.add_(1.0)
    return model


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}")
def pair(request) -> tuple[ModelShape, PreTrainedModel, dict[str, torch.Tensor]]:
    shape = make_shape(*request.param)
    reference = make_reference(shape)
    return shape, reference, {name: p.detach() for name, p in reference.named_parameters()}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_logprobs_of_whole_sequences(pair):
    shape, reference, weights = pair
    model = Transformer(shape, max_positions=POSITIONS, dtype=torch.float32, device="cpu")
    model.load(weights)
    tokens = torch.randint(VOCAB, (5, POSITIONS), generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.7):
        with torch.no_grad():
            expected = (reference(tokens).logits[:, :-1] / temperature).log_softmax(-1)
        expected = expected.gather(2, tokens[:, 1:, None])[..., 0]
        assert expected.std() > 0.5
        actual = sequence_logprobs(model, tokens, temperature=temperature, chunk=100)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_names_and_shapes_are_the_hugging_face_ones(pair):
    shape, _, weights = pair
    model = Transformer(shape, max_positions=4, dtype=torch.float32, device="cpu")
    tensors = model.hf_tensors()
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in weights.items()}
    assert sum(t.numel() for t in tensors.values()) == shape.parameters
    model.load(weights)
    assert all(torch.equal(tensors[name], weights[name]) and tensors[name].is_contiguous() for name in weights)


def test_load_names_what_does_not_fit():
    shape = make_shape("llama", False, None)
    model = Transformer(shape, max_positions=4, dtype=torch.float32, device="cpu")
    weights = {name: t.clone() for name, t in model.hf_tensors().items()}
    norm = weights.pop("model.norm.weight")
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        model.load(weights)
    with pytest.raises(UserError, match=r"unknown model\.extra"):
        model.load(weights | {"model.norm.weight": norm, "model.extra": norm})
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \(63,\)"):
        model.load(weights | {"model.norm.weight": norm[1:]})
    with pytest.raises(UserError, match="96 positions"):
        Transformer(shape, max_positions=97, dtype=torch.float32, device="cpu")


def make_requests() -> list[GenerationRequest]:
    """Three groups of four; in each, one member is greedy and one at another temperature."""
    return [
        GenerationRequest(
            sample_id=f"{group}.{member}",
            group_id=str(group),
            prompt_tokens=tuple((7 * group + 3 * i * i) % VOCAB for i in range(length)),
            seed=sample_seed(5, 2, group, member),
            max_new_tokens=30,
            temperature=temperature,
            stop_tokens=(13,),
        )
        for group, length in enumerate((1, 9, 40))
        for member, temperature in enumerate((1.0, 0.0, 0.6, 1.0))
    ]


def decode_step_by_step(reference: PreTrainedModel, request: GenerationRequest) -> GenerationResult:
    """Shared-noise decoding without any cache or batch: a full forward and the noise in plain Python per token."""
    sequence, logprobs = list(request.prompt_tokens), []
    tokens: list[int] = []
    while len(tokens) < request.max_new_tokens:
        with torch.no_grad():
            logits = reference(torch.tensor([sequence])).logits[0, -1]
        token = int(perturbed_scores(logits, request, len(sequence) - 1).argmax())
        logprobs.append(float((logits / (request.temperature or 1.0)).log_softmax(-1)[token]))
        tokens.append(token)
        sequence.append(token)
        if token in request.stop_tokens:
            return GenerationResult(request.sample_id, tokens, logprobs, [0] * len(tokens), FinishReason.STOP)
    return GenerationResult(request.sample_id, tokens, logprobs, [0] * len(tokens), FinishReason.LENGTH)


def test_engine_tokens_and_logprobs(pair):
    shape, reference, weights = pair
    engine = TorchEngine(shape, slots=5, max_positions=80, prefill_chunk=16, dtype=torch.float32, device="cpu")
    engine.begin_update(0, [TensorInfo(name, tuple(t.shape), "float32") for name, t in weights.items()])
    engine.update_weights([(name, 0, t.flatten()) for name, t in weights.items()])
    engine.end_update(0)
    requests = make_requests()
    engine.submit(requests)
    results = {result.sample_id: result for result in engine.poll(60.0)}
    expected = {request.sample_id: decode_step_by_step(reference, request) for request in requests}
    assert len({token for result in expected.values() for token in result.tokens}) > VOCAB // 3

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return reference(torch.tensor([tokens])).logits[0, -1]

    assert_same(expected, results, requests, logits)
