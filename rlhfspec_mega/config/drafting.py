"""Checks of the drafting options: which of them a policy reads, and values that fit together."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.draft.shape import DraftShape, draft_shape
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape

# The policies that read an option, those first that a remedy should name.
READ_BY = {
    "max_depth": ("adaptive",),
    "max_tokens": ("adaptive", "uniform"),
    "width": ("adaptive", "uniform", "fixed"),
    "tail_weight": ("adaptive",),
    "depth": ("fixed", "uniform"),
    "tokens": ("fixed",),
}
# What SGLang reads of them when it drafts chains, and when it drafts trees.
OF_CHAINS = ("max_depth", "depth")
OF_TREES = (*OF_CHAINS, "max_tokens", "width", "tokens")
OF_ANY_DRAFT = ("path", "refresh_every", "collapse_ratio")
OF_REFRESH = ("refresh_seconds", "refresh_steps", "buffer_tokens", "learning_rate")


def idle_drafting(config: RunConfig) -> dict[str, tuple[bool, str]]:
    """For every drafting option whether nothing reads it in this run, and what would make it count."""
    drafting, deterministic = config.drafting, config.trainer.deterministic
    off = not drafts(config)
    start = "drafting=adaptive" if drafting.policy == "off" else "drafting.path=DIR"  # makes a run draft that does not
    idle = {
        name: (off, start) if drafting.policy in readers else (True, f"drafting={readers[0]}")
        for name, readers in READ_BY.items()
    }
    if config.rollout.engine == "sglang":
        read = OF_TREES if config.rollout.sglang.trees else OF_CHAINS
        remedy = {name: "rollout.sglang.trees=true" if name in OF_TREES else "rollout=torch" for name in READ_BY}
        idle |= {name: (True, remedy[name]) for name in READ_BY if name not in read and not idle[name][0]}
    idle |= dict.fromkeys(OF_ANY_DRAFT, (off, start))
    refresh = (off, start) if off else (drafting.refresh_every == 0, "drafting.refresh_every=4")
    idle |= dict.fromkeys(OF_REFRESH, refresh)
    if not refresh[0]:
        idle["refresh_seconds"] = (deterministic, "trainer.deterministic=false")
        idle["refresh_steps"] = (not deterministic, "trainer.deterministic=true")
    return {f"drafting.{name}": entry for name, entry in idle.items()}


def drafts(config: RunConfig) -> bool:
    """Whether engines decode speculatively: there is a policy and a draft, given or made along with the model."""
    made_here = config.model.path is None and config.model.hub_name is None
    return config.drafting.policy != "off" and (config.drafting.path is not None or made_here)


def drafting_note(config: RunConfig) -> str | None:
    """What to say at the start of a run that would draft if it had a draft."""
    if config.drafting.policy == "off" or drafts(config):
        return None
    return (
        f"The model in {config.model.path} has no draft: this run decodes plainly. For speculative decoding make one, "
        f"python -m tools.train_draft --model {config.model.path} --out DIR, and add drafting.path=DIR."
    )


def shape_of_draft(config: RunConfig, shape: ModelShape) -> DraftShape | None:
    """The shape of the draft that a run of a model of this shape will use; None where it decodes plainly.

    Raises UserError for a directory without a draft of this model.
    """
    if not drafts(config):
        return None
    if config.drafting.path is None:
        return draft_shape(shape)
    from rlhfspec_mega.draft.directory import read_draft_shape  # here: it brings torch, and refusals are quick

    return read_draft_shape(config.drafting.path, shape)


def check_drafting(config: RunConfig, shape: ModelShape) -> None:
    """Refuse a drafting policy that cannot run with a model of this shape.

    Raises:
        UserError: no draft of this model in the directory given, or refreshes that learn nothing or outlast the longest
            wait.
    """
    drafting = config.drafting
    if drafting.policy == "off":
        return
    if drafting.path is not None and not (Path(drafting.path) / "config.json").is_file():
        raise UserError(f"drafting.path={drafting.path} holds no config.json: give the directory of a draft.")
    if drafting.path is not None:
        from rlhfspec_mega.draft.directory import check_draft

        check_draft(drafting.path, shape)
    if drafts(config) and drafting.refresh_every:
        _check_refresh(config)


def _check_refresh(config: RunConfig) -> None:
    drafting, rollout, cluster = config.drafting, config.rollout, config.cluster
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if drafting.buffer_tokens < longest:
        raise UserError(
            f"drafting.buffer_tokens={drafting.buffer_tokens} cannot hold the longest sample, {longest} tokens of "
            f"prompt and answer, to learn from: raise it to {16 * longest}, or use drafting.refresh_every=0."
        )
    if not config.trainer.deterministic and drafting.refresh_seconds >= cluster.deadline_seconds:
        raise UserError(
            f"drafting.refresh_seconds={drafting.refresh_seconds:g} is not below "
            f"cluster.deadline_seconds={cluster.deadline_seconds:g}, after which a worker counts as silent: lower the "
            "first or raise the second."
        )
