"""Weight updates of SGLang's target or draft: assembles full tensors from pieces and sends them in buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.rollout.update import Piece, WeightUpdate
from rlhfspec_mega.types import TensorInfo, WeightTarget

BUCKET_BYTES = 512 * 2**20
DRAFTS = ("LlamaForCausalLMEagle3",)  # model classes of drafts whose logits are perturbed and whose weights are updated
Send = Callable[[list[tuple[str, Tensor]]], None]


def into_draft(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Custom weight loader.

    SGLang's draft worker calls it for its draft and then for the target, which it leaves alone.

    `tensors` are named as in the draft's directory.
    """
    if type(model).__name__ in DRAFTS:
        model.load_weights(tensors)


INTO_DRAFT = f"{__name__}.{into_draft.__name__}"  # as --custom-weight-loader and load_format name it


def sender(engine: Any, target: WeightTarget) -> Send:
    """Return a function that loads full tensors into the target of a started `sglang.Engine`, or into its draft.

    By default SGLang would load the target's tensors into the draft first; for the draft a custom loader skips the
    target. The function raises RunError if SGLang does not load the tensors.
    """
    how: dict[str, Any] = {"disable_draft_model": True}
    if target is WeightTarget.DRAFT:
        how = {"disable_draft_model": False, "load_format": INTO_DRAFT}

    def send(tensors: list[tuple[str, Tensor]]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=engine._serialize_tensors_per_rank(tensors, None),
            flush_cache=False,  # flushing asserts that the engine is idle, and ends it otherwise
            **how,
        )
        loading = engine.tokenizer_manager.update_weights_from_tensor(request, None)
        success, message = engine.loop.run_until_complete(loading)[:2]
        if not success:
            raise RunError(f"SGLang did not load a bucket of weights: {message}")

    return send


class BucketedUpdate(WeightUpdate):
    """Sends tensors to SGLang as they become complete, so that memory never holds the whole model twice.

    Tensors are assembled on the device of their first piece.

    Args:
        send: loads full tensors by Hugging Face name.
    """

    def __init__(self, version: int, announced: Sequence[TensorInfo], send: Send) -> None:
        super().__init__(version, (), {})
        self._announced, self._send = {info.name: info for info in announced}, send
        self._left = {info.name: math.prod(info.shape) for info in announced}  # number of missing elements
        self._bucket: list[tuple[str, Tensor]] = []
        self._done: set[str] = set()

    def write(self, pieces: Sequence[Piece]) -> None:
        """Add pieces. Raises RunError as WeightUpdate does, and for a tensor that arrives twice."""
        for name, first, values in pieces:
            if name in self._done:
                raise RunError(f"Update {self.version} sends {name} twice.")
            if name in self._announced and name not in self._flat:
                dtype = getattr(torch, self._announced[name].dtype)
                self._flat[name] = torch.empty(self._left[name], dtype=dtype, device=values.device)
                self._written[name] = []
            super().write([(name, first, values)])
            self._left[name] -= values.numel()
            if self._left[name] <= 0:
                self._whole(name)

    def end(self) -> None:
        """Send the remaining tensors. Raises RunError if elements are missing."""
        if missing := sorted(self._announced.keys() - self._done):
            raise RunError(f"Update {self.version} lacks {len(missing)} tensors or parts of them: {missing[0]}, ...")
        self._flush()

    def _whole(self, name: str) -> None:
        self._check([name])
        self._done.add(name)
        self._bucket.append((name, self._flat.pop(name).view(self._announced[name].shape)))
        if sum(tensor.nbytes for _, tensor in self._bucket) >= BUCKET_BYTES:
            self._flush()

    def _flush(self) -> None:
        bucket, self._bucket = self._bucket, []
        if bucket:
            self._send(bucket)
