"""Where a model's weights, its config.json and its tokenizer are, whether it is Hugging Face's or Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhfspec_mega.errors import UserError

MEGATRON_CONFIG = "metadata.json"  # written last by Megatron: a directory with it is a distributed checkpoint
_HF_FILES = "huggingface"  # in a run's directory: config.json and tokenizer of its model
_ACTOR = "actor"  # in a checkpoint of a run
_HF_CONFIG = "config.json"
# Of directories that a run has found damaged, has not finished, or was replacing (checkpoints.directory).
_UNUSABLE = (".bad", ".partial", ".replaced")


@dataclass(frozen=True)
class ModelDirectory:
    """A model on disk.

    Attributes:
        hf_files: directory with config.json and tokenizer files, and the weights if they are safetensors.
        checkpoint: Megatron distributed checkpoint that holds the weights; None if they are safetensors.
    """

    hf_files: Path
    checkpoint: Path | None


def hf_files_of_run(run_dir: Path, model: str) -> Path:
    """Where a run keeps config.json and tokenizer of one of its models."""
    return run_dir / (_HF_FILES if model == _ACTOR else f"{_HF_FILES}_{model}")


def find_model(path: Path, hf_files: Path | None = None) -> ModelDirectory:
    """The model in a directory: a Hugging Face directory, a Megatron distributed checkpoint, or a run's checkpoint.

    Args:
        hf_files: directory with config.json and tokenizer, for a Megatron checkpoint that has none with it.

    Raises:
        UserError: the directory is none of these, a run has put it aside, or there is no config.json.
    """
    if not path.is_dir():
        raise UserError(f"{path} does not exist: give a directory with config.json and *.safetensors, or a checkpoint.")
    _refuse_put_aside(path)
    for checkpoint in (path, path / _ACTOR):
        if (checkpoint / MEGATRON_CONFIG).is_file():
            return ModelDirectory(hf_files or _hf_files_of(checkpoint), checkpoint)
    inner = _checkpoint_within(path)
    if inner is not None:
        raise UserError(f"{path} holds checkpoints: name one of them, for instance {inner}.")
    if list(path.glob("mp_rank_*")):
        raise UserError(f"{path} is in Megatron's old format: save it again with --ckpt-format torch_dist.")
    if list(path.glob("*.distcp")):
        raise UserError(f"{path} has no {MEGATRON_CONFIG}: it is an incomplete Megatron checkpoint.")
    return ModelDirectory(hf_files or path, None)


def _refuse_put_aside(path: Path) -> None:
    actual = path.resolve()  # "." has no name
    directory = actual.parent if actual.name == _ACTOR else actual
    if directory.suffix in _UNUSABLE:
        raise UserError(
            f"{directory} is no checkpoint to use: a run names so what is damaged (.bad), half written (.partial) or "
            "replaced (.replaced); name another one."
        )


def _checkpoint_within(path: Path) -> Path | None:
    """The newest checkpoint in the directory of a run, of its checkpoints, or of Megatron's."""
    patterns = ("step_*", "checkpoints/step_*")
    found = [file.parent for pattern in patterns for file in path.glob(f"{pattern}/manifest.json")]
    found = [directory for directory in found if directory.suffix not in _UNUSABLE]
    found += [file.parent for file in path.glob(f"iter_*/{MEGATRON_CONFIG}")]
    return max(found, key=lambda directory: directory.stat().st_mtime, default=None)


def _hf_files_of(checkpoint: Path) -> Path:
    of_run = hf_files_of_run(checkpoint.parent.parent.parent, checkpoint.name)  # RUN/checkpoints/step_10/actor
    for directory in (checkpoint, of_run):
        if (directory / _HF_CONFIG).is_file():
            return directory
    raise UserError(
        f"{checkpoint} has no {_HF_CONFIG} with it: copy there {_HF_CONFIG} and the tokenizer of its Hugging Face "
        "directory."
    )
