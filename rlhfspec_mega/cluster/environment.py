"""Environment variables of every worker, under any launcher."""

from __future__ import annotations

import os
import sys

LOOPBACK = "127.0.0.1"
HOST = "RLHFSPEC_MEGA_HOST"  # a worker's address for workers of other machines; unset: all are on one machine


def worker_environment(threads: int) -> dict[str, str]:
    """Variables that replace or extend those of the driver. `threads`: threads of a worker's computation."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # idle workers must not occupy a core by busy waiting
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of communication and computation relies on it
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # required by torch's deterministic algorithms
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
