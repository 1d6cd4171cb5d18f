"""HF directories: shards and index, lazy slices, atomic writing, and one clear sentence for each damaged input."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights, scores_before_end, write_config, write_directory
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.mapping.layouts import Partition
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.types import TensorInfo

SHAPE = ModelShape("llama", 16, 2, 4, 2, 4, 32, 50, 64, 5e5, 1e-5, False)
TENSORS = mapping_for("llama").hf_tensors(SHAPE)
BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {info.name: torch.randn(info.shape) for info in TENSORS}


@pytest.mark.parametrize("ends", [7, [7, 9]])
def test_a_classifier_does_not_take_the_end_of_a_text_for_padding(tmp_path, ends) -> None:
    """Its score was learnt there; transformers reads it at the last token that is not padding."""
    source = tmp_path / "config.json"
    for architecture, padding in (("LlamaForCausalLM", None), ("LlamaForSequenceClassification", 7)):
        source.write_text(
            json.dumps({**BASE, "architectures": [architecture], "pad_token_id": 7, "eos_token_id": ends})
        )
        assert scores_before_end(tmp_path) == (padding == 7), "that of somebody else's classifier stays as it is"
        made = tmp_path / architecture
        made.mkdir()
        write_config(made, SHAPE.with_value_head(), "float32", tmp_path)
        assert json.loads((made / "config.json").read_text()).get("pad_token_id") == padding


def shape_of(tmp_path, **changes) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
    return read_shape(tmp_path)


@pytest.mark.parametrize("max_shard_bytes", [1, 4000, 1 << 30])
def test_shards_are_read_back_bitwise(tmp_path, max_shard_bytes):
    path, expected = tmp_path / "model", weights()
    write_directory(path, SHAPE, expected.items(), max_shard_bytes=max_shard_bytes)
    reader = HfWeights(path)
    reader.check(TENSORS)
    assert set(reader.names()) == set(expected)
    assert all(torch.equal(reader.get(name), expected[name]) for name in expected)
    assert reader.info("lm_head.weight") == TensorInfo("lm_head.weight", (50, 16), "float32")
    assert read_shape(path) == SHAPE
    files = list(path.glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 1 << 30)
    for file in files:
        shard = load_file(file)
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= max_shard_bytes


def test_a_tensor_in_reused_memory_is_written_as_it_was(tmp_path):
    expected, memory = weights(), torch.empty(50 * 16)

    def stream():
        for name, tensor in expected.items():
            view = memory[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    write_directory(tmp_path / "model", SHAPE, stream())
    assert all(torch.equal(HfWeights(tmp_path / "model").get(name), expected[name]) for name in expected)


def test_layouts_read_lazy_tensors_like_full_ones(tmp_path):
    full = weights()
    write_directory(tmp_path / "model", SHAPE, full.items())
    reader, partition = HfWeights(tmp_path / "model"), Partition(SHAPE, 2)
    mapping = mapping_for("llama")
    for rule in (*mapping.layer_rules, mapping.embedding, mapping.head, mapping.norm):
        names = rule.hf_names(1)
        for rank in range(2):
            lazy = rule.layout.split([reader.lazy(name) for name in names], partition, rank)
            assert torch.equal(lazy, rule.layout.split([full[name] for name in names], partition, rank))


def test_failed_writing_leaves_nothing_and_the_old_model_in_place(tmp_path):
    path = tmp_path / "model"
    write_directory(path, SHAPE, weights().items())
    incomplete = dict(list(weights().items())[:-1])
    with pytest.raises(RunError, match=r"did not get lm_head\.weight"):
        write_directory(path, SHAPE, incomplete.items())
    with pytest.raises(RunError, match=r"wrongly shaped tensor model\.norm\.weight"):
        write_directory(path, SHAPE, [("model.norm.weight", torch.zeros(3))])
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    HfWeights(path).check(TENSORS)


def test_writing_replaces_a_model_but_nothing_else(tmp_path):
    path = tmp_path / "model"
    write_directory(path, SHAPE, weights().items(), max_shard_bytes=1)
    doubled = {name: 2 * tensor for name, tensor in weights().items()}
    write_directory(path, SHAPE, doubled.items())
    assert torch.equal(HfWeights(path).get("lm_head.weight"), doubled["lm_head.weight"])
    assert sorted(entry.name for entry in path.iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("keep")
    with pytest.raises(UserError, match="is not a Hugging Face model"):
        write_directory(tmp_path / "notes", SHAPE, weights().items())


def test_tokenizer_files_and_special_tokens_come_from_the_source(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 7}))
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("not this")
    write_directory(tmp_path / "model", SHAPE, weights().items(), source=source)
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "model" / "pytorch_model.bin").exists()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == 7


def test_damaged_weights_are_named(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(UserError, match=r"no file model\.safetensors"):
        HfWeights(tmp_path)
    write_directory(path, SHAPE, weights().items(), max_shard_bytes=4000)
    shard = sorted(path.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{shard.name} is damaged or truncated"):
        HfWeights(path)
    shard.unlink()
    with pytest.raises(UserError, match=f"no file {shard.name}"):
        HfWeights(path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        ([1], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"a": 1}, "has no weight_map"),
        ({"a": None}, "has no weight_map"),
        ({"a": "x.safetensors"}, "no file x.safetensors"),
        ({"a": "."}, "no file ."),
    ],
)
def test_a_bad_index_is_refused(tmp_path, weight_map, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=message):
        HfWeights(tmp_path)


def test_two_models_in_one_directory_are_refused(tmp_path):
    """Transformers would read model.safetensors, and others the shards."""
    write_directory(tmp_path, SHAPE, weights().items(), max_shard_bytes=4000)
    save_file(weights(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"which names other files: remove what is not the model\."):
        HfWeights(tmp_path)


def test_an_index_of_a_single_file_is_read(tmp_path):
    """Some tools write one beside it; both ways lead to the same tensors."""
    write_directory(tmp_path, SHAPE, weights().items())
    index = {"weight_map": dict.fromkeys(weights(), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    HfWeights(tmp_path).check(TENSORS)


def test_a_tensor_has_one_file_and_that_is_the_indexs(tmp_path):
    write_directory(tmp_path, SHAPE, weights().items(), max_shard_bytes=4000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, last = (index["weight_map"][name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert first != last
    swapped = index["weight_map"] | {"lm_head.weight": first}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(UserError, match=f"says that {first} holds lm_head.weight, which it does not"):
        HfWeights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    HfWeights(tmp_path).check(TENSORS)
    twice = load_file(tmp_path / last) | {"model.embed_tokens.weight": torch.zeros(50, 16)}
    save_file(twice, tmp_path / last)
    with pytest.raises(UserError, match=f"holds model.embed_tokens.weight in {first} and in {last}"):
        HfWeights(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path):
    write_directory(tmp_path / "model", SHAPE, weights().items())
    reader = HfWeights(tmp_path / "model")
    with pytest.raises(UserError, match=r"lacks model\.layers\.7\.up"):
        reader.check([TensorInfo("model.layers.7.up", (2,), "float32")])
    with pytest.raises(UserError, match=r"model\.norm\.weight is \[16\] float32, not \[17\]"):
        reader.check([TensorInfo("model.norm.weight", (17,), "float32")])
    with pytest.raises(UserError, match="no tensor nothing"):
        reader.get("nothing")


def test_both_rope_spellings(tmp_path):
    assert shape_of(tmp_path).rope_theta == 10000.0
    assert shape_of(tmp_path, rope_theta=5e5, rope_scaling=None).rope_theta == 5e5
    assert shape_of(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 3e4}).rope_theta == 3e4
    old = shape_of(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = shape_of(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new and old.rope_scaling == LLAMA3 and old.rope_theta == 5e5


def test_sizes_that_configs_leave_out(tmp_path):
    shape = shape_of(tmp_path)
    assert (shape.head_dim, shape.num_kv_heads, shape.tie_embeddings) == (16, 4, False)
    assert shape_of(tmp_path, head_dim=None, num_key_value_heads=2).num_kv_heads == 2
    assert shape_of(tmp_path, model_type="qwen3").head_dim == 128  # transformers' default
    assert shape_of(tmp_path, model_type="qwen2", sliding_window=4096, use_sliding_window=False).qkv_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "'mixtral': use one of llama, qwen2, qwen3"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "without low_freq_factor"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_key_value_heads": 3}, "not a multiple of its 3 KV heads"),
        ({"model_type": ["llama"]}, r"of type \['llama'\]"),
        ({"model_type": {}}, "of type {}"),
        ({"hidden_size": True}, "hidden_size = True: a positive whole number"),
        ({"head_dim": 15}, "heads of width 15"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None: a finite number above 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rope_theta": "x"}, "rope_theta = 'x'"),
        ({"rope_theta": [1]}, r"rope_theta = \[1\]"),
        ({"rope_theta": 0}, "rope_theta = 0"),
        ({"rope_theta": 10**400}, "rope_theta = 1000"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear': an object or null"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]"),
        ({"rope_parameters": "x"}, "rope_parameters = 'x'"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "has factor = None"),
        ({"rope_scaling": {"rope_type": ["llama3"], **LLAMA3}}, "asks for RoPE scaling"),
        ({"layer_types": 5}, "layer_types = 5: a list of names"),
        ({"layer_types": [{}]}, "sliding-window"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': true or false"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        shape_of(tmp_path, **changes)


def test_unreadable_configs_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_shape(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_shape(tmp_path)
