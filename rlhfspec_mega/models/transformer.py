"""The Llama/Qwen2/Qwen3 decoder in plain torch, for inference: one forward for any implementation of attention.

Weights live in fused tensors (QKV in one, gate and up in one); `hf_tensors` shows them under their Hugging Face names
as contiguous row-slice views, so that loading and updating write in place and nothing is ever re-packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.host_floats import host_array
from rlhfspec_mega.models.host_kernels import rms_norm, suits_host_kernels
from rlhfspec_mega.models.host_layer import HostLayer, HostMatrix, few_rows, product
from rlhfspec_mega.models.packed_weights import PackedWeights
from rlhfspec_mega.models.rope import Rotary
from rlhfspec_mega.models.shape import ModelShape


class Attention(Protocol):
    """How one forward mixes positions."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Rotated qkv [..., heads + 2 * kv_heads, head_dim] -> [..., heads, head_dim]; [...] as the tokens'."""


class Tap(Protocol):
    """Called with each layer's number and its output [tokens, hidden], which is never written again: it may be kept."""

    def __call__(self, layer: int, output: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class LayerWeights:
    """One layer; matrices are [out, in]. Rows of `qkv`: all Q heads, all K heads, all V heads."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Transformer:
    """A decoder with zero weights until `load` (or writes through `hf_tensors`). Serves positions < max_positions.

    Attributes:
        few_rows: tokens up to which compiled functions compute a forward, see `host_layer`; 0: no forward.
    """

    def __init__(self, shape: ModelShape, *, max_positions: int, dtype: torch.dtype, device: torch.device | str):
        if max_positions > shape.max_positions:
            raise UserError(
                f"The model serves {shape.max_positions} positions but {max_positions} are asked for; "
                "lower the prompt and response limits or choose a model with a longer context."
            )
        self.shape = shape
        self.max_positions = max_positions

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.embedding = zeros(shape.vocab_size, shape.hidden_size)
        self.layers = [_empty_layer(shape, zeros) for _ in range(shape.num_layers)]
        self.final_norm = zeros(shape.hidden_size)
        self.head = self.embedding if shape.tie_embeddings else zeros(shape.vocab_size, shape.hidden_size)
        self.rotary = Rotary(shape, max_positions, dtype, device)
        self._packed = PackedWeights()
        self._on_host = suits_host_kernels(self.embedding)
        self.few_rows = few_rows(sum(map(torch.Tensor.numel, self._matrices())), dtype) if self._on_host else 0
        self._host_layers = [_host_layer(layer, shape.norm_eps) for layer in self.layers] if self.few_rows else []
        self._host_head = HostMatrix.of(self.head) if self.few_rows else None

    def hf_tensors(self) -> dict[str, torch.Tensor]:
        """Weights under its Hugging Face name, as a contiguous view; no lm_head.weight when embeddings are tied."""
        tensors = {"model.embed_tokens.weight": self.embedding}
        for index, layer in enumerate(self.layers):
            tensors |= {f"model.layers.{index}.{name}": t for name, t in _layer_views(self.shape, layer).items()}
        tensors["model.norm.weight"] = self.final_norm
        if not self.shape.tie_embeddings:
            tensors["lm_head.weight"] = self.head
        return tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy all weights in. Raises UserError on a missing or unknown name or a wrong shape."""
        own = self.hf_tensors()
        if missing := sorted(own.keys() - tensors.keys()):
            raise UserError(f"The weights lack {_some(missing)}; check that the directory matches the model's shape.")
        if unknown := sorted(tensors.keys() - own.keys()):
            raise UserError(f"The weights hold unknown {_some(unknown)}; check the architecture in the model's config.")
        for name, target in own.items():
            if tensors[name].shape != target.shape:
                raise UserError(
                    f"Weight {name} has shape {tuple(tensors[name].shape)}, the model needs {tuple(target.shape)}; "
                    "check the sizes in the model's config."
                )
            target.copy_(tensors[name])
        self.weights_changed()

    def weights_changed(self) -> None:
        """To be called after writing through `hf_tensors`, before the next forward."""
        self._packed.pack(self._matrices())

    def make_kernels(self, most_rows: int) -> None:
        """See PackedWeights.make_kernels."""
        layer = self.layers[0]
        products = [(weight, None) for weight in (layer.out, layer.gate_up, layer.down, self.head)]
        self._packed.make_kernels([(layer.qkv, layer.qkv_bias), *products], most_rows)

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, tap: Tap | None = None
    ) -> torch.Tensor:
        """Final normed states [..., hidden] of int64 tokens [...] at int64 positions [...]."""
        shape, heads = self.shape, self.shape.num_heads
        rotated, rotate = heads + shape.num_kv_heads, self.rotary.at(positions.flatten())
        x = F.embedding(tokens.flatten(), self.embedding)
        few = 0 < len(x) <= self.few_rows
        for index, layer in enumerate(self.layers):
            qkv = self._host_layers[index].before_attention(x) if few else self._before_attention(layer, x)
            qkv = qkv.view(len(x), -1, shape.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv[:, :heads] = self.norm(qkv[:, :heads], layer.q_norm)
                qkv[:, heads:rotated] = self.norm(qkv[:, heads:rotated], layer.k_norm)
            rotate(qkv, heads=rotated)
            mixed = attention(index, qkv.view(*tokens.shape, -1, shape.head_dim)).reshape(len(x), -1)
            x = self._host_layers[index].after_attention(x, mixed) if few else self._after_attention(layer, x, mixed)
            if tap is not None:
                tap(index, x)
        return self.norm(x, self.final_norm).view(*tokens.shape, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [..., vocab_size]."""
        states = hidden.flatten(0, -2)
        if self._host_head and 0 < len(states) <= self.few_rows:
            found = product(states, self._host_head)
        else:
            found = self._packed.linear(states, self.head)
        return found.float().unflatten(0, hidden.shape[:-1])

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of x [..., hidden] with the model's epsilon."""
        if self._on_host and x.dim() == 2:
            return rms_norm(x, weight, self.shape.norm_eps)
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def _before_attention(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        return self._packed.linear(self.norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)

    def _after_attention(self, layer: LayerWeights, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = self._packed.added(x, mixed, layer.out)
        gate, up = self._packed.linear(self.norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        return self._packed.added(x, F.silu(gate).mul_(up), layer.down)

    def _matrices(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self.head


def causal_attention(shape: ModelShape) -> Attention:
    """Attention of whole sequences from position 0; padding belongs at the end."""

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.transpose(1, 2).split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    return attend


@torch.no_grad()
def sequence_logprobs(
    model: Transformer, tokens: torch.Tensor, *, temperature: float = 1.0, chunk: int = 2048
) -> torch.Tensor:
    """Log-probabilities float32 [B, T - 1] of tokens[:, 1:] given what precedes them.

    Args:
        tokens: int64 [B, T], padded at the end; values at padding mean nothing.
        temperature: log_softmax(logits / temperature); 0 counts as 1.
        chunk: positions whose logits exist at once.
    """
    if tokens.shape[1] > model.max_positions:
        raise UserError(f"A sequence of {tokens.shape[1]} tokens exceeds the model's {model.max_positions} positions.")
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    hidden = model.hidden(tokens, positions, causal_attention(model.shape))[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].reshape(-1, 1)
    pieces = []
    for states, chosen in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = model.logits(states).div_(temperature or 1.0)
        pieces.append(logits.log_softmax(dim=-1).gather(1, chosen))
    return torch.cat(pieces).view(tokens.shape[0], -1)


class _Zeros(Protocol):
    def __call__(self, *size: int) -> torch.Tensor: ...


def _empty_layer(shape: ModelShape, zeros: _Zeros) -> LayerWeights:
    hidden, head_dim = shape.hidden_size, shape.head_dim
    qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    return LayerWeights(
        input_norm=zeros(hidden),
        qkv=zeros(qkv_rows, hidden),
        qkv_bias=zeros(qkv_rows) if shape.qkv_bias else None,
        q_norm=zeros(head_dim) if shape.qk_norm else None,
        k_norm=zeros(head_dim) if shape.qk_norm else None,
        out=zeros(hidden, shape.num_heads * head_dim),
        post_norm=zeros(hidden),
        gate_up=zeros(2 * shape.ffn_size, hidden),
        down=zeros(hidden, shape.ffn_size),
    )


def _host_layer(layer: LayerWeights, epsilon: float) -> HostLayer:
    """In the memory of the same tensors."""
    bias = layer.qkv.new_empty(0) if layer.qkv_bias is None else layer.qkv_bias
    qkv, out, gate_up, down = map(HostMatrix.of, (layer.qkv, layer.out, layer.gate_up, layer.down))
    norms = host_array(layer.input_norm), host_array(layer.post_norm)
    return HostLayer(norms[0], qkv, host_array(bias), out, norms[1], gate_up, down, np.float32(epsilon))


def _layer_views(shape: ModelShape, layer: LayerWeights) -> dict[str, torch.Tensor]:
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    views = {"input_layernorm.weight": layer.input_norm}
    for part, tensor in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if tensor is not None:
            for name, view in zip("qkv", tensor.split((q_rows, kv_rows, kv_rows)), strict=True):
                views[f"self_attn.{name}_proj.{part}"] = view
    if layer.q_norm is not None and layer.k_norm is not None:
        views |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    gate, up = layer.gate_up.chunk(2)
    return views | {
        "self_attn.o_proj.weight": layer.out,
        "post_attention_layernorm.weight": layer.post_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down,
    }


def _some(names: list[str], shown: int = 5) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest
