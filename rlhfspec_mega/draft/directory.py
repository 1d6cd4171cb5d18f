"""The draft's Hugging Face directory, in the layout of SGLang's LlamaForCausalLMEagle3: read and written.

A reduced vocabulary is kept as `d2t`, int64 offsets (target id = i + d2t[i]), and `t2d`, a mask over target ids.
SGLang's eagle_aux_hidden_state_layer_ids count layers from 0 and mean their outputs, as DraftShape.taps does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhfspec_mega.draft.shape import TAPS, DraftShape, draft_tensors
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.hf_config import (
    CONFIG,
    above_zero,
    positive,
    read_json,
    read_rope,
    refuse_features,
    rope_config,
    write_json,
)
from rlhfspec_mega.models.hf_directory import WEIGHTS, HfWeights, appearing
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.types import TensorInfo

DRAFT_CLASS = "LlamaForCausalLMEagle3"
_OFFSETS, _MASK = "d2t", "t2d"
_MISSING = "a draft's directory holds one; tools.train_draft makes a draft"


def read_draft_shape(path: Path | str, target: ModelShape) -> DraftShape:
    """Shape of the draft in directory `path`.

    Raises UserError for a missing or damaged config.json, for another kind of model, for a draft of another target and
    for settings that differ from the target's where DraftShape has no place for them.
    """
    path = Path(path)
    config = read_json(path / CONFIG, _MISSING)
    if config.get("architectures") != [DRAFT_CLASS] or positive(path, config, "num_hidden_layers") != 1:
        raise UserError(f"{path} holds no EAGLE-3 draft ({DRAFT_CLASS} of one layer): make one with tools.train_draft.")
    heads = positive(path, config, "num_attention_heads")
    kv_heads = positive(path, config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(f"{path / CONFIG} has {heads} attention heads, not a multiple of its {kv_heads} KV heads.")
    refuse_features(path, config)
    _compare(path, config, target, heads)
    return DraftShape(
        target=target,
        vocab_size=positive(path, config, "draft_vocab_size", target.vocab_size),
        taps=_taps(path, config, target),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=target.head_dim,
        ffn_size=positive(path, config, "intermediate_size"),
    )


def read_draft_tensors(path: Path, target: ModelShape) -> list[TensorInfo]:
    """Of a directory's draft, without their values. Raises UserError as `read_draft_shape`."""
    return draft_tensors(read_draft_shape(path, target))


