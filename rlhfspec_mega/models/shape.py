"""The shape of a Llama/Qwen-family decoder, independent of who implements it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """What an architecture adds to the common decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention).

    Attributes:
        hf_class: in transformers, as config.json names it.
        qkv_bias: queries, keys and values have a bias.
        qk_norm: queries and keys are normalized per head.
        head_dim: where config.json gives none; None: hidden size over heads.
    """

    hf_class: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None


# By the model_type of config.json; models/mapping/ has the names of weights of each.
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}


VOCABULARY_MULTIPLE = 128  # of rows of the embedding on a rank, Megatron's default


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding in Megatron: the vocabulary rounded up to a multiple of 128 per tensor-parallel rank."""
    multiple = VOCABULARY_MULTIPLE * tp_size
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer (RMSNorm, RoPE, SwiGLU, grouped-query attention).

    `architecture` is one of ARCHITECTURES.
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
        return ARCHITECTURES[self.architecture].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return ARCHITECTURES[self.architecture].qk_norm

    @property
    def parameters(self) -> int:
        """Number of weights, embeddings included once if tied."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        extra = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        extra += 2 * self.head_dim if self.qk_norm else 0
        layer = attention + extra + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size
