"""A model given as a Megatron distributed checkpoint, converted once.

Engines, tokenizer, reference and draft all start from a Hugging Face directory, so one is made of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.bootstrap.cache import cached
from rlhfspec_mega.checkpoints.verifying import require_intact
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.models.hf_directory import new_directory
from rlhfspec_mega.models.model_directory import find_model
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.console import Console


def hf_directory_of(config: RunConfig, path: Path, shape: ModelShape, console: Console) -> Path:
    """The Hugging Face directory of a model: `path` itself, or what a checkpoint there was converted to, cached.

    Raises UserError for a checkpoint that is damaged or disagrees with its config.json.
    """
    found = find_model(path)
    if found.checkpoint is None:
        return found.hf_files
    from rlhfspec_mega.conversion.from_megatron import MegatronWeights  # torch.distributed.checkpoint takes seconds

    checkpoint = found.checkpoint
    weights = MegatronWeights(checkpoint, shape)

    def make(directory: Path) -> None:
        require_intact(checkpoint)
        with new_directory(directory, shape, weights.dtype, found.hf_files) as tensors:
            weights.copy_into(tensors)

    what = f"A Hugging Face copy of {checkpoint}"
    return cached(config, f"{config.model.name}-converted", weights.fingerprint(), make, console.note, what)
