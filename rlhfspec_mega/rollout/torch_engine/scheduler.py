"""The engine's queue, the order of prefills and the assignment of slots; it does not compute with tensors.

A sample's *prefix* is all of its tokens but the last: the prompt, and the response so far if the sample comes from
another engine. To enter a slot it needs the KV of its prefix; the last token is the input of its first decode step.
Waiting samples with the same prefix (the members of a group) share one prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rlhfspec_mega.rollout.protocol import DraftPast, LiveSample
from rlhfspec_mega.rollout.torch_engine.prefixes import PrefixPast


@dataclass
class PrefixGroup:
    """Waiting samples with the same prefix.

    Attributes:
        kv: [layers, 2, kv_heads, len(prefix), head_dim] once the prefix is prefilled.
        draft: state of the draft for the prefix, in an engine that drafts.
    """

    prefix: tuple[int, ...]
    members: list[LiveSample]
    kv: torch.Tensor | None = None
    draft: DraftPast | PrefixPast | None = None

    @property
    def ready(self) -> bool:
        return self.kv is not None or not self.prefix


class Admission(NamedTuple):
    """Samples of one group that enter the slots from `first` on."""

    first: int
    samples: list[LiveSample]
    kv: torch.Tensor | None
    draft: DraftPast | PrefixPast | None


class Move(NamedTuple):
    """The content of a slot, with `length` cached positions, is to be moved to a lower slot."""

    source: int
    target: int
    length: int


class Scheduler:
    """Serves samples in the order of arrival, except that migrated samples are queued first.

    Attributes:
        active: the samples being decoded; the index is the slot.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.active: list[LiveSample] = []
        self._waiting: deque[PrefixGroup] = deque()

    @property
    def waiting(self) -> int:
        return sum(len(group.members) for group in self._waiting)

    @property
    def queued(self) -> bool:
        """Whether any sample waits."""
        return bool(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self.active or self._waiting)

    def enqueue(self, samples: Iterable[LiveSample]) -> None:
        """Queue new samples at the end; those whose prompt is still waiting join its group."""
        groups = {group.prefix: group for group in self._waiting}
        for sample in samples:
            prefix = sample.sequence[:-1]
            if prefix in groups:
                groups[prefix].members.append(sample)
            else:
                groups[prefix] = PrefixGroup(prefix, [sample])
                self._waiting.append(groups[prefix])

    def enqueue_first(self, sample: LiveSample, kv: torch.Tensor | None, draft: DraftPast | None) -> None:
        """Queue a sample from another engine ahead of all others."""
        self._waiting.appendleft(PrefixGroup(sample.sequence[:-1], [sample], kv, draft))

    def prefixes_in_slots(self, version: int) -> list[tuple[PrefixGroup, int]]:
        """The next groups in the queue, as far as there are free slots, that lack their prefix's KV, which the slot of
        another member has; and that slot. Those behind a group that needs a prefill wait.

        Args:
            version: of the weights; KV of other ones is no use.
        """
        found, room = list[tuple[PrefixGroup, int]](), self.slots - len(self.active)
        slots: dict[str, int] | None = None
        for group in self._waiting:
            if room <= 0:
                break
            if not group.ready:
                if slots is None:
                    known = (i for i, one in enumerate(self.active) if one.versions[:1] == [version])
                    slots = {self.active[i].request.group_id: i for i in known}
                slot = slots.get(group.members[0].request.group_id)
                if slot is None or self.active[slot].request.prompt_tokens[:-1] != group.prefix:
                    break
                found.append((group, slot))
            room -= len(group.members)
        return found

    def next_prefill(self, max_tokens: int) -> list[PrefixGroup]:
        """Groups to prefill together, in queue order: enough to fill the free slots, at most `max_tokens` when padded.

        The first group is included whatever its length. Empty while prefilled groups suffice for the free slots.
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
        """Free these slots; returns the moves, in order, that keep the active slots in front."""
        moves = []
        for slot in sorted(slots, reverse=True):
            last = self.active.pop()
            if slot < len(self.active):
                self.active[slot] = last
                moves.append(Move(len(self.active), slot, last.length - 1))
        return moves

    def find(self, sample_id: str) -> int | None:
        """The slot of a sample; None if it is not being decoded."""
        return next((i for i, sample in enumerate(self.active) if sample.request.sample_id == sample_id), None)

    def withdraw(self, sample: LiveSample) -> None:
        """Remove a waiting sample from the queue."""
        for group in self._waiting:
            group.members = [one for one in group.members if one is not sample]
        self._drop_empty()

    def forget_prefills(self) -> None:
        """Drop the KV of waiting groups, because it was computed with earlier weights."""
        for group in self._waiting:
            group.kv = group.draft = None

    def _drop_empty(self) -> None:
        self._waiting = deque(group for group in self._waiting if group.members)
