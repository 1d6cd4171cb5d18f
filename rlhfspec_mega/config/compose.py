"""Composes conf/ and the command line into a RunConfig; whatever Hydra or OmegaConf object to becomes one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from rlhfspec_mega.config.names import (
    CONF_DIR,
    expected_value,
    group_options,
    option_types,
    unknown_choice,
    unknown_option,
)
from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.errors import UserError

CONFIG_NAME = "config"
OPTIONAL_GROUPS = ("experiment", "actor/preset", "warmup/preset")

ConfigStore.instance().store(name="run_schema", node=RunConfig)


def load_config(overrides: Sequence[str]) -> RunConfig:
    """Compose one run from conf/ and command-line overrides such as "model=small" or "actor.tensor_parallel=1".

    Raises UserError with the nearest valid name or the expected kind of value.
    """
    for override in parse_overrides(overrides):
        if override.is_sweep_override():
            raise UserError(f"{override.input_line} gives several values: add --multirun to run one after the other.")
        _check_names(override)
    with _in_one_sentence(overrides), initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_run_config(compose(CONFIG_NAME, list(overrides)))


def to_run_config(composed: DictConfig) -> RunConfig:
    """The dataclass instance of a composed configuration. Raises UserError for unresolvable values."""
    with _in_one_sentence(()):
        config = OmegaConf.to_object(composed)
        assert isinstance(config, RunConfig)
        # OmegaConf holds tuples as lists and gives them back so.
        betas = tuple(config.actor.optimizer.betas)
        if len(betas) != 2:
            raise UserError(f"actor.optimizer.betas={list(betas)} is not valid: it must be two numbers: [0.9,0.95].")
        config.actor.optimizer.betas = betas
        return config


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a --multirun, in the order in which Hydra's basic sweeper starts them.

    Raises UserError for syntax errors and for sweeps without a finite list of values.
    """
    parsed = parse_overrides(overrides)
    with _in_one_sentence(overrides):
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Hydra's parse of the overrides. Raises UserError for one that cannot be read."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except OverrideParseException:
            raise UserError(
                f"'{text}' cannot be read: write option=value, and quote a value that holds spaces, commas, '=' "
                "or brackets, e.g. 'name=\"a=b\"'."
            ) from None
    return parsed


def _check_names(override: Override) -> None:
    """Raise UserError unless the override's key is a group (with an option it has) or an option of the schema."""
    key, value = override.key_or_group, override.value()
    if key.split("/")[0].split(".")[0] == "hydra":
        return
    if override.is_delete():
        raise UserError(f"{override.input_line} would delete an option: set it instead, e.g. {key}=null.")
    options = group_options().get(key)
    if options is not None:
        for choice in value if isinstance(value, list) else [value]:
            if str(choice) not in options and not (choice is None and key in OPTIONAL_GROUPS):
                raise unknown_choice(key, choice, options)
    elif key not in option_types():
        if not _inside_mapping(key):
            raise unknown_option(key)
        if not override.is_add() and not override.is_force_add():
            raise UserError(f"{key} is not set yet: write +{override.input_line} to add it.")
    elif override.is_add():
        raise UserError(f"{key} exists already: write it without the plus.")


def _inside_mapping(key: str) -> bool:
    """Whether the key lies in an option that takes free names, such as reward.arguments."""
    parents = (key[:at] for at, letter in enumerate(key) if letter == ".")
    return any(str(option_types().get(parent, "")).startswith("dict[") for parent in parents)


@contextmanager
def _in_one_sentence(overrides: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a file of conf/"
        raise UserError(f"{where} is not valid YAML: {error.problem}.") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise _translated(error, overrides) from None


def _translated(error: Exception, overrides: Sequence[str]) -> UserError:
    """The error at the root of the chain of causes, as one sentence."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    key = str(getattr(root, "full_key", None) or "").split("[")[0]
    known = key in option_types()
    if isinstance(root, ConfigKeyError) and key and not known:
        return unknown_option(key)
    if isinstance(root, ValidationError) and known:
        return UserError(f"{_setting(key, overrides)} is not valid: it must be {expected_value(key)}.")
    where = key if known else "The configuration"
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    return UserError(f"{where} cannot be composed: {lines[0] if lines else type(root).__name__}.")


def _setting(key: str, overrides: Sequence[str]) -> str:
    """The override that set this key, or the key alone where a file set it."""
    return next((text.lstrip("+") for text in overrides if text.lstrip("+").startswith(f"{key}=")), key)
