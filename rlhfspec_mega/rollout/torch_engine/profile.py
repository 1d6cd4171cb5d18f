"""Synthetic samples before the first real one: they measure the cost of decode steps, and rehearse decisions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhfspec_mega.history.index import History
from rlhfspec_mega.history.propose import Proposed
from rlhfspec_mega.planning.acceptance import MATCH_CELLS
from rlhfspec_mega.planning.cost import StepCost, step_cost
from rlhfspec_mega.planning.modes import PLAIN, RECALLED, SETTLING
from rlhfspec_mega.planning.nodes import index_within_row
from rlhfspec_mega.planning.oversight import MonitoredPolicy
from rlhfspec_mega.planning.strategy import CalibratedPolicy
from rlhfspec_mega.planning.tree import ROOT, Batch, DraftingPolicy, DraftTree, Ints, Recall, StepRecord
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import GenerationRequest

SECONDS, PLAIN_SECONDS = 8.0, 2.0  # approximate time of a profile, without that of first uses
TOUCHING = 0.25  # share of that time that is spent before, at most, to use all memory once
MOST_TOKENS = 384  # most tokens of a measured step; larger steps are slow and seldom worth it
REPEATS = 3  # measurements of a step, of which the median is used
PROMPT_TOKENS = (16, 192)
LONG_SIZES = 3  # batch sizes that are measured with long prompts, too: one number says what a token of KV costs
KINDS_AT_ONCE = 4  # kinds of steps with the largest trees for which the same samples are decoded, where they fit

REHEARSED, REHEARSED_TOKENS = 2, 24  # samples and response tokens of a rehearsal


class Shape(NamedTuple):
    """A kind of step to measure.

    Attributes:
        depth: layers of the draft tree.
        drafted: nodes per sample and layer that the draft expands.
        verified: draft tokens verified per sample.
        after: plain steps before the measured step, whose tokens the draft then has to process first.
    """

    depth: int
    drafted: int
    verified: int
    after: int = 0


SHAPES = (Shape(0, 0, 0), Shape(1, 0, 1), Shape(3, 1, 3), Shape(6, 1, 6), Shape(4, 3, 12), Shape(6, 4, 24))
CATCHING_UP = Shape(1, 0, 1, after=7)
BOTH_SOURCES = Shape(2, 1, 2)  # of a rehearsal, from the draft model and from earlier text


class ScriptedPolicy(DraftingPolicy):
    """Implements `DraftingPolicy`: drafts trees of a given shape and records the cost of each step.

    Attributes:
        recalls: whether the trees come from a ScriptedHistory, alone or beside a draft model.
    """

    def __init__(self, width: int, max_depth: int, max_nodes: int, *, recalls: bool) -> None:
        self.recalls = recalls
        self.width, self.max_depth, self.max_nodes = width, max_depth, max_nodes
        self.shape = SHAPES[0]
        self.costs: list[StepCost] = []

    def recall(self, batch: Batch) -> Recall | None:
        if not self.recalls:
            return None
        most = min(self.shape.verified, self.max_nodes)
        return Recall(most, 0.0, np.zeros(batch.size, np.int64), np.ones((1, MATCH_CELLS)))

    def depth(self, batch: Batch) -> int:
        plain = len(self.costs) % (self.shape.after + 1) < self.shape.after
        return 0 if plain else min(self.shape.depth, self.max_depth)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        nodes = np.arange(tree.size)[tree.last_layer]
        if tree.depth >= self.shape.depth:
            return nodes[:0]
        return nodes[index_within_row(tree.rows[nodes]) < self.shape.drafted]

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        # A sample's nodes are ordered by layer, so that the parents of its first nodes are among them.
        return np.flatnonzero(index_within_row(tree.rows) < min(self.shape.verified, self.max_nodes))

    def observe(self, record: StepRecord) -> None:
        self.costs.append(step_cost(record))


class ScriptedHistory(History):
    """Proposes as many tokens as are asked for, in chains; it keeps nothing."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def admit(self, slot: int, prompt: Sequence[int], response: Sequence[int]) -> None:
        pass

    def extend(self, tokens: Sequence[int], counts: Ints) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass

    def propose(self, batch: int, most: int, least: float, **wanted: Any) -> Proposed:
        room = wanted["depths"]
        rows = np.repeat(np.arange(batch), np.where(room > 0, most, 0))
        places = np.tile(np.arange(most), int(np.count_nonzero(room > 0)))
        above = places % np.maximum(room[rows], 1)
        zeros = np.zeros(len(rows), np.int64)
        parents = np.where(above > 0, np.arange(len(rows)) - 1, ROOT)
        tokens = places // np.maximum(room[rows], 1)  # siblings differ
        return Proposed(rows, parents, above + 1, tokens, zeros, zeros, np.ones(len(rows)))


