"""The engine worker that decodes with the torch engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhfspec_mega.config.schema.generation import RolloutConfig, SpeculationConfig
from rlhfspec_mega.draft.directory import load_target_ids, read_draft_shape
from rlhfspec_mega.history.index import History
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.rollout.migration.messages import MigrationOrders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.rollout.torch_engine.profile import profile, profile_plain, rehearse
from rlhfspec_mega.types import DraftingTally, EngineReport, FinishedText
from rlhfspec_mega.workers.drafting import DraftingController
from rlhfspec_mega.workers.plain_pace import MeanSampleLength, PlainDecodingCost
from rlhfspec_mega.workers.serving import EngineWorker


class TorchEngineWorker(EngineWorker):
    """An engine worker with a TorchEngine and models of how fast it decodes.

    Args:
        deterministic: refuse operations whose result depends on timing (torch.set_deterministic_debug_mode), draft by
            nominal costs, and before each share of samples reset what was learnt, and history to what `remember` gave.
        draft: directory of a draft, for its shape and vocabulary; weights arrive by resharding, like the actor's.
        drafting: options of speculation; None: plain decoding.
        history_tokens: tokens of earlier text that are kept to draft from; 0: none.
        drafting_state: what `drafting_state` returned in an earlier process, maybe on another machine; see
            DraftingController.
    """

    engine: TorchEngine

    def __init__(
        self,
        shape: ModelShape,
        config: RolloutConfig,
        dtype: str,
        device: str,
        deterministic: bool = False,
        draft: Path | None = None,
        drafting: SpeculationConfig | None = None,
        history_tokens: int = 0,
        drafting_state: Any = None,
    ) -> None:
        # As torch.use_deterministic_algorithms, but it does not load torch's compiler, which this engine does not use.
        torch.set_deterministic_debug_mode("error" if deterministic else "default")
        self._drafting = None
        given: dict[str, Any] = {}
        if drafting is not None:
            draft_shape = read_draft_shape(draft, shape) if draft else None
            machine = (
                f"{_name(device)}, {dtype}, {config.max_running_requests} slots, {torch.get_num_threads()} threads"
            )
            self._drafting = DraftingController(
                drafting,
                shape,
                draft_shape,
                history_tokens > 0,
                config.temperature,
                deterministic,
                machine,
                drafting_state,
            )
            given = {"policy": self._drafting.policy, "history_tokens": history_tokens}
            if draft is not None and draft_shape is not None:
                given |= {"draft": draft_shape, "draft_vocabulary": load_target_ids(draft, draft_shape)}
        engine = TorchEngine(
            shape,
            slots=config.max_running_requests,
            max_positions=config.max_prompt_tokens + config.max_new_tokens,
            prefill_chunk=config.chunked_prefill_size,
            dtype=getattr(torch, dtype),
            device=device,
            **given,
        )
        super().__init__(engine, device)
        # Under `deterministic`, what each share of samples is drafted from besides its own text.
        shared = deterministic and history_tokens > 0
        self._shared_texts = History(config.max_running_requests, history_tokens) if shared else None
        self._plain_pace: PlainDecodingCost | None = None  # only for an engine without a draft
        self._length = MeanSampleLength(engine.max_positions // 2)

    def advance(
        self,
        samples: Sequence[SampleSnapshot],
        seconds: float,
        orders: MigrationOrders | None = None,
        forget: bool = False,
        others_wait: bool = False,
    ) -> EngineReport:
        """See EngineWorker.advance; the duration of the steps also updates the model of costs."""
        report = super().advance(samples, seconds, orders, forget, others_wait)
        decoding = [span for span in report.spans if span.name == "decode"]
        if orders is not None and decoding:
            self._length.learn(decoding)
            longest = max(decoding, key=lambda span: span.seconds)
            if self._plain_pace and not longest.arguments["draft_tokens"]:
                self._plain_pace.learn(longest)
        return report

    def prepare(self) -> None:
        """Measure costs, once, or under `deterministic` reset what was learnt, and history to the texts of all."""
        if self._shared_texts:
            assert self.engine.idle, "under trainer.deterministic an engine has one share of samples at a time"
            self.engine.restart_history(self._shared_texts)
        if self._drafting and self.engine.idle and (self.engine.speculates or self._shared_texts):
            self._drafting.prepare(lambda: profile(self.engine), partial(rehearse, self.engine))

    def pace(self, temperature: float) -> Throughput:
        """Predicted throughput from current costs and acceptance, for samples of the usual length."""
        slots, length = self.engine.load().slots, self._length.take()
        if self._drafting is not None and self.engine.speculates:
            self.prepare()
            return self._drafting.pace(slots, length, temperature)
        if self._plain_pace is None:
            self._plain_pace = PlainDecodingCost(profile_plain(self.engine))
        return self._plain_pace.throughput(slots, length)

    def end_update(self, version: int) -> None:
        """Make the received weights live; monitoring of the draft's acceptance starts anew."""
        super().end_update(version)
        if self._drafting:
            self._drafting.policy.watch.weights_changed()

    def remember(self, texts: Sequence[FinishedText], anew: bool) -> None:
        """Draft from these samples, too; see TorchEngine.remember.

        Args:
            anew: forget all others; the engine is idle.
        """
        if self._shared_texts:
            if anew:
                self._shared_texts.clear()
            self._shared_texts.add((text.prompt, text.response) for text in texts)
            return
        if anew:
            self.engine.restart_history()
        self.engine.remember(texts)

    def take_tally(self) -> DraftingTally | None:
        """What speculation did since the last call; None for plain decoding."""
        return self._drafting.take_tally() if self._drafting else None

    def drafting_state(self) -> dict[str, Any] | None:
        """The learnt models of cost and acceptance as plain data; None if they are of no use to another run."""
        return self._drafting.state_dict() if self._drafting else None


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
