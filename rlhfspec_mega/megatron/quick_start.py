"""To be imported before Megatron-core: its import then takes little more than half the time on the CPU.

Megatron marks functions for torch.compile, which loads the compiler. They are its fused kernels, and models on the CPU
are built without these.
"""

from __future__ import annotations

from unittest import mock

import torch

if not torch.cuda.is_available():
    with mock.patch.object(torch, "compile", lambda function: function):
        import megatron.core  # noqa: F401
