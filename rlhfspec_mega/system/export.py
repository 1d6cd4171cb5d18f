"""Results of a run that other programs read: actor, critic and draft as Hugging Face directories."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rlhfspec_mega.draft.directory import load_target_ids, read_draft_shape, write_draft
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import copy_hf_files, new_directory, write_config, write_directory
from rlhfspec_mega.models.model_directory import find_model, hf_files_of_run
from rlhfspec_mega.system.training import Training
from rlhfspec_mega.types import WeightTarget


def keep_hf_files(run_dir: Path, training: Training, source: Path) -> None:
    """Keep config.json and tokenizer of the models that learn, so that a run's checkpoints can be converted.

    Args:
        source: directory of the model that the actor started from, whose tokenizer is that of all.
    """
    for name, model in training.models.items():
        if model.description.learning is not None:
            directory, shape = hf_files_of_run(run_dir, name), model.description.shape
            copy_hf_files(source, directory)
            if shape.value_head:
                write_config(directory, shape, model.description.dtype, source)


def export_model(training: Training, path: Path, source: Path) -> None:
    """Write the actor's weights as a Hugging Face directory, with the tokenizer of `source`."""
    with closing(training.resharder.stream()) as tensors:  # also if the directory cannot be written
        write_directory(path, training.setup.shape, tensors, source)


def export_saved(checkpoint: Path, path: Path) -> None:
    """Write the weights of a model's distributed checkpoint, of which a run keeps config.json, as `path`."""
    from rlhfspec_mega.conversion.from_megatron import MegatronWeights  # here: it takes seconds to import

    files = find_model(checkpoint).hf_files
    shape = read_shape(files)
    weights = MegatronWeights(checkpoint, shape)
    with new_directory(path, shape, weights.dtype, files) as tensors:
        weights.copy_into(tensors, lambda _: None)


def export_draft(training: Training, path: Path) -> None:
    """Write the current draft as a directory for speculation.draft_model_path."""
    start, target = training.setup.draft, training.setup.shape
    assert start is not None
    shape = read_draft_shape(start, target)
    tensors = {name: tensor.clone() for name, tensor in training.resharder.stream(WeightTarget.DRAFT)}
    write_draft(path, shape, tensors, load_target_ids(start, shape))
