"""The shape of a run's model: from conf/, or from config.json in the user's directory."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.config.schema.training import ModelConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape

BYTE_VOCABULARY = 259  # tokens of the tokenizer that models made here use: bytes, <pad>, <bos>, <eos>


def model_shape(model: ModelConfig) -> ModelShape:
    """The shape of the model that a run trains.

    Raises:
        UserError: model.path does not exist, or its config.json is damaged or of an unsupported model.
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


def check_weights(model: ModelConfig) -> None:
    """Refuse a directory whose weights do not match its config.json, and a model without weights.

    Raises:
        UserError: see above.
    """
    if model.path is not None:
        # Here: they bring torch, and refusals are quick.
        from rlhfspec_mega.models.hf_directory import HfWeights
        from rlhfspec_mega.models.mapping import mapping_for
        from rlhfspec_mega.models.model_directory import find_model

        found, shape = find_model(Path(model.path)), model_shape(model)
        if found.checkpoint is not None:
            from rlhfspec_mega.conversion.from_megatron import (
                MegatronWeights,
            )  # torch.distributed.checkpoint takes long

            MegatronWeights(found.checkpoint, shape)
        else:
            HfWeights(found.hf_files).check(mapping_for(shape.architecture).hf_tensors(shape))
    elif model.hub_name is not None:  # models made here are tiny and small
        raise UserError(
            f"model={model.name} names a shape only: download {model.hub_name} (hf download {model.hub_name} "
            "--local-dir DIR) and add model.path=DIR."
        )


def _shape_of_directory(path: Path) -> ModelShape:
    if not path.is_dir():
        raise UserError(f"model.path={path} does not exist: give a directory with config.json and *.safetensors.")
    from rlhfspec_mega.models.hf_config import read_shape
    from rlhfspec_mega.models.model_directory import find_model

    return read_shape(find_model(path).hf_files)
