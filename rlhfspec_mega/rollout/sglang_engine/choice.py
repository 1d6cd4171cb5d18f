"""Chooses the number of draft tokens per sample for each batch, in place of SGLang's adaptive speculation."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.planning.draft_tokens import ChainLength, Sharpness, StepTable, TreeSize, accepted_of_best
from rlhfspec_mega.planning.oversight import CollapseWatch
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes
from rlhfspec_mega.rollout.sglang_engine.survival import Nodes
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally

SECTION = "rlhfspec_mega"  # key in SGLang's adaptive config, which ignores keys that are not batch sizes
NOT_FIXED = -1  # no fixed number of draft tokens: the policy chooses
METHOD = "rlhfspec_mega"  # name of the method that `attach` gives to schedulers
MOST_UNDER_WAY = 8  # most steps in progress; SGLang has two


@dataclass
class _Step:
    """A step in progress: draft tokens per sample, number of samples, and the survival probabilities of tree nodes."""

    count: int
    batch: int
    nodes: Nodes | None = None


def write_config(path: Path, shapes: DraftShapes, collapse_ratio: float, fixed: int | None = None) -> None:
    """Write the file for --speculative-adaptive-config, which every rank reads.

    SGLang itself reads the candidates under "1": they must include the number of layers that it starts with.

    Args:
        collapse_ratio: see CollapseWatch; after a collapse the smallest number of draft tokens is used.
        fixed: number of draft tokens otherwise; None: the number with the highest expected throughput.
    """
    ours = {"collapse_ratio": collapse_ratio, "fixed": NOT_FIXED if fixed is None else fixed, "shapes": asdict(shapes)}
    config = {"1": {"candidate_steps": sorted({*shapes.counts, shapes.depth})}, SECTION: ours}
    path.write_text(json.dumps(config) + "\n", encoding="utf-8")


def read_shapes(path: str | None) -> DraftShapes:
    """Read the shapes from a file of `write_config`. Raises UserError for any other file."""
    given = _section(path)["shapes"]
    return DraftShapes(tuple(given["counts"]), given["depth"], given["branches"])


def _section(path: str | None) -> dict[str, Any]:
    if path is None:
        raise UserError("Adaptive speculation needs --speculative-adaptive-config; let the engine worker write it.")
    config: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if SECTION not in config:
        raise UserError(f"{path} has no section {SECTION!r}; let the engine worker write it.")
    found: dict[str, Any] = config[SECTION]
    return found


class DraftChoice:
    """Chooses the number of draft tokens of every step.

    All tensor-parallel ranks choose the same number: they see the same acceptance and scores in the order of steps, and
    receive cost tables and commands in the same iteration. Before the first cost table, the largest number is used.

    Args:
        path: a file of `write_config`.

    Attributes:
        shapes: the shapes to choose from.
        current: the instance of this process; a scheduler has one draft.

    Raises UserError for a file that `write_config` has not written.
    """

    current: DraftChoice | None = None

    def __init__(self, path: str | None) -> None:
        ours = _section(path)
        self.shapes = read_shapes(path)
        self._fixed, self._forced = int(ours["fixed"]), NOT_FIXED
        self._rule: ChainLength | None = None
        self._under_way = deque[_Step](maxlen=MOST_UNDER_WAY)
        self._sharpness = Sharpness()
        self._ratio, self._watches = ours["collapse_ratio"], dict[int, CollapseWatch]()
        self._tally = DraftingTally()
        DraftChoice.current = self

    @property
    def sharpness(self) -> float:
        """Factor that scales the draft's perturbed scores before SGLang turns them into probabilities; see planning."""
        return self._sharpness.value if self.shapes.branches > 1 else 1.0

    # What the engine tells all ranks

    def force(self, count: int) -> None:
        """Draft `count` tokens from now on, without watching for a collapse; NOT_FIXED lets the policy choose.

        Raises RunError for a number that is not among `shapes.counts`.
        """
        if count not in (NOT_FIXED, *self.shapes.counts):
            raise RunError(f"{count} draft tokens were asked for; graphs were captured for {self.shapes.counts}.")
        self._forced = count
        self.weights_changed()
        self._tally = DraftingTally()

    def learn_costs(self, table: StepTable) -> None:
        """Use this cost table from now on. Raises RunError if its numbers of draft tokens are not `shapes.counts`."""
        counts = self.shapes.counts
        if table.counts != counts:
            raise RunError(f"A table of {table.counts} draft tokens came; graphs were captured for {counts}.")
        self._rule = TreeSize(table, self.shapes.depth) if self.shapes.branches > 1 else ChainLength(table)

    def weights_changed(self) -> None:
        """Must be called after new weights of the draft or the target.

        Counts of accepted tokens start anew, and drafting goes on if a collapse of acceptance had ended it.
        """
        for watch in self._watches.values():
            watch.weights_changed()

    def take_tally(self) -> DraftingTally:
        """Counters since the last call."""
        taken, self._tally = self._tally, DraftingTally()
        for watch in self._watches.values():
            taken.usual_rate = watch.usual
            if watch.awaits_weight_update:
                taken.collapsed_rate = watch.rate
                break
        return taken

    # Steps: they begin, are drafted and are verified in order; results may come when the next has begun

    def begin(self, batch: int) -> int:
        """Return the number of draft tokens for the batch about to be decoded."""
        self._under_way.append(_Step(self._choose(batch), batch))
        return self._under_way[-1].count

    def _choose(self, batch: int) -> int:
        if self._forced != NOT_FIXED:
            return self._forced
        if not all(watch.may_draft for watch in self._watches.values()):
            return self.shapes.counts[0]
        if self._fixed != NOT_FIXED:
            return self._fixed
        return self._rule.choose(batch) if self._rule else self.shapes.counts[-1]

    def drafted(self, nodes: Nodes) -> None:
        """Set the survival probabilities of the tree nodes of the step that began last."""
        if self._under_way:
            self._under_way[-1].nodes = nodes

    def verified(self, accepted: Sequence[int]) -> None:
        """Process the number of accepted draft tokens of each sample in the earliest step in progress."""
        while self._under_way:
            step = self._under_way.popleft()
            if step.batch == len(accepted):
                self._observe(step, accepted)
                return

    def _observe(self, step: _Step, accepted: Sequence[int]) -> None:
        batch = len(accepted)
        self._tally.sample_steps += batch
        self._tally.accepted += sum(accepted)
        self._tally.sample_steps_by_verified[int(np.searchsorted(TALLY_EDGES, step.count))] += batch
        if step.count:
            self._tally.drafted_sample_steps += batch
            self._tally.verified += step.count * batch
            if self._forced == NOT_FIXED:  # the weights are random while steps are measured
                # Whether any first child is accepted depends on how many there are: each size has its own usual rate.
                size = step.count if self.shapes.branches > 1 else 0
                watch = self._watches.setdefault(size, CollapseWatch(self._ratio))
                watch.count(batch, sum(count > 0 for count in accepted))
        if self._rule:
            self._rule.observe(step.count, accepted)
        if step.nodes is not None and isinstance(self._rule, TreeSize):
            survival, depths = step.nodes.read()
            self._sharpness.observe(accepted_of_best(survival, step.count), sum(accepted) / batch)
            self._rule.observe_tree(survival, depths, self.shapes.depth_of(step.count))


