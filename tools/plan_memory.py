"""Memory of a training rank for one model and layout, by pipeline stage; nothing is started.

    python -m tools.plan_memory --model 70b --tensor-parallel 8 --pipeline-parallel 4 --data-parallel 2
    python -m tools.plan_memory --model Qwen3-8B --tensor-parallel 4 --dtype float32 --json

Weights, gradients and optimizer are exact, activations within a tenth of what was counted on a CPU (docs/dry_run.md).
`train.py dry_run=true` adds engines, draft and reference, and knows which of them share a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import group_options
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout, parameters_per_rank
from rlhfspec_mega.planning.memory import DTYPE_BYTES, GIB, ActorPlan, stage_memory
from tools.command import exit_status

COLUMNS = ("parameters", "weights", "gradients", "optimizer", "activations", "total")


def main() -> int:
    arguments = _parser().parse_args()

    def work() -> None:
        stages = plan(_shape(arguments.model), _settings(arguments))
        print(json.dumps(stages) if arguments.json else _table(arguments, stages))

    return exit_status(work)


def plan(shape: ModelShape, settings: ActorPlan) -> list[dict[str, int]]:
    """Parameters and bytes of the fullest rank of each pipeline stage.

    Raises UserError for parallel sizes that do not divide the model.
    """
    layout = settings.layout
    if shape.num_layers % (layout.pipeline * layout.chunks):
        raise UserError(f"--pipeline-parallel {layout.pipeline} does not divide the {shape.num_layers} layers.")
    if shape.num_heads % layout.tensor or shape.num_kv_heads % layout.tensor:
        raise UserError(
            f"--tensor-parallel {layout.tensor} does not divide the {shape.num_heads} heads and the "
            f"{shape.num_kv_heads} KV heads."
        )
    parameters = parameters_per_rank(shape, layout)
    found = []
    for stage in range(layout.pipeline):
        memory = stage_memory(shape, settings, stage)
        found.append({"parameters": parameters[stage], **asdict(memory), "total": memory.total})
    return found


def _table(arguments: argparse.Namespace, stages: list[dict[str, int]]) -> str:
    lines = [
        f"Model {arguments.model}, tensor {arguments.tensor_parallel} x pipeline {arguments.pipeline_parallel} x data "
        f"{arguments.data_parallel}, {arguments.dtype}: GiB on a rank",
        "stage  " + "".join(f"{name:>15}" for name in COLUMNS),
    ]
    for number, one in enumerate(stages):
        cells = [f"{one['parameters']:>15,}", *(f"{one[name] / GIB:>15.2f}" for name in COLUMNS[1:])]
        lines.append(f"{number:<7}{''.join(cells)}")
    return "\n".join(lines)


def _shape(model: str) -> ModelShape:
    if model in group_options()["model"]:
        words = [f"model={model}", "cluster=8n8g"]
    else:
        words = [f"model.path={Path(model).absolute()}", "cluster=8n8g"]
    return model_shape(load_config(words).model)


def _settings(arguments: argparse.Namespace) -> ActorPlan:
    tensor: int = arguments.tensor_parallel
    return ActorPlan(
        layout=ParallelLayout(tensor, arguments.pipeline_parallel, arguments.data_parallel),
        dtype=arguments.dtype,
        sequence_parallel=tensor > 1 and not arguments.no_sequence_parallel,
        recompute=not arguments.no_recompute,
        microbatch_tokens=max(arguments.microbatch_tokens, arguments.sequence),
        max_sequence=arguments.sequence,
        logprob_chunk=arguments.logprob_chunk,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def number(name: str, default: int, words: str) -> None:
        parser.add_argument(name, type=_positive, default=default, metavar="N", help=f"{words} (default: {default})")

    parser.add_argument("--model", required=True, help="a model of conf/model, or a directory with config.json")
    number("--tensor-parallel", 1, "GPUs over which each layer is split")
    number("--pipeline-parallel", 1, "stages")
    number("--data-parallel", 1, "replicas, over which the optimizer's state is split")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16", help="of weights (default: bfloat16)"
    )
    number("--microbatch-tokens", 16384, "tokens of a micro-batch, at least the longest sequence")
    number("--sequence", 5120, "tokens of the longest sequence")
    number("--logprob-chunk", 2048, "tokens whose float32 logits exist at once")
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations for the backward pass")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="as actor.sequence_parallel=false")
    parser.add_argument("--json", action="store_true", help="a list by stage, in bytes")
    return parser


def _positive(text: str) -> int:
    value: Any = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
