"""SGLang behind the `RolloutEngine` protocol.

SGLang decodes in processes of its own, also between two polls. To migrate a sample, its request is aborted here and a
new one is sent to the destination's SGLang with all tokens so far as prompt. The sample's KV was copied into the radix
cache there, so that only the end of this prompt is prefilled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from functools import cached_property
from typing import Any, NoReturn

import torch

from rlhfspec_mega.errors import RunError, SilentEngineError
from rlhfspec_mega.observe.spans import SpanRecorder
from rlhfspec_mega.rollout.checks import check_request
from rlhfspec_mega.rollout.migration.staging import Layout
from rlhfspec_mega.rollout.protocol import DraftPast, SampleSnapshot
from rlhfspec_mega.rollout.sglang_engine.kv import DRAFT, METHOD, TARGET, WOKEN, KvAccess
from rlhfspec_mega.rollout.sglang_engine.samples import SGLangSample, aborted, sampling_params
from rlhfspec_mega.rollout.sglang_engine.weights import BucketedUpdate, sender
from rlhfspec_mega.rollout.update import UpdatedEngine
from rlhfspec_mega.types import (
    EngineLoad,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SampleProgress,
    TensorInfo,
    WeightTarget,
)

WEIGHTS = ("weights",)
ALL_MEMORY = ("kv_cache", "cuda_graph", *WEIGHTS)  # as SGLang names its parts
IDLE_SECONDS = 60.0  # longest time in which SGLang ends aborted requests and becomes idle
ASK_SECONDS = 1.0  # time between two abort messages for the same request
SILENCE_SECONDS = 300.0  # longest polling without output; longer than a prefill, equal to SGLang's watchdog timeout


def _raise(sentence: str) -> NoReturn:
    raise SilentEngineError(sentence)


class SGLangEngine(UpdatedEngine):
    """Implements `RolloutEngine`.

    Args:
        engine: a started `sglang.Engine`, see `launch`.
        slots: requests decoded at once (max_running_requests).
        max_positions: longest prompt + response, in tokens.
        kv: access to the KV of samples; None: migrated samples are prefilled again.
        on_silence: called with an error message, in any method, when SGLang no longer responds; must not return. By
            default it raises SilentEngineError.

    Attributes:
        last_decode: start of the last poll, in seconds since the epoch, and the duration of a decode step in it.
        spans: records what the engine spends its time on; one span per poll.
    """

    min_copy_bytes, poll_interval = 2 << 20, 0.01

    def __init__(
        self,
        engine: Any,
        slots: int,
        max_positions: int,
        kv: KvAccess | None = None,
        on_silence: Callable[[str], NoReturn] = _raise,
    ) -> None:
        self._engine, self._slots, self.max_positions, self._kv = engine, slots, max_positions, kv
        self._on_silence = on_silence
        self._held: dict[str, SGLangSample] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attempts = 0
        self._finished: list[GenerationResult] = []
        self._steps = self._generated = self._resumed = self._cached = 0
        self._asleep: list[str] = []
        self._silent = 0.0  # seconds of polling since the last output
        self.last_decode = 0.0, 0.0
        self.spans = SpanRecorder()

    @property
    def idle(self) -> bool:  # and none has ended since the last poll
        return not self._held and not self._finished

    # Samples

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See RolloutEngine. Raises UserError for a sample with a forced length, too."""
        taken = set(self._held)
        for request in requests:
            self._check(request, taken)
            taken.add(request.sample_id)
        for request in requests:
            self.import_sample(SampleSnapshot(request, [], [], []))

    def import_sample(self, snapshot: SampleSnapshot) -> None:
        """Continue a sample from its tokens. Raises UserError as `submit` does."""
        self._check(snapshot.request, self._held.keys())
        self._take_kv(snapshot)
        held = self._held[snapshot.request.sample_id] = SGLangSample.of(snapshot)
        if self._update is None and self._version >= 0:
            self._start(held)

    def _check(self, request: GenerationRequest, taken: Set[str]) -> None:
        """Raises UserError for what SGLang would refuse only later, or not at all."""
        check_request(request, self._engine.tokenizer_manager.model_config.vocab_size, self.max_positions, taken)
        sampling_params(request, 0)

    def poll(self, seconds: float) -> list[GenerationResult]:
        """Wait about `seconds` or until all samples have ended; returns the samples finished since the last poll.

        Calls `on_silence` after SILENCE_SECONDS of polling without any output.
        """
        if self._held and self._may_decode():
            self._resubmit()
            self._run(seconds)
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def _run(self, seconds: float) -> None:
        """Wait for SGLang's outputs and count its decode steps, each of which gives one output per sample."""
        held, generated, started = list(self._held.values()), self._generated, time.time()
        for one in held:
            one.outputs = 0
        self._engine.loop.run_until_complete(asyncio.wait(self._tasks.values(), timeout=seconds))
        ended = time.time()
        running = [one for one in held if one.outputs]
        steps = max((one.outputs for one in running), default=0)
        self._silent = 0.0 if steps else self._silent + ended - started
        if self._silent > SILENCE_SECONDS:
            self._on_silence(f"SGLang has put out nothing for {SILENCE_SECONDS:g} s, of {len(held)} samples.")
        self._steps += steps
        self.last_decode = started, (ended - started) / steps if steps else self.last_decode[1]
        if steps:
            tokens, kv = self._generated - generated, sum(one.outputs * one.length for one in running)
            self.spans.add(
                "decode", started, ended, batch=len(running), steps=steps, tokens=tokens, draft_tokens=0, kv_tokens=kv
            )

    def _collect(self) -> None:
        """Move samples that have ended to the finished ones. Raises any error of reading their outputs."""
        for name, task in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[name]
            if not task.cancelled():
                task.result()
            if (reason := self._held[name].reason) is not None:
                self._finished.append(self._held.pop(name).result(reason))

    def progress(self) -> list[SampleProgress]:
        """Tokens of unfinished samples since the last call, without those of samples that have just ended.

        If the driver knew a sample's last token but not its end, and the engine died, another engine would decode the
        sample beyond its end.
        """
        going_on = (held for held in self._held.values() if held.reason is None)
        return [held.progress() for held in going_on if len(held.tokens) > held.reported]

    def abort(self, sample_ids: Sequence[str]) -> list[GenerationResult]:
        """See RolloutEngine; samples that end during the call are skipped, too."""
        self._stop(sample_ids)
        withdrawn = [self._held.pop(name, None) for name in sample_ids]
        return [held.result(FinishReason.ABORTED) for held in withdrawn if held is not None]

    def clear(self) -> None:
        self.abort(list(self._held))
        self._finished.clear()

    def has_sample(self, sample_id: str) -> bool:
        return sample_id in self._held

    def is_waiting(self, sample_id: str) -> bool:
        """Whether this engine has the sample and SGLang has not returned a token of it yet."""
        return sample_id in self._held and not self._held[sample_id].started

    def request(self, sample_id: str) -> GenerationRequest:
        return self._held[sample_id].request

    def export_sample(self, sample_id: str, with_kv: bool = True) -> SampleSnapshot:
        """See RolloutEngine; never includes KV. Raises RunError for a sample that ends during the call, too."""
        self._stop([sample_id])
        held = self._held.pop(sample_id, None)
        if held is None:
            raise RunError(f"Sample {sample_id} is not on this engine any more and cannot leave it.")
        draft = None
        if self._kv and DRAFT in self._kv.parts:  # its KV may have been copied; the rest of its past is prefilled
            draft = DraftPast(torch.empty(self._kv.layout(0).parts[DRAFT]), torch.empty(0, 0))
        return held.snapshot(draft=draft)

    # KV

    def committed_positions(self, sample_id: str) -> dict[str, int] | None:
        """Positions whose KV is committed, in each part; None for a sample without a token, or without access to KV."""
        held = self._held.get(sample_id)
        if self._kv is None or held is None or not held.started:
            return None
        return dict.fromkeys(self._kv.parts, held.length - 1)

    def catch_up_draft(self, sample_ids: Sequence[str]) -> None:
        """Does nothing: SGLang's draft processes all tokens in every step."""

    def kv_layout(self, positions: int) -> Layout:
        """Without parts where there is no access to KV."""
        return self._kv.layout(positions) if self._kv else Layout("float32", {})

    def committed_kv(self, sample_id: str, part: str, first: int, last: int) -> torch.Tensor:
        """[layers, 2, kv_heads, rows, head_dim] on the host; fewer rows of a sample that has just ended."""
        assert self._kv is not None, "committed_kv needs access to SGLang's KV"
        return self._kv.read(self._held[sample_id].rid, part, first, last)

    def _take_kv(self, snapshot: SampleSnapshot) -> None:
        """Put the KV of an imported sample into SGLang's cache, if the snapshot has it for the target and any draft.

        Does nothing during a weight update, which would make the KV invalid, or before the first weights.
        """
        if self._update is not None or self._version < 0:
            return
        kv = {TARGET: snapshot.kv, DRAFT: snapshot.draft.kv if snapshot.draft else None}
        own = {part: kv[part] for part in self._kv.parts} if self._kv else {}
        whole = {part: tensor for part, tensor in own.items() if tensor is not None and tensor.shape[3]}
        if self._kv and len(whole) == len(own):
            self._wake(ALL_MEMORY)
            self._kv.write([*snapshot.request.prompt_tokens, *snapshot.tokens], whole)

    # Weights

    def _begin(self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget) -> BucketedUpdate:
        """Abort the requests of unfinished samples; the first poll after the update sends them again.

        Returns when SGLang is idle, because forward passes in progress still use the old weights.
        """
        self._stop(list(self._tasks))
        self._wake(WEIGHTS)
        self._flush_cache()
        return BucketedUpdate(version, tensors, sender(self._engine, target))

    def _make_live(self, target: WeightTarget) -> None:
        self._flush_cache()

    def _lose_draft(self) -> None:
        """Does nothing: SGLang continues to draft with mixed weights, which do not change the tokens it generates."""

    # Memory

    def sleep(self) -> None:
        """Release GPU memory until samples or weights arrive. Weights are lost, except those of the draft.

        Raises RunError if there are unfinished samples.
        """
        if self._held:
            raise RunError(f"The engine was to sleep with {len(self._held)} unfinished samples.")
        if not self._asleep:
            self._flush_cache()
            self._engine.release_memory_occupation(list(ALL_MEMORY))
            self._asleep, self._version = list(ALL_MEMORY), -1

    def _wake(self, parts: Sequence[str]) -> None:
        """Reclaim these parts of the released memory."""
        if wanted := [part for part in self._asleep if part in parts]:
            self._engine.resume_memory_occupation(wanted)
            self._asleep = [part for part in self._asleep if part not in parts]
            if not self._asleep:
                self._engine.collective_rpc(METHOD, action=WOKEN)

    # Figures

    def load(self) -> EngineLoad:
        """Load figures: of samples as they are known here (one runs from its first token on), of KV SGLang's own."""
        running = sum(held.started for held in self._held.values())
        metrics = self._metrics()
        return EngineLoad(
            running=running,
            waiting=len(self._held) - running,
            kv_tokens=metrics.num_used_tokens if metrics else 0,
            slots=self._slots,
            decode_steps=self._steps,
            generated_tokens=self._generated,
            policy_version=self._version,
        )

    def stats(self) -> dict[str, Any]:
        """Counters since start; SGLang's own of prefilling, 0 before it has written them."""
        metrics = self._metrics()
        return {
            "generated_tokens": self._generated,
            "decode_steps": self._steps,
            "resumed_tokens": self._resumed,  # of samples that came from elsewhere
            "spared_tokens": self._cached,  # those that did not have to be prefilled
            "prefill_tokens": metrics.total_prefill_uncached_tokens if metrics else 0,
            "prefill_seconds": metrics.total_prefill_busy_us / 1e6 if metrics else 0.0,
        }

    @cached_property
    def kv_room(self) -> int:
        """Tokens of KV that SGLang has room for.

        The record of its load will not do: it holds zeros until the scheduler first writes it.
        """
        return int(self._engine.get_server_info()["max_total_num_tokens"])

    def _metrics(self) -> Any:
        """SGLang's latest record of its load, which lies in memory shared with it; None before the first."""
        found = self._engine.loop.run_until_complete(self._engine.tokenizer_manager.get_loads())
        return found[0] if found else None

    def _resubmit(self) -> None:
        """Send new requests for samples whose request was aborted and that are still here, e.g. after an update."""
        for name, held in self._held.items():
            if name not in self._tasks:
                self._start(held)

    def _start(self, held: SGLangSample) -> None:
        self._wake(ALL_MEMORY)
        self._attempts += 1
        held.new_request(self._attempts)
        self._tasks[held.request.sample_id] = self._engine.loop.create_task(self._follow(held))

    async def _follow(self, held: SGLangSample) -> None:
        """Send a sample's request and read its outputs until it ends or is aborted."""
        held.submitted = True
        outputs = await self._engine.async_generate(
            input_ids=list(held.sequence),
            sampling_params=sampling_params(held.request, held.given),
            return_logprob=True,
            stream=True,
            rid=held.rid,
        )
        resumed = bool(held.tokens)
        async for output in outputs:
            if held.abort_requested and aborted(output):  # its last tokens may go beyond its end
                continue
            before = len(held.tokens)
            held.take(output, self._version)
            self._generated += len(held.tokens) - before
            if resumed:
                self._resumed += len(held.request.prompt_tokens) + before
                self._cached += output["meta_info"].get("cached_tokens", 0)
                resumed = False

    def _stop(self, sample_ids: Sequence[str]) -> None:
        """Abort the requests of samples. Tokens that are lost with them will be generated again, identically.

        Any sample may end meanwhile and is then collected as finished. A task that waits for an output is not
        cancelled: in Python 3.11, asyncio.wait_for, which SGLang uses, can lose a cancellation just after an output.

        Calls `on_silence` if SGLang has not ended the requests within IDLE_SECONDS.
        """
        names = [name for name in sample_ids if name in self._tasks]
        if not names:
            return
        end, going_on = time.monotonic() + IDLE_SECONDS, {self._tasks[name]: self._held[name] for name in names}
        while going_on:
            if time.monotonic() > end:
                self._on_silence(f"SGLang did not stop {', '.join(names)} within {IDLE_SECONDS:g} s.")
            for task, held in going_on.items():
                held.abort_requested = True
                if held.submitted:  # again and again: one that was on its way to SGLang was not known there
                    self._engine.tokenizer_manager.abort_request(held.rid)
                else:
                    task.cancel()
            waiting = asyncio.wait(going_on, timeout=ASK_SECONDS)
            done, _ = self._engine.loop.run_until_complete(waiting)
            going_on = {task: held for task, held in going_on.items() if task not in done}
        self._collect()

    def _flush_cache(self) -> None:
        """Wait until SGLang is idle and flush its cache of KV."""
        flushing = self._engine.tokenizer_manager.flush_cache(timeout_s=IDLE_SECONDS)
        if not self._engine.loop.run_until_complete(flushing).success:
            self._on_silence(f"SGLang did not become idle for a weight update within {IDLE_SECONDS:g} s.")
