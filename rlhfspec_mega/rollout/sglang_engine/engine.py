"""SGLang's engine behind the `RolloutEngine` protocol.

SGLang decodes in processes of its own, also between two polls. A sample that moves is stopped here and asked for anew
there, with its tokens as prompt: its KV, copied before into the radix cache there, spares all but the end of a prefill.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from typing import Any, NoReturn

import torch

from rlhfspec_mega.errors import RunError, SilentEngineError
from rlhfspec_mega.observe.spans import SpanRecorder
from rlhfspec_mega.rollout.checks import check_request
from rlhfspec_mega.rollout.migration.staging import Layout
from rlhfspec_mega.rollout.protocol import DraftPast, SampleSnapshot
from rlhfspec_mega.rollout.sglang_engine.kv import DRAFT, METHOD, TARGET, WOKEN, KvAccess
from rlhfspec_mega.rollout.sglang_engine.samples import Held, aborted, sampling_params
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
IDLE_SECONDS = 60.0  # in which requests that were stopped have left the engine
ASK_SECONDS = 1.0  # between two requests to stop one
SILENCE_SECONDS = 300.0  # of polls without an output: longer than a prefill takes, the time of SGLang's own watchdog


def _raise(sentence: str) -> NoReturn:
    raise SilentEngineError(sentence)


class SGLangEngine(UpdatedEngine):
    """Implements `RolloutEngine`.

    Args:
        engine: a started `sglang.Engine`, see `launch`.
        slots: requests that it decodes at once (max_running_requests).
        max_positions: tokens of prompt and response.
        kv: access to the KV of samples; None: they are prefilled where they go.
        silent: what is done, whatever the engine was asked for, when SGLang does not answer any more; it is given a
            sentence. By default that is raised as a SilentEngineError.

    Attributes:
        last_decode: when the last poll began, in seconds since the epoch, and what a decode step took in it.
        spans: what the time goes into; a poll is one.
    """

    least_copy, turn_seconds = 2 << 20, 0.01

    def __init__(
        self,
        engine: Any,
        slots: int,
        max_positions: int,
        kv: KvAccess | None = None,
        silent: Callable[[str], NoReturn] = _raise,
    ) -> None:
        self._engine, self._slots, self.max_positions, self._kv = engine, slots, max_positions, kv
        self._give_up = silent
        self._held: dict[str, Held] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attempts = 0
        self._finished: list[GenerationResult] = []
        self._steps = self._generated = self._resumed = self._spared = 0
        self._asleep: list[str] = []
        self._silent = 0.0  # seconds of polls without an output, since the last one
        self.last_decode = 0.0, 0.0
        self.spans = SpanRecorder()

    @property
    def idle(self) -> bool:  # and none has ended since the last poll
        return not self._held and not self._finished

    # Samples

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """As RolloutEngine says; UserError for a forced length, too."""
        taken = set(self._held)
        for request in requests:
            self._check(request, taken)
            taken.add(request.sample_id)
        for request in requests:
            self.import_sample(SampleSnapshot(request, [], [], []))

    def import_sample(self, snapshot: SampleSnapshot) -> None:
        """Go on with a sample from its tokens. Raises UserError as `submit` does."""
        self._check(snapshot.request, self._held.keys())
        self._take_kv(snapshot)
        held = self._held[snapshot.request.sample_id] = Held.of(snapshot)
        if self._update is None and self._version >= 0:
            self._start(held)

    def _check(self, request: GenerationRequest, taken: Set[str]) -> None:
        """Raises UserError for what SGLang would refuse only later, or not at all."""
        check_request(request, self._engine.tokenizer_manager.model_config.vocab_size, self.max_positions, taken)
        sampling_params(request, 0)

    def poll(self, seconds: float) -> list[GenerationResult]:
        """Samples finished until about `seconds` have passed or all have ended.

        SGLang is silent when nothing has come of them in SILENCE_SECONDS of polls.
        """
        if self._held and self._may_decode():
            self._ask_anew()
            self._run(seconds)
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def _run(self, seconds: float) -> None:
        """Let SGLang run, and count its steps: an output of a sample is one."""
        held, generated, started = list(self._held.values()), self._generated, time.time()
        for one in held:
            one.outputs = 0
        self._engine.loop.run_until_complete(asyncio.wait(self._tasks.values(), timeout=seconds))
        ended = time.time()
        running = [one for one in held if one.outputs]
        steps = max((one.outputs for one in running), default=0)
        self._silent = 0.0 if steps else self._silent + ended - started
        if self._silent > SILENCE_SECONDS:
            self._give_up(f"SGLang has put out nothing for {SILENCE_SECONDS:g} s, of {len(held)} samples.")
        self._steps += steps
        self.last_decode = started, (ended - started) / steps if steps else self.last_decode[1]
        if steps:
            tokens, kv = self._generated - generated, sum(one.outputs * one.length for one in running)
            self.spans.add(
                "decode", started, ended, batch=len(running), steps=steps, tokens=tokens, draft_tokens=0, kv_tokens=kv
            )

    def _collect(self) -> None:
        """File the samples that have ended. Raises what following one of them has raised."""
        for name, task in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[name]
            if not task.cancelled():
                task.result()
            if (reason := self._held[name].reason) is not None:
                self._finished.append(self._held.pop(name).result(reason))

    def progress(self) -> list[SampleProgress]:
        """What unfinished samples have gained since the last call; not those that end in this moment.

        Else one whose last token is known, and whose engine dies before it is returned, would go on beyond its end.
        """
        going_on = (held for held in self._held.values() if held.reason is None)
        return [held.progress() for held in going_on if len(held.tokens) > held.reported]

    def abort(self, sample_ids: Sequence[str]) -> list[GenerationResult]:
        """As RolloutEngine says; samples that end just then are skipped, too."""
        self._stop(sample_ids)
        withdrawn = [self._held.pop(name, None) for name in sample_ids]
        return [held.result(FinishReason.ABORTED) for held in withdrawn if held is not None]

    def clear(self) -> None:
        self.abort(list(self._held))
        self._finished.clear()

    def holds(self, sample_id: str) -> bool:
        return sample_id in self._held

    def waits(self, sample_id: str) -> bool:
        """Whether the sample is here and no token of it has come yet."""
        return sample_id in self._held and not self._held[sample_id].started

    def request(self, sample_id: str) -> GenerationRequest:
        return self._held[sample_id].request

    def export_sample(self, sample_id: str, with_kv: bool = True) -> SampleSnapshot:
        """As RolloutEngine says; KV stays behind in any case. Raises RunError for one that ends just then, too."""
        self._stop([sample_id])
        held = self._held.pop(sample_id, None)
        if held is None:
            raise RunError(f"Sample {sample_id} is not on this engine any more and cannot leave it.")
        draft = None
        if self._kv and DRAFT in self._kv.parts:  # its KV may have been copied; the rest of its past is prefilled
            draft = DraftPast(torch.empty(self._kv.layout(0).parts[DRAFT]), torch.empty(0, 0))
        return held.snapshot(draft=draft)

    # KV

    def settled(self, sample_id: str) -> dict[str, int] | None:
        """Positions whose KV is committed, in each part; None for a sample without a token, or without access to KV."""
        held = self._held.get(sample_id)
        if self._kv is None or held is None or not held.started:
            return None
        return dict.fromkeys(self._kv.parts, held.length - 1)

    def read_ahead(self, sample_ids: Sequence[str]) -> None:
        """Nothing to do: SGLang's draft reads in every step."""

    def kv_layout(self, positions: int) -> Layout:
        """Without parts where there is no access to KV."""
        return self._kv.layout(positions) if self._kv else Layout("float32", {})

    def settled_kv(self, sample_id: str, part: str, first: int, last: int) -> torch.Tensor:
        """[layers, 2, kv_heads, rows, head_dim] on the host; fewer rows of a sample that has just ended."""
        assert self._kv is not None, "only settled KV is asked for"
        return self._kv.read(self._held[sample_id].rid, part, first, last)

    def _take_kv(self, snapshot: SampleSnapshot) -> None:
        """Have SGLang know the KV that came with a sample, if it came for all that has some here.

        Not while it would be void again at once, or while there are no weights.
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
        """Takes unfinished samples back; they go on from their tokens when they are polled for after the update.

        Returns when SGLang is idle: it reads the weights in the passes that are under way.
        """
        self._stop(list(self._tasks))
        self._wake(WEIGHTS)
        self._empty()
        return BucketedUpdate(version, tensors, sender(self._engine, target))

    def _make_live(self, target: WeightTarget) -> None:
        self._empty()

    def _lose_draft(self) -> None:
        """SGLang drafts on with what has come: tokens are right whatever the draft."""

    # Memory

    def sleep(self) -> None:
        """Give back the GPU's memory until samples or weights come. The weights are lost, but for the draft's.

        Raises RunError with samples unfinished.
        """
        if self._held:
            raise RunError(f"The engine was to sleep with {len(self._held)} unfinished samples.")
        if not self._asleep:
            self._empty()
            self._engine.release_memory_occupation(list(ALL_MEMORY))
            self._asleep, self._version = list(ALL_MEMORY), -1

    def _wake(self, parts: Sequence[str]) -> None:
        """Take back these parts of what was given back."""
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
            "spared_tokens": self._spared,  # those that did not have to be prefilled
            "prefill_tokens": metrics.total_prefill_uncached_tokens if metrics else 0,
            "prefill_seconds": metrics.total_prefill_busy_us / 1e6 if metrics else 0.0,
        }

    @property
    def kv_room(self) -> int | None:
        """Tokens of KV that SGLang has room for; None before it has said so."""
        metrics = self._metrics()
        return metrics.max_total_num_tokens if metrics else None

    def _metrics(self) -> Any:
        """SGLang's latest record of its load, which lies in memory shared with it; None before the first."""
        found = self._engine.loop.run_until_complete(self._engine.tokenizer_manager.get_loads())
        return found[0] if found else None

    def _ask_anew(self) -> None:
        """Ask for samples that were stopped and not taken away: by an update, or by a stop that was heard too late."""
        for name, held in self._held.items():
            if name not in self._tasks:
                self._start(held)

    def _start(self, held: Held) -> None:
        self._wake(ALL_MEMORY)
        self._attempts += 1
        held.ask_anew(self._attempts)
        self._tasks[held.request.sample_id] = self._engine.loop.create_task(self._follow(held))

    async def _follow(self, held: Held) -> None:
        """Read a request's outputs to their end, or until it is stopped."""
        held.asked = True
        outputs = await self._engine.async_generate(
            input_ids=list(held.sequence),
            sampling_params=sampling_params(held.request, held.given),
            return_logprob=True,
            stream=True,
            rid=held.rid,
        )
        resumed = bool(held.tokens)
        async for output in outputs:
            if held.stopped and aborted(output):  # its last tokens may go beyond its end
                continue
            before = len(held.tokens)
            held.take(output, self._version)
            self._generated += len(held.tokens) - before
            if resumed:
                self._resumed += len(held.request.prompt_tokens) + before
                self._spared += output["meta_info"].get("cached_tokens", 0)
                resumed = False

    def _stop(self, sample_ids: Sequence[str]) -> None:
        """End requests of samples; tokens that they still make are made again elsewhere, the same ones.

        Others may end meanwhile, and so may these: they are collected. A task that waits for an output is not
        cancelled: in Python 3.11 asyncio.wait_for, by which SGLang waits, loses a cancellation just after the output.

        SGLang is silent if it does not give them up in IDLE_SECONDS.
        """
        names = [name for name in sample_ids if name in self._tasks]
        if not names:
            return
        end, going_on = time.monotonic() + IDLE_SECONDS, {self._tasks[name]: self._held[name] for name in names}
        while going_on:
            if time.monotonic() > end:
                self._give_up(f"SGLang did not stop {', '.join(names)} within {IDLE_SECONDS:g} s.")
            for task, held in going_on.items():
                held.stopped = True
                if held.asked:  # again and again: one that was on its way to SGLang was not known there
                    self._engine.tokenizer_manager.abort_request(held.rid)
                else:
                    task.cancel()
            waiting = asyncio.wait(going_on, timeout=ASK_SECONDS)
            done, _ = self._engine.loop.run_until_complete(waiting)
            going_on = {task: held for task, held in going_on.items() if task not in done}
        self._collect()

    def _empty(self) -> None:
        """Wait until SGLang is idle, and make its cached KV void."""
        flushing = self._engine.tokenizer_manager.flush_cache(timeout_s=IDLE_SECONDS)
        if not self._engine.loop.run_until_complete(flushing).success:
            self._give_up(f"SGLang did not become idle for a weight update within {IDLE_SECONDS:g} s.")
