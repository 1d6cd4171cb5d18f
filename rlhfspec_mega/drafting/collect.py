"""Examples for a draft from finished sequences: one forward of the target, its tapped layers kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhfspec_mega.drafting.example import DraftExample
from rlhfspec_mega.models.draft_shape import DraftShape
from rlhfspec_mega.models.transformer import Transformer, causal_attention


@torch.no_grad()
def collect_examples(
    model: Transformer, shape: DraftShape, sequences: Sequence[tuple[Sequence[int], int]], *, batch_tokens: int = 8192
) -> list[DraftExample]:
    """An example of each (tokens, prompt length), in the given order, on the CPU.

    Args:
        batch_tokens: most tokens of one forward, padding included (a longer sequence goes alone).
    """
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index][0]))
    examples: dict[int, DraftExample] = {}
    while order:
        # The longest first: it sets the width of its batch.
        width = len(sequences[order[-1]][0])
        size = max(1, batch_tokens // width)
        chosen, order = order[-size:], order[:-size]
        tokens = torch.zeros(len(chosen), width, dtype=torch.int64)
        for row, index in enumerate(chosen):
            tokens[row, : len(sequences[index][0])] = torch.tensor(sequences[index][0])
        features, states = _hidden(model, shape, tokens.to(model.embedding.device))
        for row, index in enumerate(chosen):
            length = len(sequences[index][0])
            kept = [tensor[row, :length].to("cpu", copy=True) for tensor in (tokens, features, states)]
            examples[index] = DraftExample(kept[0], sequences[index][1], kept[1], kept[2])
    return [examples[index] for index in range(len(sequences))]


def _hidden(model: Transformer, shape: DraftShape, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Features [B, T, 3 * hidden] and final states [B, T, hidden] of padded tokens [B, T]."""
    tapped: dict[int, Tensor] = {}

    def tap(layer: int, output: Tensor) -> None:
        if layer in shape.taps:
            tapped[layer] = output.view(*tokens.shape, -1).clone()

    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    states = model.hidden(tokens, positions, causal_attention(model.shape), tap)
    return torch.cat([tapped[layer] for layer in shape.taps], dim=-1), states
