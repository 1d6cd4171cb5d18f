"""Checks of the reallocation options: which of them count in a run."""

from __future__ import annotations

from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.config.sizes import engines_score
from rlhfspec_mega.errors import UserError


def check_reallocation(config: RunConfig) -> None:
    """Raises UserError for a policy that a deterministic run cannot follow."""
    if config.reallocation.policy == "queue" and config.trainer.deterministic:
        raise UserError(
            "reallocation=queue hands samples out as slots free up, which trainer.deterministic=true forbids: use "
            "reallocation=off, or trainer.deterministic=false."
        )


def idle_reallocation(config: RunConfig) -> dict[str, tuple[bool, str]]:
    """For every number of reallocation whether nothing reads it in this run, and what would make it count."""
    adaptive = config.reallocation.policy == "adaptive"
    remedy = "trainer.deterministic=false" if adaptive else "reallocation=adaptive"
    still = not adaptive or config.trainer.deterministic
    packs = "reallocation.fusion=true" if config.algorithm.kl_coef > 0 else "algorithm.kl_coef=0.01"
    return {
        "reallocation.least_gain": (still, remedy),
        "reallocation.cool_down": (still, remedy),
        "reallocation.tolerance": (still or not engines_score(config), remedy if still else packs),
    }
