"""A synthetic target and draft for the planning tests: trees whose acceptance probabilities are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlhfspec_mega.planning.tree import ROOT, Batch, Bools, DraftingPolicy, DraftTree, Floats, Ints, StepRecord

# P(child of this rank is accepted | parent accepted) [width], from gap, depth and sample length.
Truth = Callable[[float, int, int, int], Floats]


def make_batch(size: int, rng: np.random.Generator, temperature: float = 1.0, remaining: int = 1000) -> Batch:
    """Samples that no other batch has."""
    lengths = rng.integers(64, 1500, size)
    return Batch(
        lengths,
        lengths - 20,
        np.full(size, remaining),
        np.full(size, temperature),
        2 * size,
        int(lengths.sum()) + np.arange(size),
    )


def logistic(shift: float = 0.3, per_gap: float = 0.9, per_depth: float = -0.12, per_doubling: float = -0.1) -> Truth:
    """The best child by a logistic rule; later ones share what it leaves, falling by 0.6 from rank to rank."""

    def truth(gap: float, depth: int, length: int, width: int) -> Floats:
        odds = shift + per_gap * gap + per_depth * depth + per_doubling * np.log2(length / 64)
        best = 1.0 / (1.0 + np.exp(-odds))
        rest = (1.0 - best) * 0.5 * 0.6 ** np.arange(1, width)
        return np.concatenate(([best], rest))

    return truth


def constant(chance: float) -> Truth:
    return lambda gap, depth, length, width: np.concatenate(([chance], np.zeros(width - 1)))


def grow(
    tree: DraftTree, hits: Bools, batch: Batch, parents: Ints, width: int, truth: Truth, rng: np.random.Generator
) -> Bools:
    """Add the children of these nodes (of the roots for an empty tree); which nodes the target would accept."""
    rows = np.arange(batch.size) if not tree.depth else tree.rows[parents]
    above = np.full(batch.size, ROOT) if not tree.depth else parents
    alive = np.ones(batch.size, np.bool_) if not tree.depth else hits[parents]
    gaps = rng.exponential(1.2, len(rows))
    new = np.zeros((len(rows), width), np.bool_)
    for at, (row, gap) in enumerate(zip(rows.tolist(), gaps.tolist(), strict=True)):
        edges = np.cumsum(truth(gap, tree.depth + 1, int(batch.lengths[row]), width))
        hit = int(np.searchsorted(edges, rng.random()))
        if alive[at] and hit < width:
            new[at, hit] = True
    tree.add_layer(
        np.repeat(rows, width),
        np.repeat(above, width),
        np.tile(np.arange(width), len(rows)),
        np.repeat(gaps, width),
        np.zeros(new.size, np.bool_),
    )
    return np.concatenate((hits, new.ravel()))


def decode_step(
    policy: DraftingPolicy,
    batch: Batch,
    truth: Truth,
    rng: np.random.Generator,
    seconds: Callable[[DraftTree, int, int], tuple[float, float]] | None = None,
) -> StepRecord:
    """One step as an engine makes it; `seconds` gives draft and verify time of (tree, drafted, draft tokens)."""
    tree, hits, drafted = DraftTree(), np.zeros(0, np.bool_), 0
    if policy.rests(batch.size, True):
        times = seconds(tree, 0, 0) if seconds else (0.0, 0.0)
        policy.rested(batch.samples, batch.kv_tokens, [sum(times)])
        return StepRecord(batch, tree, np.zeros(0, np.int64), hits, 0, *times)
    layers = policy.depth(batch)
    parents = np.arange(batch.size)
    while tree.depth < layers and len(parents):
        drafted += len(parents) if tree.depth else 0
        hits = grow(tree, hits, batch, parents, policy.width, truth, rng)
        parents = policy.expand(batch, tree)
    chosen = policy.choose(batch, tree)
    times = seconds(tree, drafted, len(chosen)) if seconds else (0.0, 0.0)
    record = StepRecord(
        batch, tree, chosen, hits[chosen], drafted, *times, root_hits=hits[(tree.depths == 1) & (tree.ranks == 0)]
    )
    policy.observe(record)
    return record
