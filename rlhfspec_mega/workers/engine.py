"""The worker of role engine: a torch engine and its side of resharding."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhfspec_mega.cluster.environment import HOST, LOOPBACK
from rlhfspec_mega.config.schema import DraftingConfig, RolloutConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.draft_directory import load_target_ids, read_draft_shape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.planning.throughput import throughput_of
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.receive import receive_weights
from rlhfspec_mega.resharding.transport import Receiver
from rlhfspec_mega.rollout.migration.agent import MigrationAgent
from rlhfspec_mega.rollout.migration.messages import Meeting, Orders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.rollout.torch_engine.profile import profile_plain
from rlhfspec_mega.types import DraftingTally, EngineReport, GenerationResult, TensorInfo, WeightTarget
from rlhfspec_mega.workers.drafting import DraftingBrain
from rlhfspec_mega.workers.scoring import ReferenceScoring, ReferenceSettings

ORDER_SECONDS = 30.0  # in which a sample that is told to move has moved, or stays
_ACKNOWLEDGEMENT_SECONDS = 0.001  # between two looks for one, with nothing else to do


class TorchEngineWorker(ReferenceScoring, TorchEngine):
    """A TorchEngine that also receives weights, takes samples that began elsewhere, and scores finished ones.

    Args:
        deterministic: refuse operations whose result depends on timing (torch.use_deterministic_algorithms), decide
            drafting by a nominal cost, and forget for every share of samples what the ones before have taught.
        draft: directory of a draft: its shape and vocabulary; its weights come like the actor's.
        drafting_state: what `drafting_state` returned in an earlier life, on whatever machine; see DraftingBrain.
        reference: what to score with; None: this engine does not.
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
        reference: ReferenceSettings | None = None,
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
        if reference is not None:
            self.hold_reference(reference, self.max_positions, device)
        self._receiver: Receiver | None = None
        self.migration: MigrationAgent | None = None
        self._plain_cost: CostModel | None = None  # of an engine without a draft

    def advance(self, samples: Sequence[SampleSnapshot], seconds: float, orders: Orders | None = None) -> EngineReport:
        """Take these samples, decode for about `seconds`, and report all that the driver does not know yet.

        A driver that asks for samples waits for no update of the draft: one still open has lost its transfer while
        this engine was taken for silent.

        Args:
            orders: of migrations; None where samples stay.
        """
        self.abandon_draft_update()
        if self.migration:
            self.migration.collect()
            self.abort([sample.request.sample_id for sample in samples])  # copies left from moves that failed halfway
        if self._brain and self.drafting and samples:
            self._brain.prepare(self)
        fresh = [sample.request for sample in samples if not sample.tokens]
        for sample in samples:
            if sample.tokens:
                self.import_sample(sample)
        self.submit(fresh)
        moves = orders is not None and self.migration is not None  # one that was started anew has met nobody
        finished = self._decode(seconds, orders) if moves and orders else self.poll(seconds)
        load = self.load()
        report = EngineReport(finished, self.progress(), load.running + load.waiting, spans=self.spans.take())
        if moves and self.migration:
            report.migration = self.migration.report()
            report.unfinished += self.migration.undecided
        return report

    def _decode(self, seconds: float, orders: Orders) -> list[GenerationResult]:
        """Decode with migrations between the steps; an engine without samples waits for those that are expected."""
        assert self.migration is not None
        end, finished = time.monotonic() + seconds, list[GenerationResult]()
        self.migration.follow(orders)
        while True:
            self.migration.turn()
            if not self.idle:
                finished += self.poll(0.0)
                self.migration.stepped(*self.last_decode)
            left = end - time.monotonic()
            if left <= 0 or (self.idle and not self.migration.busy and not orders.expects):
                return finished
            if self.idle:
                self.migration.wait(min(left, _ACKNOWLEDGEMENT_SECONDS) if self.migration.busy else left)

    def meet(self, temperature: float) -> Meeting:
        """Before a rollout with migrations: where this engine listens, and how fast it decodes."""
        if self.migration is None:
            self.migration = MigrationAgent(self, os.environ.get(HOST, LOOPBACK), ORDER_SECONDS)
        pace, slots, stats = self._pace(temperature), self.load().slots, self.stats()
        prefill = stats["prefill_seconds"] / stats["prefill_tokens"] if stats["prefill_tokens"] else math.inf
        self.migration.forget()
        room, copy = self.max_positions * slots, self.migration.copy_seconds
        return Meeting(self.migration.address, pace, slots, room, prefill, copy)

    def _pace(self, temperature: float) -> Throughput:
        slots, length = self.load().slots, self.max_positions // 2
        if self._brain is not None and self.drafting:
            self._brain.prepare(self)
            return self._brain.pace(slots, length, temperature)
        if self._plain_cost is None:
            self._plain_cost = CostModel()
            if costs := profile_plain(self):
                self._plain_cost.fit(costs)
        return throughput_of(self._plain_cost, None, slots=slots, length=length)

    def leave(self) -> None:
        """Take no more part in migrations: connections end, as they do when the process does."""
        if self.migration is not None:
            self.migration.close()
            self.migration = None

    def clear(self) -> None:
        """Forget every sample, and those on their way here and from here."""
        super().clear()
        if self.migration is not None:
            self.migration.forget()

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
