"""What a field of the schema tells about an option besides its type.

Default, help, unit, choices, bounds, conditions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KEY = "option"  # of a dataclass field's metadata


@dataclass(frozen=True)
class Option:
    """One option, as checks, `--help`, docs/configuration.md and error messages read it.

    Attributes:
        help: what it does, a phrase without a full stop.
        unit: unit of a number, e.g. "tokens".
        choices: all allowed values, or elements of a list; empty: any value of its type.
        least, most, above, below: bounds of a number, or of every number of a tuple; the last two exclude the bound.
        only_with: conditions (see config.conditions) that must all hold for the option, or a section's options, to be
            read; in ".schedule=linear", schedule is an option of the same section.
        common: whether `--help` shows it.
        was: earlier names, as typed on the command line.
    """

    help: str
    unit: str | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    only_with: tuple[str, ...] = ()
    common: bool = False
    was: tuple[str, ...] = ()

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is one of the choices or within the bounds; null always is."""
        if value is None:
            return True
        if self.choices:
            return all(one in self.choices for one in value) if isinstance(value, list) else value in self.choices
        return all(self._within(one) for one in (value if isinstance(value, Sequence) else [value]))

    def _within(self, value: Any) -> bool:
        if isinstance(value, (str, bool)) or not isinstance(value, (int, float)):
            return True
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words, e.g. "above 0 and at most 5"; empty without any."""
        if self.least is not None and self.most is not None:
            return f"from {self.least:g} to {self.most:g}"
        low = f"{self.least:g} or more" if self.least is not None else ""
        low = f"above {self.above:g}" if self.above is not None else low
        high = f"at most {self.most:g}" if self.most is not None else ""
        high = f"below {self.below:g}" if self.below is not None else high
        return " and ".join(words for words in (low, high) if words)


def option(default: Any, help: str, *, only_with: str | tuple[str, ...] = (), **more: Any) -> Any:
    """A field of the schema with its default and the attributes of Option.

    Lists and mappings are copied for each run.
    """
    conditions = (only_with,) if isinstance(only_with, str) else only_with
    metadata = {KEY: Option(help, only_with=conditions, **more)}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, help: str, *, only_with: str | tuple[str, ...] = (), was: tuple[str, ...] = ()) -> Any:
    """A field of the schema that is a group of options. `was`: earlier names of the group."""
    conditions = (only_with,) if isinstance(only_with, str) else only_with
    return field(default_factory=kind, metadata={KEY: Option(help, only_with=conditions, was=was)})
