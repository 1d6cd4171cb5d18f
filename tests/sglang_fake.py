"""A stand-in for what real SGLang does not show on a CPU: late results, faults, states with graphs, lost hooks.

tests/contract/test_sglang_seams.py holds the names that it has against those of the real one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec_mega.rollout.sglang_engine.states import StateSwitch, start_with_largest

STOP, VOCABULARY = 0, 23


def token_at(seed: int, index: int) -> int:
    """The token at an index of a sequence: it depends on nothing else."""
    return (seed * 31 + index * 17) % VOCABULARY


class FakeManager:
    """SGLang's tokenizer manager.

    Attributes:
        refuses: loads no weights.
        busy: does not become idle.
        deaf: hears no stop.
    """

    def __init__(self) -> None:
        self.refuses = self.busy = self.deaf = False
        self.aborted: set[str] = set()
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY)

    def abort_request(self, rid: str) -> None:
        """The request ends with an output to come."""
        if not self.deaf:
            self.aborted.add(rid)

    async def flush_cache(self, timeout_s: float) -> Any:
        return SimpleNamespace(success=not self.busy)

    async def get_loads(self) -> list[Any]:
        """None: it has written none yet."""
        return []

    async def update_weights_from_tensor(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        return (False, "no memory") if self.refuses else (True, "")


class FakeEngine:
    """Requests that gain a token per output.

    Attributes:
        requests: that it was given, by what they were given with.
        reason: with which the next output ends.
        loses_logprobs: the first one of every output.
        late: outputs of a request that still come after it was stopped, as results do that are on their way.
        seconds: that an output takes.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = FakeManager()
        self.requests: list[dict[str, Any]] = []
        self.reason: dict[str, Any] | None = None
        self.loses_logprobs, self.late, self.seconds = False, 0, 0.001

    def __del__(self) -> None:
        self.loop.close()

    async def async_generate(self, **given: Any) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(given)
        return self._outputs(given["input_ids"], given["sampling_params"], given["rid"])

    async def _outputs(self, prompt: list[int], params: dict[str, Any], rid: str) -> AsyncIterator[dict[str, Any]]:
        tokens, reason, late = list[int](), None, self.late
        while reason is None:
            await asyncio.sleep(self.seconds)
            if rid in self.tokenizer_manager.aborted:
                late -= 1
            if late >= 0:
                tokens.append(token_at(params["sampling_seed"], len(prompt) + len(tokens)))
                reason = self.reason or _end(tokens, params)
            else:
                reason = {"type": "abort", "message": "Abort"}
            pairs = [(-0.01 * token, token, None) for token in tokens][self.loses_logprobs :]
            yield {"output_ids": list(tokens), "meta_info": {"output_token_logprobs": pairs, "finish_reason": reason}}

    def _serialize_tensors_per_rank(self, tensors: list[tuple[str, torch.Tensor]], load_format: str | None) -> Any:
        return [dict(tensors)]


def _end(tokens: list[int], params: dict[str, Any]) -> dict[str, Any] | None:
    if tokens[-1] in params.get("stop_token_ids", ()):
        return {"type": "stop", "matched": tokens[-1]}
    return {"type": "length", "length": len(tokens)} if len(tokens) == params["max_new_tokens"] else None


class FakeEagleWorker:
    """SGLang's worker of EAGLE, as far as its controller of adaptive speculation knows it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        config = json.loads(Path(arguments["speculative_adaptive_config"]).read_text())
        self.candidates = config["1"]["candidate_steps"]
        self.speculative_num_steps = arguments["speculative_num_steps"]
        assert self.speculative_num_steps in self.candidates, "the real one does not start"
        given = SimpleNamespace(**arguments)
        start_with_largest(_first_state, given)
        self.tokens = given.speculative_num_draft_tokens
        self.most = max(self.candidates) + 1
        assert self.tokens == self.most
        self.controller = StateSwitch(self, arguments["speculative_adaptive_config"])
        self.controller.register(_state(self.speculative_num_steps, self.tokens))
        self.controller.init_states(None)

    def build_adaptive_runtime_state(
        self, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: list[int] | None
    ) -> SimpleNamespace:
        assert (speculative_num_steps == 0) == (speculative_num_draft_tokens == 1)
        assert speculative_num_draft_tokens <= self.most, "the real one's buffers are those of the first state"
        return _state(speculative_num_steps, speculative_num_draft_tokens)

    def apply_runtime_state(self, state: SimpleNamespace) -> None:
        if state.speculative_num_steps != self.speculative_num_steps:
            self.speculative_num_steps, self.tokens = state.speculative_num_steps, state.speculative_num_draft_tokens

    def begin(self, batch: int) -> int:
        """Draft tokens of the step that begins."""
        self.controller.activate_step_by_batch(batch)
        return self.tokens - 1


def _state(steps: int, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(speculative_num_steps=steps, speculative_num_draft_tokens=tokens)


def _first_state(server_args: Any) -> None:
    """What SGLang makes of the number of draft tokens that it is started with."""
    server_args.speculative_num_draft_tokens = server_args.speculative_num_steps + 1


class FakeKind(StrEnum):
    """SGLang's HookType."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class FakeRegistry:
    """SGLang's hook registry, which applies what it can and logs the rest."""

    def __init__(self, unknown: str = "") -> None:
        self.hooks: dict[str, Any] = {}
        self._patched: set[str] = set()
        self.unknown = unknown

    def apply_hooks(self) -> None: ...

    def register(self, target: str, hook: Any, kind: str) -> None:
        self.hooks[target] = hook
        if target != self.unknown:
            self._patched.add(target)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's modules as far as an engine that was started, and the switch of states, import them."""
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.runtime_context": {"get_context": lambda: SimpleNamespace(_overrides_log=[])},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": SimpleNamespace},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
