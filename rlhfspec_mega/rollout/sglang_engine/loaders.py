"""How weights are loaded into SGLang's draft and not into its target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

DRAFTS = ("LlamaForCausalLMEagle3",)  # classes of models whose logits are perturbed and whose weights are updated


def into_draft(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """A custom weight loader: SGLang's draft worker calls it for its draft, then for the target, which is passed over.

    `tensors` are named as in the draft's directory.
    """
    if type(model).__name__ in DRAFTS:
        model.load_weights(tensors)


INTO_DRAFT = f"{__name__}.{into_draft.__name__}"  # as --custom-weight-loader and load_format name it
