"""planning.megatron_tensors against Megatron's own modules and buffers, in a pretended world of any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import rlhfspec_mega.megatron.quick_start  # noqa: F401
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.schema.training import OptimizerConfig
from rlhfspec_mega.megatron.build import build_chunks, build_model_chunk, transformer_config
from rlhfspec_mega.megatron.cuda_shim import cuda_means_cpu
from rlhfspec_mega.megatron.description import Learning, LogitSettings, ModelDescription, ParallelSizes
from rlhfspec_mega.megatron.groups import make_groups, positions
from rlhfspec_mega.megatron.optimizer import build_optimizer
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout, buffers, parameters_per_rank


@contextmanager
def pretended_rank(rank: int, sizes: ParallelSizes) -> Iterator[Any]:
    """The process groups of one rank among peers that do not exist; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.ranks)
    try:
        yield make_groups(sizes, range(sizes.ranks), timedelta(seconds=10))
    finally:
        dist.destroy_process_group()


def described(shape: ModelShape, sizes: ParallelSizes, dtype: str, learns: bool) -> ModelDescription:
    learning = Learning(OptimizerConfig(), 10) if learns else None
    return ModelDescription("actor", shape, sizes, dtype, LogitSettings(shape.vocab_size, 1.0, 64), learning=learning)


def shape_of(model: str, **changes: Any) -> ModelShape:
    values = vars(model_shape(load_config([f"model={model}", "cluster=8n8g"]).model)) | changes
    return ModelShape(**values)


@pytest.mark.parametrize(
    ("model", "tensor", "pipeline"), [("8b", 4, 1), ("32b", 8, 2), ("32b", 8, 1), ("70b", 8, 4), ("70b", 8, 8)]
)
def test_large_models_have_as_many_parameters_on_each_rank_as_megatron_gives_it(
    model: str, tensor: int, pipeline: int
) -> None:
    """Megatron's modules are built on the meta device, where they take no memory."""
    shape, sizes = shape_of(model), ParallelSizes(tensor, pipeline)
    description = described(shape, sizes, "bfloat16", learns=False)
    found = {}
    for rank, position in enumerate(positions(sizes)):
        if position.tp in (0, tensor - 1):
            with pretended_rank(rank, sizes) as groups, torch.device("meta"):
                chunk = build_model_chunk(description, transformer_config(description), groups, None)
                found[position.pp, position.tp] = sum(one.numel() for one in chunk.parameters())
    expected = parameters_per_rank(shape, ParallelLayout(tensor, pipeline))
    assert found == {(pp, tp): expected[pp] for pp in range(pipeline) for tp in (0, tensor - 1)}


TINY = ModelShape("llama", 48, 4, 4, 2, 10, 100, 259, 64, 1e4, 1e-5, False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 3, 1), (2, 2, 2, 1), (1, 2, 5, 2)])
def test_buffers_and_optimizer_state_have_the_planned_sizes(
    layout: tuple[int, int, int, int], architecture: str, tied: bool, dtype: str
) -> None:
    tensor, pipeline, data, chunks = layout
    shape = ModelShape(**vars(TINY) | {"architecture": architecture, "tie_embeddings": tied})
    sizes = ParallelSizes(tensor, pipeline, data, chunks)
    description = described(shape, sizes, dtype, learns=True)
    planned = [buffers(shape, ParallelLayout(*layout), stage) for stage in range(pipeline)]
    for rank, position in enumerate(positions(sizes)):
        with pretended_rank(rank, sizes) as groups, cuda_means_cpu():
            built = build_chunks(description, groups, torch.device("cpu"))
            optimizer = build_optimizer(OptimizerConfig(), built, dtype, groups)
            held = [buffer for chunk in built for buffer in chunk.buffers]
            expected = planned[position.pp]
            assert [buffer.param_data.numel() for buffer in held] == [one.elements for one in expected]
            assert [buffer.grad_data.numel() for buffer in held] == [one.elements for one in expected]
            states = [state for one in optimizer.chained_optimizers for state in one.optimizer.state.values()]
            moments = sum(state["exp_avg"].numel() for state in states)
            assert moments == sum(one.owned[position.dp] for one in expected)
