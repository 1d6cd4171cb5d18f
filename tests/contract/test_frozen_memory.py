"""The memory of a frozen model's rank: what planning.memory says of it, against what its tensors take."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_plan import PeakBytes
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.megatron.description import ParallelSizes, describe
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.memory import ReferencePlan, reference_memory
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import Shard
from rlhfspec_mega.rl.packing import Batching, micro_batches
from rlhfspec_mega.workers.megatron import MegatronWorker
from tests.clusters import local_cluster
from tests.megatron_probe import worker_specs

LARGE_HEAD = ModelShape("llama", 64, 2, 4, 2, 16, 96, 2048, 256, 1e4, 1e-5, True)
LARGE_LAYERS = ModelShape("qwen3", 64, 3, 4, 2, 16, 512, 50, 256, 1e4, 1e-5, False)
TOKENS, CHUNK = 512, 128


class Measured(MegatronWorker):
    """Tells what scoring takes."""

    def bytes(self, shard: Shard) -> tuple[int, int]:
        """Of the weights, and beside them at most."""
        self.score({"reference": shard})
        parameters = {id(p): p.nbytes for chunk in self._models["reference"].chunks for p in chunk.parameters()}
        with PeakBytes() as measured:
            self.score({"reference": shard})
        return sum(parameters.values()), measured.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [LARGE_HEAD, LARGE_LAYERS], ids=["head", "layers"])
def test_memory_is_as_planned(shape: ModelShape, dtype: str, tmp_path: Path) -> None:
    """However much a call is given: the largest batch counts."""
    write_directory(
        tmp_path / "model",
        shape,
        initial_tensors(mapping_for(shape.architecture).hf_tensors(shape), shape.num_layers, seed=5),
    )
    config = ActorConfig(dtype=dtype, logprob_chunk=CHUNK)
    samples = Experience.of([(1,) * 8] * 12, [[2] * (120 - number % 7) for number in range(12)])
    (plan,) = micro_batches(samples.lengths.tolist(), Batching(TOKENS))
    found = {}
    for tensor in (1, 2):
        sizes = ParallelSizes(tensor=tensor)
        model = describe("reference", shape, config, sizes, temperature=1.0, checkpoint=tmp_path / "model")
        cluster = local_cluster(tmp_path / f"{tensor}")
        try:
            specs = worker_specs(tmp_path / f"meet{tensor}", [model], kind="tests.contract.test_frozen_memory.Measured")
            workers = cluster.launch("reference", specs)
            cluster.wait_started()
            found[tensor] = workers.call("bytes", Shard.cut(samples, plan, packed=True), phase="test")
        finally:
            cluster.close()
    for tensor, ranks in found.items():
        planned = reference_memory(shape, ReferencePlan(tensor, 1, dtype, TOKENS, CHUNK))
        for weights, peak in ranks:
            assert 0.95 * (weights + peak) < planned < 1.2 * (weights + peak), (tensor, weights, peak, planned)
