"""Speculative decoding: a draft that fits the model, its memory, and a refresh that learns and ends in time."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.config.frozen import runs_engines
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.draft.shape import DraftShape, draft_shape
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.history.sizes import BYTES, kept_tokens
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.memory import DraftMemory, DraftPlan, draft_memory, verified_memory
from rlhfspec_mega.planning.strategy import make_policy
from rlhfspec_mega.planning.tree import most_drafted


def drafts(config: RunConfig) -> bool:
    """Return whether engines have a draft model.

    This takes a drafting policy other than "off", "draft" among the sources, and a draft: the configured one, or that
    built with the initial model.
    """
    made_here = config.model.path is None and config.model.hub_name is None
    return (
        runs_engines(config)
        and config.speculation.policy != "off"
        and "draft" in config.speculation.sources
        and (config.speculation.draft_model_path is not None or made_here)
    )


def recalls(config: RunConfig) -> bool:
    """Return whether engines draft from what they have generated before; SGLang's do so only without a draft model."""
    sources = config.speculation.sources
    return (
        runs_engines(config)
        and config.speculation.policy != "off"
        and "history" in sources
        and (config.rollout.engine == "torch" or "draft" not in sources)
    )


def speculates(config: RunConfig) -> bool:
    """Return whether engines decode speculatively."""
    return drafts(config) or recalls(config)


def speculation_note(config: RunConfig) -> str | None:
    """The note at the start of a run that has a drafting policy but no draft."""
    speculation = config.speculation
    if not runs_engines(config) or speculation.policy == "off" or "draft" not in speculation.sources or drafts(config):
        return None
    how, history = "drafts from its own samples alone", ""
    if not recalls(config):
        fixed = "speculation=fixed and " if config.rollout.engine == "sglang" else ""
        how, history = "decodes plainly", f" To draft from its own samples, add {fixed}speculation.sources=[history]."
    return (
        f"The model in {config.model.path} has no draft: this run {how}. To make one, "
        f"python -m tools.train_draft --model {config.model.path} --out DIR, and add speculation.draft_model_path=DIR."
        f"{history}"
    )


def shape_of_draft(config: RunConfig, shape: ModelShape) -> DraftShape | None:
    """The shape of the draft of a run with a model of this shape; None for plain decoding.

    Raises UserError for a directory without a draft of this model.
    """
    if not drafts(config):
        return None
    if config.speculation.draft_model_path is None:
        return draft_shape(shape)
    from rlhfspec_mega.draft.directory import read_draft_shape  # here: it brings torch, and refusals are quick

    return read_draft_shape(config.speculation.draft_model_path, shape)


def check_speculation(config: RunConfig, shape: ModelShape) -> None:
    """Refuse a drafting policy that cannot run with a model of this shape.

    Raises:
        UserError: no draft of this model in the directory given, or refreshes that learn nothing or outlast the longest
            wait.
    """
    speculation = config.speculation
    if speculation.policy == "off":
        return
    _check_sources(config)
    if speculation.draft_model_path is not None and not (Path(speculation.draft_model_path) / "config.json").is_file():
        raise UserError(
            f"speculation.draft_model_path={speculation.draft_model_path} holds no config.json: give the directory "
            "of a draft."
        )
    if speculation.draft_model_path is not None:
        from rlhfspec_mega.draft.directory import check_draft

        check_draft(speculation.draft_model_path, shape)
    if drafts(config) and speculation.refresh_every:
        _check_refresh(config)


def _check_sources(config: RunConfig) -> None:
    sources = config.speculation.sources
    if not sources or len(set(sources)) < len(sources):
        written = ",".join(sources)
        raise UserError(
            f"speculation.sources=[{written}] must name draft, history or both: use speculation.sources=[draft,history]"
            ", or speculation=off to decode plainly."
        )
    if "draft" not in sources and config.rollout.engine == "sglang" and config.speculation.policy != "fixed":
        raise UserError(
            "With SGLang, history gives a fixed number of draft tokens: add speculation=fixed, or use "
            "speculation.sources=[draft] or rollout.engine=torch."
        )
    if "draft" not in sources and config.speculation.draft_model_path is not None:
        raise UserError(
            "speculation.draft_model_path has no effect without the draft among the sources: use "
            "speculation.sources=[draft,history], or leave the path out."
        )


def _check_refresh(config: RunConfig) -> None:
    speculation, rollout, launcher = config.speculation, config.rollout, config.launcher
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if speculation.buffer_tokens < longest:
        raise UserError(
            f"speculation.buffer_tokens={speculation.buffer_tokens} cannot hold the longest sample, {longest} tokens "
            f"of prompt and answer, to learn from: raise it to {16 * longest}, or use speculation.refresh_every=0."
        )
    if not config.trainer.deterministic and speculation.refresh_seconds >= launcher.call_timeout:
        raise UserError(
            f"speculation.refresh_seconds={speculation.refresh_seconds:g} is not below "
            f"launcher.call_timeout={launcher.call_timeout:g}, after which a worker counts as silent: lower the "
            "first or raise the second."
        )


def memory_of_draft(config: RunConfig, shape: ModelShape, max_sequence: int) -> DraftMemory:
    """Bytes that speculation takes in training and in an engine; 0 without it."""
    draft, speculation, rollout = shape_of_draft(config, shape), config.speculation, config.rollout
    policy = make_policy(speculation, AcceptanceModel(), CostModel())
    if policy is None or not speculates(config):
        return DraftMemory(0, 0)
    device = device_type(config.cluster)
    plan = DraftPlan(
        buffer_tokens=speculation.buffer_tokens if speculation.refresh_every else 0,
        actor_dtype=config.actor.dtype,
        slots=rollout.max_running_requests,
        positions=max_sequence,
        nodes=policy.max_nodes,
        drafted=most_drafted(policy),
        depth=policy.max_depth,
        engine_dtype=rollout.dtype or config.actor.dtype,
        device=device,
    )
    found = draft_memory(draft, plan) if draft else DraftMemory(0, verified_memory(shape, plan))
    # The index lies in host memory, which a run on GPUs does not plan.
    tokens = kept_tokens(speculation.history_tokens, rollout.max_running_requests)
    copies = rollout.sglang.tensor_parallel  # 1 with the torch engine
    if rollout.engine == "torch" and config.trainer.deterministic:
        copies = 2
    index = copies * BYTES * tokens if recalls(config) and device == "cpu" else 0
    return DraftMemory(found.actor, found.engine + index)
