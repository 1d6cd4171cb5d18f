"""A weight update on its way into SGLang: pieces become full tensors, full tensors go in buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.rollout.sglang_engine.loaders import INTO_DRAFT
from rlhfspec_mega.rollout.update import Piece, WeightUpdate
from rlhfspec_mega.types import TensorInfo, WeightTarget

BUCKET_BYTES = 512 * 2**20
Send = Callable[[list[tuple[str, Tensor]]], None]


def sender(engine: Any, target: WeightTarget) -> Send:
    """Loads full tensors into the target of a started `sglang.Engine`, or into its draft.

    By default SGLang would load the target's into the draft first; for the draft's a loader passes the target over.
    What is returned raises RunError where SGLang does not load them.
    """
    how: dict[str, Any] = {"disable_draft_model": True}
    if target is WeightTarget.DRAFT:
        how = {"disable_draft_model": False, "load_format": INTO_DRAFT}

    def send(tensors: list[tuple[str, Tensor]]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=engine._serialize_tensors_per_rank(tensors, None),
            flush_cache=False,  # asserts that the engine is idle, and ends it if not
            **how,
        )
        loading = engine.tokenizer_manager.update_weights_from_tensor(request, None)
        success, message = engine.loop.run_until_complete(loading)[:2]
        if not success:
            raise RunError(f"SGLang did not load a bucket of weights: {message}")

    return send


class BucketedUpdate:
    """Gathers an update and hands it on as it becomes whole, so that memory never holds all of a model twice.

    Implements `rollout.update.OpenUpdate`.

    Tensors are put together on the device that their first piece lies on.

    Args:
        send: loads full tensors by Hugging Face name.
    """

    def __init__(self, version: int, announced: Sequence[TensorInfo], send: Send) -> None:
        self.version = version
        self._announced = {info.name: info for info in announced}
        self._send = send
        self._open: dict[str, tuple[WeightUpdate, Tensor, int]] = {}  # by name: what has come, and elements to come
        self._bucket: list[tuple[str, Tensor]] = []
        self._done: set[str] = set()

    def write(self, pieces: Sequence[Piece]) -> None:
        """Take pieces. Raises RunError as WeightUpdate does, and on a tensor that comes twice."""
        for name, first, values in pieces:
            if name not in self._announced:
                raise RunError(f"Update {self.version} brings {name}, which was not announced.")
            if name in self._done:
                raise RunError(f"Update {self.version} brings {name} twice.")
            update, tensor, left = self._opened(name, values.device)
            update.write([(name, first, values)])
            left -= values.numel()
            self._open[name] = update, tensor, left
            if left <= 0:
                self._whole(name)

    def end(self) -> None:
        """Send the rest. Raises RunError when elements are missing."""
        if missing := sorted(self._announced.keys() - self._done):
            raise RunError(f"Update {self.version} lacks {len(missing)} tensors or parts of them: {missing[0]}, ...")
        self._flush()

    def _opened(self, name: str, device: torch.device) -> tuple[WeightUpdate, Tensor, int]:
        if name not in self._open:
            info = self._announced[name]
            tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=device)
            self._open[name] = WeightUpdate(self.version, [info], {name: tensor}), tensor, tensor.numel()
        return self._open[name]

    def _whole(self, name: str) -> None:
        update, tensor, _ = self._open.pop(name)
        update.end()
        self._done.add(name)
        self._bucket.append((name, tensor))
        if sum(tensor.nbytes for _, tensor in self._bucket) >= BUCKET_BYTES:
            self._flush()

    def _flush(self) -> None:
        bucket, self._bucket = self._bucket, []
        if bucket:
            self._send(bucket)
