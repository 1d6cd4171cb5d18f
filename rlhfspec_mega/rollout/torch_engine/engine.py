"""The PyTorch engine: continuous batching over KV slots, shared-noise sampling, weights swapped in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.history.index import History
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.observe.spans import SpanRecorder
from rlhfspec_mega.planning.tree import DraftingPolicy
from rlhfspec_mega.rollout.checks import check_draft_past, check_request, check_snapshot
from rlhfspec_mega.rollout.migration.staging import Layout
from rlhfspec_mega.rollout.protocol import DraftPast, LiveSample, SampleSnapshot
from rlhfspec_mega.rollout.torch_engine.decoder import Decoded, Decoder
from rlhfspec_mega.rollout.torch_engine.prefill import Prefill
from rlhfspec_mega.rollout.torch_engine.scheduler import Scheduler
from rlhfspec_mega.rollout.update import UpdatedEngine, WeightUpdate
from rlhfspec_mega.types import (
    EngineLoad,
    FinishedText,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SampleProgress,
    TensorInfo,
    WeightTarget,
)


class TorchEngine(UpdatedEngine):
    """Implements `rollout.protocol.RolloutEngine` on one device.

    A step gives free slots to samples whose prefill is complete; if there are none, it advances one prefill by up to
    `prefill_chunk` tokens. Then it decodes at least one token of each active sample: exactly one without draft tokens.
    Weights may change during a rollout: the KV of running samples is kept, as in PipelineRL (Piché et al. 2025,
    arXiv 2509.19128), and each token records its policy version.

    Args:
        slots: samples decoded at once.
        max_positions: longest prompt + response in tokens; sets the size of the KV cache.
        prefill_chunk: most prompt tokens prefilled per step.
        draft, policy: shape of the draft and the policy for draft trees. Every step is plain without a policy, or with
            neither earlier text nor a draft that has weights.
        draft_vocabulary: int64 [draft vocabulary], the target's token id of each token of the draft; None: the two
            vocabularies are the same.
        history_tokens: tokens of earlier text that are kept to draft from; 0: none.

    Attributes:
        spans: records what the engine spends its time on.
    """

    min_copy_bytes, poll_interval = 1 << 16, 0.0

    def __init__(
        self,
        shape: ModelShape,
        *,
        slots: int,
        max_positions: int,
        prefill_chunk: int,
        dtype: torch.dtype,
        device: torch.device | str,
        draft: DraftShape | None = None,
        policy: DraftingPolicy | None = None,
        draft_vocabulary: torch.Tensor | None = None,
        history_tokens: int = 0,
    ):
        for name, value in {"slots": slots, "max_positions": max_positions, "prefill_chunk": prefill_chunk}.items():
            if value < 1:
                raise UserError(f"The engine's {name} is {value}; it must be at least 1.")
        self.max_positions, self._prefill_chunk = max_positions, prefill_chunk
        self._model = Transformer(shape, max_positions=max_positions, dtype=dtype, device=device)
        history = History(slots, history_tokens) if history_tokens else None
        self._decoder = Decoder(self._model, slots, draft, policy, draft_vocabulary, history)
        self._scheduler = Scheduler(slots)
        self._prefill: Prefill | None = None
        self._finished: list[GenerationResult] = []
        self._held: dict[str, LiveSample] = {}  # unfinished samples by id
        self._ended_here: set[str] = set()  # samples that ended since the last `remember`, if there is history
        self._counts = dict.fromkeys(("decode_steps", "generated_tokens", "prefill_tokens", "finished_samples"), 0)
        self._seconds = {"decode_seconds": 0.0, "prefill_seconds": 0.0}
        self.last_decode = 0.0, 0.0  # see RolloutEngine
        self.spans = SpanRecorder()

    @property
    def vocab_size(self) -> int:
        return self._model.shape.vocab_size

    @property
    def policy(self) -> DraftingPolicy | None:
        """The drafting policy. It may be replaced by one that does not exceed its width, depth and number of nodes."""
        return self._decoder.policy

    @policy.setter
    def policy(self, policy: DraftingPolicy) -> None:
        self._decoder.policy = policy

    @property
    def drafting(self) -> bool:
        """Whether the draft has weights and is in use."""
        return self._decoder.drafting

    @property
    def speculates(self) -> bool:
        """Whether all that gives draft tokens is there: the draft has its weights, or there is only history.

        While a draft is without weights, steps may still verify tokens from history.
        """
        decoder = self._decoder
        return decoder.policy is not None and (decoder.drafting if decoder.drafter else decoder.history is not None)

    @property
    def history(self) -> History | None:
        """Earlier text that gives draft tokens."""
        return self._decoder.history

    @history.setter
    def history(self, history: History | None) -> None:
        self._decoder.history = history

    @property
    def idle(self) -> bool:
        return not self._held

    # Samples

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        held = dict(self._held)
        for request in requests:
            check_request(request, self.vocab_size, self.max_positions, held.keys())
            held[request.sample_id] = LiveSample(request)
        self._held = held
        self._scheduler.enqueue(held[request.sample_id] for request in requests)

    def poll(self, seconds: float) -> list[GenerationResult]:
        """Decode for about `seconds` (at least one step) or until idle; returns samples finished since the last poll.

        Does not decode during a weight update. Raises RunError if there are samples before the first weight update.
        """
        deadline = time.monotonic() + seconds
        while self._scheduler.busy and self._may_decode():
            self._step()
            if time.monotonic() >= deadline:
                break
        finished, self._finished = self._finished, []
        return finished

    def progress(self) -> list[SampleProgress]:
        return [sample.progress() for sample in self._scheduler.active if len(sample.tokens) > sample.reported]

    def clear(self) -> None:
        self.abort(list(self._held))
        self._finished.clear()

    def abort(self, sample_ids: Sequence[str]) -> list[GenerationResult]:
        known = [sample_id for sample_id in dict.fromkeys(sample_ids) if sample_id in self._held]
        return [self._remove(sample_id).result(FinishReason.ABORTED) for sample_id in known]

    def has_sample(self, sample_id: str) -> bool:
        return sample_id in self._held

    def is_waiting(self, sample_id: str) -> bool:
        return sample_id in self._held and self._scheduler.find(sample_id) is None

    def remember(self, texts: Sequence[FinishedText]) -> None:
        """Add finished samples of other engines to history; those that ended here since the last call are in it."""
        if self.history:
            others = [text for text in texts if text.sample_id not in self._ended_here]
            self.history.add((text.prompt, text.response) for text in others)
            self._ended_here.clear()

    def restart_history(self, texts: History | None = None) -> None:
        """Forget all texts of an idle engine but those of another history, if one is given."""
        if self.history:
            if texts:
                self.history.become(texts)
            else:
                self.history.clear()
            self._ended_here.clear()

    def request(self, sample_id: str) -> GenerationRequest:
        return self._held[sample_id].request

    def committed_positions(self, sample_id: str) -> dict[str, int] | None:
        slot, drafter = self._scheduler.find(sample_id), self._decoder.drafter
        if slot is None:
            return None
        found = {"target": self._scheduler.active[slot].length - 1}
        return found | {"draft": drafter.committed_positions(slot)} if drafter and drafter.has_state(slot) else found

    @torch.inference_mode()
    def catch_up_draft(self, sample_ids: Sequence[str]) -> None:
        slots = [slot for name in sample_ids if (slot := self._scheduler.find(name)) is not None]
        if slots and self._decoder.drafter and self._decoder.drafting:
            self._decoder.drafter.catch_up_draft(slots, len(self._scheduler.active))

    def kv_layout(self, positions: int) -> Layout:
        caches, drafter = {"target": self._decoder.cache.kv}, self._decoder.drafter
        caches |= {"draft": drafter.cache.kv} if drafter else {}
        parts = {name: (kv.shape[0], 2, kv.shape[3], positions, kv.shape[5]) for name, kv in caches.items()}
        return Layout(str(caches["target"].dtype).removeprefix("torch."), parts)

    def committed_kv(self, sample_id: str, part: str, first: int, last: int) -> torch.Tensor:
        """See RolloutEngine; returns a view. Raises RunError for a sample that is not being decoded."""
        slot, drafter = self._scheduler.find(sample_id), self._decoder.drafter
        if slot is None:
            raise RunError(f"Sample {sample_id} has no KV in this engine: it is not being decoded here.")
        cache = drafter.cache if part == "draft" and drafter else self._decoder.cache
        return cache.prefix(slot, last)[:, :, :, first:]

    def export_sample(self, sample_id: str, with_kv: bool = True) -> SampleSnapshot:
        if sample_id not in self._held:
            raise RunError(f"Sample {sample_id} cannot be exported: this engine does not have it, or it has finished.")
        slot, drafter = self._scheduler.find(sample_id), self._decoder.drafter
        kv = draft = None
        if slot is not None:
            draft = drafter.past(slot, with_kv) if drafter else None
            if with_kv:
                kv = self._decoder.cache.prefix(slot, self._scheduler.active[slot].length - 1).clone()
        return self._remove(sample_id).snapshot(kv, draft)

    def import_sample(self, snapshot: SampleSnapshot) -> None:
        """See RolloutEngine; the sample is queued ahead of those that wait."""
        check_request(snapshot.request, self.vocab_size, self.max_positions, self._held.keys())
        check_snapshot(snapshot, self._decoder.cache.kv)
        if drafter := self._decoder.drafter:
            check_draft_past(snapshot, drafter.empty_past(), drafter.max_unread)
        sample = self._held[snapshot.request.sample_id] = LiveSample.of(snapshot)
        kv, draft, device = snapshot.kv, snapshot.draft, self._decoder.cache.kv.device
        if kv is None or (draft is None and self._decoder.follower(len(self._scheduler.active) + 1)):
            self._scheduler.enqueue_first(sample, None, None)
        else:
            draft = DraftPast(draft.kv.to(device), draft.features.to(device)) if draft else None
            self._scheduler.enqueue_first(sample, kv.to(device), draft)

    def load(self) -> EngineLoad:
        """See RolloutEngine; the policy version is -1 before the first weights."""
        return EngineLoad(
            running=len(self._scheduler.active),
            waiting=self._scheduler.waiting,
            kv_tokens=sum(sample.length - 1 for sample in self._scheduler.active),
            slots=self._scheduler.slots,
            decode_steps=self._counts["decode_steps"],
            generated_tokens=self._counts["generated_tokens"],
            policy_version=self._version,
        )

    def make_kernels(self, most_rows: int) -> None:
        """Make what the first steps with each number of tokens, up to this one, would have to make."""
        self._model.make_kernels(most_rows)
        if drafter := self._decoder.drafter:
            drafter.model.make_kernels(most_rows)

    def stats(self) -> dict[str, Any]:
        """Counters of steps, tokens, samples, and seconds of decoding and prefill since the start or `reset_stats`."""
        return self._counts | self._seconds

    def reset_stats(self) -> None:
        """Set all counters to 0."""
        self._counts, self._seconds = dict.fromkeys(self._counts, 0), dict.fromkeys(self._seconds, 0.0)

    # Weights

    def _begin(self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget) -> WeightUpdate:
        """Begin an update of the target's or the draft's weights to a version.

        Raises RunError for a name or shape that the model does not have, and if its first update lacks a tensor.
        """
        drafter = self._decoder.drafter
        if target is WeightTarget.ACTOR:
            own, first = self._model.hf_tensors(), self._version < 0
        elif drafter is not None:
            own, first = drafter.model.tensors(), not self._decoder.drafting
        else:
            raise RunError("The engine was sent weights of a draft, but it has no draft; set speculation.policy.")
        if first and (missing := sorted(own.keys() - {info.name for info in tensors})):
            raise RunError(f"The first update must have all tensors; it lacks {len(missing)}, among them {missing[0]}.")
        return WeightUpdate(version, tensors, own)

    def _make_live(self, target: WeightTarget) -> None:
        if target is WeightTarget.ACTOR:
            self._model.weights_changed()
            self._ended_here.clear()  # nobody tells of samples of earlier weights any more
        else:
            self._decoder.draft_changed(idle=not self._scheduler.active)
        self._prefill = None
        self._scheduler.forget_prefills()

    def _lose_draft(self) -> None:
        self._decoder.draft_lost()

    # The step

    @torch.inference_mode()
    def _step(self) -> None:
        started, read = time.time(), self._counts["prefill_tokens"]
        prefilling = False
        if self._prefill is not None or self._scheduler.queued:
            prefilling = not self._admit() and self._advance_prefill()  # samples with KV wait for no other's prefill
            self._admit()
        prefilled, batch = time.time(), len(self._scheduler.active)
        if prefilling:
            self._seconds["prefill_seconds"] += prefilled - started
            self.spans.add("prefill", started, prefilled, steps=1, tokens=self._counts["prefill_tokens"] - read)
        if batch:
            cached = int(self._decoder.slots.lengths[:batch].sum())
            decoded = self._decoder.step(batch)
            self._commit(decoded)
            self.spans.add(
                "decode",
                prefilled,
                time.time(),
                batch=batch,
                steps=1,
                tokens=len(decoded.tokens),
                draft_tokens=len(decoded.record.chosen) if decoded.record else 0,
                kv_tokens=cached,  # tokens of KV read in this step; in longer spans a sum over steps, like all amounts
            )
        self.last_decode = prefilled, time.time() - prefilled
        self._seconds["decode_seconds"] += self.last_decode[1]

    def _advance_prefill(self) -> bool:
        """Prefill one chunk; returns whether there was something to prefill."""
        if self._prefill is None:
            groups = self._scheduler.next_prefill(self._prefill_chunk)
            if not groups:
                return False
            self._counts["prefill_tokens"] += sum(len(group.prefix) for group in groups)
            self._prefill = Prefill(self._model, self._decoder.follower(self._batch_to_come), groups)
        if self._prefill.advance(self._prefill_chunk):
            self._prefill = None
        return True

    @property
    def _batch_to_come(self) -> int:
        """Samples that are decoded at once when all that have come so far are prefilled."""
        return min(len(self._held), self._scheduler.slots)

    def _admit(self) -> bool:
        """Give free slots to prefilled samples; returns whether there were any."""
        known = self._scheduler.prefixes_in_slots(self._version) if self._prefill is None else []
        if known and not self._decoder.follower(self._batch_to_come):  # a draft would have to read them
            for group, slot in known:
                group.kv = self._decoder.cache.prefix(slot, len(group.prefix)).clone()
        for admission in (admissions := self._scheduler.admit()):
            self._decoder.admit(admission)
        return bool(admissions)

    def _commit(self, decoded: Decoded) -> None:
        """Append the new tokens to their samples and free the slots of samples that have ended."""
        samples, ended, first, kept = self._scheduler.active, [], 0, 0
        for slot, (sample, count) in enumerate(zip(samples, decoded.counts.tolist(), strict=True)):
            new, known = slice(first, first + count), len(sample.tokens)
            first += count
            reason = sample.extend(decoded.tokens[new], decoded.logprobs[new], self._version)
            kept += len(sample.tokens) - known
            if reason is not None:
                ended.append(slot)
                self._finished.append(sample.result(reason))
                if self.history:
                    self._ended_here.add(sample.request.sample_id)
                del self._held[sample.request.sample_id]
        self._counts["generated_tokens"] += kept
        self._counts["decode_steps"] += 1
        self._counts["finished_samples"] += len(ended)
        self._retire(ended)

    def _retire(self, slots: Sequence[int]) -> None:
        before = len(self._scheduler.active)
        self._decoder.ended(slots, len(self._held))
        for move in self._scheduler.retire(slots):
            self._decoder.move(*move)
        self._decoder.leave(range(len(self._scheduler.active), before))

    def _remove(self, sample_id: str) -> LiveSample:
        """Remove an unfinished sample from its slot or from the queue."""
        sample, slot = self._held.pop(sample_id), self._scheduler.find(sample_id)
        if slot is None:
            self._scheduler.withdraw(sample)
        else:
            self._retire([slot])
        return sample
