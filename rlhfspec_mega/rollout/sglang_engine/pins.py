"""The one version of SGLang that the hooks were written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

VERSION = "0.5.17"
CUDA_KERNELS = "sglang-kernel"  # a distribution that has none for a CPU
INSTALL = {
    "cuda": f"pip install 'rlhfspec-mega[gpu]' (it brings sglang=={VERSION})",
    "cpu": "run make sglang-cpu, then .venv-sglang/bin/python train.py rollout=sglang",
}


def missing(device: str) -> str | None:
    """What keeps SGLang from being used with these hooks on a device (cuda or cpu), as a clause; None if nothing does.

    Imports nothing of SGLang: that takes seconds, and fails where its kernels cannot be loaded.
    """
    found = _installed("sglang")
    if found is None:
        return f"the package sglang is not installed: {INSTALL[device]}"
    if found != VERSION:
        return f"sglang {found} is installed and the hooks are for {VERSION}: {INSTALL[device]}"
    if device == "cpu" and _installed(CUDA_KERNELS) is not None:
        return f"the kernels of SGLang that are installed are for CUDA only: {INSTALL[device]}"
    return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
