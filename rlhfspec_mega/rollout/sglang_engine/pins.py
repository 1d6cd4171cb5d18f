"""The one version of SGLang that the hooks were written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

VERSION = "0.5.17"
INSTALL = f"pip install 'rlhfspec-mega[gpu]' (it brings sglang=={VERSION})"


def missing() -> str | None:
    """What keeps SGLang from being used with these hooks, as a clause; None if nothing does.

    Imports nothing of SGLang: that takes seconds, and fails where its kernels cannot be loaded.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return f"the package sglang is not installed: {INSTALL}"
    if found != VERSION:
        return f"sglang {found} is installed and the hooks are for {VERSION}: {INSTALL}"
    return None
