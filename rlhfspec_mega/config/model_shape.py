"""The shape of the model that a configuration names: conf/'s numbers, or config.json of the user's directory."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.config.schema import ModelConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape

BYTE_VOCABULARY = 259  # tokens of the tokenizer that models made here use: bytes, <pad>, <bos>, <eos>


def model_shape(model: ModelConfig) -> ModelShape:
    """The shape that a run trains.

    Raises:
        UserError: model.path does not exist, or holds a model that is not supported or incomplete.
    """
    if model.path is not None:
        return _shape_of_directory(Path(model.path))
    return ModelShape(
        architecture=model.architecture,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_size=model.ffn_size,
        vocab_size=model.vocab_size or BYTE_VOCABULARY,
        max_positions=model.max_positions,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        tie_embeddings=model.tie_embeddings,
    )


def _shape_of_directory(path: Path) -> ModelShape:
    if not path.is_dir():
        raise UserError(f"model.path={path} does not exist: give a directory with config.json and *.safetensors.")
    # These import torch, which takes seconds: only runs with a directory of their own pay for it here.
    from rlhfspec_mega.models.hf_directory import HfWeights, read_shape
    from rlhfspec_mega.models.mapping import mapping_for

    shape = read_shape(path)
    HfWeights(path).check(mapping_for(shape.architecture).hf_tensors(shape))
    return shape
