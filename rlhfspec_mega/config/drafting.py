"""Checks of the drafting options: which of them a policy reads, and values that fit together."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.errors import UserError

# The policies that read an option, those first that a remedy should name.
READ_BY = {
    "max_depth": ("adaptive",),
    "max_tokens": ("adaptive", "uniform"),
    "width": ("adaptive", "uniform", "fixed"),
    "tail_weight": ("adaptive",),
    "depth": ("fixed", "uniform"),
    "tokens": ("fixed",),
    "tiers": ("ema_tiers",),
    "ema_weight": ("ema_tiers",),
    "check_every": ("ema_tiers",),
    "down_hysteresis": ("ema_tiers",),
    "up_hysteresis": ("ema_tiers",),
    "arms": ("bandit",),
    "epsilon": ("bandit",),
    "max_batch": ("bandit",),
}
OF_ANY_DRAFT = ("path", "refresh_every", "collapse_ratio")
OF_REFRESH = ("refresh_seconds", "refresh_steps", "buffer_tokens", "learning_rate")


def idle_drafting(config: RunConfig) -> dict[str, tuple[bool, str]]:
    """For every drafting option whether nothing reads it in this run, and what would make it count."""
    drafting, deterministic = config.drafting, config.trainer.deterministic
    off = drafting.policy == "off"
    idle = {name: (drafting.policy not in readers, f"drafting={readers[0]}") for name, readers in READ_BY.items()}
    idle |= dict.fromkeys(OF_ANY_DRAFT, (off, "drafting=adaptive"))
    refresh = (off, "drafting=adaptive") if off else (drafting.refresh_every == 0, "drafting.refresh_every=4")
    idle |= dict.fromkeys(OF_REFRESH, refresh)
    if not refresh[0]:
        idle["refresh_seconds"] = (deterministic, "trainer.deterministic=false")
        idle["refresh_steps"] = (not deterministic, "trainer.deterministic=true")
    return {f"drafting.{name}": entry for name, entry in idle.items()}


def drafts(config: RunConfig) -> bool:
    """Whether engines decode speculatively: there is a policy and a draft, given or made along with the model."""
    drafting = config.drafting
    return drafting.policy != "off" and (drafting.path is not None or config.model.path is None)


def drafting_note(config: RunConfig) -> str | None:
    """What to say at the start of a run that would draft if it had a draft."""
    if config.drafting.policy == "off" or drafts(config):
        return None
    return (
        f"The model in {config.model.path} has no draft: this run decodes plainly. For speculative decoding make one, "
        f"python -m tools.train_draft --model {config.model.path} --out DIR, and add drafting.path=DIR."
    )


def check_drafting(config: RunConfig) -> None:
    """Refuse a drafting policy that cannot run.

    Raises:
        UserError: no draft in the directory given, tiers or arms that make no sense, or a policy that needs the clock
            in a deterministic run.
    """
    drafting = config.drafting
    if drafting.policy == "off":
        return
    if drafting.path is not None and not (Path(drafting.path) / "config.json").is_file():
        raise UserError(f"drafting.path={drafting.path} holds no config.json: give the directory of a draft.")
    if drafting.policy == "ema_tiers":
        _check_tiers(drafting.tiers)
    if drafting.policy == "bandit":
        _check_arms(drafting.arms)
        if config.trainer.deterministic:
            raise UserError(
                "drafting=bandit learns from measured times, which trainer.deterministic=true forbids: use "
                "drafting=adaptive, or trainer.deterministic=false."
            )


def _check_tiers(tiers: dict[int, list[int]]) -> None:
    sizes_fit = bool(tiers) and all(size >= 1 and steps for size, steps in tiers.items())
    if not sizes_fit or any(step < 0 for steps in tiers.values() for step in steps):
        raise UserError(
            f"drafting.tiers={tiers} is not valid: give batch sizes of 1 or more and for each the depths to choose "
            "from, 0 or more, such as {1: [1, 3, 7], 32: [0, 1]}."
        )
    if not any(step for steps in tiers.values() for step in steps):
        raise UserError(f"drafting.tiers={tiers} never drafts: add a depth above 0, or use drafting=off.")


def _check_arms(arms: list[list[int]]) -> None:
    if not arms or any(len(arm) != 3 or min(arm) < 1 for arm in arms):
        raise UserError(
            f"drafting.arms={arms} is not valid: give [depth, width, draft tokens] for each, all 1 or more, such as "
            "[[3, 1, 3], [6, 4, 16]]."
        )
