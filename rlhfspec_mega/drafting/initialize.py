"""Random weights of a new draft; its head starts as the target's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfspec_mega.models.draft_directory import draft_tensors
from rlhfspec_mega.models.draft_shape import DraftShape

_RESIDUAL_GAIN = 0.5  # of the projections that are added to the states an entry read


def initial_draft(shape: DraftShape, head: Tensor, seed: int) -> dict[str, Tensor]:
    """Weights by DraftModel.tensors() names: norms 1, matrices normal with variance 1 / inputs.

    Args:
        head: the target's output head, reduced to the draft's vocabulary: [draft vocabulary, hidden].
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for info in draft_tensors(shape):
        if "norm" in info.name:
            tensor = torch.ones(info.shape)
        else:
            gain = _RESIDUAL_GAIN if info.name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            tensor = torch.randn(info.shape, generator=generator) * gain * info.shape[1] ** -0.5
        weights[info.name] = tensor.to(head.device)
    return weights | {"lm_head.weight": head.detach().float().clone()}
