"""What connects HistoryDrafts with SGLang: hooks in its NGRAM worker, and what the engine tells all ranks."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.planning.tree import Bools, Ints
from rlhfspec_mega.rollout.sglang_engine.history import HistoryDrafts
from rlhfspec_mega.types import DraftingTally, FinishedText

METHOD = "rlhfspec_mega_history"  # of schedulers, from `attach` on
REMEMBER, FORGET, TAKE_TALLY = "remember", "forget", "take_tally"


def make_room(result: Any, worker: Any, *given: Any, **named: Any) -> None:
    """After NGRAMWorker.alloc_memory_pool, which knows how many requests there may be."""
    worker.ngram_corpus.make_room(worker.max_batch_size, worker.model_runner.model_config.vocab_size)


def draft(original: Callable[..., Any], worker: Any, batch: Any) -> tuple[Ints, Bools]:
    """Around NGRAMWorker._prepare_draft_tokens: the trees of a batch, on all ranks those of the first."""
    found: tuple[Ints, Bools] = worker.ngram_corpus.draft(batch.reqs, newest_tokens(batch))
    group = worker.model_runner.tp_group
    if group.world_size > 1:
        for array in found:
            memory = torch.from_numpy(array.view(np.uint8))
            torch.distributed.broadcast(memory, src=group.first_rank, group=group.cpu_group)
    return found


def newest_tokens(batch: Any) -> list[list[int]]:
    """The tokens of each request that are not among its `output_ids` yet.

    With overlap scheduling the results of a step are processed when the next one has been launched, unless a prefill
    came in between.
    """
    known = [len(request.origin_input_ids) + len(request.output_ids) for request in batch.reqs]
    whole = [length + 1 for length in batch.seq_lens_cpu.tolist()]  # the last token's KV is not there yet
    lacking = list(map(operator.sub, whole, known))
    if not any(lacking):
        return [[] for _ in known]
    tokens, counts = batch.spec_info.accept_tokens.cpu().view(len(known), -1), batch.spec_info.accept_lens.cpu()
    rows = zip(tokens.tolist(), counts.tolist(), lacking, strict=True)
    return [row[count - lack : count] if lack else [] for row, count, lack in rows]


def keep_nothing(original: Callable[..., None], worker: Any, batch: Any) -> None:
    """Around NGRAMWorker._update_ngram_corpus: `draft` has stored what came."""


class HistoryControl:
    """The engine's interface to HistoryDrafts on all ranks, by `collective_rpc`; `attach` is its counterpart.

    Texts and tallies travel in files, as those of DraftingControl do.

    Args:
        engine: a started `sglang.Engine` that drafts from history.
        directory: an empty directory for these files.
    """

    def __init__(self, engine: Any, directory: Path) -> None:
        self._engine, self._directory = engine, directory

    def remember(self, texts: Sequence[FinishedText], anew: bool) -> None:
        """See HistoryDrafts.remember."""
        path = self._directory / "texts.json"
        path.write_text(json.dumps([*map(tuple, texts)]) + "\n", encoding="utf-8")
        self._engine.collective_rpc(METHOD, action=REMEMBER, path=str(path), anew=anew)
        path.unlink()

    def forget(self) -> None:
        """See HistoryDrafts.forget."""
        self._engine.collective_rpc(METHOD, action=FORGET)

    def take_tally(self) -> DraftingTally:
        """See HistoryDrafts.take_tally; all ranks have equal counters."""
        path = self._directory / "history_tally.json"
        self._engine.collective_rpc(METHOD, action=TAKE_TALLY, path=str(path))
        return DraftingTally(**json.loads(path.read_text(encoding="utf-8")))


def attach(scheduler: Any) -> None:
    """Give a scheduler the method that HistoryControl calls; rank 0 writes tallies to files."""

    def act(action: str, path: str = "", anew: bool = False) -> None:
        current = HistoryDrafts.current
        if current is None:
            raise RunError("SGLang was started without draft tokens from history.")
        if action == REMEMBER:
            texts = json.loads(Path(path).read_text(encoding="utf-8"))
            current.remember([FinishedText(*text) for text in texts], anew)
        elif action == FORGET:
            current.forget()
        else:
            tally = current.take_tally()
            if scheduler.ps.tp_rank == 0:
                Path(path).write_text(json.dumps(asdict(tally)) + "\n", encoding="utf-8")

    setattr(scheduler, METHOD, act)
