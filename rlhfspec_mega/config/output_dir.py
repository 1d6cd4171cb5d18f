"""The directory of a run: claimed once per name, or taken up again by a run that resumes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.errors import UserError

CONFIG_FILE, OVERRIDES_FILE = "config.yaml", "overrides.yaml"
CHECKPOINTS = "checkpoints"  # one directory per checkpoint in it
# What a resumed run must share with its beginning; parallel sizes and engines may change.
SAME_ON_RESUME = ("seed", "model", "data")


def output_dir(config: RunConfig) -> Path:
    """Where the run of this name writes."""
    return Path(config.output_dir) / config.name


def check_output_dir(config: RunConfig) -> None:
    """Refuse a directory that this run may not use; creates nothing.

    A run may resume without a checkpoint: it died before the first one and begins again.

    Raises:
        UserError: the directory exists and the run does not resume, or it resumes and there is no such run, or the
            saved seed, model or data differ.
    """
    directory = output_dir(config)
    if not config.trainer.resume:
        if directory.exists():
            raise _taken(directory)
        return
    if not directory.is_dir():
        raise UserError(f"There is no run {directory} to resume: leave out trainer.resume=true, or correct the name.")
    _check_same(directory, config)


def claim_output_dir(config: RunConfig, overrides: Sequence[str] = ()) -> Path:
    """Create the run's directory and save the resolved configuration and the command line's overrides in it.

    Of several processes that claim one name, exactly one succeeds. A resumed run keeps its directory, and the two
    files then tell what it went on with.

    Raises:
        UserError: as check_output_dir, or the directory cannot be written.
    """
    check_output_dir(config)
    directory = output_dir(config)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(exist_ok=config.trainer.resume)
        _replace(directory / OVERRIDES_FILE, yaml.safe_dump(list(overrides)))
        _replace(directory / CONFIG_FILE, yaml.safe_dump(_plain(config), sort_keys=False))
    except FileExistsError:
        raise _taken(directory) from None
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}): set another output_dir=.") from None
    return directory


def release_output_dir(directory: Path) -> None:
    """Give the name free again if the run left nothing there but its configuration: no worker was started."""
    if {entry.name for entry in directory.iterdir()} <= {CONFIG_FILE, OVERRIDES_FILE}:
        for name in (CONFIG_FILE, OVERRIDES_FILE):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


def _replace(file: Path, text: str) -> None:
    """Write a file at once: a run killed while it resumes must find its configuration the next time."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def _taken(directory: Path) -> UserError:
    other = f"start another run with name={directory.name}2"
    if (directory / CONFIG_FILE).exists():
        return UserError(f"{directory} exists already: go on with that run by trainer.resume=true, or {other}.")
    return UserError(f"{directory} exists already and holds no run: {other}, or remove it.")


def _plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as YAML knows it: mappings, lists and scalars."""
    values = asdict(config)
    values["actor"]["optimizer"]["betas"] = list(config.actor.optimizer.betas)
    return values


def _check_same(directory: Path, config: RunConfig) -> None:
    file = directory / CONFIG_FILE
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        saved = None
    if not isinstance(saved, dict):
        raise UserError(f"{file} cannot be read, so the run cannot be resumed: start another with another name=.")
    for key, (before, now) in _differences(saved, _plain(config)).items():
        raise UserError(
            f"{directory} was started with {key}={before}, not {now}: resume with {key}={before}, or start another run "
            "with another name=."
        )


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Option -> (saved, current) for the options that a resumed run may not change."""
    found = {}
    for section in SAME_ON_RESUME:
        old, new = saved.get(section), current[section]
        if isinstance(new, dict):
            old = old if isinstance(old, dict) else {}
            # A model's cache may move; what it holds is the same.
            keys = [key for key in new if f"{section}.{key}" != "model.cache_dir"]
            found.update({f"{section}.{key}": (old.get(key), new[key]) for key in keys if old.get(key) != new[key]})
        elif old != new:
            found[section] = (old, new)
    return found
