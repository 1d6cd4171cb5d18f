"""Checks of the reallocation options: which of them count in a run."""

from __future__ import annotations

from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.config.sizes import reference_home
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.placement import GENERATION


def check_reallocation(config: RunConfig) -> None:
    """Raises UserError for what a deterministic run cannot follow."""
    if config.reallocation.policy == "queue" and config.trainer.deterministic:
        raise UserError(
            "reallocation=queue hands samples out as slots free up, which trainer.deterministic=true forbids: use "
            "reallocation=off, or trainer.deterministic=false."
        )
    if config.placement.reference == "generation" and config.trainer.deterministic:
        raise UserError(
            "placement.reference=generation scores samples in the batches in which they end, which "
            "trainer.deterministic=true forbids: use placement.reference=actor, or trainer.deterministic=false."
        )


def idle_reallocation(config: RunConfig) -> dict[str, tuple[bool, str]]:
    """For numbers of reallocation and the place of the reference whether nothing reads them in this run, and what would
    make them count."""
    adaptive = config.reallocation.policy == "adaptive"
    remedy = "trainer.deterministic=false" if adaptive else "reallocation=adaptive"
    still = not adaptive or config.trainer.deterministic
    packs = "placement.reference=generation" if config.algorithm.kl_coef > 0 else "algorithm.kl_coef=0.01"
    return {
        "placement.reference": (config.algorithm.kl_coef == 0, "algorithm.kl_coef=0.01"),
        "placement.reference_tensor_parallel": (reference_home(config) != GENERATION, packs),
        "reallocation.least_gain": (still, remedy),
        "reallocation.cool_down": (still, remedy),
        "reallocation.tolerance": (still or reference_home(config) != GENERATION, remedy if still else packs),
    }
