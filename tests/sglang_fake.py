"""A stand-in for the process boundary of SGLang's engine: its calls, its stream of outputs, its event loop.

tests/contract/test_sglang_seams.py holds the names that it has against those of the real one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import make_dataclass
from enum import StrEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec_mega.rollout.sglang_engine import control, cpu_kernels, kv, pins
from rlhfspec_mega.rollout.sglang_engine.seams import OPTIONS
from rlhfspec_mega.rollout.sglang_engine.states import StateSwitch, start_with_most

STOP = 0
SLOTS, REQUESTS, POSITIONS, LAYERS, SIZE = 1 << 15, 200, 1024, 2, 4
KNOWN = (  # further arguments that the real one takes
    *("attention_backend", "grammar_backend", "max_total_tokens"),
    *("device", "disable_cuda_graph", "cuda_graph_bs_decode", "disable_prefill_cuda_graph"),
)


def token_at(seed: int, index: int) -> int:
    """The token at an index of a sequence: it depends on nothing else, as under shared noise with these weights."""
    return (seed * 31 + index * 17) % 23


class FakeManager:
    """SGLang's tokenizer manager."""

    def __init__(self) -> None:
        self.buckets: list[Any] = []
        self.running = 0
        self.asleep: set[str] = set()
        self.load: dict[str, int] = {}  # none before the first step
        self.refuses = self.busy = False
        self.aborted: set[str] = set()
        self._subprocess_watchdog = SimpleNamespace(stop=lambda: None)

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        """Waits for the steps under way, as the real one does with a time."""
        assert timeout_s
        while self.running:
            await asyncio.sleep(0.001)
        return SimpleNamespace(success=not self.busy)

    def abort_request(self, rid: str) -> None:
        """The request ends with its next output."""
        self.aborted.add(rid)

    async def get_loads(self) -> list[Any]:
        return [SimpleNamespace(**self.load)] if self.load else []

    async def update_weights_from_tensor(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        assert self.running == 0 and not obj.flush_cache, "the real one ends the scheduler"
        assert "weights" not in self.asleep, "the real one writes to memory that it has given back"
        self.buckets.append(obj)
        return (False, "no memory") if self.refuses else (True, "")


class FakePool:
    """KV by slot: k and v of every layer, [slots, heads, size]."""

    def __init__(self, layers: int, heads: int, size: int) -> None:
        self.k_buffer = [torch.zeros(SLOTS, heads, size) for _ in range(layers)]
        self.v_buffer = [torch.zeros(SLOTS, heads, size) for _ in range(layers)]

    def fill(self, slots: torch.Tensor, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """What a pass over these tokens would write."""
        for layer, buffers in enumerate(zip(self.k_buffer, self.v_buffer, strict=True)):
            for kind, buffer in enumerate(buffers):
                buffer[slots] = self._values(tokens, positions, layer, kind)

    def holds(self, slots: torch.Tensor, tokens: Sequence[int]) -> bool:
        """Whether that is what is there, for tokens from the first on."""
        return all(
            torch.equal(buffer[slots], self._values(tokens, range(len(tokens)), layer, kind))
            for layer, buffers in enumerate(zip(self.k_buffer, self.v_buffer, strict=True))
            for kind, buffer in enumerate(buffers)
        )

    def _values(self, tokens: Sequence[int], positions: Sequence[int], layer: int, kind: int) -> torch.Tensor:
        heads, size = self.k_buffer[0].shape[1:]
        own = torch.arange(heads * size).view(heads, size) + 1000.0 * (2 * layer + kind)
        return own + 0.001 * (torch.tensor(tokens) + 100.0 * torch.tensor(positions))[:, None, None]


class FakeTree:
    """SGLang's radix cache, with pages of one token; keys are tokens, or pairs of neighbours beside a draft."""

    def __init__(self, is_eagle: bool, allocator: FakeAllocator) -> None:
        self.is_eagle, self.allocator, self.known = is_eagle, allocator, dict[tuple[int, ...], int]()

    def insert(self, params: Any) -> Any:
        tokens, bigram = list(params.key.token_ids), params.key.is_bigram
        assert bigram == self.is_eagle and len(tokens) - bigram == len(params.value)
        ends = range(1 + bigram, len(tokens) + 1)
        known = sum(tuple(tokens[:end]) in self.known for end in ends)
        for end, slot in zip(ends, params.value.tolist(), strict=True):
            self.known.setdefault(tuple(tokens[:end]), slot)
        return SimpleNamespace(prefix_len=known)

    def evict(self, params: Any) -> None:
        """All that is known, to keep it short."""
        assert params.num_tokens > 0
        self.allocator.free(torch.tensor(list(self.known.values())))
        self.known.clear()

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Slots of the longest known prefix."""
        found: list[int] = []
        while (slot := self.known.get(tuple(tokens[: len(found) + 1 + self.is_eagle]))) is not None:
            found.append(slot)
            if len(found) + self.is_eagle == len(tokens):
                break
        return found


class FakeAllocator:
    """SGLang's allocator of slots."""

    def __init__(self) -> None:
        self._free, self._taken = list(range(SLOTS)), set[int]()

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(need_size)]
        self._taken |= set(taken)
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, free_index: torch.Tensor) -> None:
        for slot in free_index.tolist():
            self._taken.remove(slot)  # KeyError: freed twice
            self._free.append(slot)


