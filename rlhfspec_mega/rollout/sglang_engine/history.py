"""Draft tokens from earlier text in SGLang: this package's index in the place of the one of its NGRAM speculation.

SGLang's NGRAM worker verifies a tree of a fixed number of nodes for each request, without a draft model. Its own index
ranks what followed by how often it did; the one here ranks it under the noise of the request, as the torch engine does
(`history.propose`), so that it is the target's choice more often.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.history.index import History
from rlhfspec_mega.history.propose import Proposed
from rlhfspec_mega.planning.acceptance import AcceptanceModel, temperature_classes
from rlhfspec_mega.planning.tree import MATCHED, Batch, Bools, DraftTree, Ints, StepRecord
from rlhfspec_mega.sampling.noise import seed_states
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally, FinishedText

LEAST_SURVIVAL = 1e-3  # of a node that is proposed: as many nodes are verified in any case


@dataclass
class _Followed:
    """A request of SGLang whose tokens go into history.

    Attributes:
        request: SGLang's `Req`.
        slot: in history.
        number: consecutive number of the request, under which its acceptance is learnt.
        known: its tokens, those of the prompt included, that history has.
    """

    request: Any
    slot: int
    number: int
    known: int


@dataclass(frozen=True)
class _Drafted:
    """What was proposed for a batch of requests: rows of its nodes are places in `rids`."""

    rids: list[str]
    batch: Batch
    proposed: Proposed


class HistoryDrafts:
    """Replaces SGLang's NgramCorpus: makes the trees of each step, and learns which of their nodes are accepted.

    Each tensor-parallel rank has one; all see the same tokens in the same order.

    Args:
        capacity: tokens that are kept.
        draft_token_num: nodes of a tree, with the request's last token.

    Attributes:
        current: the instance of this process; a scheduler has one.
    """

    current: HistoryDrafts | None = None

    def __init__(self, *, capacity: int, draft_token_num: int, **of_the_other_index: Any) -> None:
        self._capacity, self._most = capacity, draft_token_num - 1
        self._acceptance, self._tally = AcceptanceModel(), DraftingTally()
        self._followed: dict[str, _Followed] = {}
        self._numbers = 0
        self._ended: set[str] = set()  # samples that ended here since the last `remember`
        self._latest: _Drafted | None = None
        self.make_room(1, 1)
        HistoryDrafts.current = self

    def make_room(self, slots: int, vocabulary: int) -> None:
        """For so many requests at once; to be called before the first one."""
        self._history, self._free = History(slots, self._capacity), list(range(slots))[::-1]
        self._noise, self._temperatures = np.zeros(slots, np.int64), np.zeros(slots)
        self._stops = np.zeros((slots, vocabulary), np.bool_)

    # Steps

    def draft(self, requests: Sequence[Any], newest: Sequence[Sequence[int]]) -> tuple[Ints, Bools]:
        """The trees of a batch of requests, each with `draft_token_num` nodes.

        Args:
            newest: tokens of each request that are not among its `output_ids` yet.

        Returns:
            int64 [B * nodes], the tokens, of which the first of each tree is the request's last token; and bool
            [B * nodes * nodes], which nodes of its tree a node sees: its ancestors and itself.
        """
        taken = self._leave({request.rid for request in requests})
        last, rows = [], []
        for request, new in zip(requests, newest, strict=True):
            taken[request.rid] = self._follow(request, new)
            rows.append(self._followed[request.rid])
            last.append(new[-1] if len(new) else request.output_ids[-1])
        self._store(rows, taken)
        self._learn(taken)
        batch = self._batch(rows)
        proposed = self._propose(batch, np.array([row.slot for row in rows]))
        self._latest = _Drafted([request.rid for request in requests], batch, proposed)
        return trees_of(np.array(last), proposed, self._most + 1)

    def erase_match_state(self, rids: Sequence[str]) -> None:
        """Called by SGLang; does nothing: `draft` sees which requests have left."""

    def reset(self) -> None:
        """Called by SGLang when it empties its cache, for new weights: texts stay, as they may well come again.

        Nobody tells of samples of earlier weights any more.
        """
        self._ended.clear()

    # Between steps

    def remember(self, texts: Sequence[FinishedText], anew: bool) -> None:
        """Draft from these samples, too, but for those that ended here since the last call: history has them.

        Args:
            anew: forget all others; no request is being decoded.
        """
        self._settle()
        if anew:
            self._history.clear()
        others = [text for text in texts if text.sample_id not in self._ended]
        self._history.add((text.prompt, text.response) for text in others)
        self._ended.clear()

    def forget(self) -> None:
        """Forget all texts, and all that was learnt and counted. No request is being decoded."""
        self._leave(set())
        self._history.clear()
        self._ended.clear()
        self._latest, self._tally, self._acceptance = None, DraftingTally(), AcceptanceModel()

    def take_tally(self) -> DraftingTally:
        """Counters since the last call."""
        self._settle()
        taken, self._tally = self._tally, DraftingTally()
        report = self._acceptance.report()
        if report.observations:
            taken.calibration_error = report.calibration_error
            taken.predicted_accepted, taken.realised_accepted = report.recent_predicted, report.recent_realised
        return taken

    def _settle(self) -> None:
        """Once all requests have ended let go of them: no step follows that shows it."""
        if all(one.request.finished() for one in self._followed.values()):
            self._learn(self._leave(set()))

    # Requests come and go

    def _follow(self, request: Any, new: Sequence[int]) -> list[int]:
        """The tokens of a request that history does not have yet; one that has just come brings its prompt along."""
        one, total = self._followed.get(request.rid), len(request.origin_input_ids) + len(request.output_ids) + len(new)
        if one is not None and (one.request is not request or total < one.known):  # SGLang has begun it anew
            self._free.append(self._followed.pop(request.rid).slot)
            one = None
            if self._latest:  # what came of its tree is not known
                self._latest.rids[:] = ["" if rid == request.rid else rid for rid in self._latest.rids]
        if one is None:
            one = self._admit(request)
        found = _tokens_from(request, one.known, request.output_ids, new)
        one.known = total
        return found

    def _admit(self, request: Any) -> _Followed:
        one = _Followed(request, self._free.pop(), self._numbers, len(request.origin_input_ids))
        self._numbers += 1
        self._followed[request.rid] = one
        params, seed = request.sampling_params, request.sampling_params.sampling_seed
        seed = zlib.crc32(str(request.rid).encode()) if seed is None else seed
        self._noise[one.slot] = int(seed_states(torch.tensor(seed)))
        self._temperatures[one.slot] = 0.0 if params.top_k == 1 else params.temperature
        self._stops[one.slot] = False
        self._stops[one.slot, list(params.stop_token_ids or ())] = True
        self._history.admit(one.slot, list(request.origin_input_ids), [])
        return one

    def _leave(self, staying: Set[str]) -> dict[str, list[int]]:
        """Let go of all requests but these; returns their tokens that history did not have."""
        taken = dict[str, list[int]]()
        left = [one for rid, one in self._followed.items() if rid not in staying]
        for one in left:
            rid, ended = one.request.rid, one.request.finished()
            output = one.request.output_ids_through_stop if ended else one.request.output_ids
            taken[rid] = _tokens_from(one.request, one.known, output, ())
            if ended and one.request.finished_reason.to_json()["type"] != "abort":
                self._ended.add(str(rid).rsplit("/", 2)[0])
            del self._followed[rid]
        self._store(left, taken)
        self._free += [one.slot for one in left]
        return taken

    def _store(self, some: Sequence[_Followed], taken: dict[str, list[int]]) -> None:
        """Append tokens of requests to history."""
        if not some:
            return
        by_slot = sorted(some, key=lambda one: one.slot)
        counts = np.zeros(by_slot[-1].slot + 1, np.int64)
        for one in by_slot:
            counts[one.slot] = len(taken[one.request.rid])
        self._history.extend([token for one in by_slot for token in taken[one.request.rid]], counts)

    # Trees

    def _batch(self, rows: Sequence[_Followed]) -> Batch:
        slots = np.array([row.slot for row in rows])
        lengths = np.array([row.known for row in rows])
        generated = lengths - [len(row.request.origin_input_ids) for row in rows]
        return Batch(
            lengths=lengths,
            generated=generated,
            remaining=np.array([row.request.sampling_params.max_new_tokens for row in rows]) - generated,
            temperatures=self._temperatures[slots],
            backlog=0,
            samples=np.array([row.number for row in rows]),
        )

    def _propose(self, batch: Batch, slots: Ints) -> Proposed:
        """The most promising continuations of each request, fewer where history has fewer."""
        size = int(slots.max()) + 1
        lengths, depths, classes, place = (np.zeros(size, np.int64) for _ in range(4))
        lengths[slots], classes[slots], place[slots] = batch.lengths, temperature_classes(batch), np.arange(len(slots))
        depths[slots] = np.clip(batch.remaining - 1, 0, self._most)
        found = self._history.propose(
            size,
            self._most,
            LEAST_SURVIVAL,
            noise=self._noise[:size],
            lengths=lengths,
            depths=depths,
            sampled=self._temperatures[:size] > 0,
            classes=classes,
            accepted=self._acceptance.recalled_table(),
            stops=self._stops[:size],
            forced=np.zeros(size, np.bool_),
        )
        return found._replace(rows=place[found.rows])

    def _learn(self, taken: dict[str, list[int]]) -> None:
        """Learn from the latest trees, now that it is known which tokens came."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        came = [taken.get(rid, []) for rid in latest.rids]
        ends = np.cumsum([len(tokens) for tokens in came])
        flat, proposed = np.array([token for tokens in came for token in tokens], np.int64), latest.proposed
        passed = np.array([len(tokens) > 0 for tokens in came])
        chosen = np.flatnonzero(passed[proposed.rows])
        accepted = on_path(proposed, flat, ends)[chosen]
        tree = DraftTree()
        undrafted = np.zeros(len(proposed.rows), np.bool_)
        tree.add_recalled(proposed.rows, proposed.parents, proposed.depths, MATCHED + proposed.cells, undrafted)
        tree.survival = proposed.survival
        self._acceptance.observe(StepRecord(latest.batch, tree, chosen, accepted, 0, 0.0, 0.0))
        self._count(np.bincount(proposed.rows, minlength=len(ends))[passed], len(flat) - int(passed.sum()))

    def _count(self, verified: Ints, accepted: int) -> None:
        """Add a step to the tally: draft tokens of each request, and those accepted of all, nodes that fill trees up
        included."""
        tally = self._tally
        tally.sample_steps += len(verified)
        tally.drafted_sample_steps += int((verified > 0).sum())
        tally.verified += int(verified.sum())
        tally.accepted += accepted
        tally.recalled += accepted
        for group in np.searchsorted(TALLY_EDGES, verified).tolist():
            tally.sample_steps_by_verified[group] += 1


