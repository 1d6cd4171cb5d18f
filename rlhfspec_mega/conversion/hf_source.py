"""A Hugging Face directory as the source of a conversion: refused unless it holds exactly what its config.json says."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.hf_config import listed
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape

_COMPUTED = "rotary_emb.inv_freq"  # older versions of transformers stored it; it follows from config.json
_ROWS = 8192  # compared at a time


def exact_weights(path: Path, shape: ModelShape) -> HfWeights:
    """The weights of a directory whose tensors are exactly those of its config.json.

    A tensor too many is no detail: 32 layers under a config.json of 28 load in other tools, and give another model.

    Raises UserError naming the tensors that are missing, left over or of another shape.
    """
    weights = HfWeights(path)
    wanted = mapping_for(shape.architecture).hf_tensors(shape)
    weights.check(wanted)
    left = set(weights.names()) - {tensor.name for tensor in wanted}
    left -= {name for name in left if name.endswith(_COMPUTED)}
    mapping = mapping_for(shape.architecture)
    (head,), (embedding,) = mapping.head.hf_names(None), mapping.embedding.hf_names(None)
    if head in left:  # tied: it may be stored again
        if not _equal(weights, head, embedding):
            raise UserError(
                f"{path} has tie_word_embeddings=true in its config.json, but {head} differs from {embedding}: set "
                "tie_word_embeddings to false there, or download the directory again."
            )
        left.discard(head)
    if left:
        raise UserError(
            f"{path} holds {listed(sorted(left))}, which a {shape.architecture} model of its config.json does not "
            "have: config.json is of another model."
        )
    return weights


def common_dtype(weights: HfWeights, shape: ModelShape) -> str:
    """The dtype of all weights, "float32" or "bfloat16". Raises UserError if they have several, or another."""
    dtypes = {weights.info(tensor.name).dtype for tensor in mapping_for(shape.architecture).hf_tensors(shape)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        raise UserError(
            f"The weights in {weights.path} are {listed(sorted(dtypes))}: choose one with --dtype float32 or bfloat16."
        )
    return dtypes.pop()


def _equal(weights: HfWeights, one: str, other: str) -> bool:
    a, b = weights.lazy(one), weights.lazy(other)
    if (a.shape, a.info.dtype) != (b.shape, b.info.dtype):
        return False
    rows = range(0, a.shape[0], _ROWS)
    return all(torch.equal(a[start : start + _ROWS], b[start : start + _ROWS]) for start in rows)