def _compare(path: Path, config: dict[str, Any], target: ModelShape, heads: int) -> None:
    """Raise UserError unless the draft has the target's sizes, rotary embedding and epsilon, which the two share."""
    hidden = positive(path, config, "hidden_size")
    theta, scaling = read_rope(path, config)
    pairs: dict[str, tuple[Any, Any]] = {
        "hidden_size": (hidden, target.hidden_size),
        "target_hidden_size": (positive(path, config, "target_hidden_size", hidden), target.hidden_size),
        "vocab_size": (positive(path, config, "vocab_size"), target.vocab_size),
        "head_dim": (positive(path, config, "head_dim", hidden // heads), target.head_dim),
        "rope_theta": (theta, target.rope_theta),
        "rope_scaling": (scaling, target.rope_scaling),
        "rms_norm_eps": (above_zero(path, config, "rms_norm_eps", 1e-6), target.norm_eps),
    }
    for key, (found, wanted) in pairs.items():
        if found != wanted:
            raise UserError(
                f"The draft in {path} was made for another target: its {key} is {found}, this model needs {wanted}; "
                "make one for this model with tools.train_draft."
            )


def check_draft(path: Path | str, target: ModelShape) -> DraftShape:
    """Shape of the draft in directory `path`, all of which fits `target`; its weights are not read.

    Raises UserError as `load_draft` and `load_target_ids`.
    """
    shape = read_draft_shape(path, target)
    HfWeights(path).check(draft_tensors(shape))
    load_target_ids(path, shape)
    return shape


def load_draft(path: Path | str, target: ModelShape) -> tuple[DraftShape, dict[str, Tensor]]:
    """Shape and weights, float32 by DraftModel.tensors() names; a copy of the target's embedding is ignored.

    Raises UserError as `read_draft_shape`, and for missing, damaged or ill-fitting weights.
    """
    shape = read_draft_shape(path, target)
    weights, infos = HfWeights(path), draft_tensors(shape)
    weights.check(infos)
    return shape, {info.name: weights.get(info.name).float() for info in infos}


def load_target_ids(path: Path | str, shape: DraftShape) -> Tensor | None:
    """Target token int64 [draft vocabulary] of each draft token; None where the two vocabularies are the same.

    Raises UserError when the directory lacks them or they are no tokens of the target, each once.
    """
    if shape.vocab_size == shape.target.vocab_size:
        return None
    offsets = HfWeights(path).get(_OFFSETS)
    ids = offsets.long() + torch.arange(len(offsets))
    if len(ids) != shape.vocab_size or len(ids.unique()) != len(ids) or not _within(ids, shape.target.vocab_size):
        raise UserError(
            f"{_OFFSETS} in {path} does not name {shape.vocab_size} tokens of the target: make the draft again with "
            "tools.train_draft."
        )
    return ids


def write_draft(
    path: Path | str, shape: DraftShape, tensors: Mapping[str, Tensor], target_ids: Tensor | None = None
) -> None:
    """Write a directory that SGLang loads; it appears under its name only when complete, replacing an older draft.

    Args:
        tensors: by DraftModel.tensors() names.
        target_ids: int64 [draft vocabulary], where that is reduced.

    Raises:
        RunError: `tensors` or `target_ids` is not what the shape asks for.
        UserError: `path` exists and is no draft.
    """
    path = Path(path)
    check_place(path)
    wanted = {info.name: info.shape for info in draft_tensors(shape)}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != wanted:
        raise RunError("The draft's tensors do not fit its shape.")
    if (target_ids is None) != (shape.vocab_size == shape.target.vocab_size):
        raise RunError("A draft has target ids exactly if its vocabulary is reduced.")
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if target_ids is not None:
        ids = target_ids.cpu().long()
        stored[_OFFSETS] = ids - torch.arange(len(ids))
        stored[_MASK] = torch.zeros(shape.target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    with appearing(path) as partial:
        save_file(stored, partial / WEIGHTS, metadata={"format": "pt"})
        write_json(partial / CONFIG, _config_of(shape, stored["fc.weight"].dtype))


def check_place(path: Path) -> None:
    """Raise UserError where `write_draft` would: at a file and at a directory with anything but a draft in it."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / CONFIG).is_file() or read_json(path / CONFIG, "move it away").get("architectures") != [DRAFT_CLASS]:
        raise UserError(f"{path} exists and holds no draft: move it away or write to another place.")


def _taps(path: Path, config: dict[str, Any], target: ModelShape) -> tuple[int, int, int]:
    """The tapped layers; where config.json leaves them out, those that SGLang captures then."""
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = [1, target.num_layers // 2 - 1, target.num_layers - 4]
    whole = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not whole or len(layers) != TAPS or not _within(torch.tensor(layers), target.num_layers):
        raise UserError(
            f"The draft in {path} reads the layers {layers}, this model has {target.num_layers}: make one for this "
            "model with tools.train_draft."
        )
    low, middle, high = layers
    return low, middle, high


def _within(ids: Tensor, count: int) -> bool:
    return bool(((ids >= 0) & (ids < count)).all())


def _config_of(shape: DraftShape, dtype: torch.dtype) -> dict[str, Any]:
    target, name = shape.target, str(dtype).removeprefix("torch.")
    return {
        "architectures": [DRAFT_CLASS],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.norm_eps,
        "tie_word_embeddings": False,
        **rope_config(target),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": name,
        "dtype": name,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(shape.taps), "use_aux_hidden_state": True},
    }
