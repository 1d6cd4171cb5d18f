"""The names a user may write on the command line, and the nearest valid one for a name that is not among them."""

from __future__ import annotations

import dataclasses
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.errors import UserError

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"


@cache
def group_options() -> dict[str, tuple[str, ...]]:
    """Every config group (nested ones with a slash) and the options it has, from the files of conf/."""
    options: dict[str, list[str]] = {}
    for file in sorted(CONF_DIR.rglob("*.yaml")):
        if file.parent != CONF_DIR:
            options.setdefault(file.parent.relative_to(CONF_DIR).as_posix(), []).append(file.stem)
    return {group: tuple(names) for group, names in options.items()}


@cache
def option_types() -> dict[str, Any]:
    """Every dotted option of the schema, sections included, and its type."""
    return dict(_fields(RunConfig, ""))


def _fields(schema: type, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    hints = get_type_hints(schema)
    for item in dataclasses.fields(schema):
        key, kind = prefix + item.name, hints[item.name]
        found.append((key, kind))
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            found += _fields(kind, key + ".")
    return found


def expected_value(key: str) -> str:
    """What the value of an option must be, in words, e.g. "a whole number or null"."""
    kind = option_types()[key]
    if get_origin(kind) is UnionType:
        inner = next(part for part in get_args(kind) if part is not NoneType)
        return f"{_type_in_words(inner)} or null"
    return _type_in_words(kind)


def _type_in_words(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    containers = {
        list: "a list such as [a,b]",
        tuple: "a list of two numbers such as [0.9,0.95]",
        dict: "a mapping such as {a:1}",
    }
    return words.get(kind) or containers.get(get_origin(kind)) or "a section, whose options are set one by one"


def nearest_options(word: str) -> list[str]:
    """Valid groups or dotted options that the user most likely meant; several if options share their last name."""
    names = list(dict.fromkeys([*group_options(), *option_types()]))
    # A dotted name never stands for a whole section, however alike they look.
    alike = [name for name in names if "." in name] if "." in word else names
    if close := get_close_matches(word, alike, n=1, cutoff=0.8):
        return close
    leaf = word.rsplit(".", 1)[-1]
    leaves = sorted({name.rsplit(".", 1)[-1] for name in names})
    near_leaf = get_close_matches(leaf, leaves, n=1, cutoff=0.7)
    if near_leaf:
        same = [name for name in names if name.rsplit(".", 1)[-1] == near_leaf[0]]
        return sorted(same, key=lambda name: -SequenceMatcher(None, word, name).ratio())[:3]
    return get_close_matches(word, names, n=1, cutoff=0.5)


def unknown_option(word: str) -> UserError:
    """The refusal of a key that is neither a group nor an option."""
    near = " or ".join(f"'{name}'" for name in nearest_options(word))
    hint = f"did you mean {near}?" if near else "no name resembles it."
    return UserError(f"There is no option '{word}': {hint} See python train.py --help, or --cfg job for all options.")


def unknown_choice(key: str, value: object, choices: tuple[str, ...]) -> UserError:
    """The refusal of a value outside a fixed set (of a group or of an enumerated option)."""
    near = get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? There" if near else "there"
    return UserError(f"{key}={value} does not exist: {hint} is {', '.join(choices)}.")
