"""Names on the command line: what each is, its earlier names, and the nearest name to a wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rlhfspec_mega.config.option import KEY, Option
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
CONFIG_NAME = "config"  # the file of CONF_DIR that every run begins with


@dataclasses.dataclass(frozen=True)
class Known:
    """A field of the schema.

    Attributes:
        kind: its type; for a section the dataclass.
        default: None for a section.
    """

    key: str
    kind: Any
    default: Any
    option: Option

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.kind)

    @property
    def expected(self) -> str:
        """What its value must be, in words, e.g. "a whole number or null"."""
        if get_origin(self.kind) is UnionType:
            inner = next(part for part in get_args(self.kind) if part is not NoneType)
            return f"{_in_words(inner)} or null"
        return _in_words(self.kind)


def _in_words(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    containers = {
        list: "a list such as [a,b]",
        tuple: "a list of two numbers such as [0.9,0.95]",
        dict: "a mapping such as {a:1}",
    }
    return words.get(kind) or containers.get(get_origin(kind)) or "a section, whose options are set one by one"


@cache
def group_options() -> dict[str, tuple[str, ...]]:
    """Every config group (nested ones with a slash) and the options it has, from the files of conf/."""
    options: dict[str, list[str]] = {}
    for file in sorted(CONF_DIR.rglob("*.yaml")):
        if file.parent != CONF_DIR:
            options.setdefault(file.parent.relative_to(CONF_DIR).as_posix(), []).append(file.stem)
    return {group: tuple(names) for group, names in options.items()}


@cache
def known() -> dict[str, Known]:
    """Every dotted option of the schema, sections included, in the schema's order."""
    return {one.key: one for one in _fields(RunConfig, "", ())}


def _fields(schema: type, prefix: str, only_with: tuple[str, ...]) -> Iterator[Known]:
    """The fields of a section; `only_with`: conditions of the sections around it."""
    hints = get_type_hints(schema)
    for item in dataclasses.fields(schema):
        kind, default = hints[item.name], item.default
        if item.default_factory is not dataclasses.MISSING and not dataclasses.is_dataclass(kind):
            default = item.default_factory()
        declared: Option = item.metadata[KEY]
        own = (prefix + one[1:] if one.startswith(".") else one for one in declared.only_with)
        option = dataclasses.replace(declared, only_with=(*only_with, *own))
        yield Known(prefix + item.name, kind, None if default is dataclasses.MISSING else default, option)
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _fields(kind, prefix + item.name + ".", option.only_with)


def options() -> list[Known]:
    """All options that hold a value; the sections that contain them are left out."""
    return [one for one in known().values() if not one.is_section]


@cache
def _renamed() -> dict[str, str]:
    """Names of earlier versions and their current names."""
    now = {old: one.key for one in known().values() for old in one.option.was}
    for one in known().values():
        parent, _, leaf = one.key.rpartition(".")
        for old in known()[parent].option.was if parent else ():
            now.setdefault(f"{old}.{leaf}", one.key)
    return now


def nearest_options(word: str) -> list[str]:
    """Valid groups or dotted options that the user most likely meant; several if options share their last name."""
    names = list(dict.fromkeys([*group_options(), *known()]))
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
    """The refusal of a key that is neither a group nor an option; an earlier name is answered with the current one."""
    if word in _renamed():
        return UserError(f"'{word}' is called '{_renamed()[word]}' now: write {_renamed()[word]}=VALUE.")
    near = " or ".join(f"'{name}'" for name in nearest_options(word))
    hint = f"did you mean {near}?" if near else "no name resembles it."
    return UserError(f"There is no option '{word}': {hint} See python train.py --help, or docs/configuration.md.")


def unknown_choice(key: str, value: object, choices: tuple[str, ...]) -> UserError:
    """The refusal of a value outside a fixed set (of a group or of an enumerated option)."""
    near = get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? There" if near else "there"
    return UserError(f"{key}={value} does not exist: {hint} is {', '.join(choices)}.")


def as_written(key: str, value: object) -> str:
    """An option as one types it; for a field that a group chooses, the group's option.

    For example, data.kind=files is typed data=files.
    """
    group = key.rpartition(".")[0]
    chooses = key.endswith((".kind", ".policy", ".engine", ".mode"))
    if chooses and str(value) in group_options().get(group, ()):
        return f"{group}={value}"
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    return f"{key}={value}"
