"""Planned against counted bytes of actor ranks: python -m benchmarks.memory_plan [--out FILE.json].

A model of 100 million weights is trained for an update under four layouts, in both precisions, with and without
recomputation. Bytes are counted from every tensor that an operation returns, which sees nothing of what an operation
allocates and frees inside itself; a GPU's fused attention is not checked by this.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.megatron.description import Learning, ParallelSizes, describe
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout
from rlhfspec_mega.planning.memory import ActorPlan, stage_memory
from rlhfspec_mega.rl.microbatch import MicroBatch
from rlhfspec_mega.workers.megatron import MegatronWorker

SHAPE = ModelShape("llama", 768, 12, 12, 4, 64, 2048, 32000, 2048, 1e4, 1e-5, True)
LAYOUTS = {"one process": (1, 1, 1), "TP 2": (2, 1, 2), "PP 2": (1, 2, 2), "DP 2": (1, 1, 2)}  # TP, PP, ranks
SEQUENCES = {"float32": (2, 256), "bfloat16": (1, 128)}  # of a micro-batch: how many, and tokens of each
# Few and short ones in bfloat16: without instructions for it, a CPU takes a hundred times as long for a product.
MICRO_BATCHES = 2
LIMITS = {"call_timeout": 1800.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 0}


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside have taken at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        owned = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is None or storage._cdata in self._sizes or storage._cdata in owned:
                continue
            self._sizes[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._drop, storage._cdata)
        self.peak = max(self.peak, self._now)
        return result

    def _drop(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def negative_logprob(
    logprobs: torch.Tensor, entropy: torch.Tensor, _: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The supervised loss."""
    return -logprobs, {"entropy": entropy}


class CountingWorker(MegatronWorker):
    """Counts what an update takes."""

    def bytes(self, batches: list[MicroBatch]) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer, and the most beside them."""
        model = self._models["actor"]
        model.accumulate(batches, negative_logprob, ["entropy"])
        model.step()
        with PeakBytes() as counted:
            model.accumulate(batches, negative_logprob, ["entropy"])
        buffers = [buffer for chunk in model.chunks for buffer in chunk.buffers]
        held = {buffer.param_data.data_ptr() for buffer in buffers}
        optimizers = [one.optimizer for one in model.optimizer.chained_optimizers]
        states = [state for one in optimizers for state in one.state.values()]
        main = [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
        return {
            "weights": sum(buffer.param_data.nbytes for buffer in buffers),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": sum(value.nbytes for state in states for name, value in state.items() if name != "step")
            + sum(weight.nbytes for weight in main if weight.untyped_storage().data_ptr() not in held),
            "activations": counted.peak,
        }


def micro_batches(sequences: tuple[int, int], vocabulary: int) -> list[MicroBatch]:
    """Random tokens, packed."""
    found = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(0, vocabulary, (sequences[0], sequences[1] + 1))
        inputs, targets = (part.reshape(1, -1) for part in (tokens[:, :-1], tokens[:, 1:]))
        mask = torch.ones(inputs.shape, dtype=torch.bool)
        lengths = [sequences[1]] * sequences[0]
        found.append(MicroBatch(inputs, targets, mask, {"weights": mask.float()}, lengths, packed=True))
    return found


def counted(
    shape: ModelShape, config: ActorConfig, ranks: int, sequences: tuple[int, int], directory: Path
) -> list[dict[str, int]]:
    """Bytes of every rank."""
    sizes = ParallelSizes.of_actor(config, ranks)
    model = describe("actor", shape, config, sizes, temperature=1.0, learning=Learning(config.optimizer, 10))
    specs = [
        WorkerSpec(
            "benchmarks.memory_plan.CountingWorker",
            {
                "models": [model],
                "rendezvous": Rendezvous(f"file://{directory / 'meet'}", rank, ranks, LIMITS["call_timeout"]),
                "device": "cpu",
                "seed": 0,
            },
            devices=(rank,),
        )
        for rank in range(ranks)
    ]
    cluster = LocalCluster(directory / "logs", threads=1, use_gpus=False, **LIMITS)
    try:
        workers = cluster.launch("actor", specs)
        cluster.wait_started()
        return workers.call("bytes", micro_batches(sequences, shape.vocab_size), phase="counting")
    finally:
        cluster.close()


def compare(
    shape: ModelShape, config: ActorConfig, ranks: int, sequences: tuple[int, int], directory: Path
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """(planned, counted) bytes of every rank."""
    stages = config.pipeline_parallel
    plan = ActorPlan(
        ParallelLayout(config.tensor_parallel, stages, ranks // (config.tensor_parallel * stages)),
        config.dtype,
        config.sequence_parallel,
        config.recompute,
        microbatch_tokens=sequences[0] * sequences[1],
        max_sequence=sequences[1],
        logprob_chunk=config.logprob_chunk,
    )
    planned = [vars(stage_memory(shape, plan, stage)) for stage in range(stages)]
    found = counted(shape, config, ranks, sequences, directory)
    return [(planned[rank * stages // ranks], one) for rank, one in enumerate(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory_plan_cpu.json"))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("layout       precision  recompute  rank  what stays is  activations counted, MiB  planned / counted")
    for (name, (tensor, stages, ranks)), dtype, recompute in itertools.product(
        LAYOUTS.items(), ("float32", "bfloat16"), (False, True)
    ):
        config = ActorConfig(tensor, stages, dtype=dtype, recompute=recompute, logprob_chunk=128)
        with tempfile.TemporaryDirectory(prefix="benchmark.") as directory:
            found = compare(SHAPE, config, ranks, SEQUENCES[dtype], Path(directory))
        for rank, (planned, real) in enumerate(found):
            equal = all(planned[kind] == real[kind] for kind in ("weights", "gradients", "optimizer"))
            ratio = planned["activations"] / real["activations"]
            print(
                f"{name:11}  {dtype:9}  {recompute!s:9}  {rank:4}  {'as planned' if equal else 'not equal':13}  "
                f"{real['activations'] / 2**20:24.1f}  {ratio:17.3f}",
                flush=True,
            )
            rows.append(
                {"layout": name, "dtype": dtype, "recompute": recompute, "rank": rank}
                | {"planned": planned, "counted": real, "ratio": ratio}
            )
    ratios = [row["ratio"] for row in rows]
    print(f"activations planned / counted: {min(ratios):.3f} to {max(ratios):.3f}")
    arguments.out.write_text(json.dumps({"parameters": SHAPE.parameters, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
