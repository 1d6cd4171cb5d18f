"""What the engine tells all schedulers at once: SGLang calls a method in the same iteration on every rank."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.planning.draft_tokens import StepTable
from rlhfspec_mega.rollout.sglang_engine.choice import DraftChoice
from rlhfspec_mega.types import DraftingTally

METHOD = "rlhfspec_mega"  # of schedulers, from `attach` on


class DraftingControl:
    """The engine's side, over its `collective_rpc`; the schedulers' is `attach`.

    Arguments are flat and answers are dropped on the way: tables and tallies go through files.

    Args:
        engine: a started `sglang.Engine` that drafts.
        directory: an empty one, for these files.
    """

    def __init__(self, engine: Any, directory: Path) -> None:
        self._engine, self._directory = engine, directory

    def force(self, count: int) -> None:
        """See DraftChoice.force."""
        self._engine.collective_rpc(METHOD, action="force", count=count)

    def learn_costs(self, table: StepTable) -> None:
        """See DraftChoice.learn_costs."""
        path = self._directory / "table.json"
        path.write_text(json.dumps(table.as_json()) + "\n", encoding="utf-8")
        self._engine.collective_rpc(METHOD, action="learn_costs", path=str(path))

    def weights_changed(self) -> None:
        """See DraftChoice.weights_changed."""
        self._engine.collective_rpc(METHOD, action="weights_changed")

    def take_tally(self) -> DraftingTally:
        """See DraftChoice.take_tally; all ranks count the same."""
        path = self._directory / "tally.json"
        self._engine.collective_rpc(METHOD, action="take_tally", path=str(path))
        return DraftingTally(**json.loads(path.read_text(encoding="utf-8")))


def attach(scheduler: Any) -> None:
    """Give a scheduler the method that DraftingControl calls; its rank 0 writes the answers."""

    def act(action: str, count: int = 0, path: str = "") -> None:
        current = DraftChoice.current
        if current is None:
            raise RunError("SGLang was started without adaptive speculation: there is no number of draft tokens.")
        if action == "force":
            current.force(count)
        elif action == "learn_costs":
            current.learn_costs(StepTable.from_json(json.loads(Path(path).read_text(encoding="utf-8"))))
        elif action == "weights_changed":
            current.weights_changed()
        else:
            tally = current.take_tally()
            if scheduler.ps.tp_rank == 0:
                Path(path).write_text(json.dumps(asdict(tally)) + "\n", encoding="utf-8")

    setattr(scheduler, METHOD, act)