class FakeScheduler:
    """One rank's scheduler, as far as the plug-in's methods look into it."""

    def __init__(self, rank: int = 0, drafts: bool = False, heads: int = 1) -> None:
        self.ps = SimpleNamespace(tp_rank=rank)
        pool = SimpleNamespace(token_to_kv_pool=FakePool(LAYERS, heads, SIZE))
        self.tp_worker = SimpleNamespace(model_runner=pool)
        self.draft_worker = None
        if drafts:
            runner = SimpleNamespace(token_to_kv_pool=FakePool(1, heads, SIZE))
            self.draft_worker = SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=runner))
        self.running_batch, self.last_batch = SimpleNamespace(reqs=list[Any]()), None
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(REQUESTS, POSITIONS, dtype=torch.int32))
        self.token_to_kv_pool_allocator = FakeAllocator()
        self.tree_cache = FakeTree(drafts, self.token_to_kv_pool_allocator)
        self.prefilled, self.loads = 0, dict[str, int]()
        control.attach(self)
        kv.attach(self)

    def begin(self, rid: str, tokens: Sequence[int]) -> Any:
        """A request is prefilled but for what is known; that must be what a pass would have written."""
        known = self.tree_cache.match(tokens)[: len(tokens) - 1]
        for pool in kv.pools(self).values():
            assert pool.holds(torch.tensor(known, dtype=torch.int64), tokens[: len(known)])
        self.prefilled += len(tokens) - len(known)
        self.loads |= {
            "num_used_tokens": SLOTS - self.token_to_kv_pool_allocator.available_size(),
            "max_total_num_tokens": SLOTS,
            "total_prefill_uncached_tokens": self.prefilled,
            "total_prefill_busy_us": 10 * self.prefilled,
        }
        taken = {request.req_pool_idx for request in self.running_batch.reqs}
        place = next(place for place in range(REQUESTS) if place not in taken)
        self.req_to_token_pool.req_to_token[place, : len(known)] = torch.tensor(known)
        request = SimpleNamespace(
            rid=rid, req_pool_idx=place, kv_committed_len=len(known), known=len(known), ended=False
        )
        request.finished = lambda: request.ended
        self.running_batch.reqs.append(request)
        self.commit(request, tokens)
        return request

    def commit(self, request: Any, tokens: Sequence[int]) -> None:
        """The KV of these tokens, all that the request has, is there."""
        first, last = request.kv_committed_len, len(tokens)
        slots = self.token_to_kv_pool_allocator.alloc(last - first)
        assert slots is not None
        self.req_to_token_pool.req_to_token[request.req_pool_idx, first:last] = slots
        for pool in kv.pools(self).values():
            pool.fill(slots, tokens[first:last], range(first, last))
        request.kv_committed_len = last

    def end(self, request: Any) -> None:
        request.ended = True
        self.running_batch.reqs.remove(request)
        row = self.req_to_token_pool.req_to_token[request.req_pool_idx]
        self.token_to_kv_pool_allocator.free(row[request.known : request.kv_committed_len].long())


