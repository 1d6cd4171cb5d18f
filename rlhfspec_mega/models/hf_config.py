"""The config.json of a Hugging Face model directory: read as a shape, and written from one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ARCHITECTURES, ModelShape

CONFIG = "config.json"
_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_shape(path: Path | str) -> ModelShape:
    """Shape of the model in directory `path`, with transformers' defaults for what config.json leaves out.

    Raises UserError for a missing or damaged config.json and for every feature that ModelShape cannot express.
    """
    path = Path(path)
    config = read_json(path / CONFIG, "the directory of a Hugging Face model holds one")
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UserError(
            f"{path / CONFIG} describes a model of type {architecture!r}: use one of {', '.join(ARCHITECTURES)}."
        )
    refuse_features(path, config)
    hidden, heads = positive(path, config, "hidden_size"), positive(path, config, "num_attention_heads")
    kv_heads = positive(path, config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(f"{path / CONFIG} has {heads} attention heads, not a multiple of its {kv_heads} KV heads.")
    theta, scaling = read_rope(path, config)
    value_head = _has_value_head(path, config)
    head_dim = positive(path, config, "head_dim", ARCHITECTURES[architecture].head_dim or hidden // heads)
    if head_dim % 2:
        raise UserError(f"{path / CONFIG} has heads of width {head_dim}: RoPE turns pairs, so it must be even.")
    return ModelShape(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=positive(path, config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=positive(path, config, "intermediate_size"),
        vocab_size=positive(path, config, "vocab_size"),
        max_positions=positive(path, config, "max_position_embeddings"),
        rope_theta=theta,
        norm_eps=above_zero(path, config, "rms_norm_eps", 1e-6),
        tie_embeddings=not value_head and _flag(path, config, "tie_word_embeddings"),
        rope_scaling=scaling,
        value_head=value_head,
    )


def _has_value_head(path: Path, config: dict[str, Any]) -> bool:
    """Whether the directory holds a model with one number per token.

    Raises UserError for a classifier of several classes.
    """
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not any(str(one).endswith("ForSequenceClassification") for one in classes):
        return False
    names = config.get("id2label")
    labels = config.get("num_labels", len(names) if isinstance(names, dict) else 2)
    if labels != 1:
        raise UserError(f"{path / CONFIG} describes a classifier of {labels} classes: a reward model has one.")
    return True


def config_of(shape: ModelShape, dtype: str, source_config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a shape."""
    config = {
        "architectures": [shape.hf_class],
        "model_type": shape.architecture,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        **rope_config(shape),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        "dtype": dtype,
        **({"num_labels": 1} if shape.value_head else {}),
    }
    special = {key: source_config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**config, **special}


def rope_config(shape: ModelShape) -> dict[str, Any]:
    """RoPE settings for config.json, in the spellings before and since transformers 5."""
    scaling: dict[str, Any] | None = None
    if shape.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **shape.rope_scaling}
        scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    return {
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": shape.rope_theta},
    }


def refuse_features(path: Path, config: dict[str, Any]) -> None:
    """Raise UserError for a feature that changes the computation and that this project does not implement."""
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise UserError(f"{path / CONFIG} has layer_types = {layer_types!r}: a list of names is needed.")
    other_layers = any(one != "full_attention" for one in layer_types)
    windows = config.get("use_sliding_window") and config.get("sliding_window") is not None
    refused = {
        "mixture of experts": any(config.get(key) for key in ("num_experts", "num_local_experts")),
        "sliding-window attention": other_layers or windows,
        "a bias in attention (attention_bias)": config.get("attention_bias"),
        "a bias in the MLP (mlp_bias)": config.get("mlp_bias"),
        f"the activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "quantized weights": config.get("quantization_config"),
        "partial rotary embedding": _rope(path, config).get("partial_rotary_factor", 1.0) != 1.0,
    }
    for feature, present in refused.items():
        if present:
            raise UserError(f"{path / CONFIG} asks for {feature}, which is not supported: choose another one.")


def _rope(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings in one dictionary, from the spellings before and since transformers 5 (the older one wins)."""
    rope = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if given is not None and not isinstance(given, dict):
            raise UserError(f"{path / CONFIG} has {key} = {given!r}: an object or null is needed.")
        rope |= given or {}
    return rope


def read_rope(path: Path, config: dict[str, Any]) -> tuple[float, dict[str, float] | None]:
    """RoPE base and, where present, the parameters of Llama-3's scaling. Raises UserError for what is neither."""
    rope = _rope(path, config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = above_zero(path, rope, "rope_theta", 10000.0)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{path / CONFIG} asks for RoPE scaling {kind!r}: only 'default' and 'llama3' are supported.")
    missing = [key for key in _LLAMA3_ROPE if key not in rope]
    if missing:
        raise UserError(f"{path / CONFIG} asks for llama3 RoPE scaling without {listed(missing)}: add it.")
    return theta, {key: above_zero(path, rope, key) for key in _LLAMA3_ROPE}


def positive(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A size in the config.json of directory `path`. Raises UserError unless it is a positive whole number."""
    value = config.get(key) if config.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path / CONFIG} has {key} = {value!r}: a positive whole number is needed.")
    return value


def above_zero(path: Path, settings: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number of the config.json of directory `path`, or of an object in it.

    Raises UserError unless it is above 0 and finite; null is no number.
    """
    value = settings.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UserError(f"{path / CONFIG} has {key} = {value!r}: a finite number above 0 is needed.")
    return float(value)


def _flag(path: Path, config: dict[str, Any], key: str) -> bool:
    """A truth value in the config.json of directory `path`; null is false. Raises UserError for anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path / CONFIG} has {key} = {value!r}: true or false is needed.")
    return bool(value)


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError, with `hint` at its end, for a missing or damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {hint}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): {hint}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: {hint}.")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
