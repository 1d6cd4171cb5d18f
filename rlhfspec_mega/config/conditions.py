"""Conditions under which an option is read; an option that is set without them is refused.

A condition is "option=value", "option=value|value", "option>number", several joined by " or ", or one of FACTS.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import yaml

from rlhfspec_mega.config.critic import has_critic
from rlhfspec_mega.config.frozen import frozen_home
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import as_written, known, options
from rlhfspec_mega.config.presets import presets
from rlhfspec_mega.config.schema.generation import LAYERED, SIZED
from rlhfspec_mega.config.schema.reward import FUNCTION, REWARD_MODEL, SERVICE
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.speculation import drafts, recalls, speculates
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.placement import GENERATION


def _start_drafting(config: RunConfig) -> str:
    if config.speculation.policy == "off":
        return "speculation=adaptive"
    return (
        "speculation.draft_model_path=DIR" if "draft" in config.speculation.sources else "speculation.sources=[draft]"
    )


def _start_recalling(config: RunConfig) -> str:
    speculation = config.speculation
    if speculation.policy == "off":
        return "speculation=adaptive"
    if config.rollout.engine == "sglang":
        return "speculation=fixed and speculation.sources=[history]"
    return "speculation.sources=[draft,history]"


def _move_frozen(config: RunConfig) -> str:
    return "placement.reference=generation" if frozen_home(config) else "algorithm.kl_coef=0.01"


# Conditions on several options at once: whether one holds, and what to add if it does not.
FACTS: dict[str, tuple[Callable[[RunConfig], bool], Callable[[RunConfig], str]]] = {
    "a draft": (drafts, _start_drafting),
    "draft tokens": (speculates, _start_drafting),
    "draft tokens from history": (recalls, _start_recalling),
    # SGLang makes trees of history's tokens, limited by their number alone, and chains of a draft model's.
    SIZED: (
        lambda config: config.rollout.engine == "torch" or config.rollout.sglang.trees or recalls(config),
        lambda config: "rollout.sglang.trees=true",
    ),
    LAYERED: (
        lambda config: config.rollout.engine == "torch" or drafts(config),
        lambda config: "rollout.engine=torch",
    ),
    "a critic": (has_critic, lambda config: "algorithm=ppo"),
    FUNCTION: (lambda config: bool(config.reward.function), lambda config: "reward.function=package.module.function"),
    SERVICE: (lambda config: config.reward.remote.url is not None, lambda config: "reward.remote.url=URL"),
    REWARD_MODEL: (lambda config: config.reward.model.path is not None, lambda config: "reward.model.path=DIR"),
    "a GPU": (lambda config: device_type(config.cluster) == "cuda", lambda config: "cluster=1n1g"),
    "a frozen model": (lambda config: frozen_home(config) is not None, lambda config: "algorithm.kl_coef=0.01"),
    "frozen models on generation devices": (lambda config: frozen_home(config) == GENERATION, _move_frozen),
}


def check_read(config: RunConfig) -> None:
    """Refuse options that are set but not read in this run, so that nobody believes they have an effect.

    Raises:
        UserError: for the first one, with what to add or to leave out.
    """
    given = presets(model_shape(config.model).parameters, config.cluster)
    for one in options():
        value = attrgetter(one.key)(config)
        if value == one.default or (one.key in given and value == given[one.key][0]):
            continue  # not set
        for condition in one.option.only_with:
            if remedy := missing(condition, config):
                raise UserError(
                    f"{as_written(one.key, value)} has no effect here: add {remedy}, or set "
                    f"{as_written(one.key, one.default)}."
                )


def missing(condition: str, config: RunConfig) -> str | None:
    """What to add so that the condition holds; None if it holds."""
    if condition in FACTS:
        holds, remedy = FACTS[condition]
        return None if holds(config) else remedy(config)
    alternatives = condition.split(" or ")
    return None if any(_holds(one, config) for one in alternatives) else _remedy(alternatives[0])


def _holds(comparison: str, config: RunConfig) -> bool:
    if ">" in comparison:
        key, bound = comparison.split(">")
        return bool(attrgetter(key)(config) > float(bound))
    key, values = comparison.split("=")
    texts: list[Any] = values.split("|")
    return attrgetter(key)(config) in [*texts, *map(_value, texts)]  # of a text option, "true" is a word


def _remedy(comparison: str) -> str:
    if ">" in comparison:
        key, bound = comparison.split(">")
        default = known()[key].default
        above = default if isinstance(default, (int, float)) and default > float(bound) else int(bound) + 1
        return as_written(key, above)
    key, values = comparison.split("=")
    return as_written(key, _value(values.split("|")[0]))


def _value(text: str) -> Any:
    """The value as YAML reads it, except that "off" stays a word."""
    return text if text == "off" else yaml.safe_load(text)
