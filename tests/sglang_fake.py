"""A stand-in for the process boundary of SGLang's engine: its calls, its stream of outputs, its event loop.

tests/contract/test_sglang_seams.py holds the names that it has against those of the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import torch

STOP = 0


def token_at(seed: int, index: int) -> int:
    """The token at an index of a sequence: it depends on nothing else, as under shared noise with these weights."""
    return (seed * 31 + index * 17) % 23


class FakeManager:
    """SGLang's tokenizer manager."""

    def __init__(self) -> None:
        self.buckets: list[Any] = []
        self.running = 0
        self.refuses = self.busy = False

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        """Waits for the steps under way, as the real one does with a time."""
        assert timeout_s
        while self.running:
            await asyncio.sleep(0.001)
        return SimpleNamespace(success=not self.busy)

    async def update_weights_from_tensor(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        assert self.running == 0 and not obj.flush_cache, "the real one ends the scheduler"
        self.buckets.append(obj)
        return (False, "no memory") if self.refuses else (True, "")


class FakeEngine:
    """Requests that gain up to `pace` tokens per output."""

    def __init__(self, pace: int = 3) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = FakeManager()
        self.requests: list[dict[str, Any]] = []
        self.loses_logprobs = False
        self.reason: dict[str, Any] | None = None  # with which the next output ends
        self._pace = pace

    def __del__(self) -> None:
        self.loop.close()

    async def async_generate(self, **given: Any) -> AsyncIterator[dict[str, Any]]:
        assert given["stream"] and given["return_logprob"]
        self.requests.append(given)
        return self._outputs(given["input_ids"], given["sampling_params"], given["rid"])

    async def _outputs(self, prompt: list[int], params: dict[str, Any], rid: str) -> AsyncIterator[dict[str, Any]]:
        tokens: list[int] = []
        self.tokenizer_manager.running += 1
        try:
            while True:
                reason = None
                await asyncio.sleep(0.001)
                for _ in range(self._pace):
                    tokens.append(token_at(params["sampling_seed"], len(prompt) + len(tokens)))
                    if tokens[-1] in params["stop_token_ids"]:
                        reason = {"type": "stop", "matched": tokens[-1]}
                    elif len(tokens) == params["max_new_tokens"]:
                        reason = {"type": "length", "length": len(tokens)}
                    if reason:
                        break
                reason = self.reason or reason
                pairs = [(-0.01 * token, token, None) for token in tokens]
                meta = {"output_token_logprobs": pairs[self.loses_logprobs :], "finish_reason": reason}
                yield {"output_ids": list(tokens), "meta_info": meta}
                if reason:
                    return
        finally:
            self.loop.call_later(0.005, self._left)  # an aborted request runs a few more steps

    def _left(self) -> None:
        self.tokenizer_manager.running -= 1

    def _serialize_tensors_per_rank(self, tensors: list[tuple[str, torch.Tensor]], load_format: str | None) -> Any:
        return [{name: tensor.clone() for name, tensor in tensors}]
