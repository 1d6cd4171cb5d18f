"""Our choice of draft tokens in the place of SGLang's adaptive rule: it chooses one number for a whole batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.planning.chain import ChainLength, StepTable
from rlhfspec_mega.planning.watch import CollapseWatch
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally

SECTION = "rlhfspec_mega"  # of SGLang's adaptive config; it skips keys that are no batch size
FREE = -1  # in place of a number of draft tokens


def write_config(path: Path, candidates: Sequence[int], collapse_ratio: float, fixed: int = FREE) -> None:
    """Write what --speculative-adaptive-config names, for every rank to read.

    SGLang itself sizes its buffers and captures its graphs by the candidates under "1".

    Args:
        candidates: numbers of draft tokens; 0 decodes plainly.
        collapse_ratio: see CollapseWatch; the least candidate then is used.
        fixed: the number to use otherwise; FREE: the one that pays best.
    """
    ours = {"collapse_ratio": collapse_ratio, "fixed": fixed}
    config = {"1": {"candidate_steps": sorted(set(candidates))}, SECTION: ours}
    path.write_text(json.dumps(config) + "\n", encoding="utf-8")


class ProfiledSteps:
    """Implements what SGLang's AdaptiveController asks of its AdaptiveSpeculativeParams.

    All tensor-parallel ranks decide alike: they are shown the same acceptance, and tables and orders reach them in the
    same iteration (`control`). Until a table comes, the number is that of the start.

    Args:
        initial_steps: draft tokens that the engine was started with; a candidate.
        cfg_path: of a file from `write_config`.

    Attributes:
        current: the one of this process: a scheduler has one draft.

    Raises UserError for a file that `write_config` has not written.
    """

    current: ProfiledSteps | None = None

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
        if cfg_path is None:
            raise UserError("Adaptive speculation needs --speculative-adaptive-config; let the engine worker write it.")
        config: dict[str, Any] = json.loads(Path(cfg_path).read_text(encoding="utf-8"))
        if SECTION not in config:
            raise UserError(f"{cfg_path} has no section {SECTION!r}; let the engine worker write it.")
        self._candidates = sorted({*config["1"]["candidate_steps"], initial_steps})
        self._initial, self._fixed, self._forced = initial_steps, int(config[SECTION]["fixed"]), FREE
        self._chain: ChainLength | None = None
        self._chosen = [initial_steps] * 2  # for the batch before the last, and for the last
        self._graph_batches: list[int] | None = None
        self._watch = CollapseWatch(config[SECTION]["collapse_ratio"])
        self._tally = DraftingTally()
        ProfiledSteps.current = self

    @property
    def candidate_steps(self) -> list[int]:
        """Ascending."""
        return list(self._candidates)

    # What the engine tells all ranks

    def force(self, steps: int) -> None:
        """Draft so many tokens from now on, unwatched, or as many as the policy wants (FREE).

        Raises RunError for no candidate.
        """
        if steps not in (FREE, *self._candidates):
            raise RunError(f"{steps} draft tokens were asked for; graphs were captured for {self._candidates}.")
        self._forced = steps
        self._watch.weights_changed()
        self._tally = DraftingTally()

    def learn_costs(self, table: StepTable) -> None:
        """Choose by this table. Raises RunError for other numbers than those that graphs were captured for."""
        if list(table.counts) != self._candidates:
            raise RunError(f"A table of {table.counts} draft tokens came; graphs were captured for {self._candidates}.")
        self._chain = ChainLength(table)

    def weights_changed(self) -> None:
        """The draft or the target has new weights: it is watched anew, and tried again where it had collapsed."""
        self._watch.weights_changed()

    def take_tally(self) -> DraftingTally:
        """What was done since the last call."""
        taken, self._tally = self._tally, DraftingTally()
        taken.collapsed_rate = self._watch.rate if self._watch.without_hope else None
        taken.usual_rate = self._watch.usual
        return taken

    # What SGLang asks

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Batch sizes that graphs are captured for; None: there are no graphs."""
        self._graph_batches = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Batch sizes at which a number of draft tokens may be chosen: all, for any of them."""
        return self._graph_batches

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The number for the batch about to be decoded."""
        self._chosen = [self._chosen[1], self._choose(batch_size)]
        return self._chosen[1]

    def _choose(self, batch: int) -> int:
        if self._forced != FREE:
            return self._forced
        if not self._watch.may_draft:
            return self._candidates[0]
        if self._fixed != FREE:
            return self._fixed
        return self._chain.choose(batch) if self._chain else self._initial

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """Learn from a step; the number changes only where a batch begins, so: None.

        With overlapped scheduling results come when the next number is chosen already, and nothing tells which one they
        belong to: where the two differ they teach nothing and are not counted.
        """
        if self._chosen[0] == self._chosen[1]:
            self._observe(self._chosen[1], num_correct_drafts_per_req)
        return None

    def _observe(self, steps: int, accepted: list[int]) -> None:
        batch = len(accepted)
        self._tally.sample_steps += batch
        self._tally.accepted += sum(accepted)
        self._tally.sample_steps_by_verified[int(np.searchsorted(TALLY_EDGES, steps))] += batch
        if steps:
            self._tally.drafted_sample_steps += batch
            self._tally.verified += steps * batch
            if self._forced == FREE:  # while steps are measured the weights are random
                self._watch.count(batch, sum(count > 0 for count in accepted))
        if self._chain:
            self._chain.observe(steps, accepted)
