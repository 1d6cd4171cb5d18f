"""The draft's differentiable forward with training-time test (EAGLE-3, Li et al. 2025, arXiv 2503.01840).

Step 1 reads the target's states, as the first draft step of decoding does. Step j continues the branch of each root:
it reads the state that the branch put out at step j - 1, attends to the real entries up to the root and to the branch's
own later ones, and embeds the sequence's own tokens, since only accepted paths are continued to any use. All that a
branch computes is kept at its root's place, so that an entry meets its branch's earlier entries on the diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfspec_mega.draft.examples import LOOKAHEAD, Example
from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.models.rope import rope_table

_Rotation = tuple[Tensor, Tensor]  # cos and sin [N, 1, head_dim]
_NORM, _LAYER, _ATTENTION = "norm", "midlayer.", "midlayer.self_attn."


class Batch:
    """The entries of some sequences one after another, and its cells: the response tokens to predict.

    A sequence of T tokens has T - 2 entries; entry t reads features t, embeds token t + 1 and predicts token t + 2.
    A sequence's cells are its last entries, those that predict response tokens, in order.

    Args:
        examples: with at least one token to predict each; moved to `device`.

    Attributes:
        inputs: int64 [E], token t + 1 of each entry.
        features: float32 [E, 3 * hidden].
        states: float32 [C, hidden], of each cell the target's state t + 1, from which it samples token t + 2.
        entries, cells: int64 [B], how many of each, per sequence.
        sequences, positions: int64 [E], of each entry its sequence and its place there.
        rows, columns: int64 [C], the same of each cell.
        left: int64 [C], cells from each on to the end of its sequence.
        root_entries: int64 [C], the entry that predicts each cell.
    """

    def __init__(self, examples: Sequence[Example], device: torch.device | str = "cpu"):
        def joined(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(tensors)).to(device)

        self.inputs = joined([example.tokens[1:-1] for example in examples])
        self.features = joined([example.features[:-LOOKAHEAD] for example in examples]).float()
        self.states = joined([example.states[-1 - example.predicted : -1] for example in examples]).float()
        self.entries = torch.tensor([len(example.tokens) - LOOKAHEAD for example in examples], device=device)
        self.cells = torch.tensor([example.predicted for example in examples], device=device)
        self.sequences, self.positions = _numbered(self.entries)
        self.rows, self.columns = _numbered(self.cells)
        self.left = self.cells[self.rows] - self.columns
        self.root_entries = self.entries.cumsum(0)[self.rows] - self.left

    def grid_bias(self) -> Tensor:
        """[B, columns, entries]: 0 where the root of a column sees an entry, minus infinity elsewhere."""
        entry = torch.arange(int(self.entries.max()), device=self.entries.device)
        column = torch.arange(int(self.cells.max()), device=self.entries.device)
        last_seen = (self.entries - self.cells)[:, None] + column
        hidden = entry > last_seen[..., None]
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


class Prediction(NamedTuple):
    """What the branches that reach so far predict at one step.

    Attributes:
        states: float32 [N, hidden], what Network.logits reads.
        roots: int64 [N], cells of the batch at which the branches begin.
        cells: int64 [N], cells predicted: `roots` + step - 1.
    """

    states: Tensor
    roots: Tensor
    cells: Tensor


class Network:
    """Computes what draft.model.DraftModel computes, with gradients, for every root of a batch at once.

    Each step's attention takes a few float32 tensors [heads, sequences, longest cells, longest entries], which a
    gradient keeps.

    Args:
        weights: by DraftModel.tensors() names; read anew by every call.
        embedding: the target's, float32 [vocab, hidden].
    """

    def __init__(self, shape: DraftShape, weights: Mapping[str, Tensor], embedding: Tensor):
        self.shape, self._weights, self._embedding = shape, weights, embedding

    def unroll(self, batch: Batch, steps: int) -> Iterator[Prediction]:
        """Predictions of steps 1, 2, ... as long as there are branches."""
        cos, sin = rope_table(self.shape.target, int(batch.entries.max()), batch.inputs.device)

        def rotation(positions: Tensor) -> _Rotation:
            return cos[positions][:, None], sin[positions][:, None]

        states = self._linear(batch.features, "fc")
        inputs = self._normed_inputs(batch.inputs, states)
        attention = _BranchAttention(batch, *self._keys_values(inputs, rotation(batch.positions)))
        entry = batch.root_entries
        states, inputs = states[entry], inputs[entry]
        keep = torch.arange(len(entry), device=entry.device)  # the roots of the branches that reach this step
        for step in range(1, steps + 1):
            if step > 1:
                inside = batch.left[keep] >= step
                keep, states = keep[inside], states[inside]
                if not len(keep):
                    return
                inputs = self._normed_inputs(batch.inputs[entry[keep] + step - 1], states)
            turned = rotation(batch.positions[entry[keep]] + step - 1)
            query = self._rotated(self._linear(inputs, f"{_ATTENTION}q_proj"), turned)
            own = self._keys_values(inputs, turned) if step > 1 else None
            states = self._finish(states, attention(keep, query, own))
            yield Prediction(self._norm(states, _NORM), keep, keep + step - 1)

    def logits(self, states: Tensor) -> Tensor:
        """float32 [N, draft vocabulary] of predicted states [N, hidden]."""
        return self._linear(states, "lm_head")

    def _normed_inputs(self, tokens: Tensor, states: Tensor) -> Tensor:
        embedded = self._norm(F.embedding(tokens, self._embedding), f"{_LAYER}input_layernorm")
        return torch.cat((embedded, self._norm(states, f"{_LAYER}hidden_norm")), dim=-1)

    def _keys_values(self, inputs: Tensor, rotation: _Rotation) -> tuple[Tensor, Tensor]:
        keys = self._rotated(self._linear(inputs, f"{_ATTENTION}k_proj"), rotation)
        return keys, self._linear(inputs, f"{_ATTENTION}v_proj").unflatten(-1, (-1, self.shape.head_dim))

    def _rotated(self, x: Tensor, rotation: _Rotation) -> Tensor:
        """Heads [N, heads, head_dim] of x [N, heads * head_dim]."""
        x, (cos, sin) = x.unflatten(-1, (-1, self.shape.head_dim)), rotation
        return x * cos + x.roll(self.shape.head_dim // 2, dims=-1) * sin

    def _finish(self, states: Tensor, mixed: Tensor) -> Tensor:
        """States that entries put out, from those they read and the mixed values [N, heads * head_dim]."""
        x = states + self._linear(mixed, f"{_ATTENTION}o_proj")
        normed = self._norm(x, f"{_LAYER}post_attention_layernorm")
        gate, up = (self._linear(normed, f"{_LAYER}mlp.{name}") for name in ("gate_proj", "up_proj"))
        return x + self._linear(F.silu(gate) * up, f"{_LAYER}mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._weights[f"{name}.weight"], self.shape.target.norm_eps)


class _BranchAttention:
    """Attention of branches over the real entries up to their roots and over their own entries of later steps."""

    def __init__(self, batch: Batch, keys: Tensor, values: Tensor):
        """Keys and values of all entries [E, kv_heads, head_dim]."""
        self._batch, self._bias = batch, batch.grid_bias()[:, None, None]
        rows, self._columns, self._width = self._bias.shape[0], *self._bias.shape[-2:]
        at = batch.sequences * self._width + batch.positions
        # [B, kv_heads, 1, entries, head_dim]; zeros where a sequence is shorter, hidden by the bias.
        self._keys, self._values = (
            x.new_zeros(rows * self._width, *x.shape[1:])
            .index_copy(0, at, x)
            .unflatten(0, (rows, -1))
            .transpose(1, 2)[:, :, None]
            for x in (keys, values)
        )
        self._own: list[tuple[Tensor, Tensor]] = []

    def __call__(self, roots: Tensor, query: Tensor, own: tuple[Tensor, Tensor] | None) -> Tensor:
        """Mixed values [N, heads * head_dim] of query [N, heads, head_dim] of the branches begun at cells `roots` [N].

        own: keys and values [N, kv_heads, head_dim] that the branches grow by; None at step 1, whose entries are real.
        """
        cells = self._batch.rows[roots] * self._columns + self._batch.columns[roots]
        if own is not None:
            self._own.append((self._to_grid(own[0], cells), self._to_grid(own[1], cells)))
        grid = self._to_grid(query * query.shape[-1] ** -0.5, cells).unflatten(1, (self._keys.shape[1], -1))
        scores = [grid @ self._keys.transpose(-1, -2) + self._bias]
        scores += [(grid * key[:, :, None]).sum(-1, keepdim=True) for key, _ in self._own]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        mixed = weights[..., : self._width] @ self._values
        for number, (_, value) in enumerate(self._own):
            mixed = mixed + weights[..., self._width + number, None] * value[:, :, None]
        return mixed.flatten(1, 2).transpose(1, 2).flatten(2).flatten(0, 1)[cells]

    def _to_grid(self, x: Tensor, cells: Tensor) -> Tensor:
        """[B, heads, columns, head_dim] of x [N, heads, head_dim] at the given cells of the grid, zero elsewhere."""
        grid = x.new_zeros(self._bias.shape[0] * self._columns, *x.shape[1:]).index_copy(0, cells, x)
        return grid.unflatten(0, (-1, self._columns)).transpose(1, 2)


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For groups of so many elements one after another: the group of each element and its number in the group."""
    groups = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    return groups, torch.arange(len(groups), device=counts.device) - (counts.cumsum(0) - counts)[groups]
