"""Our choice of draft tokens in the place of SGLang's adaptive rule: it chooses one number for a whole batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.chain import ChainLength
from rlhfspec_mega.planning.cost import CostModel

SECTION = "rlhfspec_mega"  # of SGLang's adaptive config; it skips keys that are no batch size


def write_config(path: Path, candidates: list[int], cost: CostModel, length: int) -> None:
    """Write what --speculative-adaptive-config names, for every rank to read.

    SGLang itself sizes its buffers by the candidates under "1".

    Args:
        candidates: numbers of draft tokens; 0 decodes plainly.
        cost: profiled once; the same file, so the same decisions, on all tensor-parallel ranks.
        length: tokens of prompt and response of a typical sample.
    """
    section = {"cost": cost.state_dict(), "length": length}
    config = {"1": {"candidate_steps": candidates}, SECTION: section}
    path.write_text(json.dumps(config) + "\n", encoding="utf-8")


class ProfiledSteps:
    """Implements what SGLang's AdaptiveController asks of its AdaptiveSpeculativeParams.

    Args:
        initial_steps: draft tokens that the engine was started with; a candidate.
        cfg_path: of a file from `write_config`.

    Raises UserError for a file that `write_config` has not written.
    """

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
        if cfg_path is None:
            raise UserError(
                "Adaptive speculation needs --speculative-adaptive-config with a cost table of this engine."
            )
        config: dict[str, Any] = json.loads(Path(cfg_path).read_text(encoding="utf-8"))
        if SECTION not in config:
            raise UserError(f"{cfg_path} has no section {SECTION!r} with a cost table; let the engine worker write it.")
        cost = CostModel(frozen=True)
        cost.load_state_dict(config[SECTION]["cost"])
        candidates = sorted({*config["1"]["candidate_steps"], initial_steps})
        self._chain = ChainLength(candidates, cost, config[SECTION]["length"])
        self._chosen = [initial_steps] * 2  # for the batch before the last, and for the last
        self._graph_batches: list[int] | None = None

    @property
    def candidate_steps(self) -> list[int]:
        """Ascending."""
        return list(self._chain.candidates)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Batch sizes that graphs are captured for; None: there are no graphs."""
        self._graph_batches = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Batch sizes at which a number of draft tokens may be chosen: all, for any of them."""
        return self._graph_batches

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The number for the batch about to be decoded."""
        self._chosen = [self._chosen[1], self._chain.choose(batch_size)]
        return self._chosen[1]

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """Learn from a step; the number changes only where a batch begins, so: None.

        With overlapped scheduling results come when the next number is chosen already, and nothing tells which one they
        belong to: where the two differ they teach nothing.
        """
        if self._chosen[0] == self._chosen[1]:
            self._chain.observe(self._chosen[1], num_correct_drafts_per_req)
        return None
