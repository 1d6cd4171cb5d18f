"""The draft at work in an engine: reads accepted tokens, then grows a tree of draft tokens layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.shape import TAPS, DraftShape
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.planning.memory import LOGITS_AT_ONCE
from rlhfspec_mega.planning.tree import BACKLOG, ROOT, Batch, Bools, DraftingPolicy, DraftTree, Ints, most_drafted
from rlhfspec_mega.rollout.protocol import DraftPast
from rlhfspec_mega.rollout.torch_engine.cache import CachedAttention, Inputs, KVCache, number_in_row
from rlhfspec_mega.rollout.torch_engine.slots import SlotState, StepNoise


class Features:
    """A tap (`models.transformer.Tap`) that keeps what a draft reads of its target's forward.

    Args:
        layers: whose outputs; a layer may be named twice.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._outputs: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, output: torch.Tensor) -> None:
        if layer in self._layers:
            self._outputs[layer] = output

    def concatenated(self) -> torch.Tensor:
        """[tokens, layers * hidden] of the last forward, in the order in which the layers were named."""
        return torch.cat([self._outputs[layer] for layer in self._layers], dim=-1)


class Grown:
    """A draft tree with the tokens of its nodes: int64 [nodes] on the device, and how many nodes were drafted from."""

    def __init__(self, device: torch.device) -> None:
        self.tree = DraftTree()
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self.drafted = 0


