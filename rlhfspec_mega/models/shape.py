"""The shape of a Llama/Qwen-family decoder, independent of who implements it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """What an architecture adds to the common decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention).

    Attributes:
        hf_class: in transformers, as config.json names it, without the head's name.
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
    "llama": Architecture("Llama"),
    "qwen2": Architecture("Qwen2", qkv_bias=True),
    "qwen3": Architecture("Qwen3", qk_norm=True, head_dim=128),
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
    `value_head`: the model ends in one number per token instead of logits, as critics and reward models do. It has no
    output layer, so nothing is tied.
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
    value_head: bool = False

    @property
    def hf_class(self) -> str:
        """The class in transformers."""
        head = "ForSequenceClassification" if self.value_head else "ForCausalLM"
        return ARCHITECTURES[self.architecture].hf_class + head

    def with_value_head(self) -> ModelShape:
        """The same decoder with a value head."""
        return replace(self, value_head=True, tie_embeddings=False)

    def identity(self) -> dict[str, Any]:
        """What two models must have in common for one to load the other's checkpoint, as JSON."""
        fields = asdict(self)
        if not self.value_head:
            del fields["value_head"]  # checkpoints without it are of models with logits
        return fields

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
        embedding = self.vocab_size * self.hidden_size
        head = self.hidden_size if self.value_head else 0 if self.tie_embeddings else embedding
        return self.num_layers * layer + embedding + head + self.hidden_size
