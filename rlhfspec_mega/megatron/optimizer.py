"""Megatron's distributed AdamW with its learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.config.schema.training import OptimizerConfig
from rlhfspec_mega.megatron import adamw_fixes


def build_optimizer(config: OptimizerConfig, chunks: list[Any], dtype: str, groups: ProcessGroupCollection) -> Any:
    """Distributed AdamW with fp32 main weights, its state primed so that it can be saved before the first step."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr * config.min_lr_ratio,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == "bfloat16",
            params_dtype=getattr(torch, dtype),
            use_distributed_optimizer=True,
        ),
        chunks,
        use_gloo_process_groups=False,  # only needed by Megatron's other checkpoint formats
        pg_collection=groups,
    )
    if adamw_fixes.needs_fixes():
        adamw_fixes.prime_state(optimizer)
        adamw_fixes.keep_step_when_loading(optimizer)
    return optimizer


def build_scheduler(config: OptimizerConfig, optimizer: Any, total_updates: int) -> OptimizerParamScheduler:
    """Warm-up then constant, linear or cosine; it also sets weight decay, which AdamW would not take from `wd_mult`.

    Args:
        total_updates: optimizer steps of the whole run; linear and cosine end there at lr * min_lr_ratio.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(total_updates, config.warmup_steps + 1),
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run keeps its position in the schedule; the schedule itself follows its configuration.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
