"""The EAGLE-3 draft for inference: one forward for any implementation of attention; weights named as SGLang names them.

The draft's entry t reads the target's states at position t and the token at t + 1, and predicts the token at t + 2.
For draft tokens the target's states are not known yet: there an entry reads the output state of its parent's entry.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlhfspec_mega.draft.host_draft import HostDraft, most_entries
from rlhfspec_mega.draft.shape import TAPS, DraftShape
from rlhfspec_mega.models.host_kernels import suits_host_kernels
from rlhfspec_mega.models.packed_weights import PackedWeights
from rlhfspec_mega.models.transformer import Attention, Transformer


class DraftModel:
    """A draft with zero weights until they are written through `tensors`.

    Args:
        target: shares its embedding and its table of rotations with the draft.
    """

    def __init__(self, shape: DraftShape, target: Transformer):
        self.shape = shape
        self._target = target
        weights = target.embedding

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=weights.dtype, device=weights.device)

        hidden, mixed = shape.hidden_size, shape.num_heads * shape.head_dim
        self.fc = zeros(hidden, TAPS * hidden)
        self.input_norm, self.hidden_norm, self.post_norm, self.norm = (zeros(hidden) for _ in range(4))
        self.qkv = zeros((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, 2 * hidden)
        self._kv = self.qkv[mixed:]  # the part for keys and values
        self.out = zeros(hidden, mixed)
        self.gate_up = zeros(2 * shape.ffn_size, hidden)
        self.down = zeros(hidden, shape.ffn_size)
        self.head = zeros(shape.vocab_size, hidden)
        self._packed = PackedWeights()
        self._host: HostDraft | None = None
        self._few = 0  # entries for which it is used
        # Target token of each draft token; None while the two vocabularies are the same.
        self.target_ids: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights by name, as contiguous views to be written in place."""
        shape = self.shape
        q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        q, k, v = self.qkv.split((q_rows, kv_rows, kv_rows))
        gate, up = self.gate_up.chunk(2)
        return {
            "fc.weight": self.fc,
            "midlayer.hidden_norm.weight": self.hidden_norm,
            "midlayer.input_layernorm.weight": self.input_norm,
            "midlayer.self_attn.q_proj.weight": q,
            "midlayer.self_attn.k_proj.weight": k,
            "midlayer.self_attn.v_proj.weight": v,
            "midlayer.self_attn.o_proj.weight": self.out,
            "midlayer.post_attention_layernorm.weight": self.post_norm,
            "midlayer.mlp.gate_proj.weight": gate,
            "midlayer.mlp.up_proj.weight": up,
            "midlayer.mlp.down_proj.weight": self.down,
            "norm.weight": self.norm,
            "lm_head.weight": self.head,
        }

    def weights_changed(self) -> None:
        """To be called after writing through `tensors`, before the next forward."""
        matrices = self.fc, self.qkv, self.out, self.gate_up, self.down, self.head
        self._packed.pack((*matrices, self._kv))
        self._host, self._few = None, most_entries(matrices)  # the old copies are gone before new ones are made
        if suits_host_kernels(self.fc):
            norms = self.input_norm, self.hidden_norm, self.post_norm, self.norm
            self._host = HostDraft.of(self._target.embedding, norms, matrices, self._target.shape.norm_eps)

    def make_kernels(self, most_rows: int) -> None:
        """See PackedWeights.make_kernels."""
        matrices = self.fc, self.qkv, self._kv, self.out, self.gate_up, self.down, self.head
        self._packed.make_kernels([(matrix, None) for matrix in matrices], most_rows)

    def _for_few(self, entries: int) -> HostDraft | None:
        return self._host if 0 < entries <= self._few else None

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """States [N, hidden] of the target's tapped outputs [N, 3 * hidden], low to high."""
        host = self._for_few(len(features))
        return host.fuse(features) if host else self._packed.linear(features, self.fc)

    def advance(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Output states of the entries, [N, hidden].

        Args:
            tokens, positions: int64 [N], the token that each entry embeds and its position.
            states: [N, hidden], what the entries read.
        """
        shape, host = self.shape, self._for_few(len(tokens))
        qkv = host.entries_in(tokens, states) if host else self._entries_in(tokens, states, self.qkv)
        qkv = qkv.view(len(tokens), -1, shape.head_dim)
        self._target.rotary.at(positions)(qkv, heads=shape.num_heads + shape.num_kv_heads)
        mixed = attention(0, qkv).flatten(1)
        return host.entries_out(states, mixed) if host else self._entries_out(states, mixed)

    def keys_values(self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys and values [N, 2 * kv_heads, head_dim] of entries; arguments as `advance`.

        A draft has one layer. Of an entry whose output nobody reads they are all that later entries need.
        """
        shape, host = self.shape, self._for_few(len(tokens))
        kv = host.keys_values_in(tokens, states) if host else self._entries_in(tokens, states, self._kv)
        kv = kv.view(len(tokens), -1, shape.head_dim)
        self._target.rotary.at(positions)(kv, heads=shape.num_kv_heads)
        return kv

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [N, draft vocabulary] of the states that entries put out."""
        if host := self._for_few(len(states)):
            return host.logits(states)
        return self._packed.linear(self._target.norm(states, self.norm), self.head).float()

    def _entries_in(self, tokens: torch.Tensor, states: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [N, rows of the matrix], of those that it makes."""
        norm, embedded = self._target.norm, F.embedding(tokens, self._target.embedding)
        inputs = torch.cat((norm(embedded, self.input_norm), norm(states, self.hidden_norm)), dim=-1)
        return self._packed.linear(inputs, matrix)

    def _entries_out(self, states: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Output states, after attention."""
        x = self._packed.added(states, mixed, self.out)
        gate, up = self._packed.linear(self._target.norm(x, self.post_norm), self.gate_up).chunk(2, dim=-1)
        return self._packed.added(x, F.silu(gate).mul_(up), self.down)