def _tokens_from(request: Any, known: int, output: Sequence[int], new: Sequence[int]) -> list[int]:
    """What follows the first `known` tokens of prompt, output and new tokens; the prompt is among them."""
    start = known - len(request.origin_input_ids)
    return [*output[start:], *new[max(0, start - len(output)) :]]


@compiled
def on_path(proposed: Proposed, came: Ints, ends: Ints) -> Bools:
    """Whether each proposed node was accepted.

    Args:
        came: the tokens that a step gave, request by request; the last one of each is the target's own.
        ends: of each request, the end of its tokens in `came`.
    """
    found = np.zeros(len(proposed.rows), np.bool_)
    for node in range(len(found)):
        row, parent, depth = proposed.rows[node], proposed.parents[node], proposed.depths[node]
        first = ends[row - 1] if row else 0
        if depth < ends[row] - first and (parent < 0 or found[parent]):
            found[node] = proposed.tokens[node] == came[first + depth - 1]
    return found


@compiled
def trees_of(last: Ints, proposed: Proposed, nodes: int) -> tuple[Ints, Bools]:
    """See HistoryDrafts.draft. Of a request with fewer proposals the other nodes are children of its last token, too,
    with that token again: if it is the target's choice, it is accepted like any other.

    Args:
        last: [B] the last token of each request.
        nodes: of a tree, at least one more than those of a request.
    """
    tokens, sees = np.empty((len(last), nodes), np.int64), np.zeros((len(last), nodes, nodes), np.bool_)
    used, at = np.ones(len(last), np.int64), np.empty(len(proposed.rows), np.int64)
    for row in range(len(last)):
        tokens[row] = last[row]
        for node in range(nodes):
            sees[row, node, 0] = sees[row, node, node] = True
    for node in range(len(proposed.rows)):
        row, parent = proposed.rows[node], proposed.parents[node]
        place = at[node] = used[row]
        used[row] += 1
        tokens[row, place] = proposed.tokens[node]
        if parent >= 0:
            sees[row, place, : at[parent] + 1] = sees[row, at[parent], : at[parent] + 1]
    return tokens.ravel(), sees.ravel()
