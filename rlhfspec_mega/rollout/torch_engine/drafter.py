"""The draft model in the engine: it processes accepted tokens, then grows a tree of draft tokens layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch

from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.shape import TAPS, DraftShape
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.planning.memory import LOGITS_AT_ONCE
from rlhfspec_mega.planning.tree import (
    BACKLOG,
    ROOT,
    STEPS_KEPT,
    Batch,
    Bools,
    DraftingPolicy,
    DraftTree,
    Ints,
    most_drafted,
)
from rlhfspec_mega.rollout.protocol import DraftPast
from rlhfspec_mega.rollout.torch_engine.cache import Inputs, KVCache
from rlhfspec_mega.rollout.torch_engine.host_attention import step_attention
from rlhfspec_mega.rollout.torch_engine.prefixes import PrefixPast, UnreadPrefixes
from rlhfspec_mega.rollout.torch_engine.slots import SlotState
from rlhfspec_mega.rollout.torch_engine.step_noise import StepNoise
from rlhfspec_mega.rollout.torch_engine.tree_layers import (
    best_children,
    layer_inputs,
    masks_below,
    seen_before,
    unread_places,
    with_room,
)
from rlhfspec_mega.rollout.torch_engine.unread import Features, Unread

# Share of a batch that the draft follows, below which nothing is drafted.
FOLLOWED_SHARE = 7 / 8
# Tokens from which on it pays to compute only keys and values of those whose outputs nobody reads, in products of their
# own: that takes a quarter to two fifths of the arithmetic, but a dozen more calls. Estimated from what calls take, not
# measured one by one.
APART = {"cpu": 8, "cuda": 1024}


@dataclass
class GrownTree:
    """A draft tree with its tokens.

    Attributes:
        tokens: [nodes].
    """

    tree: DraftTree = field(default_factory=DraftTree)
    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


class _Entries(NamedTuple):
    """Tokens that the draft reads.

    Attributes:
        at: int64 [3, N], slot of each, its number among those of the slot, and its entry's place in the cache.
        further: bool [N], whether others of the same slot follow.
        tokens: int64 [N], on the draft's device.
        states: [N, hidden], what the entries read.
    """

    at: Ints
    further: Bools
    tokens: torch.Tensor
    states: torch.Tensor

    def some(self, chosen: Bools) -> _Entries:
        """Those of them."""
        indices = np.flatnonzero(chosen)
        here = torch.from_numpy(indices).to(self.tokens.device)
        return _Entries(self.at.take(indices, axis=1), self.further[indices], self.tokens[here], self.states[here])


class Drafter:
    """The draft's weights, its KV cache, and the tokens that it has not read yet, by slot.

    Entry t of the cache is computed from the target's hidden states at position t and the token at t + 1. Entries of
    tree nodes lie behind the sample's committed entries. "Reading" a token means to compute its entry.

    Args:
        policy: decides how deep to draft and which nodes to expand.
        vocabulary: int64 [draft vocabulary], the target's token id of each token of the draft; None: the two
            vocabularies are the same.

    Attributes:
        max_unread: most unread tokens that a slot can hold.
        unread: accepted tokens that have no entry yet.
    """

    def __init__(
        self,
        shape: DraftShape,
        target: Transformer,
        policy: DraftingPolicy,
        *,
        slots: int,
        vocabulary: torch.Tensor | None = None,
    ):
        self.model = DraftModel(shape, target)
        same = np.zeros(0, np.int64)  # where the two vocabularies are the same
        self._host_ids = same if vocabulary is None else vocabulary.cpu().numpy()
        if vocabulary is not None:
            self.model.target_ids = vocabulary.to(target.embedding.device)
        self.policy = policy
        weights = target.embedding
        self._most_drafted = most_drafted(policy)
        places = target.max_positions + self._most_drafted
        self.cache = KVCache(shape, slots=slots, places=places, dtype=weights.dtype, device=weights.device)
        self.max_unread = BACKLOG + policy.max_depth + 1
        width = TAPS * shape.hidden_size
        self.unread = Unread(slots, self.max_unread, width, dtype=weights.dtype, device=weights.device)
        self._read = np.zeros(slots, np.int64)
        self._prefixes: list[PrefixPast | None] = [None] * slots  # where the KV of the prefix is not in the cache yet
        self._unread_prefixes: WeakSet[UnreadPrefixes] = WeakSet()  # those that somebody may still ask for

    # Samples in slots

    def new_prefixes(self, tokens: torch.Tensor, lengths: Ints) -> UnreadPrefixes:
        """For a prefill of prefixes [n, longest + 1] of these lengths."""
        found = UnreadPrefixes(self.model, tokens, lengths)
        self._unread_prefixes.add(found)
        return found

    def bound_prefixes(self) -> None:
        """Read prefixes if states of more than STEPS_KEPT positions for each slot are kept."""
        room = STEPS_KEPT * len(self._read)
        for prefixes in sorted(self._unread_prefixes, key=lambda one: -one.size):
            if sum(one.size for one in self._unread_prefixes) <= room:
                break
            prefixes.read()
            waiting = [slot for slot, past in enumerate(self._prefixes) if past and past.prefixes is prefixes]
            self._read_prefixes(waiting)

    def admit(self, slot: int, past: DraftPast | PrefixPast | None, tokens: Sequence[int]) -> None:
        """Put a sample with these tokens into a slot; with `past` None, nothing is drafted for it."""
        self._read[slot], self._prefixes[slot] = 0, None
        self.unread.end(slot)
        if isinstance(past, PrefixPast):
            self._read[slot], self._prefixes[slot] = past.entries, past
        elif past is not None:
            self.cache.fill(slot, 1, past.kv)
            self._read[slot] = past.kv.shape[3]
        if past is not None:
            self.unread.begin(slot, past.features, tokens)

    def empty_past(self) -> DraftPast:
        """The draft's state for a sample of one token, of which there is nothing to read yet."""
        return DraftPast(self.cache.prefix(0, 0), self.unread.features[0, :0])

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another."""
        read = self._read[target] = self._read[source]
        if read and self._prefixes[source] is None:
            self.cache.move(source, target, int(read))
        self._prefixes[target], self._prefixes[source] = self._prefixes[source], None
        self.unread.move(source, target)

    def tap(self) -> Features | None:
        """What keeps the target's states in a step, if any sample is followed."""
        return Features(self.model.shape.taps) if self.unread.following else None

    def follows_most(self, batch: int) -> bool:
        """Whether nearly all of the first samples are followed."""
        return bool(np.count_nonzero(self.unread.followed(batch)) >= FOLLOWED_SHARE * batch)

    def leave(self, slot: int) -> None:
        """The sample in a slot has ended or moved away."""
        self._prefixes[slot] = None
        self.unread.end(slot)

    def backlog(self, batch: int) -> int:
        """Tokens that the first slots' samples have for the draft to read, those of prefixes included."""
        prefixes = {id(past.prefixes): past.prefixes.size for past in self._prefixes[:batch] if past is not None}
        return int(self.unread.counts[:batch].sum()) + sum(prefixes.values())

    def has_state(self, slot: int) -> bool:
        """Whether the draft has a state for a slot's sample; if not, nothing is drafted for it."""
        return bool(self.unread.followed(slot + 1)[slot])

    def past(self, slot: int, with_kv: bool = True) -> DraftPast | None:
        """The draft's state for a slot's sample, as `admit` takes it; None if there is none.

        Args:
            with_kv: if false, the KV in it is empty.
        """
        if not self.has_state(slot):
            return None
        self.unread.gather()
        if with_kv:
            self._read_prefixes([slot])
        kv = self.cache.prefix(slot, int(self._read[slot]) if with_kv else 0).clone()
        return DraftPast(kv, self.unread.features[slot, : self.unread.counts[slot]].clone())

    def committed_positions(self, slot: int) -> int:
        """Number of committed entries of a slot's sample; 0 if the draft has no state for it."""
        return int(self._read[slot])

    def catch_up_draft(self, slots: Sequence[int], batch: int) -> None:
        """Run the draft over all but the newest unread token of each of these slots, before their samples migrate.

        A token's entry in the draft's KV cache is smaller to copy than the features of an unread token. The newest one
        stays unread, since a slot without unread tokens cannot be drafted for in the next step.

        Args:
            batch: slots in use; `slots` are among the first so many.
        """
        counts = np.zeros(batch, np.int64)
        counts[list(slots)] = np.maximum(self.unread.counts[list(slots)] - 1, 0)
        if counts.any():
            self._cache_entries(self._taken(counts))
        else:
            self._read_prefixes(slots)

    # Drafting

    def can_draft(self, batch: Batch) -> Bools:
        """bool [batch]: samples that the draft has a state for and that may still get more than one token."""
        return (self.unread.counts[: batch.size] > 0) & (batch.remaining > 1)

    def make_room(self, batch: int) -> None:
        """Read all tokens if a slot might not have room for those of another step; then nothing can be drafted."""
        if self.unread.longest >= BACKLOG and self.unread.counts[:batch].max() >= BACKLOG:
            self._cache_entries(self._taken(self.unread.counts[:batch].copy()))

    def grow(self, batch: Batch, slots: SlotState, noise: StepNoise, depth: int) -> GrownTree:
        """Grow a tree of up to `depth` layers; the policy chooses the nodes to expand and may stop earlier."""
        grown, able = GrownTree(), np.flatnonzero(self.can_draft(batch))
        tree = grown.tree
        if not len(able):
            self.make_room(batch.size)
            return grown
        states = self._read_unread(self.unread.counts[: batch.size].copy())
        if len(able) < batch.size:
            states = states[torch.from_numpy(able).to(states.device)]
        rows, parents = able, np.full(len(able), ROOT)
        used = np.zeros(batch.size, np.int64)
        above = np.zeros((len(able), 0), np.bool_)  # for each of `states`, which expanded nodes are its ancestors
        while True:
            width = self._add_layer(grown, slots, noise, rows, parents, states)
            nodes = self.policy.expand(batch, tree)
            if tree.depth >= depth:
                return grown
            nodes, columns = with_room(
                nodes, tree.rows, tree.ends, batch.remaining, tree.depth, used, self._most_drafted
            )
            if not len(nodes):
                return grown
            sources = (nodes - tree.layers[-1]) // width
            above = masks_below(above, sources, columns)
            rows, parents = tree.rows[nodes], nodes
            parents_states = states[torch.from_numpy(sources).to(states.device)]
            states = self._draft_from(grown, nodes, columns, above, parents_states, batch.size)

    def _add_layer(
        self, grown: GrownTree, slots: SlotState, noise: StepNoise, rows: Ints, parents: Ints, states: torch.Tensor
    ) -> int:
        """Add a layer with the best children of each of the nodes `parents`.

        Args:
            rows, parents: slot and index of each parent node.
            states: the draft's outputs at the parents.

        Returns:
            the number of children of each parent.
        """
        tree, ids = grown.tree, self.model.target_ids
        most = self.model.shape.vocab_size
        wanted, at_once = min(max(self.policy.width, 2), most), LOGITS_AT_ONCE // self.model.shape.target.vocab_size
        depths, pieces = np.full(len(rows), tree.depth), []
        for first in range(0, len(states), max(1, at_once)):
            some = slice(first, first + max(1, at_once))
            pieces.append(noise.best(self.model.logits(states[some]), rows[some], depths[some], wanted, ids))
        columns, scores = pieces[0] if len(pieces) == 1 else map(np.concatenate, zip(*pieces, strict=True))
        width = min(self.policy.width, most)
        stops = slots.host_stops, slots.host_forced
        made, gaps, ends = best_children(columns, scores, rows, parents, width, self._host_ids, *stops)
        tokens, children, parents, ranks = made
        tree.add_layer(children, parents, ranks, gaps, ends)
        grown.tokens = np.concatenate((grown.tokens, tokens))
        return width

    def _draft_from(
        self, grown: GrownTree, nodes: Ints, columns: Ints, above: Bools, states: torch.Tensor, batch: int
    ) -> torch.Tensor:
        """Run the draft on nodes; returns its outputs.

        Args:
            nodes, columns: indices of the nodes in the tree, and places of their entries behind the committed ones.
            above: bool, the ancestors of each node by column, itself included.
            states: the draft's outputs at the nodes' parents.
        """
        tree, device = grown.tree, states.device
        made, visible, queries = layer_inputs(
            self._read[:batch], tree.rows, grown.tokens, nodes, columns, above, tree.depth
        )
        tokens, positions, rows, numbers, places = torch.from_numpy(made).to(device)
        seen = torch.from_numpy(visible).to(device)
        inputs = Inputs(tokens, positions, rows, numbers, places, seen, batch, queries)
        return self.model.advance(inputs.tokens, states, inputs.positions, step_attention(self.cache, inputs))

    def _read_unread(self, counts: Ints) -> torch.Tensor:
        """Read the first counts[i] unread tokens of slot i.

        Returns:
            [batch, hidden], the draft's output at the last token read in each slot; undefined where counts[i] is 0.
        """
        entries = self._taken(counts)
        if np.count_nonzero(entries.further) >= APART[self.unread.tokens.device.type]:
            self._cache_entries(entries.some(entries.further))
            entries = entries.some(~entries.further)
            entries.at[1] = 0
        device = entries.tokens.device
        rows, columns, places = torch.from_numpy(entries.at).to(device)
        visible = torch.from_numpy(seen_before(entries.at[2])).to(device)
        queries = int(entries.at[1].max()) + 1
        inputs = Inputs(entries.tokens, places, rows, columns, places, visible, len(counts), queries)
        put_out = self.model.advance(entries.tokens, entries.states, places, step_attention(self.cache, inputs))
        if len(put_out) == len(counts) and queries == 1:
            return put_out
        last, found = np.flatnonzero(~entries.further), np.zeros(len(counts), np.int64)
        found[entries.at[0, last]] = last
        return put_out[torch.from_numpy(found).to(device)]

    def _taken(self, counts: Ints) -> _Entries:
        """Of the first counts[i] unread tokens of slot i, which are unread no more, what their entries are made of."""
        self._read_prefixes(range(len(counts)))
        at, further = unread_places(self._read, counts)
        tokens, features = self.unread.take(at[0], at[1], counts)
        self._read[: len(counts)] += counts
        return _Entries(at, further, tokens, self.model.fuse(features))

    def _cache_entries(self, entries: _Entries) -> None:
        """Put the keys and values of entries whose outputs nobody reads in the cache."""
        rows, _, places = torch.from_numpy(entries.at).to(entries.tokens.device)
        self.cache.write(0, rows, places, self.model.keys_values(entries.tokens, entries.states, places))

    def _read_prefixes(self, slots: Iterable[int]) -> None:
        """Put the KV of the prefixes of these slots in the cache."""
        for slot in slots:
            if (past := self._prefixes[slot]) is not None:
                self._prefixes[slot] = None
                self.cache.fill(slot, 1, past.kv())
