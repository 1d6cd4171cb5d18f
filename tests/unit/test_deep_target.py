"""The benchmarks' deep target computes what the small one does before it is trained, and its draft reads the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.deep_target import SHARES, TIMES, deep_draft_shape, expanded
from rlhfspec_mega.draft.directory import write_draft
from rlhfspec_mega.draft.distillation import initial_draft
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.models.hf_directory import HfWeights, write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer, causal_attention

SMALL = ModelShape("llama", 16, 4, 2, 1, 8, 32, 31, 64, 1e4, 1e-5, True)
DEEP = replace(SMALL, num_layers=TIMES * SMALL.num_layers, ffn_size=len(SHARES) * SMALL.ffn_size)


class Tapped:
    """The output of each layer."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def __call__(self, layer: int, output: torch.Tensor) -> None:
        self.outputs.append(output.clone())


def states(shape: ModelShape, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model, tapped = Transformer(shape, max_positions=64, dtype=torch.float32, device="cpu"), Tapped()
    model.load(weights)
    tokens = torch.arange(1, 21)[None]
    return model.hidden(tokens, torch.arange(20)[None], causal_attention(shape), tapped), tapped.outputs


def test_an_expanded_model_computes_the_same(tmp_path: Path) -> None:
    weights = dict(initial_tensors(mapping_for("llama").hf_tensors(SMALL), 1, seed=1))
    write_directory(tmp_path / "small", SMALL, iter(weights.items()))
    deep = dict(expanded(HfWeights(tmp_path / "small"), TIMES, SHARES))
    wanted, small_outputs = states(SMALL, weights)
    found, deep_outputs = states(DEEP, deep)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    of_small = draft_shape(SMALL)
    write_draft(tmp_path / "draft", of_small, initial_draft(of_small, torch.zeros(31, 16), seed=0))
    of_deep = deep_draft_shape(tmp_path / "draft", DEEP)
    assert of_deep == replace(of_small, target=DEEP, taps=of_deep.taps)
    for low, high in zip(of_small.taps, of_deep.taps, strict=True):
        torch.testing.assert_close(deep_outputs[high], small_outputs[low], rtol=1e-5, atol=1e-5)
    for layer in range(DEEP.num_layers):
        gate, up, down = (deep[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        neurons = torch.cat((gate, up, down.t()), dim=1)
        assert len(neurons.unique(dim=0)) == DEEP.ffn_size, "two neurons would stay the same for ever"
