"""The worker of role engine: a torch engine and its side of resharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhfspec_mega.config.schema import RolloutConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.receive import receive_weights
from rlhfspec_mega.resharding.transport import Receiver
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import EngineReport, TensorInfo


class TorchEngineWorker(TorchEngine):
    """A TorchEngine that also receives weights and takes samples that began elsewhere.

    Args:
        deterministic: refuse operations whose result depends on timing (torch.use_deterministic_algorithms).
    """

    def __init__(
        self, shape: ModelShape, config: RolloutConfig, dtype: str, device: str, deterministic: bool = False
    ) -> None:
        torch.use_deterministic_algorithms(deterministic)
        super().__init__(
            shape,
            slots=config.slots,
            max_positions=config.max_prompt_tokens + config.max_new_tokens,
            prefill_chunk=config.prefill_chunk,
            dtype=getattr(torch, dtype),
            device=device,
        )
        self._receiver: Receiver | None = None

    def advance(self, samples: Sequence[SampleSnapshot], seconds: float) -> EngineReport:
        """Take these samples, decode for about `seconds`, and report all that the driver does not know yet."""
        fresh = [sample.request for sample in samples if not sample.tokens]
        for sample in samples:
            if sample.tokens:
                self.import_sample(sample)
        self.submit(fresh)
        finished = self.poll(seconds)
        load = self.load()
        return EngineReport(finished, self.progress(), load.running + load.waiting)

    def connect(self, address: Any, index: int) -> None:
        """Make the receiving end of a transport in place of the last one."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = address.receiver(index)

    def receive_weights(self, version: int, tensors: Sequence[TensorInfo], buckets: Sequence[Bucket]) -> dict[int, int]:
        """Load an update; {bucket id: checksum}. Not live before `end_update`."""
        if self._receiver is None:
            raise RunError("An engine was asked for weights before it was connected to a transport.")
        return receive_weights(self, self._receiver, version, tensors, buckets)
