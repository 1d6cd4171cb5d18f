"""Checkpoints of a run: the actor's distributed checkpoint and the driver's state, complete or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from rlhfspec_mega.config.output_dir import CHECKPOINTS, complete_checkpoints
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.workers.actor_group import ActorGroup

STATE_FILE = "state.json"
_PARTIAL = ".partial"


def save(run_dir: Path, step: int, actor: ActorGroup, state: dict[str, Any], keep: int) -> Path:
    """Write `checkpoints/step_<step>`, renamed from a temporary name when complete, and drop all but the last `keep`.

    Args:
        step: steps done so far.
        state: the driver's part, JSON.
    """
    root = run_dir / CHECKPOINTS
    partial, final = root / f"step_{step}{_PARTIAL}", root / f"step_{step}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "actor").mkdir()
    actor.save(partial / "actor")
    (partial / STATE_FILE).write_text(json.dumps({"step": step, **state}), encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    for old in complete_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)
    return final


def load_latest(run_dir: Path, actor: ActorGroup) -> dict[str, Any]:
    """Load the newest complete checkpoint into the actor; returns the driver's state with "step".

    Raises:
        UserError: there is none, or its state cannot be read.
    """
    found = complete_checkpoints(run_dir)
    if not found:
        raise UserError(f"{run_dir} holds no complete checkpoint: remove the directory and start anew.")
    try:
        state: dict[str, Any] = json.loads((found[-1] / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{found[-1]} has no readable {STATE_FILE} ({error}): remove that checkpoint.") from None
    actor.load(found[-1] / "actor")
    return state
