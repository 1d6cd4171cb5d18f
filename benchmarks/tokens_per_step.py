"""In how many steps each verification rule would have decoded finished sequences of the target.

That is exact, not a simulation: shared noise and top-k trees accept exactly what the finished sequence follows, and
the chance that a rejection chain accepted a token is known given the token. Survival is learnt on other sequences than
those that are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.draft_rollout import DraftRollout
from benchmarks.samples import Sampled, Target, sample
from benchmarks.verification_rules import (
    SharedNoise,
    SurvivalTable,
    TopK,
    accepted_layers,
    chain_acceptance,
    follow,
    grow,
    perturbed_scores,
)
from rlhfspec_mega.draft.examples import Example, collect_examples
from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.sampling.noise import gumbel

SHARED, TOP_K, CHAIN = "shared noise", "top-k, target-only", "rejection chain"
RULES = (SHARED, TOP_K, CHAIN)
KEPT = (1, 2, 4, 8, 16, 32, 64)  # draft tokens verified per step
DEPTHS = (4, 8)
WIDTH = 10  # children of a node and nodes expanded per layer, as EAGLE-2's default
ROOTS_AT_ONCE = 64
NOWHERE = -1  # no token: what follows the end of a sequence
SAMPLING_SEED = 17

Setting = tuple[str, int, int]  # rule, depth, draft tokens
SETTINGS: tuple[Setting, ...] = tuple((rule, depth, kept) for rule in RULES for depth in DEPTHS for kept in KEPT)


@dataclass(frozen=True)
class Task:
    """A target with its draft and prompts.

    Attributes:
        tokens: of the longest response.
        forced: <eos> is masked in target and draft, so that every response has that length.
    """

    name: str
    target: Target
    draft: DraftModel
    prompts: Sequence[tuple[int, ...]]
    tokens: int
    forced: bool

    @property
    def eos(self) -> Tensor:
        return torch.tensor([self.target.tokenizer.eos_token_id])

    @property
    def banned(self) -> Tensor:
        """Tokens that neither target nor draft may choose."""
        return self.eos if self.forced else self.eos[:0]


@torch.no_grad()
def measure(task: Task, temperature: float, learnt: int) -> tuple[Tensor, dict[Setting, Tensor]]:
    """Tokens [sequences] and, by setting, the expected steps [sequences] that they would take.

    Args:
        learnt: prompts, the first ones, whose sequences teach survival and are not judged.
    """
    samples = sample(
        task.target,
        task.prompts,
        temperature=temperature,
        max_new_tokens=task.tokens,
        seed=SAMPLING_SEED,
        forced=task.forced,
    )
    sequences = [(list(s.tokens), s.prompt_length) for s in samples]
    examples = collect_examples(task.target.model, task.draft.shape, sequences)
    pairs = list(zip(samples, examples, strict=True))
    survival = _learn_survival(task, temperature, pairs[:learnt])
    judged = pairs[learnt:]
    steps: dict[Setting, list[float]] = {setting: [] for setting in SETTINGS}
    for sampled, example in judged:
        going_on = torch.cat(
            [_going_on(task, temperature, survival, sampled, example, roots) for roots in _roots(example)], dim=1
        )
        for setting, expected in zip(SETTINGS, expected_steps(going_on), strict=True):
            steps[setting].append(float(expected))
    tokens = torch.tensor([len(sampled.response) for sampled, _ in judged])
    return tokens, {setting: torch.tensor(values) for setting, values in steps.items()}


def expected_steps(going_on: Tensor) -> Tensor:
    """Steps [K] to decode a sequence from its first root on.

    Args:
        going_on: [K, R, depth], the probability that a step begun at root r accepts its layer d, given that it
            accepted those before. Root R would be the end.
    """
    kinds, roots, depth = going_on.shape
    survival = torch.cat((torch.ones(kinds, roots, 1), going_on.cumprod(-1), torch.zeros(kinds, roots, 1)), dim=-1)
    exactly = survival[..., :-1] - survival[..., 1:]  # P(accepted = 0 ... depth)
    steps = torch.zeros(kinds, roots + depth + 1, dtype=torch.float64)
    for root in reversed(range(roots)):
        steps[:, root] = 1 + (exactly[:, root] * steps[:, root + 1 : root + depth + 2]).sum(-1)
    return steps[:, 0]


def _roots(example: Example) -> Iterator[Tensor]:
    """Positions of the last committed tokens from which some token of the response remains, in pieces."""
    return iter(torch.arange(max(example.prompt_length - 1, 1), len(example.tokens) - 1).split(ROOTS_AT_ONCE))


def _ahead(example: Example, roots: Tensor, depth: int) -> Tensor:
    """The sequence's own tokens [P, depth] after each root; NOWHERE beyond its end."""
    padded = torch.cat((example.tokens, torch.full((depth,), NOWHERE)))
    return padded[roots[:, None] + 1 + torch.arange(depth)]


