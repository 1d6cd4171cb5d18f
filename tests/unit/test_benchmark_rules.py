"""The three rules of the acceptance study: exact on a toy target, the study's short cuts equal to real decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.draft_rollout import DraftRollout
from benchmarks.verification_rules import (
    ROOT,
    SharedNoise,
    SurvivalTable,
    TopK,
    Trees,
    accepted_layers,
    chain_acceptance,
    follow,
    grow,
    independent_choice,
    perturbed_scores,
    rejection_chain,
    shared_noise_choice,
)
from rlhfspec_mega.draft.examples import Example
from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer, causal_attention
from rlhfspec_mega.sampling.noise import gumbel

VOCAB, LENGTH, COUNT = 16, 4, 20_000
NO_STOPS = torch.zeros(0, dtype=torch.int64)
_GENERATOR = torch.Generator().manual_seed(3)
TARGET = 1.5 * torch.randn(VOCAB, VOCAB, generator=_GENERATOR)  # a Markov chain: logits by last token
DRAFT = TARGET + 0.8 * torch.randn(VOCAB, VOCAB, generator=_GENERATOR)
START = 5

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # last tokens, positions -> accepted, tokens


class MarkovDrafter:
    """Logits by the last token alone."""

    def __init__(self, last: Tensor):
        self._last = last

    def root(self) -> Tensor:
        return DRAFT[self._last][:, None]

    def extend(self, parents: Tensor, tokens: Tensor) -> Tensor:
        return DRAFT[tokens]


def target_logits(trees: Trees, last: Tensor, nodes: Tensor) -> Tensor:
    at_node = trees.tokens.gather(1, nodes.clamp(min=0)[:, None])[:, 0]
    return TARGET[torch.where(nodes == ROOT, last, at_node)]


def toy_survival() -> SurvivalTable:
    """Any weights must do; these favour unlikely ranks now and then."""
    generator = torch.Generator().manual_seed(0)
    return SurvivalTable(torch.tensor([0.3, 1.0]).double(), 0.1 + 0.8 * torch.rand(3, 3, generator=generator).double())


def decode(step: Step) -> Tensor:
    """Tokens [COUNT, LENGTH] of samples decoded step by step."""
    tokens = torch.full((COUNT, LENGTH + 8), START)
    length = torch.zeros(COUNT, dtype=torch.int64)  # response tokens so far; column 0 is the prompt
    while (length < LENGTH).any():
        last = tokens.gather(1, length[:, None])[:, 0]
        accepted, new = step(last, length)
        for column in range(new.shape[1]):
            used = (length < LENGTH) & (column <= accepted)
            places = (length + 1 + column).clamp(max=tokens.shape[1] - 1)
            tokens[used, places[used]] = new[used, column]
        length = torch.where(length < LENGTH, length + accepted + 1, length)
    return tokens[:, 1 : LENGTH + 1]


def shared_noise_step(temperature: float, kept: int = 3) -> Step:
    rule = SharedNoise(temperature, toy_survival())
    seeds = torch.arange(COUNT) * 7919 + 1

    def step(last: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        def noise(level: int) -> Tensor | None:
            return gumbel(seeds, positions + level, VOCAB) if temperature else None

        trees = grow(
            MarkovDrafter(last),
            rule,
            depth=2,
            noise=lambda level: n[:, None] if (n := noise(level)) is not None else n,
            stops=NO_STOPS,
        )
        nodes, choices = follow(
            trees,
            lambda nodes, level: shared_noise_choice(target_logits(trees, last, nodes), temperature, noise(level)),
        )
        return accepted_layers(nodes, trees.ranks(2), kept).sum(1), choices

    return step


def top_k_step(temperature: float, kept: int = 3) -> Step:
    generator = torch.Generator().manual_seed(11)

    def step(last: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        trees = grow(MarkovDrafter(last), TopK(temperature, 3), depth=2, noise=lambda level: None, stops=NO_STOPS)
        nodes, choices = follow(
            trees, lambda nodes, level: independent_choice(target_logits(trees, last, nodes), temperature, generator)
        )
        return accepted_layers(nodes, trees.ranks(2), kept).sum(1), choices

    return step


def draw_chain(last: Tensor, length: int, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [COUNT, length] drawn from the draft and the logits [COUNT, length + 1] after each."""
    drawn, before = [], [last]
    for _ in range(length):
        drawn.append(independent_choice(DRAFT[before[-1]], temperature, generator))
        before.append(drawn[-1])
    return torch.stack(drawn, 1), torch.stack(before, 1)


