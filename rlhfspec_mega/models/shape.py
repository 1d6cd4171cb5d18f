"""The shape of a Llama/Qwen-family decoder, independent of who implements it."""

from __future__ import annotations

from dataclasses import dataclass

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer (RMSNorm, RoPE, SwiGLU, grouped-query attention).

    `architecture` decides the variant: qwen2 has a bias on Q, K, V; qwen3 normalises Q and K per head.
    `vocab_size` is the true (unpadded) vocabulary. `rope_scaling` is None or the "llama3" parameters of HF's config.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    rope_scaling: dict[str, float] | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "qwen3"

    @property
    def parameters(self) -> int:
        """Number of weights, embeddings included once if tied."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        extra = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        extra += 2 * self.head_dim if self.qk_norm else 0
        layer = attention + extra + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size