def _noise(sampled: Sampled, roots: Tensor, level: int, temperature: float, vocab: int) -> Tensor | None:
    """Noise [P, 1, V] of a layer; None when greedy."""
    return gumbel(torch.tensor([sampled.seed]), roots + level, vocab)[:, None] if temperature > 0 else None


def _along(rollout: DraftRollout, ahead: Tensor) -> Iterator[Tensor]:
    """Draft logits [P, V] of each layer, on the branch that the sequence itself takes."""
    parents = torch.zeros(len(ahead), 1, dtype=torch.int64)
    yield rollout.root()[:, 0]
    for level in range(ahead.shape[1] - 1):
        yield rollout.extend(parents, ahead[:, level : level + 1].clamp(min=0))[:, 0]


def _learn_survival(task: Task, temperature: float, pairs: Sequence[tuple[Sampled, Example]]) -> SurvivalTable:
    """From the rank that the sequences' own tokens have among the children, down to the first miss."""
    ranks, gaps = [], []
    for sampled, example in pairs:
        for roots in _roots(example):
            ahead = _ahead(example, roots, max(DEPTHS))
            inside = torch.ones(len(roots), dtype=torch.bool)
            for level, logits in enumerate(_along(DraftRollout(task.draft, example, roots, task.banned), ahead)):
                noise = _noise(sampled, roots, level, temperature, task.target.shape.vocab_size)
                scores = perturbed_scores(logits, temperature, None if noise is None else noise[:, 0])
                inside = inside & (ahead[:, level] != NOWHERE)
                own = scores.gather(1, ahead[:, level : level + 1].clamp(min=0))
                rank, best = (scores > own).sum(1), scores.topk(2).values
                ranks.append(rank[inside])
                gaps.append((best[:, 0] - best[:, 1])[inside])
                inside = inside & (rank < WIDTH)
    return SurvivalTable.fit(torch.cat(ranks), torch.cat(gaps), WIDTH)


def _going_on(
    task: Task, temperature: float, survival: SurvivalTable, sampled: Sampled, example: Example, roots: Tensor
) -> Tensor:
    """Of every setting the probability [settings, P, depth] that a step accepts a layer (0 or 1 with trees)."""
    ahead, vocab, deepest = _ahead(example, roots, max(DEPTHS)), task.target.shape.vocab_size, max(DEPTHS)
    found = {}
    for rule, drafting in ((SHARED, SharedNoise(temperature, survival)), (TOP_K, TopK(temperature, WIDTH))):
        trees = grow(
            DraftRollout(task.draft, example, roots, task.banned),
            drafting,
            depth=deepest,
            noise=lambda level: _noise(sampled, roots, level, temperature, vocab),
            stops=task.eos,
        )
        nodes, _ = follow(trees, lambda _, level: _ahead(example, roots, level + 1)[:, level])
        for depth in DEPTHS:
            ranks = trees.ranks(depth)
            for kept in KEPT:
                found[rule, depth, kept] = accepted_layers(nodes[:, :depth], ranks, kept).double()
    odds = _chain(task, temperature, example, roots, ahead)
    for depth in DEPTHS:
        for kept in KEPT:
            found[CHAIN, depth, kept] = odds[:, : min(depth, kept)]
    pad = torch.nn.functional.pad
    return torch.stack([pad(found[setting], (0, deepest - found[setting].shape[1])) for setting in SETTINGS])


def _chain(task: Task, temperature: float, example: Example, roots: Tensor, ahead: Tensor) -> Tensor:
    """Chance [P, depth] that a chain's token was accepted, given that the step committed the sequence's own."""
    columns = []
    for level, logits in enumerate(_along(DraftRollout(task.draft, example, roots, task.banned), ahead)):
        states = example.states[(roots + level).clamp(max=len(example.states) - 1)]
        target_logits = task.target.model.logits(states).index_fill_(-1, task.banned, float("-inf"))
        odds = chain_acceptance(target_logits, logits, ahead[:, level].clamp(min=0), temperature)
        columns.append(torch.where(ahead[:, level] == NOWHERE, 0.0, odds))
    return torch.stack(columns, dim=1)
