"""What decode steps cost on this machine: measured on made-up samples before the first real one."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from rlhfspec_mega.planning.cost import StepCost, step_cost
from rlhfspec_mega.planning.strategy import SETTLING, places
from rlhfspec_mega.planning.tree import Batch, DraftTree, Ints, StepRecord
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import GenerationRequest

SECONDS, PLAIN_SECONDS = 8.0, 2.0  # of a profile, about
MOST_TOKENS = 384  # of a step; more take long and are seldom worth it
REPEATS = 3  # of a step; the median counts
PROMPT_TOKENS = (16, 192)


class Shape(NamedTuple):
    """A step to measure: layers, nodes drafted from per sample and layer, draft tokens verified per sample.

    Attributes:
        after: plain steps before it, whose tokens the draft has then to read first.
    """

    depth: int
    drafted: int
    verified: int
    after: int = 0


SHAPES = (Shape(0, 0, 0), Shape(1, 0, 1), Shape(3, 1, 3), Shape(6, 1, 6), Shape(4, 3, 12), Shape(6, 4, 24))
CATCHING_UP = Shape(1, 0, 1, after=7)


class ScriptedPolicy:
    """Implements `DraftingPolicy`: drafts trees of the shape it is told, and notes what they took."""

    def __init__(self, width: int, max_depth: int, max_nodes: int) -> None:
        self.width, self.max_depth, self.max_nodes = width, max_depth, max_nodes
        self.shape = SHAPES[0]
        self.costs: list[StepCost] = []

    def depth(self, batch: Batch) -> int:
        plain = len(self.costs) % (self.shape.after + 1) < self.shape.after
        return 0 if plain else min(self.shape.depth, self.max_depth)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        nodes = np.arange(tree.size)[tree.last_layer]
        return nodes[places(tree.rows[nodes]) < self.shape.drafted] if tree.depth < self.shape.depth else nodes[:0]

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        # The first nodes of a sample are its first layer, and so on: with them come their parents.
        return np.flatnonzero(places(tree.rows) < min(self.shape.verified, self.max_nodes))

    def observe(self, record: StepRecord) -> None:
        self.costs.append(step_cost(record))


def profile(engine: TorchEngine, seconds: float = SECONDS) -> list[StepCost]:
    """Decode made-up samples in batches and trees of many sizes; the engine is idle, has all its weights and a draft.

    Every batch size has its share of the time, the largest and smallest first; what one leaves is for the others.
    """
    own = engine.policy
    assert own is not None
    script = ScriptedPolicy(own.width, own.max_depth, own.max_nodes)
    deadline, measured = time.monotonic() + seconds, list[StepCost]()
    engine.policy = script
    try:
        turns = [(length, size) for length in PROMPT_TOKENS for size in _outside_in(engine.load().slots)]
        for turn, (length, size) in enumerate(turns):
            now = time.monotonic()
            if now > deadline:
                return measured
            share = now + (deadline - now) / (len(turns) - turn)
            measured += _measure(engine, script, size, length, share)
    finally:
        engine.policy = own
        _forget(engine)
    return measured


def profile_plain(engine: TorchEngine, seconds: float = PLAIN_SECONDS) -> list[StepCost]:
    """As `profile`, of plain steps alone, of an engine without a draft."""
    deadline, measured = time.monotonic() + seconds, list[StepCost]()
    try:
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
    return measured


def _forget(engine: TorchEngine) -> None:
    """Leave no trace of what was made up: no samples, counts or spans."""
    engine.clear()
    engine.reset_stats()
    engine.spans.take()


def _measure(engine: TorchEngine, script: ScriptedPolicy, size: int, length: int, deadline: float) -> list[StepCost]:
    requests = _made_up(engine, size, length, max(REPEATS * (script.max_depth + 1), CATCHING_UP.after + 2))
    found = []
    for script.shape in SHAPES:
        if size * (1 + script.shape.verified) > MOST_TOKENS and script.shape.verified > 1:
            break
        settling = 0 if script.shape.depth else SETTLING
        whole = _decode(engine, script, requests, settling + REPEATS, deadline)
        whole = whole[settling:] or whole[-1:]
        if whole:
            found.append(sorted(whole, key=lambda cost: cost.draft_seconds + cost.verify_seconds)[len(whole) // 2])
    script.shape = CATCHING_UP
    return found + _decode(engine, script, requests, CATCHING_UP.after + 1, deadline)[CATCHING_UP.after :]


def _decode(
    engine: TorchEngine, script: ScriptedPolicy, requests: list[GenerationRequest], steps: int, deadline: float
) -> list[StepCost]:
    """Of at most so many steps those in which all samples were decoded."""
    script.costs.clear()
    engine.submit(requests)
    while not engine.idle and len(script.costs) < steps and time.monotonic() < deadline:
        engine.poll(0)
    engine.clear()
    return [cost for cost in script.costs if cost.batch == len(requests)]


def _made_up(engine: TorchEngine, size: int, length: int, tokens: int) -> list[GenerationRequest]:
    """Samples of one prompt of about `length` tokens and responses of about `tokens`."""
    prompt = tuple(token % engine.vocab_size for token in range(max(1, min(length, engine.max_positions - tokens))))
    tokens = min(tokens, engine.max_positions - len(prompt))
    return [GenerationRequest(f"profile.{i}", "profile", prompt, seed=i, max_new_tokens=tokens) for i in range(size)]


def _outside_in(largest: int) -> list[int]:
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    order = [largest]
    while sizes:
        order += [sizes.pop(0)]
        order += [sizes.pop()] if sizes else []
    return order