class DraftingControl:
    """The engine's interface to DraftChoice on all ranks, by `collective_rpc`.

    `attach` is its counterpart in schedulers.

    SGLang calls a method in the same iteration on every rank. It passes flat arguments only and drops return values, so
    tables and tallies travel in files. All ranks have equal counters.

    Args:
        engine: a started `sglang.Engine` that drafts.
        directory: an empty directory for these files.
    """

    def __init__(self, engine: Any, directory: Path) -> None:
        self._engine, self._directory = engine, directory

    def force(self, count: int) -> None:
        self._engine.collective_rpc(METHOD, action="force", count=count)

    def learn_costs(self, table: StepTable) -> None:
        path = self._directory / "table.json"
        path.write_text(json.dumps(table.as_json()) + "\n", encoding="utf-8")
        self._engine.collective_rpc(METHOD, action="learn_costs", path=str(path))

    def weights_changed(self) -> None:
        self._engine.collective_rpc(METHOD, action="weights_changed")

    def take_tally(self) -> DraftingTally:
        path = self._directory / "tally.json"
        self._engine.collective_rpc(METHOD, action="take_tally", path=str(path))
        return DraftingTally(**json.loads(path.read_text(encoding="utf-8")))


def attach(scheduler: Any) -> None:
    """Give a scheduler the method that DraftingControl calls; rank 0 writes the return values to files."""

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
