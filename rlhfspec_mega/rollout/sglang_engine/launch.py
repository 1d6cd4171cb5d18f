"""Starts an SGLang engine with this package's plug-in."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.rollout.sglang_engine import pins, plugin
from rlhfspec_mega.rollout.sglang_engine.choice import write_config
from rlhfspec_mega.rollout.sglang_engine.loaders import INTO_DRAFT
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes

CONFIG_FILE = "sglang_drafting.json"


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with.

    Attributes:
        model: Hugging Face directory; only its config.json is read, the weights come with the first update.
        draft: directory of an EAGLE-3 draft, whose weights are read; None: plain decoding.
        shapes: of what is drafted, by numbers of draft tokens.
        fixed: the number to use; None: the one that pays best.
        collapse_ratio: see CollapseWatch.
        slots: requests decoded at once.
        max_positions: tokens of prompt and response; the model has `shapes.spare_positions` more.
        prefill_chunk: prompt tokens per pass.
        dtype: e.g. "bfloat16".
        tensor_parallel: GPUs of this engine.
        memory: share of a GPU's memory for weights and KV; None: SGLang's choice.
        sleeps: whether its GPU memory can be given back between rollouts.
        options: further arguments of SGLang by name; they win.
    """

    model: Path
    draft: Path | None
    shapes: DraftShapes
    fixed: int | None
    collapse_ratio: float
    slots: int
    max_positions: int
    prefill_chunk: int
    dtype: str
    tensor_parallel: int
    memory: float | None
    sleeps: bool
    options: dict[str, Any]


def arguments(settings: EngineSettings, directory: Path) -> dict[str, Any]:
    """Arguments of sglang.Engine.

    Args:
        directory: where the file that tells of the numbers of draft tokens is.
    """
    found: dict[str, Any] = {
        "model_path": str(settings.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "context_length": settings.max_positions + settings.shapes.spare_positions,
        "max_running_requests": settings.slots,
        "chunked_prefill_size": settings.prefill_chunk,
        "tp_size": settings.tensor_parallel,
        "enable_memory_saver": settings.sleeps,
        "page_size": 1,  # samples move by tokens, not by pages
        "sampling_backend": "pytorch",  # the sampler that is hooked
        "log_level": "warning",
    }
    if settings.memory is not None:
        found["mem_fraction_static"] = settings.memory
    if settings.draft is not None:
        found |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(settings.draft),
            "speculative_draft_load_format": "auto",
            "speculative_num_steps": settings.shapes.depth,
            "speculative_eagle_topk": settings.shapes.branches,
            "speculative_num_draft_tokens": settings.shapes.counts[-1] + 1,
            "speculative_adaptive": True,
            "speculative_adaptive_config": str(directory / CONFIG_FILE),
            "custom_weight_loader": [INTO_DRAFT],
            "enable_draft_weights_cpu_backup": settings.sleeps,
        }
    return found | settings.options


def start(settings: EngineSettings, directory: Path) -> Any:
    """An sglang.Engine whose processes sample by the shared noise. Takes minutes: graphs are captured.

    Args:
        directory: an empty one for files of this engine.

    Raises:
        UserError: SGLang is not there in the version that the plug-in is for, or an option does not exist.
        RunError: a hook could not be applied in this process.
    """
    if (wrong := pins.missing()) is not None:
        raise UserError(f"rollout=sglang cannot be used: {wrong}; or use rollout=torch.")
    import sglang
    from sglang.srt.server_args import ServerArgs

    if settings.draft is not None:
        write_config(directory / CONFIG_FILE, settings.shapes, settings.collapse_ratio, settings.fixed)
    os.environ["SGLANG_PLUGINS"] = plugin.NAME
    plugin.apply_here()
    given = arguments(settings, directory)
    if unknown := sorted(given.keys() - {field.name for field in fields(ServerArgs)}):
        raise UserError(f"rollout.sglang.options has {', '.join(unknown)}, which sglang {pins.VERSION} does not know.")
    return sglang.Engine(**given)
