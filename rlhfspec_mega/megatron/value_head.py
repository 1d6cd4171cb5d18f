"""The head of critics and reward models: one number per token, in place of Megatron's output layer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

_SEED = 0


class ValueHead(MegatronModule):
    """A linear layer without bias, whole on every tensor-parallel rank and computed in fp32.

    It is called as GPTModel calls its output layer. Every rank of the group computes the same values from the same
    hidden states, so the gradients of the weight and of the hidden states are whole without a reduction.
    """

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(initial_value_head(config.hidden_size).to(config.params_dtype))
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden [length, rows, hidden_size], a part of the length under sequence parallelism -> [length, rows, 1]."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None


def initial_value_head(hidden_size: int) -> torch.Tensor:
    """Weights [1, hidden_size] of a new head: normal with variance 1 / (hidden_size + 1), so values begin near 0.

    From "Learning to summarize from human feedback" (arXiv 2009.01325, appendix B.1). They do not depend on parallel
    sizes.
    """
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1) ** 0.5
