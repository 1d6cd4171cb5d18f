"""The worker of role engine: a torch engine and its side of resharding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhfspec_mega.config.schema import DraftingConfig, RolloutConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.draft_directory import load_target_ids, read_draft_shape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.receive import receive_weights
from rlhfspec_mega.resharding.transport import Receiver
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import DraftingTally, EngineReport, TensorInfo, WeightTarget
from rlhfspec_mega.workers.drafting import DraftingBrain


class TorchEngineWorker(TorchEngine):
    """A TorchEngine that also receives weights and takes samples that began elsewhere.

    Args:
        deterministic: refuse operations whose result depends on timing (torch.use_deterministic_algorithms), decide
            drafting by a nominal cost, and forget for every share of samples what the ones before have taught.
        draft: directory of a draft: its shape and vocabulary; its weights come like the actor's.
        drafting_state: what `drafting_state` returned in an earlier life, on whatever machine; see DraftingBrain.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: RolloutConfig,
        dtype: str,
        device: str,
        deterministic: bool = False,
        draft: Path | None = None,
        drafting: DraftingConfig | None = None,
        seed: int = 0,
        drafting_state: Any = None,
    ) -> None:
        torch.use_deterministic_algorithms(deterministic)
        self._brain = None
        given: dict[str, Any] = {}
        if draft is not None and drafting is not None:
            draft_shape = read_draft_shape(draft, shape)
            machine = f"{_name(device)}, {dtype}, {config.slots} slots, {torch.get_num_threads()} threads"
            self._brain = DraftingBrain(drafting, shape, draft_shape, seed, deterministic, machine, drafting_state)
            vocabulary = load_target_ids(draft, draft_shape)
            given = {"draft": draft_shape, "draft_vocabulary": vocabulary, "policy": self._brain.policy}
        super().__init__(
            shape,
            slots=config.slots,
            max_positions=config.max_prompt_tokens + config.max_new_tokens,
            prefill_chunk=config.prefill_chunk,
            dtype=getattr(torch, dtype),
            device=device,
            **given,
        )
        self._receiver: Receiver | None = None

    def advance(self, samples: Sequence[SampleSnapshot], seconds: float) -> EngineReport:
        """Take these samples, decode for about `seconds`, and report all that the driver does not know yet.

        A driver that asks for samples waits for no update of the draft: one still open has lost its transfer while
        this engine was taken for silent.
        """
        self.abandon_draft_update()
        if samples and self._brain and self.drafting:
            self._brain.prepare(self)
        fresh = [sample.request for sample in samples if not sample.tokens]
        for sample in samples:
            if sample.tokens:
                self.import_sample(sample)
        self.submit(fresh)
        finished = self.poll(seconds)
        load = self.load()
        return EngineReport(finished, self.progress(), load.running + load.waiting)

    def end_update(self, version: int) -> None:
        """Make weights live; the draft is watched anew."""
        super().end_update(version)
        if self._brain:
            self._brain.policy.watch.weights_changed()

    def take_tally(self) -> DraftingTally | None:
        """What speculation did since the last call; None without a draft."""
        return self._brain.take_tally() if self._brain else None

    def drafting_state(self) -> dict[str, Any] | None:
        """What was learnt of costs and acceptance, as plain data; None if there is nothing that another run may use."""
        return self._brain.state_dict() if self._brain else None

    def connect(self, address: Any, index: int) -> None:
        """Make the receiving end of a transport in place of the last one."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = address.receiver(index)

    def receive_weights(
        self,
        version: int,
        tensors: Sequence[TensorInfo],
        buckets: Sequence[Bucket],
        target: WeightTarget = WeightTarget.ACTOR,
    ) -> dict[int, int]:
        """Load an update; {bucket id: checksum}. Not live before `end_update`."""
        if self._receiver is None:
            raise RunError("An engine was asked for weights before it was connected to a transport.")
        return receive_weights(self, self._receiver, version, tensors, buckets, target)


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
