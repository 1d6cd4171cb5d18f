"""Who waits, who is prefilled next and who holds which slot: bookkeeping only, no tensors computed.

A sample's *prefix* is everything but its last token: prompt and response so far when it comes from elsewhere. The KV of
the prefix is what it needs to enter a slot; the last token is the first decode step's input. Waiting samples with
the same prefix (the members of a group) share one prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rlhfspec_mega.rollout.protocol import DraftPast
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, SampleProgress


@dataclass
class LiveSample:
    """An unfinished sample and its response so far; `reported`: response tokens that the driver knows of."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reported = len(self.tokens)
        self._stop = frozenset() if self.request.ignore_stop else frozenset(self.request.stop_tokens)

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.request.prompt_tokens) + len(self.tokens)

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt_tokens[-1]

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.prompt_tokens, *self.tokens)

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.sequence[:-1]

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> FinishReason | None:
        """Add tokens up to the one that ends the sample; the reason if there is one."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            if token in self._stop:
                return FinishReason.STOP
            if len(self.tokens) >= self.request.max_new_tokens:
                return FinishReason.LENGTH
        return None

    def progress(self) -> SampleProgress:
        """What came since the last call."""
        new, self.reported = slice(self.reported, None), len(self.tokens)
        return SampleProgress(self.request.sample_id, self.tokens[new], self.logprobs[new], self.versions[new])

    def result(self, reason: FinishReason) -> GenerationResult:
        return GenerationResult(self.request.sample_id, self.tokens, self.logprobs, self.versions, reason)


@dataclass
class PrefixGroup:
    """Waiting samples that share `prefix`; `kv` [layers, 2, kv_heads, len(prefix), head_dim] once prefilled.

    `draft` is the draft's part of it, where an engine drafts.
    """

    prefix: tuple[int, ...]
    members: list[LiveSample]
    kv: torch.Tensor | None = None
    draft: DraftPast | None = None

    @property
    def ready(self) -> bool:
        return self.kv is not None or not self.prefix


class Admission(NamedTuple):
    """Samples of one group that enter the slots from `first` on."""

    first: int
    samples: list[LiveSample]
    kv: torch.Tensor | None
    draft: DraftPast | None


class Move(NamedTuple):
    """A slot's content goes to a lower slot; `length` positions of it are cached."""

    source: int
    target: int
    length: int


class Scheduler:
    """First come, first served, except that migrated samples go ahead.

    Attributes:
        active: the decoding samples; the index is the slot.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.active: list[LiveSample] = []
        self._waiting: deque[PrefixGroup] = deque()

    @property
    def waiting(self) -> int:
        return sum(len(group.members) for group in self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self.active or self._waiting)

    def enqueue(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue new samples at the end; those whose prompt is still waiting join its group."""
        groups = {group.prefix: group for group in self._waiting}
        for request in requests:
            sample = LiveSample(request)
            prefix = sample.prefix
            if prefix in groups:
                groups[prefix].members.append(sample)
            else:
                groups[prefix] = PrefixGroup(prefix, [sample])
                self._waiting.append(groups[prefix])

    def enqueue_first(self, sample: LiveSample, kv: torch.Tensor | None, draft: DraftPast | None) -> None:
        """Queue a sample that has waited elsewhere ahead of all others."""
        self._waiting.appendleft(PrefixGroup(sample.prefix, [sample], kv, draft))

    def next_prefill(self, max_tokens: int) -> list[PrefixGroup]:
        """Groups to prefill together: of slots' worth of members, in queue order, at most `max_tokens` once padded.

        The first is taken whatever its length; nothing is taken while the prefilled ones fill the free slots.
        """
        room = self.slots - len(self.active) - sum(len(group.members) for group in self._waiting if group.ready)
        chosen: list[PrefixGroup] = []
        longest = 0
        for group in self._waiting:
            if group.ready:
                continue
            longest = max(longest, len(group.prefix))
            if room <= 0 or (chosen and (len(chosen) + 1) * longest > max_tokens):
                break
            chosen.append(group)
            room -= len(group.members)
        return chosen

    def admit(self) -> list[Admission]:
        """Give free slots to members of prefilled groups, in queue order."""
        admissions = []
        for group in [group for group in self._waiting if group.ready]:
            first = len(self.active)
            entering = group.members[: self.slots - first]
            if not entering:
                break
            admissions.append(Admission(first, entering, group.kv, group.draft))
            self.active += entering
            del group.members[: len(entering)]
        self._drop_empty()
        return admissions

    def retire(self, slots: Sequence[int]) -> list[Move]:
        """Free these slots; the moves, in order, that keep the active slots in front."""
        moves = []
        for slot in sorted(slots, reverse=True):
            last = self.active.pop()
            if slot < len(self.active):
                self.active[slot] = last
                moves.append(Move(len(self.active), slot, last.length - 1))
        return moves

    def find(self, sample_id: str) -> int | None:
        """The slot of a decoding sample."""
        return next((i for i, sample in enumerate(self.active) if sample.request.sample_id == sample_id), None)

    def sample(self, sample_id: str) -> LiveSample | None:
        """A decoding or waiting sample."""
        members = (sample for group in self._waiting for sample in group.members)
        return next((s for s in (*self.active, *members) if s.request.sample_id == sample_id), None)

    def withdraw(self, sample_id: str) -> LiveSample | None:
        """Take a waiting sample out of the queue."""
        for group in self._waiting:
            for sample in group.members:
                if sample.request.sample_id == sample_id:
                    group.members.remove(sample)
                    self._drop_empty()
                    return sample
        return None

    def forget_prefills(self) -> None:
        """Drop the KV of waiting groups: the weights that made it are gone."""
        for group in self._waiting:
            group.kv = group.draft = None

    def _drop_empty(self) -> None:
        self._waiting = deque(group for group in self._waiting if group.members)
