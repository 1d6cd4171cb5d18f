"""Checks of rollout=sglang: what must be installed, and what the torch engine can do but SGLang cannot."""

from __future__ import annotations

from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.reach import ray_address
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.speculation import drafts, recalls
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.placement import ACTOR, ENGINE, FROZEN, Placement
from rlhfspec_mega.rollout.sglang_engine import pins
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes, shape_of_history, shapes_of

ENGINE_BYTES = 2 << 30  # per engine on a CPU, besides weights and KV; measured: 1.4 to 1.9 GB
POLICIES = ("off", "adaptive", "fixed")
HALF = 0.5  # default share of a GPU's memory if another model uses the GPU, too
INSTEAD = "use python train.py rollout=torch here"


def uses_sglang(config: RunConfig) -> bool:
    """Whether engines decode with SGLang."""
    return config.rollout.engine == "sglang"


def engine_gpus(config: RunConfig) -> int:
    """Number of devices per engine."""
    return config.rollout.sglang.tensor_parallel if uses_sglang(config) else 1


def engines_sleep(config: RunConfig, placement: Placement) -> bool:
    """Whether engines free their GPU memory while the actor trains on the same devices."""
    return uses_sglang(config) and config.rollout.sglang.enable_memory_saver and placement.share_device(ACTOR, ENGINE)


def memory_share(config: RunConfig, placement: Placement) -> float | None:
    """Share of each GPU's memory for an SGLang engine; None: SGLang's default, which is nearly all."""
    shared = placement.share_device(ACTOR, ENGINE) or any(placement.share_device(model, ENGINE) for model in FROZEN)
    return config.rollout.sglang.mem_fraction_static or (HALF if shared else None)


def check_sglang(config: RunConfig) -> None:
    """Refuse options that SGLang cannot follow.

    Raises:
        UserError: see above.
    """
    if not uses_sglang(config):
        return
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
    """Raise UserError if SGLang would not start, since it reserves some of the model's positions."""
    shapes = DraftShapes()
    if drafts(config):
        shapes = shapes_of(config.speculation, config.rollout.sglang.trees)[0]
    elif recalls(config):
        shapes = shape_of_history(config.speculation)
    lacking = longest + shapes.spare_positions - positions
    if uses_sglang(config) and lacking > 0:
        raise UserError(
            f"rollout.max_prompt_tokens plus max_new_tokens is {longest} of the model's {positions} positions, and "
            f"SGLang keeps {shapes.spare_positions} to itself: lower one of the two by {lacking}."
        )


def check_sglang_installed(config: RunConfig) -> None:
    """Refuse rollout=sglang if SGLang is not installed here.

    Raises:
        UserError: see above.
    """
    if not uses_sglang(config) or ray_address(config.launcher):
        return  # with Ray GPUs and packages are on other machines: the workers check
    if missing := pins.missing(device_type(config.cluster)):
        raise UserError(f"rollout=sglang cannot be used: {missing}; or {INSTEAD}.")
