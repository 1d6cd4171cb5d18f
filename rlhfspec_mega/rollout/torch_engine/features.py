"""What a draft reads of its target: the outputs of some layers in one forward."""

from __future__ import annotations

import torch


class Features:
    """A tap (`models.transformer.Tap`) that keeps the outputs of these layers; a layer may be tapped twice."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._outputs: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, output: torch.Tensor) -> None:
        if layer in self._layers:
            self._outputs[layer] = output

    def concatenated(self) -> torch.Tensor:
        """[tokens, layers * hidden] of the last forward, in the order in which the layers were named."""
        return torch.cat([self._outputs[layer] for layer in self._layers], dim=-1)
