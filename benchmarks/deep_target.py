"""A target with as many layers as real ones have, made from model=small: each layer is followed by others.

A draft has one layer. Beside eight layers of a target it costs an eighth of a step, beside 24 or more it costs as
little as it does in practice. The added layers are copies whose outputs begin at zero, so that training goes on from
what the small model can do (block expansion, LLaMA Pro, arXiv 2401.02415).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from rlhfspec_mega.bootstrap.cache import cached
from rlhfspec_mega.bootstrap.start import warm_model
from rlhfspec_mega.bootstrap.warmup import WarmUp
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights, copy_tokenizer, write_directory
from rlhfspec_mega.observe.console import Console

TIMES = 3  # layers for each of the small model's
TRAINING = ("sft_warmup.max_steps=50", "sft_warmup.lr=5e-4", "sft_warmup.target_exact=0.6")
_RECIPE_VERSION = 1  # part of the cache key: raise it when the recipe's code changes


def deep_target() -> Path:
    """Directory of the model, from the cache or made now."""
    shallow = load_config(["model=small"])
    layers = TIMES * shallow.model.num_layers
    config = load_config(["model=small", f"model.num_layers={layers}", *TRAINING])
    shape = model_shape(config.model)
    with tempfile.TemporaryDirectory(prefix="benchmark.") as temporary, Console(0) as console:
        small = warm_model(shallow, model_shape(shallow.model), Path(temporary), console)

        def make(directory: Path) -> None:
            start = Path(temporary) / "expanded"
            write_directory(start, replace(read_shape(small), num_layers=layers), expanded(HfWeights(small), TIMES))
            copy_tokenizer(small, start)
            WarmUp(config, shape, start, Path(temporary), console).run(directory)

        recipe = (_RECIPE_VERSION, small.name, TIMES, asdict(config.sft_warmup))
        return cached(config, "deep", recipe, make, console.note, "Model deep")


def expanded(weights: HfWeights, times: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a model with `times` layers for each of the given one's, which computes the same."""
    for name in weights.names():
        tensor, layer = weights.get(name), re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            yield name, tensor
            continue
        number, part = int(layer[1]), layer[2]
        for copy in range(times):
            adds = copy > 0 and part in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            yield f"model.layers.{times * number + copy}.{part}", torch.zeros_like(tensor) if adds else tensor