def profile(engine: TorchEngine, seconds: float = SECONDS) -> list[StepCost]:
    """Decode synthetic samples in batches and trees of many sizes; returns the cost of the measured steps.

    The engine must be idle and have all weights, including those of its draft, if it has one. Every batch size gets an
    equal share of the remaining time, the largest and smallest first; long prompts come last.

    Args:
        seconds: time for all measurements.
    """
    own, history = engine.policy, engine.history
    assert own is not None
    script = ScriptedPolicy(own.width, own.max_depth, own.max_nodes, recalls=not engine.drafting)
    measured = list[StepCost]()
    engine.policy, engine.history = script, None if engine.drafting else ScriptedHistory()
    try:
        _measure(engine, script, 1, PROMPT_TOKENS[0], math.inf)  # untimed: a first step of each kind may compile
        sizes, (short, long) = _outside_in(engine.load().slots), PROMPT_TOKENS
        engine.make_kernels(MOST_TOKENS)
        # Untimed, too: memory that nobody has written to yet makes the first steps of a size take up to twice as long.
        _measure(engine, script, sizes[0], long, time.monotonic() + seconds * TOUCHING)
        deadline = time.monotonic() + seconds
        turns = [(short, size) for size in sizes] + [(long, size) for size in sizes[:LONG_SIZES]]
        for turn, (length, size) in enumerate(turns):
            now = time.monotonic()
            if now > deadline:
                return measured
            share = now + (deadline - now) / (len(turns) - turn)
            measured += _measure(engine, script, size, length, share)
    finally:
        _forget(engine)
        engine.policy, engine.history = own, history
    return measured


