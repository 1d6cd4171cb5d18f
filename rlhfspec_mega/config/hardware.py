"""What this machine has: GPUs, memory, fast bf16. Imports torch only if there is a GPU, so that refusals are quick."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import psutil

from rlhfspec_mega.config.schema.system import ClusterConfig


@cache
def gpu_memory() -> tuple[int, ...]:
    """Memory in bytes of every GPU that torch can use, in device order; empty without GPUs."""
    if not any(re.fullmatch(r"nvidia\d+", node.name) for node in Path("/dev").glob("nvidia*")):
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def host_memory() -> int:
    """Memory in bytes of this machine, or of this process's control group if that is less."""
    limits = [psutil.virtual_memory().total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(file).read_text().strip() if Path(file).is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def device_memory(cluster: ClusterConfig) -> int:
    """Memory in bytes of a GPU: of this machine's smallest, or by the cluster's data sheet if it has none.

    0 on a CPU.
    """
    if device_type(cluster) == "cpu":
        return 0
    return min(gpu_memory(), default=int(cluster.gpu.memory_gib * 2**30))


def device_type(cluster: ClusterConfig) -> str:
    """ "cuda" or "cpu": the given device, or what cluster.device=auto means on this machine."""
    if cluster.device == "auto":
        return "cuda" if gpu_memory() else "cpu"
    return cluster.device


def cpu_has_fast_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices in hardware (AVX512-BF16, AMX, or Arm's BF16)."""
    file = Path("/proc/cpuinfo")
    flags = set(file.read_text().split()) if file.is_file() else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
