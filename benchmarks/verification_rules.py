"""Three rules of speculative sampling on equal terms: how draft tokens are found, and which of them a step accepts.

* shared noise: children are the best perturbed scores log q + g, with the noise g of the sample's position; the
  target's choice argmax(log p + g) is followed while it is among them. Nodes are kept by estimated survival. This is
  the engine's rule.
* top-k with target-only verification: children are the most probable tokens of the draft, kept by cumulative draft
  probability; the target draws a token of its own at every node and follows it while it is among the children. EAGLE-2
  (Li et al. 2024, arXiv 2406.16858) as serving engines do it.
* rejection chain: a chain drawn from q; a token x is accepted with probability min(1, p(x) / q(x)), else another is
  drawn from the rest max(0, p - q) (Leviathan et al. 2023, arXiv 2211.17192).

All are lossless; each works on P positions at once. Temperature 0 is greedy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlhfspec_mega.sampling.select import select_tokens

ROOT = -1  # the last committed token, parent of the first layer


class Drafter(Protocol):
    """Grows one beam of draft tokens at each of P positions, layer by layer."""

    def root(self) -> Tensor:
        """Draft logits [P, 1, V] of the first layer."""

    def extend(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Draft logits [P, B, V] after `tokens` [P, B], children of entries `parents` [P, B] of the beam before."""


class Children(NamedTuple):
    """The `width` children of each drafted node, best first: tokens int64 and log-weights float64 [P, B, width]."""

    tokens: Tensor
    logs: Tensor


class TreeRule(Protocol):
    """Which children a node gets and how they are weighed against others."""

    def children(self, logits: Tensor, noise: Tensor | None) -> Children:
        """From draft logits [P, B, V] and the layer's noise [P, 1, V] (None: greedy)."""


@dataclass(frozen=True)
class TopK:
    """EAGLE-2's tree: draft probability is taken for the probability of acceptance."""

    temperature: float
    width: int

    def children(self, logits: Tensor, noise: Tensor | None) -> Children:
        logs, tokens = draft_logprobs(logits, self.temperature).topk(self.width)
        return Children(tokens, logs)


@dataclass(frozen=True)
class SharedNoise:
    """The tree of perturbed scores, weighed by survival learnt elsewhere."""

    temperature: float
    survival: SurvivalTable

    def children(self, logits: Tensor, noise: Tensor | None) -> Children:
        scores = perturbed_scores(logits, self.temperature, noise)
        best, tokens = scores.topk(self.survival.width)
        return Children(tokens, self.survival.logs(best[..., 0] - best[..., 1]))


@dataclass(frozen=True)
class SurvivalTable:
    """P(the target chooses the child of this rank | the gap between the two best perturbed scores), from counts.

    Attributes:
        edges: float64 [bins - 1], between bins of the gap.
        probabilities: float64 [bins, width].
    """

    edges: Tensor
    probabilities: Tensor

    @property
    def width(self) -> int:
        return self.probabilities.shape[1]

    @classmethod
    def fit(cls, ranks: Tensor, gaps: Tensor, width: int, bins: int = 16) -> SurvivalTable:
        """From the rank of the target's choice (`width` and more: no child) and the gap, int64 and float64 [N]."""
        edges = gaps.double().quantile(torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1])
        cells = torch.bucketize(gaps.double(), edges) * (width + 1) + ranks.clamp(max=width)
        counts = torch.bincount(cells, minlength=bins * (width + 1)).view(bins, width + 1).double()
        overall = (counts.sum(0) + 1) / (counts.sum() + width + 1)
        smoothed = (counts + 4 * overall) / (counts.sum(1, keepdim=True) + 4)
        # A worse rank is never the more probable one: few counts must not turn siblings round.
        return cls(edges, smoothed[:, :width].sort(dim=1, descending=True).values)

    def logs(self, gaps: Tensor) -> Tensor:
        """Log-probabilities [..., width] of the children of nodes with these gaps [...]."""
        return self.probabilities.log()[torch.bucketize(gaps.contiguous(), self.edges)]


@dataclass(frozen=True)
class Trees:
    """Candidates of P positions: C nodes each, parents before children.

    Attributes:
        tokens, parents: int64 [P, C]; parents count within the position's nodes, or are ROOT.
        logs: float64 [P, C], summed log-weights along the path: never more than the parent's.
        layers: first node of each layer, and C.
    """

    tokens: Tensor
    parents: Tensor
    logs: Tensor
    layers: tuple[int, ...]

    def ranks(self, depth: int) -> Tensor:
        """Place [P, C'] of every node of the first `depth` layers among them, best first: the n best are rank < n.

        Equal nodes rank in their order, so that the best n hold every ancestor of each.
        """
        order = self.logs[:, : self.layers[depth]].argsort(dim=1, descending=True, stable=True)
        return order.argsort(dim=1)