class FakeEagleWorker:
    """SGLang's worker of EAGLE, as far as its controller of adaptive speculation knows it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        config = json.loads(Path(arguments["speculative_adaptive_config"]).read_text())
        self.candidates = config["1"]["candidate_steps"]
        self.speculative_num_steps = arguments["speculative_num_steps"]
        assert self.speculative_num_steps in self.candidates, "the real one does not start"
        given = SimpleNamespace(**arguments)
        start_with_most(_first_state, given)
        self.tokens = given.speculative_num_draft_tokens
        self.most = max(self.candidates) + 1
        assert self.tokens == self.most
        self.reserved = max(arguments["speculative_eagle_topk"] * self.speculative_num_steps, self.most)
        self.controller = StateSwitch(self, arguments["speculative_adaptive_config"])
        self.controller.register(self._state(self.speculative_num_steps, self.tokens))
        self.controller.init_states(None)

    def _state(self, steps: int, tokens: int) -> SimpleNamespace:
        return SimpleNamespace(speculative_num_steps=steps, speculative_num_draft_tokens=tokens)

    def build_adaptive_runtime_state(
        self, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: list[int] | None
    ) -> SimpleNamespace:
        assert (speculative_num_steps == 0) == (speculative_num_draft_tokens == 1)
        assert speculative_num_draft_tokens <= self.most, "the real one's buffers are those of the first state"
        return self._state(speculative_num_steps, speculative_num_draft_tokens)

    def apply_runtime_state(self, state: SimpleNamespace) -> None:
        if state.speculative_num_steps != self.speculative_num_steps:
            self.speculative_num_steps, self.tokens = state.speculative_num_steps, state.speculative_num_draft_tokens

    def begin(self, batch: int) -> int:
        """Draft tokens of the step that begins."""
        self.controller.activate_step_by_batch(batch)
        return self.tokens - 1


def _first_state(server_args: Any) -> None:
    """What SGLang makes of the number of draft tokens that it is started with."""
    server_args.speculative_num_draft_tokens = server_args.speculative_num_steps + 1


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
        if "model_path" in arguments:
            config = json.loads((Path(arguments["model_path"]) / "config.json").read_text())
            assert arguments["context_length"] <= config["max_position_embeddings"], "the real one does not start"
        self._pace = pace
        self._worker = FakeEagleWorker(arguments) if "speculative_adaptive_config" in arguments else None
        self.scheduler = FakeScheduler(drafts="speculative_algorithm" in arguments)
        self.tokenizer_manager.load = self.scheduler.loads

    def __del__(self) -> None:
        self.loop.close()

    def collective_rpc(self, method: str, **parameters: Any) -> None:
        assert method != kv.METHOD or not self.tokenizer_manager.asleep, "the real one writes to memory given back"
        getattr(self.scheduler, method)(**parameters)

    def release_memory_occupation(self, tags: list[str]) -> None:
        assert self.tokenizer_manager.running == 0, "the real one ends the scheduler"
        self.tokenizer_manager.asleep |= set(tags)

    def resume_memory_occupation(self, tags: list[str]) -> None:
        for tag in tags:
            self.tokenizer_manager.asleep.remove(tag)

    def shutdown(self) -> None: ...

    async def async_generate(self, **given: Any) -> Any:
        """An iterator of outputs, or without `stream` the last one."""
        assert not self.tokenizer_manager.asleep
        self.requests.append(given)
        needed = len(given["input_ids"]) + given["sampling_params"]["max_new_tokens"]
        needed += self._worker.reserved if self._worker else 0
        assert needed <= self.arguments.get("context_length", needed), "the real one refuses it"
        outputs = self._outputs(given["input_ids"], given["sampling_params"], given["rid"])
        return outputs if given.get("stream") else [output async for output in outputs][-1]

    async def _outputs(self, prompt: list[int], params: dict[str, Any], rid: str) -> AsyncIterator[dict[str, Any]]:
        tokens: list[int] = []
        self.tokenizer_manager.running += 1
        request = self.scheduler.begin(rid, prompt)
        try:
            while True:
                reason = None
                await asyncio.sleep(0.001)
                for _ in range(self._gain()):
                    tokens.append(token_at(params.get("sampling_seed", 0), len(prompt) + len(tokens)))
                    if tokens[-1] in params.get("stop_token_ids", ()):
                        reason = {"type": "stop", "matched": tokens[-1]}
                    elif len(tokens) == params["max_new_tokens"]:
                        reason = {"type": "length", "length": len(tokens)}
                    if reason:
                        break
                self.scheduler.commit(request, [*prompt, *tokens][:-1])
                reason = self.reason or reason
                if rid in self.tokenizer_manager.aborted:
                    reason = {"type": "abort", "message": "Abort in waiting queue"}
                pairs = [(-0.01 * token, token, None) for token in tokens]
                meta = {"output_token_logprobs": pairs[self.loses_logprobs :], "finish_reason": reason}
                meta["cached_tokens"] = request.known
                yield {"output_ids": list(tokens), "meta_info": meta}
                if reason:
                    return
        finally:
            self.scheduler.end(request)
            self.loop.call_later(0.005, self._left)  # an aborted request runs a few more steps

    def _gain(self) -> int:
        """Tokens of a step: as many draft tokens as it has are accepted, up to the pace."""
        if self._worker is None:
            return self._pace
        accepted = min(self._worker.begin(1), self._pace - 1)
        self._worker.controller.on_verify_complete([accepted], 1)
        return 1 + accepted

    def _left(self) -> None:
        self.tokenizer_manager.running -= 1

    def _serialize_tensors_per_rank(self, tensors: list[tuple[str, torch.Tensor]], load_format: str | None) -> Any:
        return [{name: tensor.clone() for name, tensor in tensors}]


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
    """SGLang's modules as far as this package imports them, with the stand-in for its engine."""
    monkeypatch.setattr(pins, "missing", lambda device: None)
    monkeypatch.setattr(cpu_kernels, "prepare", lambda ranks=1: False)
    for name in ("SGLANG_PLUGINS", "SGLANG_DISABLED_MODEL_ARCHS"):  # so that what is set meanwhile is undone
        monkeypatch.setenv(name, "")
    modules: dict[str, dict[str, Any]] = {
        "sglang": {"Engine": FakeEngine},
        "sglang.srt": {},
        "sglang.srt.plugins": {"load_plugins": lambda: None},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": FakeRegistry(), "HookType": FakeKind},
        "sglang.srt.runtime_context": {"get_context": lambda: SimpleNamespace(_overrides_log=[])},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": SimpleNamespace},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.base_prefix_cache": {"InsertParams": SimpleNamespace, "EvictParams": SimpleNamespace},
        "sglang.srt.mem_cache.radix_cache": {"RadixKey": _key},
        "sglang.srt.server_args": {"ServerArgs": make_dataclass("ServerArgs", [*OPTIONS.attributes, *KNOWN])},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__spec__.submodule_search_locations = [str(Path(__file__).parent)]
        monkeypatch.setitem(sys.modules, name, module)


def _key(token_ids: Any, extra_key: str | None = None, is_bigram: bool = False) -> Any:
    assert extra_key is None
    return SimpleNamespace(token_ids=token_ids, is_bigram=is_bigram)
