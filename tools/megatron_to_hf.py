"""Converts a Megatron distributed checkpoint, or one of a run, to a Hugging Face directory.

    python -m tools.megatron_to_hf outputs/tiny/checkpoints/step_40 tiny_step_40
    python -m tools.megatron_to_hf megatron/iter_0001000 qwen3_8b --config Qwen3-8B

Any parallel sizes may have written it. A checkpoint of Megatron-LM has no config.json and no tokenizer: --config names
a Hugging Face directory that has them. The optimizer's state in a checkpoint is left out.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.model_directory import find_model
from tools.command import exit_status, progress_in_bytes, require_room


def convert(arguments: argparse.Namespace) -> None:
    """Convert; raises UserError for bad input and OSError for a disk that cannot be written."""
    model = find_model(arguments.source, arguments.config)
    if model.checkpoint is None:
        raise UserError(f"{arguments.source} is no Megatron distributed checkpoint: it has no metadata.json.")
    if arguments.out.exists():
        raise UserError(f"{arguments.out} exists already: name a new directory, or move it away.")
    if not 0 < arguments.max_shard_gib < math.inf:
        raise UserError(f"--max-shard-gib {arguments.max_shard_gib:g} must be a number above 0.")
    shape = read_shape(model.hf_files)
    # Here: they take seconds to import.
    import torch

    from rlhfspec_mega.checkpoints.verifying import require_intact
    from rlhfspec_mega.conversion.from_megatron import MegatronWeights
    from rlhfspec_mega.models.hf_directory import new_directory

    require_intact(model.checkpoint)
    weights = MegatronWeights(model.checkpoint, shape)
    dtype = arguments.dtype or weights.dtype
    nbytes = shape.parameters * getattr(torch, dtype).itemsize
    require_room(arguments.out, nbytes)
    shard_bytes = int(arguments.max_shard_gib * 2**30)
    with (
        progress_in_bytes("writing", nbytes) as progress,
        new_directory(arguments.out, shape, dtype, model.hf_files, shard_bytes) as tensors,
    ):
        weights.copy_into(tensors, progress)
    print(f"{arguments.out}: {shape.parameters:,} weights in {dtype}.")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a distributed checkpoint, or a step_N directory of a run")
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--config", type=Path, metavar="DIR", help="directory with config.json and tokenizer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the result (default: as the source)")
    parser.add_argument("--max-shard-gib", type=float, default=4, metavar="X", help="size of a file (default 4)")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    return exit_status(lambda: convert(arguments))


if __name__ == "__main__":
    sys.exit(main())
