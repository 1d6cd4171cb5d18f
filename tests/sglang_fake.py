"""A stand-in for the process boundary of SGLang's engine: its calls, its stream of outputs, its event loop.

tests/contract/test_sglang_seams.py holds the names that it has against those of the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import torch

from rlhfspec_mega.rollout.sglang_engine import control
from rlhfspec_mega.rollout.sglang_engine.steps import ProfiledSteps

STOP = 0


def token_at(seed: int, index: int) -> int:
    """The token at an index of a sequence: it depends on nothing else, as under shared noise with these weights."""
    return (seed * 31 + index * 17) % 23


class FakeManager:
    """SGLang's tokenizer manager."""

    def __init__(self) -> None:
        self.buckets: list[Any] = []
        self.running = 0
        self.asleep: set[str] = set()
        self.refuses = self.busy = False

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        """Waits for the steps under way, as the real one does with a time."""
        assert timeout_s
        while self.running:
            await asyncio.sleep(0.001)
        return SimpleNamespace(success=not self.busy)

    async def update_weights_from_tensor(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        assert self.running == 0 and not obj.flush_cache, "the real one ends the scheduler"
        assert "weights" not in self.asleep, "the real one writes to memory that it has given back"
        self.buckets.append(obj)
        return (False, "no memory") if self.refuses else (True, "")


class FakeEngine:
    """Requests that gain up to `pace` tokens per output; one that drafts gains what its number of draft tokens allows.

    Args:
        arguments: that the real one is started with.
    """

    def __init__(self, pace: int = 3, **arguments: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = FakeManager()
        self.requests: list[dict[str, Any]] = []
        self.loses_logprobs = False
        self.reason: dict[str, Any] | None = None  # with which the next output ends
        self.arguments = arguments
        self._pace = pace
        self._steps: ProfiledSteps | None = None
        if arguments.get("speculative_adaptive"):
            self._steps = ProfiledSteps(arguments["speculative_num_steps"], arguments["speculative_adaptive_config"])
        self._scheduler = SimpleNamespace(ps=SimpleNamespace(tp_rank=0))
        control.attach(self._scheduler)

    def __del__(self) -> None:
        self.loop.close()

    def collective_rpc(self, method: str, **parameters: Any) -> None:
        getattr(self._scheduler, method)(**parameters)

    def release_memory_occupation(self, tags: list[str]) -> None:
        assert self.tokenizer_manager.running == 0, "the real one ends the scheduler"
        self.tokenizer_manager.asleep |= set(tags)

    def resume_memory_occupation(self, tags: list[str]) -> None:
        for tag in tags:
            self.tokenizer_manager.asleep.remove(tag)

    async def async_generate(self, **given: Any) -> AsyncIterator[dict[str, Any]]:
        assert given["stream"] and not self.tokenizer_manager.asleep
        self.requests.append(given)
        return self._outputs(given["input_ids"], given["sampling_params"], given["rid"])

    async def _outputs(self, prompt: list[int], params: dict[str, Any], rid: str) -> AsyncIterator[dict[str, Any]]:
        tokens: list[int] = []
        self.tokenizer_manager.running += 1
        try:
            while True:
                reason = None
                await asyncio.sleep(0.001)
                for _ in range(self._gain()):
                    tokens.append(token_at(params["sampling_seed"], len(prompt) + len(tokens)))
                    if tokens[-1] in params.get("stop_token_ids", ()):
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

    def _gain(self) -> int:
        """Tokens of a step: as many draft tokens as it has are accepted, up to the pace."""
        if self._steps is None:
            return self._pace
        accepted = min(self._steps.get_steps_for_batch(1), self._pace - 1)
        self._steps.on_verify_complete([accepted], 1)
        return 1 + accepted

    def _left(self) -> None:
        self.tokenizer_manager.running -= 1

    def _serialize_tensors_per_rank(self, tensors: list[tuple[str, torch.Tensor]], load_format: str | None) -> Any:
        return [{name: tensor.clone() for name, tensor in tensors}]
