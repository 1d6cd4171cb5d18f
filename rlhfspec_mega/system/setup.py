"""What the processes of a run are built from, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhfspec_mega.cluster.launchers import import_ahead
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import engines_sleep, uses_sglang
from rlhfspec_mega.config.sizes import Sizes
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.placement import Placement
from rlhfspec_mega.rl.packing import Batching

MEGATRON_WORKER = "rlhfspec_mega.workers.megatron.MegatronWorker"
TORCH_ENGINE = "rlhfspec_mega.workers.torch_engine.TorchEngineWorker"
SGLANG_ENGINE = "rlhfspec_mega.workers.sglang_engine.SGLangEngineWorker"


def engine_worker(config: RunConfig) -> str:
    """Import path of the worker of an engine."""
    return SGLANG_ENGINE if uses_sglang(config) else TORCH_ENGINE


def import_workers_ahead(config: RunConfig) -> None:
    """Let the code of all workers be imported beside what comes before their start."""
    modules = [path.rpartition(".")[0] for path in (engine_worker(config), MEGATRON_WORKER)]
    import_ahead(config.cluster, config.launcher, modules, use_gpus=device_type(config.cluster) == "cuda")


@dataclass(frozen=True)
class Setup:
    """Inputs from which the processes of a run, or a part of them, are built.

    Attributes:
        run_dir: directory of the run; worker logs go to its `logs`.
        total_updates: optimizer steps of the whole run, for the learning-rate schedule.
        model: directory from which SGLang reads the actor's shape.
        draft: directory of the initial draft; None: there is none.
        reference: directory of the frozen reference; None: there is none.
        with_engines: False for a replay of saved rollouts, which needs no engines.
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
        """ "cpu" or "cuda"."""
        return device_type(self.config.cluster)

    @property
    def engine_dtype(self) -> str:
        """Precision of the engines' weights."""
        return self.config.rollout.dtype or self.config.actor.dtype

    @property
    def batching(self) -> Batching:
        """How samples become micro-batches of models on Megatron."""
        trainer = self.config.trainer
        return Batching(trainer.max_tokens_per_microbatch, trainer.sequence_packing)

    @property
    def engines_sleep(self) -> bool:
        """Whether engines free their GPU memory while the actor trains on the same devices."""
        return engines_sleep(self.config, self.placement)

    @property
    def fuses_scoring(self) -> bool:
        """Whether frozen models lie on generation devices, so that samples are scored as they finish."""
        return self.placement.scorer is not None
