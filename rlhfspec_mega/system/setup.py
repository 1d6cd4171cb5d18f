"""What the processes of a run are made from, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import engines_sleep
from rlhfspec_mega.config.sizes import Sizes
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.placement import REFERENCE, Placement


@dataclass(frozen=True)
class Setup:
    """Of one run, or of a part of one.

    Attributes:
        run_dir: worker logs go to its `logs`.
        total_updates: optimizer steps to come, for the learning-rate schedule.
        model: directory that SGLang reads the actor's shape in.
        draft: directory of the draft to start from; None: engines decode plainly.
        reference: directory of the frozen model to score with; None: there is none.
        with_engines: a replay of saved rollouts needs none.
    """

    config: RunConfig
    sizes: Sizes
    shape: ModelShape
    run_dir: Path
    total_updates: int
    model: Path | None = None
    draft: Path | None = None
    reference: Path | None = None
    with_engines: bool = True

    @property
    def placement(self) -> Placement:
        return self.sizes.placement

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return device_type(self.config.cluster)

    @property
    def engine_dtype(self) -> str:
        """Of the engines' weights."""
        return self.config.rollout.dtype or self.config.actor.dtype

    @property
    def engines_sleep(self) -> bool:
        """Whether engines give their GPU memory back while the actor, on the same devices, trains."""
        return engines_sleep(self.config, self.placement)

    @property
    def fuses_scoring(self) -> bool:
        """Whether the reference lies on generation devices, so that samples are scored as they finish."""
        return REFERENCE in self.placement.processes()
