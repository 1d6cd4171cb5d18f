"""The memory of a rank that trains: what planning says of it, against what its tensors take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout
from rlhfspec_mega.planning.memory import ActorPlan, stage_memory
from rlhfspec_mega.rl.microbatch import MicroBatch
from rlhfspec_mega.workers.megatron import MegatronWorker
from tests.clusters import local_cluster
from tests.megatron_probe import described, negative_logprob, worker_specs
from tests.peak_bytes import PeakBytes


class Measured(MegatronWorker):
    """Tells what an update takes."""

    def bytes(self, batches: list[MicroBatch]) -> dict[str, int]:
        """Of weights, gradients and optimizer, and at most beside them."""
        model = self._models["actor"]
        for _ in range(2):
            model.accumulate(batches, negative_logprob, ["entropy"])
            model.step()
        with PeakBytes() as measured:
            model.accumulate(batches, negative_logprob, ["entropy"])
        buffers = [buffer for chunk in model.chunks for buffer in chunk.buffers]
        held = {buffer.param_data.data_ptr() for buffer in buffers}
        optimizers = [one.optimizer for one in model.optimizer.chained_optimizers]
        states = [state for one in optimizers for state in one.state.values()]
        main = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        return {
            "weights": sum(buffer.param_data.nbytes for buffer in buffers),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": sum(value.nbytes for state in states for name, value in state.items() if name != "step")
            + sum(p.nbytes for p in main if p.untyped_storage().data_ptr() not in held),
            "activations": measured.peak,
        }


def batches(rows: int, length: int, count: int, vocabulary: int) -> list[MicroBatch]:
    """Micro-batches of random tokens without padding."""
    found = []
    for _ in range(count):
        tokens = torch.randint(0, vocabulary, (rows, length + 1))
        mask = torch.ones(rows, length, dtype=torch.bool)
        found.append(MicroBatch(tokens[:, :-1], tokens[:, 1:], mask, {"weights": mask.float()}))
    return found


def measured(
    shape: ModelShape, config: ActorConfig, ranks: int, sequences: tuple[int, int], directory: Path
) -> list[dict[str, int]]:
    """Bytes of every rank in an update of four micro-batches of so many sequences of such a length."""
    cluster = local_cluster(directory)
    try:
        kind = "tests.contract.test_training_memory.Measured"
        specs = worker_specs(directory / "meet", [described(shape, config, ranks)], kind=kind)
        workers = cluster.launch("actor", specs)
        cluster.wait_started()
        return workers.call("bytes", batches(*sequences, 4, shape.vocab_size), phase="test")
    finally:
        cluster.close()


def compare(
    shape: ModelShape, config: ActorConfig, ranks: int, sequences: tuple[int, int], directory: Path
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """(planned, measured) bytes of every rank."""
    stages = config.pipeline_parallel
    layout = ParallelLayout(config.tensor_parallel, stages, ranks // (config.tensor_parallel * stages))
    plan = ActorPlan(
        layout,
        config.dtype,
        config.sequence_parallel,
        config.recompute,
        microbatch_tokens=sequences[0] * sequences[1],
        max_sequence=sequences[1],
        logprob_chunk=config.logprob_chunk,
    )
    planned = [vars(stage_memory(shape, plan, stage)) for stage in range(stages)]
    found = measured(shape, config, ranks, sequences, directory)
    return [(planned[rank * stages // ranks], one) for rank, one in enumerate(found)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tensor", "stages", "ranks"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen3", False)])
def test_memory_is_as_planned(
    architecture: str, tied: bool, tensor: int, stages: int, ranks: int, dtype: str, recompute: bool, tmp_path: Path
) -> None:
    """Tensors that stay are planned exactly, activations within a tenth."""
    shape = ModelShape(architecture, 192, 4, 6, 2, 32, 520, 3000, 256, 1e4, 1e-5, tied)
    config = ActorConfig(tensor, stages, dtype=dtype, recompute=recompute, logprob_chunk=64)
    for planned, found in compare(shape, config, ranks, (3, 100), tmp_path):
        assert found["activations"] == pytest.approx(planned["activations"], rel=0.1)
        assert found["weights"] == planned["weights"] and found["gradients"] == planned["gradients"]
        assert found["optimizer"] <= planned["optimizer"], "the fullest data-parallel rank is planned"
        assert found["optimizer"] > 0.9 * planned["optimizer"]
