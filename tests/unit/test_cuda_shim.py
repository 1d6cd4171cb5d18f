"""The shim: "cuda" means cpu inside it, and nothing is changed outside."""

from __future__ import annotations

import threading

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from rlhfspec_mega.megatron.cuda_shim import cuda_means_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where CUDA is available")


def test_device_spellings() -> None:
    with cuda_means_cpu():
        made = [
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0], device="cuda:0"),
            torch.empty(1, device=torch.device("cuda")),
            torch.zeros(2).to("cuda"),
            torch.zeros(2).to(device="cuda"),
            torch.zeros(2).cuda(),
            torch.zeros(2, device=torch.cuda.current_device()),
        ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_type_strings_are_cuda_spelled() -> None:
    with cuda_means_cpu():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.bfloat16).dtype is torch.bfloat16
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_everything_is_restored_also_after_an_error_and_when_nested() -> None:
    before = (torch.cuda.current_device, torch.cuda.synchronize, megatron_random._set_cuda_rng_state)
    with pytest.raises(ValueError, match="inside"), cuda_means_cpu(), cuda_means_cpu():
        torch.cuda.synchronize()
        raise ValueError("inside")
    assert before == (torch.cuda.current_device, torch.cuda.synchronize, megatron_random._set_cuda_rng_state)
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_a_function_mode_is_per_thread() -> None:
    """Why each method enters the shim itself: a thread started inside is outside."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError) as error:
            errors.append(error)

    with cuda_means_cpu():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert errors
