"""Builds Megatron-core's GPTModel from a description, over explicit process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhfspec_mega.megatron.description import ModelDescription
from rlhfspec_mega.megatron.groups import ensure_memory_buffer
from rlhfspec_mega.megatron.layers import layer_spec
from rlhfspec_mega.megatron.value_head import ValueHead
from rlhfspec_mega.models.shape import padded_vocab_size

_FUSIONS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
)


def transformer_config(description: ModelDescription) -> TransformerConfig:
    """Megatron's configuration; every fusion is off because none of them runs without Transformer Engine or apex."""
    shape, sizes, dtype = description.shape, description.parallel, getattr(torch, description.dtype)
    pipelined = sizes.pipeline > 1
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
        sequence_parallel=sizes.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        calculate_per_token_loss=True,
        # The interleaved schedule exchanges shapes with both neighbours at once; with two stages they are the same rank
        # and the shapes get swapped. There all micro-batches have one shape instead (microbatch.same_shape).
        variable_seq_lengths=pipelined and sizes.virtual_pipeline == 1,
        moe_token_dispatcher_type="alltoall",  # what variable_seq_lengths insists on, even without experts
        batch_p2p_comm=pipelined and description.batch_p2p,
        overlap_p2p_comm=pipelined and description.overlap_p2p and sizes.virtual_pipeline > 1,  # a critic has none
        batch_p2p_sync=pipelined and description.batch_p2p,
        recompute_granularity="full" if description.recompute else None,
        recompute_method="uniform" if description.recompute else None,
        recompute_num_layers=1 if description.recompute else None,
        **dict.fromkeys(_FUSIONS, False),
    )


def build_model_chunk(
    description: ModelDescription, config: TransformerConfig, groups: ProcessGroupCollection, chunk: int | None
) -> GPTModel:
    shape, chunks = description.shape, config.virtual_pipeline_model_parallel_size
    layers = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=groups.pp.rank())
    # Megatron knows Llama 3's scaling with one free constant, the factor; the configuration's checks refuse others.
    factor = shape.rope_scaling["factor"] if shape.rope_scaling else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(shape.qk_norm, layers),
        vocab_size=padded_vocab_size(shape.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=is_pp_first_stage(groups.pp) and is_vp_first_stage(chunk, chunks),
        post_process=is_pp_last_stage(groups.pp) and is_vp_last_stage(chunk, chunks),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        rope_scaling=factor is not None,
        rope_scaling_factor=factor or 1.0,
        pg_collection=groups,
        vp_stage=chunk,
    )
    if shape.value_head and model.post_process:
        model.output_layer = ValueHead(config, groups.tp)
    return model


def build_chunks(description: ModelDescription, groups: ProcessGroupCollection, device: torch.device) -> list[Any]:
    """The model chunks of this pipeline rank; only those that learn have gradients, in DistributedDataParallel.

    Chunks are several only with the interleaved schedule. Call inside `cuda_means_cpu`.
    """
    config, count = transformer_config(description), description.parallel.virtual_pipeline
    if config.sequence_parallel:
        ensure_memory_buffer()
    chunks: list[Any] = []
    for index in range(count):
        chunk: Any = build_model_chunk(description, config, groups, index if count > 1 else None).to(device)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    if description.learning is None:
        return [chunk.requires_grad_(False) for chunk in chunks]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
    )
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0, pg_collection=groups)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def unwrap(chunk: Any) -> GPTModel:
    """The GPTModel behind the data-parallel and precision wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
