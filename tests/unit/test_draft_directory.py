"""The draft's directory: read back bitwise, laid out as SGLang's EAGLE-3 loader wants it, refusals in one sentence."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfspec_mega.draft.directory import (
    check_draft,
    load_draft,
    load_target_ids,
    read_draft_shape,
    write_draft,
)
from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.shape import DraftShape, draft_shape, draft_tensors
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer

TARGET = ModelShape("qwen3", 32, 6, 4, 2, 12, 48, 29, 96, 1e6, 1e-6, True)
SHAPE = draft_shape(TARGET)
REDUCED = draft_shape(TARGET, 7)
IDS = torch.tensor([0, 2, 3, 11, 20, 27, 28])


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tensors_of(shape: DraftShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {info.name: torch.randn(info.shape, generator=generator) for info in draft_tensors(shape)}


@pytest.mark.parametrize("shape", [SHAPE, REDUCED])
def test_names_and_shapes_are_the_models(shape):
    model = DraftModel(shape, Transformer(TARGET, max_positions=1, dtype=torch.float32, device="cpu"))
    own = {name: tuple(tensor.shape) for name, tensor in model.tensors().items()}
    assert own == {info.name: info.shape for info in draft_tensors(shape)}


@pytest.mark.parametrize(("shape", "ids"), [(SHAPE, None), (REDUCED, IDS)])
def test_what_is_written_is_read_back(tmp_path, shape, ids):
    path, tensors = tmp_path / "draft", tensors_of(shape)
    write_draft(path, shape, tensors, ids)
    found, loaded = load_draft(path, TARGET)
    assert found == shape == read_draft_shape(path, TARGET) == check_draft(path, TARGET)
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    read_ids = load_target_ids(path, shape)
    assert (read_ids is None) if ids is None else torch.equal(read_ids, ids)
    write_draft(path, shape, {name: 2 * tensor for name, tensor in tensors.items()}, ids)  # replaced
    assert torch.equal(load_draft(path, TARGET)[1]["fc.weight"], 2 * tensors["fc.weight"])
    assert sorted(entry.name for entry in path.iterdir()) == ["config.json", "model.safetensors"]


def test_the_layout_is_the_one_that_sglang_loads(tmp_path):
    """As its LlamaForCausalLMEagle3 reads it: names after stacking, offsets added to a range, a mask, config keys."""
    write_draft(tmp_path / "draft", REDUCED, tensors_of(REDUCED), IDS)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (1, False)
    assert (config["vocab_size"], config["draft_vocab_size"]) == (29, 7)
    assert (config["hidden_size"], config["target_hidden_size"], config["head_dim"]) == (32, 32, 12)
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64 and torch.equal(stored["d2t"] + torch.arange(7), IDS)
    assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero()[:, 0].tolist() == IDS.tolist()
    assert stored["midlayer.self_attn.k_proj.weight"].shape == (2 * 12, 2 * 32)
    assert stored["fc.weight"].shape == (32, 3 * 32) and stored["lm_head.weight"].shape == (7, 32)


def changed(path, config=None, weights=None) -> None:
    """Change keys of the config (None removes one) and tensors (None removes one)."""
    for file, changes, load, save in (
        (path / "config.json", config, lambda f: json.loads(f.read_text()), lambda d, f: f.write_text(json.dumps(d))),
        (path / "model.safetensors", weights, load_file, save_file),
    ):
        content = {**load(file), **(changes or {})}
        save({key: value for key, value in content.items() if value is not None}, file)


def test_drafts_made_elsewhere_are_read(tmp_path):
    """Without layers of their own they read those that SGLang captures: outputs 1, half - 1 and four before the end."""
    path = tmp_path / "draft"
    write_draft(path, SHAPE, tensors_of(SHAPE))
    left_out = dict.fromkeys(("target_hidden_size", "eagle_config", "draft_vocab_size"))
    half = {name: tensor.bfloat16() for name, tensor in tensors_of(SHAPE).items()}
    changed(path, left_out, {**half, "embed_tokens.weight": torch.zeros(29, 32)})
    shape, tensors = load_draft(path, TARGET)
    assert shape == dataclasses.replace(SHAPE, taps=(1, 2, 2)) and "embed_tokens.weight" not in tensors
    assert torch.equal(tensors["fc.weight"], half["fc.weight"].float())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, this model needs 32"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48, this model needs 32"),
        ({"vocab_size": 30}, "vocab_size is 30, this model needs 29"),
        ({"architectures": ["LlamaForCausalLM"]}, "holds no EAGLE-3 draft"),
        ({"num_hidden_layers": 2}, "holds no EAGLE-3 draft"),
        ({"intermediate_size": None}, "intermediate_size = None"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, r"reads the layers \[1, 2, 6\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, r"reads the layers \[1, 2\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3.0]}}, r"reads the layers \[1, 2, 3\.0\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "reads the layers all"),
        ({"head_dim": None}, "head_dim is 8, this model needs 12"),
        ({"num_attention_heads": 3}, "has 3 attention heads, not a multiple of its 2 KV heads"),
        ({"rope_theta": 1e4, "rope_parameters": None}, r"rope_theta is 10000\.0, this model needs 1000000\.0"),
        ({"rope_theta": None, "rope_parameters": None}, r"rope_theta is 10000\.0"),
        ({"rope_scaling": LLAMA3}, r"rope_scaling is \{'factor': 8\.0.*, this model needs None"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "asks for RoPE scaling 'yarn'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, this model needs 1e-06"),
        ({"attention_bias": True}, "asks for a bias in attention"),
        ({"hidden_act": "gelu"}, "asks for the activation 'gelu'"),
    ],
)
def test_a_draft_of_another_model_is_refused(tmp_path, config, message):
    write_draft(tmp_path / "draft", SHAPE, tensors_of(SHAPE))
    changed(tmp_path / "draft", config)
    with pytest.raises(UserError, match=message):
        load_draft(tmp_path / "draft", TARGET)


def test_a_target_with_scaled_rotations_gets_its_draft_back(tmp_path):
    scaled = dataclasses.replace(
        TARGET, rope_scaling={key: value for key, value in LLAMA3.items() if key != "rope_type"}
    )
    shape = draft_shape(scaled)
    write_draft(tmp_path / "draft", shape, tensors_of(shape))
    assert read_draft_shape(tmp_path / "draft", scaled) == shape


def test_too_shallow_a_target_needs_to_be_told_the_layers(tmp_path):
    shallow = dataclasses.replace(TARGET, num_layers=3)
    write_draft(tmp_path / "draft", draft_shape(shallow), tensors_of(draft_shape(shallow)))
    changed(tmp_path / "draft", {"eagle_config": None})
    with pytest.raises(UserError, match=r"reads the layers \[1, 0, -1\], this model has 3"):
        read_draft_shape(tmp_path / "draft", shallow)


def test_damaged_weights_are_refused(tmp_path):
    path = tmp_path / "draft"
    with pytest.raises(UserError, match="cannot be read"):
        load_draft(path, TARGET)
    write_draft(path, REDUCED, tensors_of(REDUCED), IDS)
    changed(path, weights={"fc.weight": torch.zeros(32, 32)})
    with pytest.raises(UserError, match=r"fc\.weight is \[32, 32\] float32, not \[32, 96\]"):
        load_draft(path, TARGET)
    for offsets in (IDS - torch.arange(7) + 1, torch.zeros(6, dtype=torch.int64), -torch.arange(7)):
        changed(path, weights={"d2t": offsets})
        with pytest.raises(UserError, match="does not name 7 tokens"):
            load_target_ids(path, REDUCED)
        changed(path, weights={"fc.weight": tensors_of(REDUCED)["fc.weight"]})
        with pytest.raises(UserError, match="does not name 7 tokens"):
            check_draft(path, TARGET)
    changed(path, weights={"d2t": None, "norm.weight": None})
    with pytest.raises(UserError, match="no tensor d2t"):
        load_target_ids(path, REDUCED)
    for read in (load_draft, check_draft):
        with pytest.raises(UserError, match=r"lacks norm\.weight"):
            read(path, TARGET)
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no file model\.safetensors"):
        load_draft(path, TARGET)


def test_nothing_wrong_is_written_and_no_model_replaced(tmp_path):
    tensors = tensors_of(SHAPE)
    with pytest.raises(RunError, match="do not fit"):
        write_draft(tmp_path / "draft", dataclasses.replace(SHAPE, ffn_size=50), tensors)
    with pytest.raises(RunError, match="target ids"):
        write_draft(tmp_path / "draft", SHAPE, tensors, torch.arange(29))
    assert not list(tmp_path.iterdir())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="holds no draft"):
        write_draft(tmp_path / "model", SHAPE, tensors)
    (tmp_path / "empty").mkdir()
    write_draft(tmp_path / "empty", SHAPE, tensors)
    assert check_draft(tmp_path / "empty", TARGET) == SHAPE
