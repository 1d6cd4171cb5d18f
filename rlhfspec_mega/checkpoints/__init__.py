"""Checkpoints of a run: the actor's distributed checkpoint and the driver's state, complete or not there at all.

outputs/<run>/checkpoints/
  latest            "step_40": the newest checkpoint that counts, replaced last and atomically
  step_40/          actor/ (Megatron), state.json (the driver's), manifest.json (sizes, checksums, whose it is)
  step_40.bad/      found damaged or foreign when a run resumed; kept to look at, never used
  step_60.partial/  being written or removed, or left by a killed process; the next save or load removes it
"""

from rlhfspec_mega.checkpoints.loading import load_latest
from rlhfspec_mega.checkpoints.saving import Saver, save

__all__ = ["Saver", "load_latest", "save"]
