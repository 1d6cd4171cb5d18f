"""Environment variables that every worker gets, whatever starts it."""

from __future__ import annotations

import os
import sys

LOOPBACK = "127.0.0.1"
HOST = "RLHFSPEC_MEGA_HOST"  # a worker's address for workers of other machines; unset: all are on one machine


def worker_environment(threads: int) -> dict[str, str]:
    """Variables over those of the driver. `threads`: of a worker's computation."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # busy waits of idle workers would take the core from the others
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of communication and computation relies on it
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what torch's deterministic algorithms ask of cuBLAS
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
