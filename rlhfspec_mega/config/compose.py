"""Composes conf/ and the command line into a RunConfig; every objection of Hydra or OmegaConf becomes one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any, cast, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import CONF_DIR, CONFIG_NAME, group_options, known, unknown_choice, unknown_option
from rlhfspec_mega.config.presets import from_presets, presets
from rlhfspec_mega.config.ranges import check_ranges
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.schema.system import ClusterConfig
from rlhfspec_mega.config.schema.training import ModelConfig
from rlhfspec_mega.errors import UserError


def _schema() -> DictConfig:
    """The schema, in which options of conf/presets.yaml are still missing."""
    schema = OmegaConf.structured(RunConfig)
    for key in from_presets():
        OmegaConf.update(schema, key, MISSING)
    return schema


ConfigStore.instance().store(name="run_schema", node=_schema())


class NoPresetError(UserError):
    """conf/presets.yaml has no line for this model and hardware, and the run does not set these options itself.

    Attributes:
        config: the configuration, with defaults for the options that are not set.
        unset: the options that must be set.
    """

    def __init__(self, config: RunConfig, unset: Sequence[str]) -> None:
        self.config, self.unset = config, tuple(unset)
        cluster = config.cluster
        kind = "CPU processes" if cluster.device == "cpu" else f"GPUs ({cluster.gpu.name})"
        super().__init__(
            f"conf/presets.yaml has no line for a model of {model_shape(config.model).parameters / 1e9:,.1f} billion "
            f"weights on {cluster.nodes} x {cluster.devices_per_node} {kind}: set "
            f"{', '.join(options_read(config, unset))}."
        )


def options_read(config: RunConfig, keys: Sequence[str]) -> list[str]:
    """Return the keys that this configuration uses: options of SGLang are left out unless SGLang is the engine."""
    return [key for key in keys if config.rollout.engine == "sglang" or not key.startswith("rollout.sglang.")]


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


def saved_config(file: Path) -> RunConfig:
    """The configuration that a run has written to its directory. Raises UserError if it cannot be read."""
    with _in_one_sentence(()):
        try:
            saved = OmegaConf.load(file)
            return to_run_config(cast(DictConfig, OmegaConf.merge(OmegaConf.structured(RunConfig), saved)))
        except OSError as error:
            sentence = f"{file.parent} holds no run ({file.name}: {error.strerror}): give the directory of a run."
            raise UserError(sentence) from None
        except yaml.YAMLError:
            raise UserError(f"{file} is damaged: give the directory of another run.") from None


def to_run_config(composed: DictConfig) -> RunConfig:
    """The dataclass instance of a composed configuration; unset options get their values from conf/presets.yaml.

    Raises:
        UserError: values that cannot be resolved.
        NoPresetError: see there.
    """
    with _in_one_sentence(()):
        composed = deepcopy(composed)
        _resolve_containers(composed)
        unset = [key for key in from_presets() if OmegaConf.is_missing(*_parent(composed, key))]
        lacking = _fill(composed, unset) if unset else []
        config = OmegaConf.to_object(composed)
        assert isinstance(config, RunConfig)
        # OmegaConf returns tuples as lists.
        config.dry_run = config.dry_run.lower()  # dry_run=true is a truth value to Hydra
        for model, learner in (("actor", config.actor), ("critic", config.critic)):
            betas = tuple(learner.optimizer.betas)
            if len(betas) != 2:
                raise UserError(
                    f"{model}.optimizer.betas={list(betas)} is not valid: it must be two numbers: [0.9,0.95]."
                )
            learner.optimizer.betas = betas
        if lacking and any(options_read(config, lacking)):
            raise NoPresetError(config, lacking)
        return config


def _resolve_containers(composed: DictConfig) -> None:
    """Replace interpolated lists and mappings by their values; raise UserError if these are something else.

    OmegaConf checks the types of interpolated numbers and texts only.
    """
    kinds = {list: ListConfig, tuple: ListConfig, dict: DictConfig}
    for key, one in known().items():
        parent, name = _parent(composed, key)
        kind = kinds.get(get_origin(one.kind))
        if (one.is_section or kind is ListConfig) and not OmegaConf.is_interpolation(parent, name):
            continue
        if one.is_section or (kind and not isinstance(value := parent[name], kind)):
            given: Any = OmegaConf.to_container(parent, resolve=False)
            raise UserError(f"{key}={given[name]} is not valid: it must be {one.expected}.")
        if kind:
            OmegaConf.update(composed, key, OmegaConf.to_container(value, resolve=True), merge=False)


def _fill(composed: DictConfig, unset: Sequence[str]) -> list[str]:
    """Set unset options from conf/presets.yaml, else to their defaults; returns those that the table does not give."""
    cluster, model = OmegaConf.to_object(composed.cluster), OmegaConf.to_object(composed.model)
    assert isinstance(cluster, ClusterConfig) and isinstance(model, ModelConfig)
    check_ranges(RunConfig(model=model, cluster=cluster))  # the table is for shapes and hardware that make sense
    found = presets(model_shape(model).parameters, cluster)
    for key in unset:
        OmegaConf.update(composed, key, found[key][0] if key in found else known()[key].default)
    return [key for key in unset if key not in found]


def _parent(composed: DictConfig, key: str) -> tuple[DictConfig, str]:
    section, _, name = key.rpartition(".")
    return (OmegaConf.select(composed, section) if section else composed), name


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a --multirun, in the order in which Hydra's basic sweeper starts them.

    Raises UserError for syntax errors and for sweeps without a finite list of values.
    """
    values: dict[str, list[str]] = {}  # by key: if a key is given twice, the last value counts
    with _in_one_sentence(overrides):
        for override in parse_overrides(overrides):
            key = override.get_key_element()
            if override.is_discrete_sweep():
                values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            elif override.is_sweep_override():
                raise UserError(f"{override.input_line} names no values to run one after the other: list them, a=1,2.")
            else:
                values[key] = [override.input_line or ""]
    return [list(job) for job in product(*values.values())]


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
        chosen = value if isinstance(value, list) else [value]
        if "/" in key and not override.is_sweep_override() and not all(isinstance(one, str | None) for one in chosen):
            raise UserError(f"{override.input_line} names no choice of a Hydra group: write e.g. hydra/launcher=basic.")
        return
    if override.is_delete():
        raise UserError(f"{override.input_line} would delete an option: set it instead, e.g. {key}=null.")
    options = group_options().get(key)
    if options is not None:
        for choice in value if isinstance(value, list) else [value]:
            if str(choice) not in options and not (choice is None and key == "experiment"):
                raise unknown_choice(key, choice, options)
    elif key not in known():
        if not _inside_mapping(key):
            raise unknown_option(key)
        if not override.is_add() and not override.is_force_add():
            raise UserError(f"{key} is not set yet: write +{override.input_line} to add it.")
    elif override.is_add():
        raise UserError(f"{key} exists already: write it without the plus.")


def _inside_mapping(key: str) -> bool:
    """Whether the key is inside an option with free names, such as reward.arguments."""
    parents = (key[:at] for at, letter in enumerate(key) if letter == ".")
    return any(parent in known() and str(known()[parent].kind).startswith("dict[") for parent in parents)


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
    if isinstance(root, ConfigKeyError) and key and key not in known():
        return unknown_option(key)
    if isinstance(root, ValidationError) and key in known():
        return UserError(f"{_setting(key, overrides)} is not valid: it must be {known()[key].expected}.")
    if homeless := re.match(r"Could not override '([\w/]+)'", str(root)):
        return UserError(f"{homeless[1]} has no place here: choose what it belongs to as well, e.g. cluster=1n8g.")
    where = key if key in known() else "The configuration"
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    return UserError(f"{where} cannot be composed: {lines[0] if lines else type(root).__name__}.")


def _setting(key: str, overrides: Sequence[str]) -> str:
    """The override that set this key; the key alone if a file set it."""
    return next((text.lstrip("+") for text in overrides if text.lstrip("+").startswith(f"{key}=")), key)