class Drafter:
    """The draft's weights, its KV cache and what it has still to read, in slot order.

    Entry t of the cache holds the target's states at position t and the token at t + 1. Entries of nodes lie behind
    the settled ones of the longest sample, in every slot at the same places.

    Args:
        policy: decides how deep and from which nodes to draft.
        vocabulary: int64 [draft vocabulary], the target's token of each of the draft's; None: they are the same.

    Attributes:
        room: unread tokens that a slot can hold.
        unread: int64 on the host [slots], accepted tokens that have no entry yet.
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
        if vocabulary is not None:
            self.model.target_ids = vocabulary.to(target.embedding.device)
        self.policy = policy
        weights = target.embedding
        self._most_drafted = most_drafted(policy)
        places = target.max_positions + self._most_drafted
        self.cache = KVCache(shape, slots=slots, places=places, dtype=weights.dtype, device=weights.device)
        self.room = BACKLOG + policy.max_depth + 1
        size = (slots, self.room, TAPS * shape.hidden_size)
        self._features = torch.zeros(size, dtype=weights.dtype, device=weights.device)
        self._tokens = torch.zeros(slots, self.room, dtype=torch.int64, device=weights.device)
        self._read = np.zeros(slots, np.int64)
        self._follows = np.zeros(slots, np.bool_)  # false: the sample came without what the draft needs of its past
        self.unread = np.zeros(slots, np.int64)

    # Samples in slots

    def admit(self, slot: int, past: DraftPast | None, tokens: Sequence[int]) -> None:
        """A sample of these tokens takes a slot; without its past it is not drafted for."""
        self._follows[slot] = past is not None
        self._read[slot] = self.unread[slot] = 0
        if past is not None:
            unread = len(past.features)
            self.cache.fill(slot, 1, past.kv)
            self._read[slot], self.unread[slot] = past.kv.shape[3], unread
            self._features[slot, :unread] = past.features
            self._tokens[slot, :unread] = torch.tensor(tokens[len(tokens) - unread :], device=self._tokens.device)

    def no_past(self) -> DraftPast:
        """Of a sample of one token: the draft has nothing to read yet."""
        return DraftPast(self.cache.prefix(0, 0), self._features[0, :0])

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another."""
        self.cache.move(source, target, int(self._read[source]))
        unread = int(self.unread[source])
        for values in (self._features, self._tokens):
            values[target, :unread] = values[source, :unread]
        for array in (self._read, self._follows, self.unread):
            array[target] = array[source]

    def follows(self, slot: int) -> bool:
        """Whether a slot's sample is drafted for."""
        return bool(self._follows[slot])

    def past(self, slot: int, with_kv: bool = True) -> DraftPast | None:
        """What `admit` takes of a slot's sample; None if it is not drafted for. Without KV, that part is empty."""
        if not self._follows[slot]:
            return None
        kv = self.cache.prefix(slot, int(self._read[slot]) if with_kv else 0).clone()
        return DraftPast(kv, self._features[slot, : self.unread[slot]].clone())

    def accept(
        self, rows: torch.Tensor, columns: torch.Tensor, features: torch.Tensor, tokens: torch.Tensor, counts: Ints
    ) -> None:
        """Note the target's states and choices of a step: column i of a row is its i-th new token, of counts[row]."""
        places = torch.from_numpy(self.unread).to(rows.device)[rows] + columns
        self._features[rows, places] = features
        self._tokens[rows, places] = tokens
        self.unread[: len(counts)] += np.where(self._follows[: len(counts)], counts, 0)

    def settled(self, slot: int) -> int:
        """Entries of a slot's sample that no longer change; 0 where it is not drafted for."""
        return int(self._read[slot])

    def read_ahead(self, slots: Sequence[int], batch: int) -> None:
        """Make entries of all but the newest unread token of these slots: features are larger than entries to copy.

        The newest one is left: a slot without unread tokens could not be drafted for in the next step.
        """
        counts = np.zeros(batch, np.int64)
        counts[list(slots)] = np.maximum(self.unread[list(slots)] - 1, 0)
        if not counts.any():
            return
        self._read_unread(counts)
        for slot in np.flatnonzero(counts):
            left = slice(int(counts[slot]), int(counts[slot] + self.unread[slot]))
            for values in (self._features, self._tokens):
                values[slot, : self.unread[slot]] = values[slot, left].clone()

    # Drafting

    def can_draft(self, batch: Batch) -> Bools:
        """bool [batch]: samples that the draft follows, and of which more than one token is still to come."""
        return self._follows[: batch.size] & (self.unread[: batch.size] > 0) & (batch.remaining > 1)

    def make_room(self, batch: int) -> None:
        """Read everything when a slot could not hold another step's tokens unread; nothing can be drafted after it."""
        if self.unread[:batch].max(initial=0) >= BACKLOG:
            self._read_unread(self.unread[:batch].copy())

    def grow(self, batch: Batch, slots: SlotState, noise: StepNoise, depth: int) -> Grown:
        """A tree of up to `depth` layers, as deep and as wide as the policy wants it."""
        grown, able = Grown(self._tokens.device), np.flatnonzero(self.can_draft(batch))
        tree = grown.tree
        if not len(able):
            self.make_room(batch.size)
            return grown
        states = self._read_unread(self.unread[: batch.size].copy())
        if len(able) < batch.size:
            states = states[torch.from_numpy(able).to(states.device)]
        rows, parents = able, np.full(len(able), ROOT)
        used = np.zeros(batch.size, np.int64)
        above = np.zeros((len(able), 0), np.bool_)  # by place, the drafted nodes on the way to each of `states`
        while True:
            width = self._add_layer(grown, slots, noise, rows, parents, states)
            nodes = self.policy.expand(batch, tree)
            nodes = nodes[~tree.ends[nodes] & (batch.remaining[tree.rows[nodes]] - 1 > tree.depth)]
            columns = used[tree.rows[nodes]] + number_in_row(tree.rows[nodes])
            fits = columns < self._most_drafted
            nodes, columns = nodes[fits], columns[fits]
            if not len(nodes) or tree.depth >= depth:
                return grown
            sources = (nodes - tree.layers[-1]) // width
            above = _extended(above[sources], columns)
            rows, parents = tree.rows[nodes], nodes
            used[: batch.size] += np.bincount(rows, minlength=batch.size)
            parents_states = states[torch.from_numpy(sources).to(states.device)]
            states = self._draft_from(grown, nodes, columns, above, parents_states, batch.size)
            grown.drafted += len(nodes)

    def _add_layer(
        self, grown: Grown, slots: SlotState, noise: StepNoise, rows: Ints, parents: Ints, states: torch.Tensor
    ) -> int:
        """Add the best children of nodes `parents` of `rows`, whose entries put out `states`; children of each."""
        tree, device_rows = grown.tree, torch.from_numpy(rows).to(states.device)
        ids = self.model.target_ids
        most = self.model.shape.vocab_size
        at_once = max(1, LOGITS_AT_ONCE // self.model.shape.target.vocab_size)
        pieces = []
        for some, their_rows in zip(states.split(at_once), device_rows.split(at_once), strict=True):
            _, scores = noise.scores(self.model.logits(some), their_rows, tree.depth, ids)
            pieces.append(scores.topk(min(max(self.policy.width, 2), most), dim=-1))
        values, indices = map(torch.cat, zip(*pieces, strict=True))
        width = min(self.policy.width, most)
        tokens = indices[:, :width].flatten()
        tokens = tokens if ids is None else ids[tokens]
        ends = slots.ends(device_rows.repeat_interleave(width), tokens)
        gaps = (values[:, 0] - values[:, 1]).cpu().numpy()
        ranks = np.tile(np.arange(width), len(rows))
        tree.add_layer(
            np.repeat(rows, width), np.repeat(parents, width), ranks, np.repeat(gaps, width), ends.cpu().numpy()
        )
        grown.tokens = torch.cat((grown.tokens, tokens))
        return width

    def _draft_from(
        self, grown: Grown, nodes: Ints, columns: Ints, above: Bools, states: torch.Tensor, batch: int
    ) -> torch.Tensor:
        """Run the draft on nodes; what their entries put out. `states` are those their parents' entries put out."""
        tree, device = grown.tree, states.device
        rows, settled = tree.rows[nodes], self._read[:batch]
        longest = int(settled.max())
        visible = np.concatenate((np.arange(longest) < settled[rows, None], above), axis=1)
        numbers = number_in_row(rows)
        places = (settled[rows] - 1 + tree.depth, rows, numbers, longest + columns)
        positions, device_rows, device_numbers, device_places = (torch.from_numpy(a).to(device) for a in places)
        inputs = Inputs(
            tokens=grown.tokens[torch.from_numpy(nodes).to(device)],
            positions=positions,
            rows=device_rows,
            columns=device_numbers,
            places=device_places,
            visible=torch.from_numpy(visible).to(device),
            batch=batch,
            queries=int(numbers.max()) + 1,
        )
        return self.model.advance(inputs.tokens, states, inputs.positions, CachedAttention(self.cache, inputs))

    def _read_unread(self, counts: Ints) -> torch.Tensor:
        """Make entries of the first counts[i] unread tokens of slot i; states [batch, hidden] its last entry puts out.

        The state of a slot of which nothing was read means nothing.
        """
        batch, device = len(counts), self._tokens.device
        rows = np.repeat(np.arange(batch), counts)
        columns = number_in_row(rows)
        places = self._read[rows] + columns
        end = int((self._read[:batch] + counts).max())
        device_rows, device_columns, device_places = (torch.from_numpy(a).to(device) for a in (rows, columns, places))
        inputs = Inputs(
            tokens=self._tokens[device_rows, device_columns],
            positions=device_places,
            rows=device_rows,
            columns=device_columns,
            places=device_places,
            visible=torch.arange(end, device=device) <= device_places[:, None],
            batch=batch,
            queries=int(counts.max()),
        )
        states = self.model.fuse(self._features[device_rows, device_columns])
        put_out = self.model.advance(inputs.tokens, states, inputs.positions, CachedAttention(self.cache, inputs))
        last = np.maximum(np.cumsum(counts) - 1, 0)
        self._read[:batch] += counts
        self.unread[:batch] -= counts
        return put_out[torch.from_numpy(last).to(device)]


def _extended(above: Bools, columns: Ints) -> Bools:
    """Rows of ancestors with the node's own place added."""
    extended = np.zeros((len(columns), max(above.shape[1], int(columns.max()) + 1)), np.bool_)
    extended[:, : above.shape[1]] = above
    extended[np.arange(len(columns)), columns] = True
    return extended
