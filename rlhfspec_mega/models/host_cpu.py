"""What a CPU computes with, as far as the quicker of two ways depends on it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch


@cache
def has_avx512() -> bool:
    """Whether torch uses AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def has_amx() -> bool:
    """Whether bfloat16 matrices are multiplied tile by tile."""
    return bool(torch.cpu._is_amx_tile_supported())


@cache
def mkl_has_avx512() -> bool:
    """Whether MKL uses AVX-512, too, which it does on Intel's CPUs only."""
    described = Path("/proc/cpuinfo")
    return has_avx512() and described.is_file() and "GenuineIntel" in described.read_text()
