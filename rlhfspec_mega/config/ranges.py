"""Allowed values of single options, as the schema declares them."""

from __future__ import annotations

from operator import attrgetter

from rlhfspec_mega.config.names import options, unknown_choice
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError


def check_ranges(config: RunConfig) -> None:
    """Raise UserError for the first option whose value is not one of its choices or is out of bounds."""
    for one in options():
        value = attrgetter(one.key)(config)
        if one.option.allows(value):
            continue
        if one.option.choices:
            raise unknown_choice(one.key, value, one.option.choices)
        shown = list(value) if isinstance(value, tuple) else value
        raise UserError(f"{one.key}={shown} is out of range: it must be {one.option.bounds}.")
