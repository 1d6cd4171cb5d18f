"""To be imported before Megatron-core: a rank on the CPU then starts in two thirds of the time.

Megatron marks functions for torch.compile, which loads the compiler. They are its fused kernels, and models on the CPU
are built without these.
"""

from __future__ import annotations

from unittest import mock

import torch

if not torch.cuda.is_available():
    with mock.patch.object(torch, "compile", lambda function: function):
        import megatron.core  # noqa: F401