def chain_step(temperature: float) -> Step:
    generator = torch.Generator().manual_seed(12)

    def step(last: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        drawn, before = draw_chain(last, 2, temperature, generator)
        return rejection_chain(drawn, DRAFT[before[:, :-1]], TARGET[before], temperature, generator)

    return step


def chi_square_p(tokens: Tensor, temperature: float) -> float:
    """p-value of a chi-square test of all tokens against the target's own chain, by position and previous token.

    Given its predecessor a token is a draw of softmax; the statistic adds up over (position, predecessor), cells of
    an expected count under 5 are merged.
    """
    statistic, freedom = 0.0, 0
    before = torch.cat((torch.full((len(tokens), 1), START), tokens[:, :-1]), dim=1)
    for position in range(tokens.shape[1]):
        for last in range(VOCAB):
            seen = tokens[before[:, position] == last, position]
            expected = (TARGET[last].double() / temperature).softmax(-1) * len(seen)
            counts = torch.bincount(seen, minlength=VOCAB).double()
            large = expected >= 5
            pairs = list(zip(counts[large].tolist(), expected[large].tolist(), strict=True))
            if expected[~large].sum() >= 5:
                pairs.append((float(counts[~large].sum()), float(expected[~large].sum())))
            elif pairs:
                pairs[0] = (pairs[0][0] + float(counts[~large].sum()), pairs[0][1] + float(expected[~large].sum()))
            if len(pairs) > 1:
                statistic += sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
                freedom += len(pairs) - 1
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


STEPS = {"shared noise": shared_noise_step, "top-k": top_k_step, "rejection chain": chain_step}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rule", STEPS)
def test_tokens_are_distributed_as_the_targets_softmax(rule: str, temperature: float):
    assert chi_square_p(decode(STEPS[rule](temperature)), temperature) > 1e-3


@pytest.mark.parametrize("rule", STEPS)
def test_greedy_decoding_is_the_targets_own(rule: str):
    expected, last = [], START
    for _ in range(LENGTH):
        last = int(TARGET[last].argmax())
        expected.append(last)
    assert (decode(STEPS[rule](0.0)) == torch.tensor(expected)).all()


def test_the_chi_square_test_sees_a_wrong_rest():
    """A chain that draws from p after a rejection, instead of max(0, p - q), is off: the test must say so."""
    generator = torch.Generator().manual_seed(12)

    def step(last: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        drawn, before = draw_chain(last, 2, 1.0, generator)
        accepted, tokens = rejection_chain(drawn, DRAFT[before[:, :-1]], TARGET[before], 1.0, generator)
        at = before.gather(1, accepted[:, None])[:, 0]
        return accepted, tokens.scatter(1, accepted[:, None], independent_choice(TARGET[at], 1.0, generator)[:, None])

    assert chi_square_p(decode(step), 1.0) < 1e-9


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_acceptance_of_a_chain_is_read_off_finished_sequences(temperature: float):
    """The study's estimate, from tokens the target drew alone, equals the acceptance of real rejection sampling."""
    generator = torch.Generator().manual_seed(4)
    last, length = torch.full((COUNT,), START), 3
    drawn, before = draw_chain(last, length, temperature, generator)
    accepted, _ = rejection_chain(drawn, DRAFT[before[:, :-1]], TARGET[before], temperature, generator)
    path = [last]
    for _ in range(length):
        path.append(independent_choice(TARGET[path[-1]], temperature, generator))
    own = torch.stack(path, 1)
    odds = chain_acceptance(TARGET[own[:, :-1]], DRAFT[own[:, :-1]], own[:, 1:], temperature)
    estimate = odds.cumprod(1).sum(1)
    error = float((estimate.var() + accepted.double().var()) / COUNT) ** 0.5
    assert float(estimate.mean() - accepted.double().mean()) == pytest.approx(0.0, abs=4 * error + 1e-12)
    assert estimate.var() <= accepted.double().var()


def test_kept_nodes_are_the_best_and_hold_their_ancestors():
    last = torch.arange(VOCAB)
    trees = grow(MarkovDrafter(last), TopK(1.0, 4), depth=3, noise=lambda level: None, stops=NO_STOPS)
    assert trees.layers == (0, 4, 20, 36)
    logq = DRAFT.double().log_softmax(-1)
    for depth in (2, 3):
        ranks = trees.ranks(depth)
        for row in range(VOCAB):
            kept = (ranks[row] < 7).nonzero()[:, 0].tolist()
            assert len(kept) == 7 and all(int(trees.parents[row, node]) in (ROOT, *kept) for node in kept)
            assert (
                trees.logs[row, kept].min()
                >= trees.logs[row, [n for n in range(ranks.shape[1]) if n not in kept]].max()
            )
            for node in kept:
                total, at = 0.0, node
                while at != ROOT:
                    parent = int(trees.parents[row, at])
                    before = row if parent == ROOT else int(trees.tokens[row, parent])
                    total += float(logq[before, trees.tokens[row, at]])
                    at = parent
                assert float(trees.logs[row, node]) == pytest.approx(total)


def test_tokens_that_end_a_sample_get_no_children():
    last = torch.arange(VOCAB)
    stop = int(DRAFT.argmax(-1).mode().values)
    trees = grow(MarkovDrafter(last), TopK(1.0, 4), depth=2, noise=lambda level: None, stops=torch.tensor([stop]))
    ended = (trees.tokens[:, :4] == stop).nonzero()
    assert len(ended) > 3
    for row, node in ended.tolist():
        children = trees.parents[row] == node
        assert not children.any() or trees.logs[row, children].isneginf().all()


def test_survival_table_finds_known_probabilities():
    generator = torch.Generator().manual_seed(0)
    gaps = 4 * torch.rand(200_000, generator=generator, dtype=torch.float64)
    first = torch.rand(200_000, generator=generator) < 0.2 + 0.15 * gaps
    ranks = torch.where(first, 0, torch.randint(1, 9, gaps.shape, generator=generator))
    table = SurvivalTable.fit(ranks, gaps, width=4, bins=8)
    middles = torch.arange(8).double() / 2 + 0.25
    logs = table.logs(middles)
    assert torch.allclose(logs[:, 0].exp(), 0.2 + 0.15 * middles, atol=0.01)
    assert torch.allclose(logs[:, 1:].exp(), ((0.8 - 0.15 * middles) / 8)[:, None].expand(-1, 3), atol=0.01)


SHAPE = ModelShape("llama", 32, 3, 4, 2, 8, 48, VOCAB, 64, 500.0, 1e-5, True)


def random_pair() -> tuple[Transformer, DraftModel]:
    generator = torch.Generator().manual_seed(1)
    model = Transformer(SHAPE, max_positions=64, dtype=torch.float32, device="cpu")
    draft = DraftModel(draft_shape(SHAPE), model)
    for name, tensor in (*model.hf_tensors().items(), *draft.tensors().items()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + ("norm" in name))
    return model, draft


def plain_draft_logits(draft: DraftModel, features: Tensor, tokens: Tensor, root: int, path: list[int]) -> Tensor:
    """Logits after a path of draft tokens, one entry after the other, each with attention over all entries so far."""
    shape, keys, values = draft.shape, [], []

    def attend(layer: int, qkv: Tensor) -> Tensor:
        query, key, value = qkv[0].split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
        keys.append(key.clone())
        values.append(value.clone())
        group = shape.num_heads // shape.num_kv_heads
        k, v = (torch.stack(kept, 1).repeat_interleave(group, 0) for kept in (keys, values))
        weights = ((query[:, None] @ k.transpose(1, 2)) / shape.head_dim**0.5).softmax(-1)
        return (weights @ v).transpose(0, 1)

    for entry in range(root):
        state = draft.advance(
            tokens[entry + 1 : entry + 2], draft.fuse(features[entry : entry + 1]), torch.tensor([entry]), attend
        )
    for level, token in enumerate(path):
        state = draft.advance(torch.tensor([token]), state, torch.tensor([root + level]), attend)
    return draft.logits(state)[0]


def random_example(model: Transformer, draft: DraftModel) -> Example:
    tokens = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(2))
    tapped: list[Tensor] = [torch.empty(0)] * SHAPE.num_layers

    def tap(layer: int, output: Tensor) -> None:
        tapped[layer] = output.clone()

    with torch.no_grad():
        states = model.hidden(tokens[None], torch.arange(20)[None], causal_attention(SHAPE), tap)[0]
    return Example(tokens, 4, torch.cat([tapped[layer] for layer in draft.shape.taps], -1), states)


def test_trees_of_a_real_draft_are_those_of_one_entry_at_a_time():
    model, draft = random_pair()
    example = random_example(model, draft)
    roots = torch.tensor([1, 4, 11, 19])
    trees = grow(
        DraftRollout(draft, example, roots, NO_STOPS), TopK(1.0, 3), depth=3, noise=lambda level: None, stops=NO_STOPS
    )
    for row, root in enumerate(roots.tolist()):
        for node in (0, 2, 5, 11, 15, 20):
            path, at = [], node
            while at != ROOT:
                path.insert(0, int(trees.tokens[row, at]))
                at = int(trees.parents[row, at])
            total = 0.0
            for level, token in enumerate(path):
                logits = plain_draft_logits(draft, example.features, example.tokens, root, path[:level])
                total += float(logits.double().log_softmax(-1)[token])
            assert float(trees.logs[row, node]) == pytest.approx(total, abs=1e-4)


def test_a_reduced_draft_vocabulary_is_spread_over_the_targets():
    model, draft = random_pair()
    example, roots = random_example(model, draft), torch.tensor([3, 7])
    full = DraftRollout(draft, example, roots, NO_STOPS).root()
    ids = torch.tensor([2, 3, 11])
    draft.head, draft.target_ids = draft.head[ids].clone(), ids
    logits = DraftRollout(draft, example, roots, NO_STOPS).root()
    assert torch.allclose(logits[..., ids], full[..., ids], atol=1e-6)
    assert logits.isneginf().sum() == 2 * (VOCAB - 3)


def test_banned_tokens_are_never_drafted():
    model, draft = random_pair()
    rollout = DraftRollout(draft, random_example(model, draft), torch.tensor([3, 7]), torch.tensor([2, 9]))
    assert rollout.root()[..., [2, 9]].isneginf().all()
    logits = rollout.extend(torch.zeros(2, 4, dtype=torch.int64), torch.arange(8).view(2, 4))
    assert logits[..., [2, 9]].isneginf().all() and logits.isneginf().sum() == 2 * 4 * 2


def test_perturbed_scores_choose_as_the_engine_does():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, VOCAB, generator=generator)
    noise = gumbel(torch.arange(500), torch.arange(500), VOCAB)
    for temperature, shared in ((1.0, noise), (0.6, noise), (0.0, None)):
        chosen = shared_noise_choice(logits, temperature, shared)
        assert torch.equal(chosen, perturbed_scores(logits, temperature, shared).argmax(-1))
