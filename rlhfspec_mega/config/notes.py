"""Notes about configurations that run but probably not as intended."""

from __future__ import annotations

import importlib.util

from rlhfspec_mega.config.hardware import cpu_has_fast_bf16, device_type
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import uses_sglang
from rlhfspec_mega.config.speculation import speculation_note
from rlhfspec_mega.rollout.sglang_engine.cpu_kernels import NOTICE

LONG_RUN = 100  # steps from which on a lost run of a built model is worth a note


def notes(config: RunConfig) -> list[str]:
    """Sentences for the start of a run."""
    found = []
    dtypes = {config.actor.dtype, config.rollout.dtype or config.actor.dtype}
    if "bfloat16" in dtypes and device_type(config.cluster) == "cpu" and not cpu_has_fast_bf16():
        found.append("This CPU has no bf16 instructions, so bfloat16 is many times slower here than float32.")
    real_kernels = importlib.util.find_spec("sgl_kernel") is not None
    if uses_sglang(config) and device_type(config.cluster) == "cpu" and not real_kernels:
        found.append(NOTICE)
    if config.data.kind == "files" and config.model.path is None:
        found.append(f"Model {config.model.name} is warmed up on chain sums only: data of yours may be beyond it.")
    if note := speculation_note(config):
        found.append(note)
    trainer = config.trainer
    if trainer.checkpoint_every == 0 and (trainer.steps > LONG_RUN or config.model.path is not None):
        found.append(
            "trainer.checkpoint_every=0 saves at the end only, so a failure before it costs all steps: set e.g. "
            "trainer.checkpoint_every=10."
        )
    return found