def profile_plain(engine: TorchEngine, seconds: float = PLAIN_SECONDS) -> list[StepCost]:
    """As `profile`, for plain steps of an engine without a draft, or whose draft has no weights."""
    measured = list[StepCost]()
    history, engine.history = engine.history, None
    try:
        engine.submit(_made_up(engine, 1, PROMPT_TOKENS[0], REPEATS))
        while not engine.idle:  # untimed: the first steps may compile
            engine.poll(0)
        deadline = time.monotonic() + seconds
        for length in PROMPT_TOKENS:
            for size in _outside_in(engine.load().slots):
                engine.submit(_made_up(engine, size, length, 2 * REPEATS))
                found = list[StepCost]()
                while not engine.idle and (time.monotonic() < deadline or not measured + found):
                    started, load = time.perf_counter(), engine.load()
                    engine.poll(0)
                    if load.running == size:
                        took = time.perf_counter() - started
                        found.append(StepCost(size, load.kv_tokens, size, 0, 0, 0, 0.0, took))
                engine.clear()
                if found:
                    measured.append(sorted(found, key=lambda cost: cost.verify_seconds)[len(found) // 4])
    finally:
        _forget(engine)
        engine.history = history
    return measured


def rehearse(engine: TorchEngine, policy: DraftingPolicy) -> None:
    """Decode synthetic samples with a policy that is not used any more afterwards.

    Whatever its decisions compile, or load, is there by then. Otherwise the first drafted steps of a run would take ten
    times as long as later ones, and drafting would be judged by them.
    """
    own, history = engine.policy, engine.history
    assert own is not None
    if isinstance(policy, CalibratedPolicy) and policy.modes:
        policy.modes.forget_draft()  # then the first steps try it
    try:
        if history and engine.drafting:  # a policy may not come to ask both
            script = ScriptedPolicy(own.width, own.max_depth, own.max_nodes, recalls=True)
            script.shape = BOTH_SOURCES
            engine.policy, engine.history = script, ScriptedHistory()
            _decode_all(engine)
        engine.policy = MonitoredPolicy(policy, collapse_ratio=0.0)  # as in a run: its counters are compiled, too
        engine.history = History(REHEARSED, 1) if history else None
        for _ in range(2):  # the second time there is history of the same samples
            _decode_all(engine)
        if isinstance(policy, CalibratedPolicy) and policy.modes:
            for mode in (*([RECALLED] if history else []), PLAIN):  # whatever the policy came to choose by itself
                policy.modes.keep_to(mode)
                _decode_all(engine)
    finally:
        _forget(engine)
        engine.policy, engine.history = own, history


def _decode_all(engine: TorchEngine) -> None:
    """Decode the samples of a rehearsal."""
    engine.submit(_made_up(engine, REHEARSED, PROMPT_TOKENS[0], REHEARSED_TOKENS))
    while not engine.idle:
        engine.poll(0)


def _forget(engine: TorchEngine) -> None:
    """Remove all traces of the synthetic samples: the samples, counters and spans."""
    engine.clear()
    engine.reset_stats()
    engine.spans.take()


def _measure(engine: TorchEngine, script: ScriptedPolicy, size: int, length: int, deadline: float) -> list[StepCost]:
    """The cost of each kind of step; the same samples decode for as many kinds as they have tokens left for."""
    least = max(REPEATS * (script.max_depth + 1), CATCHING_UP.after + 2)
    requests = _made_up(engine, size, length, max(least, min(KINDS_AT_ONCE * least, engine.max_positions - length)))
    found, left = list[StepCost](), 0
    for shape in SHAPES if script.recalls else (*SHAPES, CATCHING_UP):
        script.shape = shape
        if size * (1 + shape.verified) > MOST_TOKENS and shape.verified > 1:
            continue
        unused = shape.after if shape.depth else SETTLING
        steps = unused + (1 if shape.after else REPEATS)
        needed = steps * (1 + min(shape.depth, script.max_depth))
        if needed >= left:
            engine.clear()
            engine.submit(requests)
            left = requests[0].max_new_tokens
        left -= needed
        whole = _decode(engine, script, size, steps, deadline)
        whole = whole[unused:] or ([] if shape.after else whole[-1:])
        if whole:
            found.append(sorted(whole, key=lambda cost: cost.draft_seconds + cost.verify_seconds)[len(whole) // 2])
    engine.clear()
    return found


def _decode(engine: TorchEngine, script: ScriptedPolicy, size: int, steps: int, deadline: float) -> list[StepCost]:
    """Decode up to `steps` steps; returns the cost of those in which all samples were decoded."""
    script.costs.clear()
    while not engine.idle and len(script.costs) < steps and time.monotonic() < deadline:
        engine.poll(0)
    return [cost for cost in script.costs if cost.batch == size]


def _made_up(engine: TorchEngine, size: int, length: int, tokens: int) -> list[GenerationRequest]:
    """`size` samples with the same prompt of about `length` tokens and responses of about `tokens` tokens."""
    prompt = tuple(token % engine.vocab_size for token in range(max(1, min(length, engine.max_positions - tokens))))
    tokens = min(tokens, engine.max_positions - len(prompt))
    return [GenerationRequest(f"profile.{i}", "profile", prompt, seed=i, max_new_tokens=tokens) for i in range(size)]


def _outside_in(largest: int) -> list[int]:
    """Batch sizes up to `largest`: the largest, the smallest, the second largest, and so on; powers of two between."""
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    order = [largest]
    while sizes:
        order += [sizes.pop(0)]
        order += [sizes.pop()] if sizes else []
    return order
