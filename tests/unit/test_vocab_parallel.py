"""Vocabulary-parallel log-probs, entropy and their gradient on real gloo ranks, against float64 log_softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.megatron.vocab_parallel import vocab_parallel_logprobs
from tests.clusters import local_cluster

VOCABULARY, PADDED, TEMPERATURE = 21, 32, 0.7


class Rank:
    """One tensor-parallel rank."""

    def __init__(self, rank: int, world_size: int, meeting_point: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size)

    def compute(
        self, logits: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor, bonus: torch.Tensor | None, chunk: int
    ) -> Any:
        width = logits.shape[-1] // dist.get_world_size()
        mine = logits[..., dist.get_rank() * width :][..., :width].clone().requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            mine, targets, temperature=TEMPERATURE, vocab_size=VOCABULARY, chunk=chunk, group=dist.group.WORLD
        )
        loss = (logprobs * grad).sum()
        (loss if bonus is None else loss + (entropy * bonus).sum()).backward()
        return logprobs.detach(), entropy.detach(), mine.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_against_float64(world_size: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 7, PADDED, generator=generator)
    logits[..., VOCABULARY:] = 100.0  # padding columns must not count, however large
    targets = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    grad = torch.randn(3, 7, generator=generator)
    exact = logits.double().requires_grad_()
    log_softmax = (exact[..., :VOCABULARY] / TEMPERATURE).log_softmax(-1)
    want = log_softmax.gather(-1, targets[..., None])[..., 0]
    want_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    bonus = torch.randn(3, 7, generator=generator)
    (with_bonus,) = torch.autograd.grad((want * grad).sum() + (want_entropy * bonus).sum(), exact, retain_graph=True)
    want.backward(grad.double())

    cluster = local_cluster(tmp_path)
    try:
        arguments = {"world_size": world_size, "meeting_point": str(tmp_path / "meet")}
        path = "tests.unit.test_vocab_parallel.Rank"
        group = cluster.launch("rank", [WorkerSpec(path, {"rank": r, **arguments}) for r in range(world_size)])
        cluster.wait_started()
        for chunk in (1, 5, 1000):
            answers = group.call("compute", logits, targets, grad, None, chunk, phase="test")
            for logprobs, entropy, _ in answers:
                torch.testing.assert_close(logprobs.double(), want.detach(), atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(entropy.double(), want_entropy.detach(), atol=1e-5, rtol=1e-5)
            gradient = torch.cat([part for _, _, part in answers], dim=-1)
            torch.testing.assert_close(gradient.double(), exact.grad, atol=1e-5, rtol=1e-5)
            assert not gradient[..., VOCABULARY:].any()
            answers = group.call("compute", logits, targets, grad, bonus, chunk, phase="test")
            gradient = torch.cat([part for _, _, part in answers], dim=-1)
            torch.testing.assert_close(gradient.double(), with_bonus, atol=1e-5, rtol=1e-5)
    finally:
        cluster.close()
