"""Converts a Hugging Face directory to a Megatron distributed checkpoint.

    python -m tools.hf_to_megatron Qwen3-8B qwen3_8b_megatron --tensor-parallel 4 --pipeline-parallel 2

Megatron loads it under any parallel sizes; those given here say which blocks the files hold, so that ranks of the same
sizes read whole blocks. With Megatron-LM: --ckpt-format torch_dist --finetune --load DIR. Here: model.path=DIR.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.hf_config import read_shape
from tools.command import exit_status, progress_in_bytes, require_room


def convert(arguments: argparse.Namespace) -> None:
    """Convert; raises UserError for bad input and OSError for a disk that cannot be written."""
    shape = read_shape(arguments.source)
    # Here: they take seconds to import.
    import torch

    from rlhfspec_mega.conversion.hf_source import common_dtype, exact_weights
    from rlhfspec_mega.conversion.to_megatron import RankLayout, check_layout, write_checkpoint

    layout = RankLayout(arguments.tensor_parallel, arguments.pipeline_parallel)
    check_layout(shape, layout)
    if arguments.out.exists():
        raise UserError(f"{arguments.out} exists already: name a new directory, or move it away.")
    weights = exact_weights(arguments.source, shape)
    dtype = getattr(torch, arguments.dtype or common_dtype(weights, shape))
    nbytes = shape.parameters * dtype.itemsize
    require_room(arguments.out, nbytes)
    with progress_in_bytes("writing", nbytes) as progress:
        write_checkpoint(arguments.out, weights, shape, layout, dtype, progress)
    print(f"{arguments.out}: {shape.parameters:,} weights in {str(dtype).removeprefix('torch.')}.")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Hugging Face directory: config.json and *.safetensors")
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="cut blocks as so many ranks would")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="and so many stages (default 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the checkpoint (default: as the source)")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    return exit_status(lambda: convert(arguments))


if __name__ == "__main__":
    sys.exit(main())
