"""Two repairs of Megatron's DistributedOptimizer when it runs on torch's AdamW (no Transformer Engine, no apex).

They apply on any device, wherever `USING_PYTORCH_OPTIMIZER` is set:
1. Loading sets the main parameter and its state from a dictionary without AdamW's `step`: KeyError. Keep the step.
2. `load_state_dict` gives all parameters one shared `step` tensor, which every parameter then increments, so that bias
   correction runs ahead by the number of parameters. Give each its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def needs_fixes() -> bool:
    """Whether Megatron fell back to torch's AdamW."""
    return bool(USING_PYTORCH_OPTIMIZER)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The Megatron optimizers behind a chained one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def prime_state(optimizer: Any) -> None:
    """Create AdamW's moments before the first step: `state_dict()` asserts that they exist."""
    for megatron_optimizer in inner_optimizers(optimizer):
        inner = megatron_optimizer.optimizer
        for group in inner.param_groups:
            group.setdefault("step", 0)
            for parameter in group["params"]:
                state = inner.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)


def keep_step_when_loading(optimizer: Any) -> None:
    """First repair: loaded tensors keep the parameter's current step. Applies to this optimizer instance only."""
    for megatron_optimizer in inner_optimizers(optimizer):
        if not isinstance(megatron_optimizer, DistributedOptimizer):
            continue
        original = megatron_optimizer._set_main_param_and_optimizer_states
        megatron_optimizer._set_main_param_and_optimizer_states = partial(_set_with_step, megatron_optimizer, original)


def _set_with_step(optimizer: Any, original: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    group, order = optimizer.model_param_group_index_map[model_param]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    original(model_param, {"step": optimizer.optimizer.state[main]["step"], **tensors})


def unshare_steps(optimizer: Any) -> None:
    """Second repair, after loading: one step tensor per parameter."""
    for megatron_optimizer in inner_optimizers(optimizer):
        for state in megatron_optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].detach().clone()
