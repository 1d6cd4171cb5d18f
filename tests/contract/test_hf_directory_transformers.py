"""HF directories against transformers: its directories through our reader, ours through its loader, bit by bit."""

from __future__ import annotations

import pytest
import torch
import transformers

from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights, write_directory
from rlhfspec_mega.models.mapping import mapping_for

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3-rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16, "rms_norm_eps": 1e-5}),
}


def random_model(family: str, **changes) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=101,
        max_position_embeddings=128,
        initializer_range=0.3,
        **changes,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():  # zero biases and unit norms would hide a mix-up
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5 if "norm" in name else -0.5, 1.5)
    return model


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(100).view(2, 50) % 101
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, tmp_path):
    family, changes = CASES[case]
    model = random_model(family, **changes)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")

    shape, weights = read_shape(tmp_path / "theirs"), HfWeights(tmp_path / "theirs")
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    weights.check(tensors)
    state = model.state_dict()
    assert {tensor.name for tensor in tensors} == set(state) - ({"lm_head.weight"} if shape.tie_embeddings else set())
    assert all(torch.equal(weights.get(tensor.name), state[tensor.name]) for tensor in tensors)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())

    stream = ((tensor.name, weights.get(tensor.name)) for tensor in tensors)
    write_directory(tmp_path / "ours", shape, stream, source=tmp_path / "theirs", max_shard_bytes=10_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    assert type(again) is type(model) and again.dtype == torch.float32
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(logits(again), logits(model))


def test_bfloat16_stays_bfloat16(tmp_path):
    model = random_model("Qwen3", tie_word_embeddings=True, head_dim=8).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    shape, weights = read_shape(tmp_path / "theirs"), HfWeights(tmp_path / "theirs")
    assert weights.info("model.norm.weight").dtype == "bfloat16"
    write_directory(tmp_path / "ours", shape, ((name, weights.get(name)) for name in weights.names()))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
