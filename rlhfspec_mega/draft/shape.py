"""The shape of an EAGLE-3 draft (Li et al. 2025, arXiv 2503.01840): one decoder layer reading its target's states."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.types import TensorInfo

TAPS = 3  # hidden states of the target that a draft reads: low, middle, high


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft; RoPE, norm epsilon and positions are its target's.

    Raises UserError for a vocabulary of fewer than 2 tokens.

    Attributes:
        vocab_size: of the draft's output head; less than the target's when the vocabulary is reduced.
        taps: target layers whose outputs are read (0 is the output of the first layer), low to high.
    """

    target: ModelShape
    vocab_size: int
    taps: tuple[int, int, int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.vocab_size < 2:  # with one token there is nothing to choose
            raise UserError(f"A draft's vocabulary of {self.vocab_size} is too small; give it at least 2 tokens.")

    @property
    def hidden_size(self) -> int:
        """Equal to the target's, since the two share the embedding."""
        return self.target.hidden_size

    @property
    def parameters(self) -> int:
        """Number of weights, without the target's embedding."""
        hidden = self.hidden_size
        attention = hidden * self.head_dim * (2 * (self.num_heads + 2 * self.num_kv_heads) + self.num_heads)
        return TAPS * hidden * hidden + attention + 3 * hidden * self.ffn_size + (self.vocab_size + 4) * hidden


def draft_shape(target: ModelShape, vocab_size: int | None = None, ffn_size: int | None = None) -> DraftShape:
    """The usual draft of a target: a layer of the target's own sizes; taps after an early, the middle and a late layer.

    Args:
        vocab_size: of a reduced draft vocabulary; None: the target's.
        ffn_size: of a feed-forward network of another width; None: the target's.
    """
    layers = target.num_layers
    return DraftShape(
        target=target,
        vocab_size=vocab_size or target.vocab_size,
        # The output of the very last layer is left to the head: serving engines cannot tap it.
        taps=(min(1, max(layers - 4, 0)), max(layers // 2 - 1, 0), max(layers - 2, 0)),
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        ffn_size=target.ffn_size if ffn_size is None else ffn_size,
    )


def draft_tensors(shape: DraftShape) -> list[TensorInfo]:
    """Name and shape of every weight of a draft, as DraftModel.tensors() has them, in float32."""
    hidden, layer = shape.hidden_size, "midlayer."
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "fc": (hidden, TAPS * hidden),
        f"{layer}hidden_norm": (hidden,),
        f"{layer}input_layernorm": (hidden,),
        f"{layer}self_attn.q_proj": (q_rows, 2 * hidden),
        f"{layer}self_attn.k_proj": (kv_rows, 2 * hidden),
        f"{layer}self_attn.v_proj": (kv_rows, 2 * hidden),
        f"{layer}self_attn.o_proj": (hidden, q_rows),
        f"{layer}post_attention_layernorm": (hidden,),
        f"{layer}mlp.gate_proj": (shape.ffn_size, hidden),
        f"{layer}mlp.up_proj": (shape.ffn_size, hidden),
        f"{layer}mlp.down_proj": (hidden, shape.ffn_size),
        "norm": (hidden,),
        "lm_head": (shape.vocab_size, hidden),
    }
    return [TensorInfo(f"{name}.weight", size, "float32") for name, size in sizes.items()]
