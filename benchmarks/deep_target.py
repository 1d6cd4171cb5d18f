"""A target with as many layers as real ones have, made from model=small: each layer is wider and followed by others.

A draft has one layer. Beside eight layers of a target it costs an eighth of a step, beside 24 or more it costs as
little as it does in practice; and the wider a layer, the less of a step is left to everything but matrix products. The
added layers are copies whose outputs begin at zero (block expansion, LLaMA Pro, arXiv 2401.02415), and every neuron of
an MLP becomes several which share what it puts out (Net2Net, Chen et al., arXiv 1511.05641): training goes on from what
the small model can do, and the deep one's draft from the small one's.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from rlhfspec_mega.bootstrap.cache import cached
from rlhfspec_mega.bootstrap.start import warm_model
from rlhfspec_mega.bootstrap.warmup import WarmUp
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.draft.directory import read_draft_shape
from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights, copy_tokenizer, write_directory
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.console import Console

TIMES = 3  # layers for each of the small model's
# What each of the neurons that come of one contributes of its output. The shares differ, and where outputs begin at
# zero the inputs' weights are disturbed: neurons with the same weights and gradients would stay the same for ever.
SHARES = (0.5, 0.3, 0.2)
TRAINING = ("sft_warmup.max_steps=50", "sft_warmup.lr=5e-4", "sft_warmup.target_exact=0.6")
DISTURBANCE = 0.1  # in standard deviations of the weights
_RECIPE_VERSION = 3  # part of the cache key: raise it when the recipe's code changes


def deep_target() -> Path:
    """Directory of the model, from the cache or made now."""
    shallow = load_config(["model=small"])
    layers = TIMES * shallow.model.num_layers
    ffn_size = len(SHARES) * shallow.model.ffn_size
    sizes = (f"model.num_layers={layers}", f"model.ffn_size={ffn_size}")
    config = load_config(["model=small", *sizes, *TRAINING])
    shape = model_shape(config.model)
    with tempfile.TemporaryDirectory(prefix="benchmark.") as temporary, Console(0) as console:
        small = warm_model(shallow, model_shape(shallow.model), Path(temporary), console)

        def make(directory: Path) -> None:
            start = Path(temporary) / "expanded"
            of_start = replace(read_shape(small), num_layers=layers, ffn_size=ffn_size)
            write_directory(start, of_start, expanded(HfWeights(small), TIMES, SHARES))
            copy_tokenizer(small, start)
            WarmUp(config, shape, start, Path(temporary), console).run(directory)

        recipe = (_RECIPE_VERSION, small.name, TIMES, SHARES, asdict(config.sft_warmup))
        return cached(config, "deep", recipe, make, console.note, "Model deep")


def expanded(weights: HfWeights, times: int, shares: Sequence[float]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a model that computes the same with `times` layers for each of the given one's.

    Args:
        shares: one for each neuron that an MLP's neuron becomes; they sum to 1.
    """
    for name in weights.names():
        tensor, layer = weights.get(name), re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            yield name, tensor
            continue
        number, part = int(layer[1]), layer[2]
        if part in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            tensor = tensor.repeat(len(shares), 1)
        elif part == "mlp.down_proj.weight":
            tensor = torch.cat([share * tensor for share in shares], dim=1)
        for copy in range(times):
            yield f"model.layers.{times * number + copy}.{part}", _added(tensor, part, copy) if copy else tensor


def _added(tensor: torch.Tensor, part: str, copy: int) -> torch.Tensor:
    """A tensor of a layer whose outputs begin at zero."""
    if part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        return torch.zeros_like(tensor)
    if part == "mlp.gate_proj.weight":
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(copy))
        return tensor + DISTURBANCE * tensor.std() * noise.to(tensor)
    return tensor


def deep_draft_shape(small_draft: Path, deep: ModelShape) -> DraftShape:
    """Of the small target's draft beside the deep one: it reads the states behind all copies of the layers it read."""
    of_small = read_draft_shape(small_draft, deep)
    low, middle, high = (TIMES * (tap + 1) - 1 for tap in of_small.taps)
    return replace(of_small, taps=(low, middle, high))