def draft_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / T) in float64; a greedy draft is weighed at T = 1."""
    return (logits.double() / (temperature or 1.0)).log_softmax(dim=-1)


def perturbed_scores(logits: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """log q + g in float64 [..., V]; without noise log q."""
    scores = draft_logprobs(logits, temperature)
    return scores if noise is None else scores + noise


def grow(
    drafter: Drafter,
    rule: TreeRule,
    *,
    depth: int,
    noise: Callable[[int], Tensor | None],
    stops: Tensor,
) -> Trees:
    """Candidates by beam search: of every layer the best `width` nodes get `width` children each.

    Args:
        noise: noise [P, 1, V] of layer 0, 1, ...; None at temperature 0.
        stops: int64 [S], tokens that end a sample: they get no children.
    """
    logits = drafter.root()
    count = len(logits)
    beam, beam_logs = torch.full((count, 1), ROOT), torch.zeros(count, 1, dtype=torch.float64)
    tokens, parents, logs, layers = [], [], [], [0]
    for level in range(depth):
        children = rule.children(logits, noise(level))
        width = children.tokens.shape[-1]
        tokens.append(children.tokens.flatten(1))
        parents.append(beam.repeat_interleave(width, dim=1))
        logs.append((beam_logs[..., None] + children.logs).flatten(1))
        layers.append(layers[-1] + tokens[-1].shape[1])
        if level + 1 < depth:
            living = logs[-1].masked_fill(torch.isin(tokens[-1], stops), float("-inf"))
            beam_logs, places = living.topk(width)
            beam = layers[-2] + places
            logits = drafter.extend(places // width, tokens[-1].gather(1, places))
    return Trees(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(logs, 1), tuple(layers))


def follow(trees: Trees, choose: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Walk down from the roots as long as the target's choice is a candidate.

    Args:
        choose: (nodes [P] or ROOT, level) -> the target's choice [P] after them.

    Returns:
        nodes int64 [P, depth], ROOT from where the walk left the tree; and the choices [P, depth + 1], of which a step
        that accepts k nodes commits the first k + 1.
    """
    count, depth = len(trees.tokens), len(trees.layers) - 1
    current, inside = torch.full((count,), ROOT), torch.ones(count, dtype=torch.bool)
    nodes, choices = [], [choose(current, 0)]
    for level in range(depth):
        layer = slice(trees.layers[level], trees.layers[level + 1])
        match = (trees.parents[:, layer] == current[:, None]) & (trees.tokens[:, layer] == choices[-1][:, None])
        inside = inside & match.any(1)
        current = torch.where(inside, layer.start + match.int().argmax(1), current)
        nodes.append(torch.where(inside, current, ROOT))
        choices.append(choose(current, level + 1))
    return torch.stack(nodes, 1), torch.stack(choices, 1)


def accepted_layers(nodes: Tensor, ranks: Tensor, kept: int) -> Tensor:
    """Bool [P, depth]: whether the node that was followed in each layer is among the `kept` best; a true prefix."""
    depth_ranks = ranks.gather(1, nodes.clamp(min=0))
    return (nodes != ROOT) & (depth_ranks < kept)


def shared_noise_choice(logits: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """argmax(log p + g) [P] of target logits and noise [P, V]: the choice that the engine makes."""
    return select_tokens(logits, torch.full((len(logits),), temperature), noise).tokens


def independent_choice(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """A draw [P] from softmax(logits / T), the target's alone; the mode at T = 0."""
    return torch.multinomial(_probabilities(logits, temperature), 1, generator=generator)[:, 0]


def rejection_chain(
    drawn: Tensor, draft_logits: Tensor, target_logits: Tensor, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Verify chains drawn from the draft (at T = 0: its modes).

    Args:
        drawn: int64 [P, n].
        draft_logits: [P, n, V], that they were drawn from.
        target_logits: [P, n + 1, V].

    Returns:
        accepted counts [P] and tokens [P, n + 1], of which the first accepted + 1 are committed.
    """
    p, q = _probabilities(target_logits, temperature), _probabilities(draft_logits, temperature)
    picked = drawn[..., None]
    odds = (p[:, :-1].gather(2, picked) / q.gather(2, picked))[..., 0]
    coins = torch.rand(odds.shape, dtype=torch.float64, generator=generator)
    accepted = (coins < odds).long().cumprod(1).sum(1)
    rest = torch.cat(((p[:, :-1] - q).clamp_(min=0), p[:, -1:]), dim=1)  # after n acceptances the target draws freely
    last = torch.multinomial(rest[torch.arange(len(drawn)), accepted], 1, generator=generator)
    tokens = torch.cat((drawn, drawn[:, :1]), dim=1).scatter(1, accepted[:, None], last)
    return accepted, tokens


def chain_acceptance(target_logits: Tensor, draft_logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """P(a rejection chain's token was accepted | the step committed this token) [...], of logits [..., V].

    Accepting x has the joint probability q(x) min(1, p(x) / q(x)), committing x has p(x): the quotient is
    min(1, q(x) / p(x)). So finished sequences of the target tell the chain's acceptance without decoding again.
    """
    p, q = _probabilities(target_logits, temperature), _probabilities(draft_logits, temperature)
    picked = tokens[..., None]
    # At T = 0 a near tie may have gone the other way: then p(x) is 0 here.
    own = p.gather(-1, picked).clamp_(min=torch.finfo(p.dtype).tiny)
    return (q.gather(-1, picked) / own).clamp_(max=1.0)[..., 0]


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / T) in float64; all on the mode at T = 0."""
    if temperature > 0:
        return draft_logprobs(logits, temperature).exp_()
    return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
