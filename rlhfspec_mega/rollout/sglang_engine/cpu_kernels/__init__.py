"""Plain-torch stand-ins for SGLang's compiled CPU kernels: for checking, not for speed.

No package index has SGLang's kernels for a CPU. With these its scheduler, radix cache, EAGLE worker and weight updates
run unchanged where there is no GPU. `packages/` holds what SGLang imports by other names: its kernel package, and two
packages that exist for CUDA only. A package that is installed comes before its stand-in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import RunError

NOTICE = "SGLang runs with plain-torch stand-ins for its kernels: for checking, not for speed."
PACKAGES = Path(__file__).parent / "packages"
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"  # tells SGLang in every process that it runs on a CPU


def prepare(tensor_parallel: int = 1) -> bool:
    """Make SGLang importable and startable on a CPU, in this process and those that it starts.

    Returns whether stand-ins are used, which is not so if SGLang's own kernels are installed. Raises RunError if
    transformers was imported before.
    """
    os.environ[CPU_ENGINE] = "1"
    # A list of cores for each rank, which only SGLang's own kernels bind to; one of another length is refused.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * tensor_parallel)
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # its first use takes 20 seconds, more than it saves
    if str(PACKAGES) not in sys.path:
        if "transformers" in sys.modules and find_spec("torchvision") is None:
            raise RunError("transformers was imported before SGLang was prepared for a CPU, and has no torchvision.")
        sys.path.append(str(PACKAGES))  # processes that SGLang spawns get this path
    return in_use()


def device() -> str:
    """The device that SGLang uses in this process: cpu or cuda."""
    return "cpu" if os.environ.get(CPU_ENGINE) == "1" else "cuda"


def in_use() -> bool:
    """Return whether the kernels that this process would import are the stand-ins."""
    spec = find_spec("sgl_kernel")
    return spec is not None and spec.origin is not None and Path(spec.origin).is_relative_to(PACKAGES)


def allow_attention() -> None:
    """Make SGLang accept its CPU attention backend with these stand-ins when it resolves an engine's arguments.

    A hook would answer yes wherever SGLang asks for AMX instructions, but elsewhere the answer must be no.
    """
    from sglang.srt.arg_groups import overrides

    overrides.cpu_has_amx_support = lambda: True


def hooks() -> list[tuple[str, Callable[..., Any], str]]:
    """Return (target, hook, kind) for SGLang's registry of plug-in hooks; empty unless SGLang runs on a CPU.

    The hooks correct faults of SGLang itself, whichever kernels it uses.
    """
    if device() == "cuda":
        return []
    from rlhfspec_mega.rollout.sglang_engine import seams
    from rlhfspec_mega.rollout.sglang_engine.cpu_kernels import attention

    return [
        (seams.AMX_DECODE.target, attention.decode_prepared_lengths, "AROUND"),
        (seams.AMX_EXTEND.target, attention.extend_prepared_lengths, "AROUND"),
    ]
