"""Layer specification of the Llama/Qwen family: Transformer Engine's where it imports, Megatron's local one otherwise.

Two modules stand in for local ones: an RMSNorm that works with sequence parallelism (the stock wrapper asserts it off)
and an attention on torch's scaled_dot_product_attention (the stock one materialises all s x s scores).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from rlhfspec_mega.megatron.packed_sequences import PackedSequences, attend, causal_attention


class RMSNorm(torch.nn.Module):
    """Root-mean-square normalisation over the last dimension, computed in fp32 as the Llama family does."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradient over the tensor-parallel ranks where this attribute is set.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden_size]."""
        if hidden.dtype == torch.float32:
            return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class CausalAttention(MegatronModule):
    """Causal grouped-query attention on scaled_dot_product_attention.

    Right padding needs no mask of its own; sequences packed into one row are kept apart.
    """

    def __init__(self, config: TransformerConfig, *_: Any, pg_collection: ProcessGroupCollection, **__: Any) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp  # without it, saving asks Megatron's globals

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedSequences | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """query [s, b, heads, d], key and value [s, b, kv_heads, d] -> [s, b, heads * d]; without b for packed ones."""
        if packed_seq_params is not None:
            return attend(query, key, value, packed_seq_params.runs)
        return causal_attention(*(x.transpose(0, 1) for x in (query, key, value))).transpose(0, 1).flatten(2)


def have_transformer_engine() -> bool:
    """Whether Transformer Engine imports and can run (it needs a GPU)."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:  # a broken build raises anything from ImportError to OSError
        return False
    return True


def _local_layer(qk_norm: bool) -> ModuleSpec:
    head_norm = RMSNorm if qk_norm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def layer_spec(qk_norm: bool, layers: int) -> ModuleSpec | TransformerBlockSubmodules:
    """Specification of a block of `layers` layers on this rank."""
    if have_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    return TransformerBlockSubmodules(layer_specs=[_local_layer(qk_norm)] * layers, layer_norm=RMSNorm)
