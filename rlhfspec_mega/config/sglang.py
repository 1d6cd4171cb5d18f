"""Checks of rollout=sglang: what must be there, and what SGLang cannot do of what the torch engine can."""

from __future__ import annotations

from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.reach import ray_address
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.speculation import drafts
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.placement import ACTOR, ENGINE, REFERENCE, Placement
from rlhfspec_mega.rollout.sglang_engine import pins
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes, shapes_of

ENGINE_BYTES = 2 << 30  # of an engine's processes on a CPU, beside weights and KV: 1.4 to 1.9 GB were measured
POLICIES = ("off", "adaptive", "fixed")
HALF = 0.5  # of a GPU's memory, where another model is on it, unless another share is set
INSTEAD = "use python train.py rollout=torch here"


def uses_sglang(config: RunConfig) -> bool:
    """Whether engines decode with SGLang."""
    return config.rollout.engine == "sglang"


def engine_gpus(config: RunConfig) -> int:
    """Devices of one engine."""
    return config.rollout.sglang.tensor_parallel if uses_sglang(config) else 1


def engines_sleep(config: RunConfig, placement: Placement) -> bool:
    """Whether engines give their GPU memory back while the actor, on the same devices, trains."""
    return uses_sglang(config) and config.rollout.sglang.enable_memory_saver and placement.share_device(ACTOR, ENGINE)


def memory_share(config: RunConfig, placement: Placement) -> float | None:
    """Share of each GPU's memory that an SGLang engine takes; None: what SGLang chooses, nearly all."""
    shared = placement.share_device(ACTOR, ENGINE) or placement.share_device(REFERENCE, ENGINE)
    return config.rollout.sglang.mem_fraction_static or (HALF if shared else None)


def check_sglang(config: RunConfig) -> None:
    """Refuse rollout=sglang where SGLang is not, and options that it cannot follow.

    Raises:
        UserError: see above.
    """
    if not uses_sglang(config):
        return
    _check_there(config)
    policy, tensor, cluster = config.speculation.policy, config.rollout.sglang.tensor_parallel, config.cluster
    if drafts(config) and policy not in POLICIES:
        raise UserError(
            f"speculation={policy} is a policy of the torch engine; with rollout=sglang use speculation=adaptive, "
            "speculation=fixed or speculation=off."
        )
    if cluster.devices_per_node % tensor:
        raise UserError(
            f"rollout.sglang.tensor_parallel={tensor} does not divide cluster.devices_per_node="
            f"{cluster.devices_per_node}, and an engine lives on one node: use a divisor."
        )


def check_positions(config: RunConfig, longest: int, positions: int) -> None:
    """Raise UserError where SGLang would not start: it keeps some of the model's positions to itself."""
    shapes = shapes_of(config.speculation, config.rollout.sglang.trees)[0] if drafts(config) else DraftShapes()
    lacking = longest + shapes.spare_positions - positions
    if uses_sglang(config) and lacking > 0:
        raise UserError(
            f"rollout.max_prompt_tokens plus max_new_tokens is {longest} of the model's {positions} positions, and "
            f"SGLang keeps {shapes.spare_positions} to itself: lower one of the two by {lacking}."
        )


def _check_there(config: RunConfig) -> None:
    if ray_address(config.launcher):
        return  # GPUs and packages are elsewhere: the workers look
    if missing := pins.missing(device_type(config.cluster)):
        raise UserError(f"rollout=sglang cannot be used: {missing}; or {INSTEAD}.")
