"""The command-line flags of Hydra (hydra.cc, "Hydra's command line flags") that a run supports."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rlhfspec_mega.errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"The command line cannot be read ({message}): write python train.py [flag] option=value ...")


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    """The flags, and all other words under `overrides`.

    Raises UserError for a flag that does not exist, or that would use a configuration other than conf/.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=_INFO)
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_intermixed_args(arguments)


_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
