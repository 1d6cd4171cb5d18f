"""Megatron shards of one pipeline stage as full Hugging Face tensors, bucket by bucket."""

from __future__ import annotations

import torch

from rlhfspec_mega.actor.actor import Actor, on_megatron
from rlhfspec_mega.actor.weights import MappedParameter, mapped_parameters, merge_parameter
from rlhfspec_mega.resharding.buckets import Bucket


class WeightExporter:
    """Merges the parameters a bucket asks for; holds at most one merged parameter beyond the bucket itself."""

    def __init__(self, actor: Actor) -> None:
        self._shape = actor.shape
        self._by_name: dict[str, MappedParameter] = {
            name: mapped
            for mapped in mapped_parameters(actor.chunks, actor.shape)
            if not mapped.is_tied_copy
            for name in mapped.hf_names
        }

    def names(self) -> list[str]:
        """Hugging Face names of the tensors that this pipeline stage holds."""
        return list(self._by_name)

    @on_megatron
    def gather(self, bucket: Bucket) -> dict[str, torch.Tensor] | None:
        """Full tensors of a bucket on the stage's first tensor-parallel rank, None on the others; collective over TP.

        A parameter is gathered once for all its tensors (Q, K and V of one `linear_qkv`) when they share a bucket.
        """
        tensors: dict[str, torch.Tensor] = {}
        is_first = True
        for name in dict.fromkeys(piece.name for piece in bucket.pieces):
            if name in tensors:
                continue
            merged = merge_parameter(self._by_name[name], self._shape)
            is_first = merged is not None
            wanted = {piece.name for piece in bucket.pieces}
            # The same order on every rank decides what is gathered: the others note the names without the values.
            names = self._by_name[name].hf_names
            tensors |= {n: merged[n] if merged else torch.empty(0) for n in names if n in wanted}
        return tensors if is_first else None
