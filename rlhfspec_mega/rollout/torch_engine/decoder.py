"""One decode step on tensors: draft, run the target, select tokens, accept. It works on slots, not on requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.history.index import History
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.planning.memory import LOGITS_AT_ONCE
from rlhfspec_mega.planning.tree import Batch, Bools, DraftingPolicy, Ints, Recall, StepRecord
from rlhfspec_mega.rollout.torch_engine.cache import KVCache
from rlhfspec_mega.rollout.torch_engine.drafter import Drafter, GrownTree
from rlhfspec_mega.rollout.torch_engine.host_attention import step_attention
from rlhfspec_mega.rollout.torch_engine.recall import join, recall, recall_alone
from rlhfspec_mega.rollout.torch_engine.scheduler import Admission
from rlhfspec_mega.rollout.torch_engine.slots import SlotState
from rlhfspec_mega.rollout.torch_engine.step_noise import StepNoise, step_noise
from rlhfspec_mega.rollout.torch_engine.unread import Features
from rlhfspec_mega.rollout.torch_engine.verification import Verification, accept, plain, with_drafts
from rlhfspec_mega.sampling.host_select import Chosen


class Decoded(NamedTuple):
    """New tokens of the active samples, sample by sample; sample i has counts[i] of them.

    Attributes:
        record: the draft tree of the step and the time it took; None without a policy, or anything to draft from.
    """

    tokens: list[int]
    logprobs: list[float]
    counts: Ints
    record: StepRecord | None


class _Planned(NamedTuple):
    """What a step drafts and verifies.

    Attributes:
        chosen: indices of the nodes to verify, ascending.
        noise: that of the step, if the draft needed it.
    """

    batch: Batch
    grown: GrownTree
    chosen: Ints
    verification: Verification
    noise: StepNoise | None


@dataclass
class _Row:
    """Plain steps in a row, by one decision of the policy, of the same samples.

    Attributes:
        samples: numbers of the samples.
        kv_tokens: in the KV caches at the first step.
        most: steps that may be made.
        seconds: of each step that was made.
    """

    samples: Ints
    kv_tokens: int
    most: int
    seconds: list[float] = field(default_factory=list)


class Decoder:
    """The target model with its KV cache and slots, and the draft model if there is one.

    Args:
        slots: samples decoded at once.
        draft, policy: shape of the draft and the policy for its trees; without a policy, every step is plain.
        vocabulary: see Drafter.
        history: earlier text that gives draft tokens too, with or without a draft.

    Attributes:
        drafting: whether the draft has weights; without them every step is plain.
    """

    def __init__(
        self,
        model: Transformer,
        slots: int,
        draft: DraftShape | None,
        policy: DraftingPolicy | None,
        vocabulary: torch.Tensor | None,
        history: History | None,
    ):
        weights, room = model.embedding, policy.max_nodes if policy else 0
        self._device = weights.device
        self._policy, self.history = policy, history
        self.model, self.slots = model, SlotState(slots, model.shape.vocab_size, weights.device)
        self.drafter = Drafter(draft, model, policy, slots=slots, vocabulary=vocabulary) if draft and policy else None
        places = model.max_positions + room
        self.cache = KVCache(model.shape, slots=slots, places=places, dtype=weights.dtype, device=weights.device)
        self.drafting = False
        self._row: _Row | None = None

    @property
    def policy(self) -> DraftingPolicy | None:
        return self._policy

    @policy.setter
    def policy(self, policy: DraftingPolicy) -> None:
        self._end_row()
        self._policy = policy
        if self.drafter:
            self.drafter.policy = policy

    def draft_changed(self, idle: bool) -> None:
        """Use the draft, whose new weights were written.

        Args:
            idle: whether no sample is in a slot. If so, the draft's cache is cleared: attention gives entries beyond a
                sample's end a weight of 0, but 0 * NaN is NaN, so that an entry that overflowed would spoil all later
                samples in its slot.
        """
        self._end_row()
        if self.drafter:
            self.drafter.model.weights_changed()
            self.drafting = True
            if idle:
                self.drafter.cache.kv.zero_()

    def draft_lost(self) -> None:
        """Stop drafting until the draft's next update, because its weights are a mixture of two versions.

        Samples that are in slots by then lose the draft's state and are not drafted for any more.
        """
        self._end_row()
        self.drafting = False
        if self.drafter:
            for slot in range(len(self.slots.tokens)):
                self.drafter.admit(slot, None, ())

    def follower(self, size: int) -> Drafter | None:
        """The drafter, if it is to follow samples that make a batch of this size."""
        if self.drafter is None or self._policy is None or not self.drafting:
            return None
        return self.drafter if self._policy.follows(size) else None

    def admit(self, admission: Admission) -> None:
        """Put the samples of a group into their slots."""
        self._end_row()
        first, samples, kv, past = admission
        if kv is not None:
            self.cache.fill(first, len(samples), kv)
        self.slots.assign(first, samples)
        if self.history:
            for slot, sample in enumerate(samples, start=first):
                self.history.admit(slot, sample.request.prompt_tokens, sample.tokens)
        if self.drafter:
            if not self.drafting:
                past = None  # plain steps would not keep it up to date
            elif kv is None:
                past = self.drafter.empty_past() if self.follower(first + len(samples)) else None
            followed = self.drafter.unread.following
            for slot, sample in enumerate(samples, start=first):
                self.drafter.admit(slot, past, sample.sequence)
            if self._policy and past is not None and not followed:
                self._policy.draft_returns()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot with `length` cached positions over another."""
        self.cache.move(source, target, length)
        self.slots.move(source, target)
        if self.history:
            self.history.move(source, target)
        if self.drafter:
            self.drafter.move(source, target)

    def ended(self, slots: Sequence[int], left: int) -> None:
        """Tell the policy that the samples of these slots have ended, or move away, while `left` others are here."""
        if self._policy and slots:
            self._end_row()
            rows, own = list(slots), self.slots
            tokens = own.generated[rows] - own.brought[rows]
            self._policy.ended(own.numbers[rows], tokens, own.joined[rows], left)

    def leave(self, slots: Iterable[int]) -> None:
        """The samples of these slots have ended, or moved to others."""
        if self.drafter:
            for slot in slots:
                self.drafter.leave(slot)

    def step(self, batch: int) -> Decoded:
        """Decode at least one token of each of the first `batch` slots."""
        drafter = self.drafter if self.drafting else None
        policy = self._policy if drafter or self.history else None
        if policy is None:
            decoded = self._plain(None, batch)
        elif row := self._row or self._begin_row(policy, drafter, batch):
            decoded = self._rest(row, drafter, batch)
        else:
            decoded = self._speculate(policy, drafter, batch)
        self.slots.progress += len(decoded.tokens) / batch
        if self.history:
            self.history.extend(decoded.tokens, decoded.counts)
        return decoded

    def _plain(self, features: Features | None, batch: int) -> Decoded:
        verification = plain(self.slots.tokens[:batch], self.slots.lengths[:batch], self._device)
        noise = step_noise(self.slots, batch, 1)
        return self._accept(verification, self._select(verification, noise, features), features)[0]

    def _begin_row(self, policy: DraftingPolicy, drafter: Drafter | None, batch: int) -> _Row | None:
        """Plain steps in which nothing is asked, if the policy says so: asking takes 3% of a tiny model's step."""
        able = self.history is not None or (drafter is not None and drafter.unread.following > 0)
        if steps := policy.rests(batch, able):
            slots = self.slots
            self._row = _Row(slots.numbers[:batch].copy(), int(slots.lengths[:batch].sum()), steps)
        return self._row

    def _rest(self, row: _Row, drafter: Drafter | None, batch: int) -> Decoded:
        """A step of a row; the draft can still follow the samples."""
        features = None
        if drafter and drafter.unread.following:
            drafter.make_room(batch)
            features = drafter.tap()
        started = time.perf_counter()
        decoded = self._plain(features, batch)
        row.seconds.append(time.perf_counter() - started)
        if len(row.seconds) == row.most:
            self._end_row()
        return decoded

    def _end_row(self) -> None:
        """Tell the policy of the plain steps since it was asked last."""
        row, self._row = self._row, None
        if row and row.seconds and self._policy:
            self._policy.rested(row.samples, row.kv_tokens, row.seconds)

    def _speculate(self, policy: DraftingPolicy, drafter: Drafter | None, batch: int) -> Decoded:
        started, slots = time.perf_counter(), self.slots
        state = Batch(
            lengths=slots.lengths[:batch].copy(),
            generated=slots.generated[:batch].copy(),
            remaining=slots.remaining[:batch].copy(),
            temperatures=slots.host_temperatures[:batch].copy(),
            backlog=drafter.backlog(batch) if drafter else 0,
            samples=slots.numbers[:batch].copy(),
            draftable=drafter is not None and drafter.follows_most(batch),
        )
        state, grown, chosen, verification, noise = self._planned(policy, drafter, state)
        noise = noise or step_noise(slots, batch, 1 + int(verification.nodes.depths.max()))
        features = drafter.tap() if drafter else None
        proposed = time.perf_counter()
        decoded, accepted = self._accept(verification, self._select(verification, noise, features), features)
        record = StepRecord(
            batch=state,
            tree=grown.tree,
            chosen=chosen,
            accepted=accepted,
            drafted=grown.tree.drafted,
            draft_seconds=proposed - started,
            verify_seconds=time.perf_counter() - proposed,
            root_hits=_root_hits(grown, decoded),
        )
        policy.observe(record)
        return decoded._replace(record=record)

    def _planned(self, policy: DraftingPolicy, drafter: Drafter | None, batch: Batch) -> _Planned:
        """Draft, and choose what to verify."""
        history, slots, device = self.history, self.slots, self._device
        ask = policy.recall(batch) if history else None
        if history and ask and ask.worth:
            if drafter:
                drafter.make_room(batch.size)
            found = recall_alone(history, ask, ask.worth, batch, slots, policy.max_depth, device)
            return _Planned(batch, *found, None)
        batch, grown, noise = self._draft(policy, drafter, batch, ask)
        chosen = policy.choose(batch, grown.tree) if grown.tree.size else np.zeros(0, np.int64)
        last = slots.tokens[: batch.size]
        if len(chosen):
            verification = with_drafts(last, batch.lengths, grown.tree, chosen, grown.tokens, device)
        else:
            verification = plain(last, batch.lengths, device)
        return _Planned(batch, grown, chosen, verification, noise)

    def _draft(
        self, policy: DraftingPolicy, drafter: Drafter | None, batch: Batch, ask: Recall | None
    ) -> tuple[Batch, GrownTree, StepNoise | None]:
        """The batch with what was recalled, the draft tokens to choose from, and the noise if the draft needed it."""
        slots, recalled = self.slots, None
        if ask and self.history:
            recalled = recall(self.history, ask, batch, slots, policy.max_depth)
            batch = replace(batch, recalled=recalled.survival) if len(recalled.rows) else batch
        depth = policy.depth(batch) if drafter else 0
        grown, noise = GrownTree(), None
        if drafter and depth > 0:
            noise = step_noise(slots, batch.size, 1 + (policy.max_depth if len(batch.recalled) else depth))
            grown = drafter.grow(batch, slots, noise, depth)
        elif drafter:
            drafter.make_room(batch.size)
        if recalled is not None and len(recalled.rows):
            join(grown, recalled, batch.size)
        return batch, grown, noise

    def _select(self, verification: Verification, noise: StepNoise, features: Features | None) -> Chosen:
        """Run the target: the token it chooses after every input, with its log-prob."""
        inputs, nodes = verification
        hidden = self.model.hidden(inputs.tokens, inputs.positions, step_attention(self.cache, inputs), features)
        at_once = max(1, LOGITS_AT_ONCE // self.model.shape.vocab_size)
        pieces = []
        for first in range(0, len(hidden), at_once):
            some = slice(first, first + at_once)
            logits = self.model.logits(hidden[some])
            pieces.append(noise.choose(logits, nodes.rows[some], nodes.depths[some]))
        return pieces[0] if len(pieces) == 1 else Chosen(*map(np.concatenate, zip(*pieces, strict=True)))

    def _accept(self, verification: Verification, chosen: Chosen, features: Features | None) -> tuple[Decoded, Bools]:
        """Keep the path that the target takes through each tree; also [chosen nodes], whether a node is on it."""
        (choices, logprobs), batch = chosen, verification.inputs.batch
        taken, counts, last, accepted = None, np.ones(batch, np.int64), choices, np.zeros(0, np.bool_)
        if verification.has_drafts:
            taken, counts, last, accepted, moves = accept(verification.nodes, choices, self.slots.lengths)
            choices, logprobs = choices[taken], logprobs[taken]
            if moves.shape[1]:
                self.cache.commit(*moves)
        if features is not None and self.drafter is not None:
            self.drafter.unread.add(features.outputs(), taken, choices, counts)
        self.slots.grow(last, counts)
        return Decoded(choices.tolist(), logprobs.tolist(), counts, None), accepted


def _root_hits(grown: GrownTree, decoded: Decoded) -> Bools:
    """bool [samples with a tree]: whether the target chose the draft's best first token."""
    tree, tokens = grown.tree, grown.tokens
    if not tree.depth:
        return np.zeros(0, np.bool_)
    first = np.flatnonzero((tree.depths == 1) & (tree.ranks == 0))
    came = np.array(decoded.tokens)[np.cumsum(decoded.counts) - decoded.counts]
    return np.asarray(tokens[first] == came[tree.rows[first]])
