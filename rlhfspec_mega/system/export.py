"""Results of a run that other programs read: the actor and its draft as Hugging Face directories."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rlhfspec_mega.draft.directory import load_target_ids, read_draft_shape, write_draft
from rlhfspec_mega.models.hf_directory import copy_hf_files, write_directory
from rlhfspec_mega.models.model_directory import HF_FILES
from rlhfspec_mega.system.training import Training
from rlhfspec_mega.types import WeightTarget


def keep_hf_files(run_dir: Path, model: Path) -> None:
    """Keep config.json and tokenizer of a run's model in its directory, so that its checkpoints can be converted."""
    copy_hf_files(model, run_dir / HF_FILES)


def export_model(training: Training, path: Path, source: Path) -> None:
    """Write the actor's weights as a Hugging Face directory, with the tokenizer of `source`."""
    with closing(training.resharder.stream()) as tensors:  # also if the directory cannot be written
        write_directory(path, training.setup.shape, tensors, source)


def export_draft(training: Training, path: Path) -> None:
    """Write the current draft as a directory for speculation.draft_model_path."""
    start, target = training.setup.draft, training.setup.shape
    assert start is not None
    shape = read_draft_shape(start, target)
    tensors = {name: tensor.clone() for name, tensor in training.resharder.stream(WeightTarget.DRAFT)}
    write_draft(path, shape, tensors, load_target_ids(start, shape))
