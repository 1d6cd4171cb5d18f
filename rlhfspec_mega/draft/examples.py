"""What a draft learns from: sequences that the target sampled, with its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.models.transformer import Transformer, causal_attention

LOOKAHEAD = 2  # the draft's entry t predicts token t + 2: the first two tokens of a sequence are never predicted


@dataclass
class Example:
    """One sequence of the target's own sampling.

    Attributes:
        tokens: int64 [T], prompt and response.
        prompt_length: tokens of the prompt.
        features: [T, 3 * hidden], outputs of the tapped target layers (DraftShape.taps), low to high.
        states: [T, hidden], the target's final normed states, which its head turns into logits.
    """

    tokens: Tensor
    prompt_length: int
    features: Tensor
    states: Tensor

    @property
    def predicted(self) -> int:
        """Number of response tokens that a draft can predict."""
        return max(0, len(self.tokens) - max(self.prompt_length, LOOKAHEAD))


@torch.no_grad()
def collect_examples(
    model: Transformer, shape: DraftShape, sequences: Sequence[tuple[Sequence[int], int]], *, batch_tokens: int = 8192
) -> list[Example]:
    """An example of each (tokens, prompt length), in the given order, on the CPU.

    Args:
        batch_tokens: most tokens of one forward, padding included (a longer sequence goes alone).
    """
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index][0]))
    examples: dict[int, Example] = {}
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
            examples[index] = Example(kept[0], sequences[index][1], kept[1], kept[2])
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
