"""The parts of a started run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfspec_mega.algorithms.policy_gradient import PolicyGradient
from rlhfspec_mega.checkpoints.saving import Saver
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.data.prompts import PromptStream
from rlhfspec_mega.data.reward_encoder import RewardEncoder
from rlhfspec_mega.generation import SampleGenerator
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.observe.progress import write_progress
from rlhfspec_mega.observe.spans import PhaseTimer
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.reward.rewards import Rewards
from rlhfspec_mega.system.system import System
from rlhfspec_mega.types import Prompt


@dataclass
class Run:
    """The parts of a started run; built by startup.started.

    Attributes:
        model: the Hugging Face directory from which the actor and the reference start.
        encode: from a sample to the tokens that the reward model reads; None without one.
        started: start time in seconds of time.monotonic().
        beginning: state of prompts, ledger and algorithm before the first step.
    """

    config: RunConfig
    directory: Path
    model: Path
    console: Console
    timeline: Timeline
    prompts: PromptStream
    held_out: list[Prompt]
    rewards: Rewards
    encode: RewardEncoder | None
    system: System
    generator: SampleGenerator
    algorithm: PolicyGradient
    started: float = field(default_factory=time.monotonic)
    phases: PhaseTimer = field(init=False)
    ledger: Ledger = field(init=False)
    saver: Saver = field(init=False)
    beginning: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.phases = PhaseTimer(entered=self._enter, charged=self.timeline.phase)
        self.ledger = self.generator.ledger
        trainer = self.config.trainer
        self.saver = Saver(self.directory, trainer.keep_checkpoints, trainer.async_save)
        self.beginning = {
            "prompts": self.prompts.state_dict(),
            "ledger": self.ledger.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def _enter(self, phase: str) -> None:
        self.console.phase(phase)
        write_progress(self.directory, phase)
