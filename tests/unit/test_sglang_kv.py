"""KV of a request, read out of SGLang's pools wherever its scheduler has the request just then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec_mega.rollout.sglang_engine.kv import TARGET, gather

SLOTS, HEADS, SIZE = 16, 2, 3


@pytest.fixture
def request_() -> Any:
    """Five committed positions in the slots 3, 1, 4, 1 + 4, 9."""
    return SimpleNamespace(rid="s/1/", req_pool_idx=1, kv_committed_len=5, finished=lambda: False)


def scheduler(running: list[Any], last: list[Any] | None) -> Any:
    buffers = torch.arange(2.0 * SLOTS * HEADS * SIZE).view(2, SLOTS, HEADS, SIZE)
    pool = SimpleNamespace(k_buffer=[buffers[0]], v_buffer=[buffers[1]])
    rows = torch.zeros(2, 8, dtype=torch.int32)
    rows[1, :5] = torch.tensor([3, 1, 4, 5, 9])
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool)),
        draft_worker=None,
        running_batch=SimpleNamespace(reqs=running),
        last_batch=None if last is None else SimpleNamespace(reqs=last),
        req_to_token_pool=SimpleNamespace(req_to_token=rows),
    )


@pytest.mark.parametrize("where", ["decoding", "just prefilled", "both"])
def test_committed_positions_are_read(where: str, request_: Any) -> None:
    """A request whose prompt was just read has not joined those that decode."""
    running = [request_] if where != "just prefilled" else []
    found = scheduler(running, [request_] if where != "decoding" else None)
    kv = gather(found, TARGET, "s/1/", 1, 9)
    pool = found.tp_worker.model_runner.token_to_kv_pool
    wanted = torch.stack([buffer[0][torch.tensor([1, 4, 5, 9])] for buffer in (pool.k_buffer, pool.v_buffer)])
    assert torch.equal(kv, wanted.transpose(1, 2)[None])


def test_nothing_is_read_of_what_has_ended_or_is_not_there(request_: Any) -> None:
    assert gather(scheduler([request_], None), TARGET, "other/1/", 0, 5).shape == (1, 2, HEADS, 0, SIZE)
    request_.finished = lambda: True
    assert gather(scheduler([], [request_]), TARGET, "s/1/", 0, 5).shape == (1, 2, HEADS, 0, SIZE)
