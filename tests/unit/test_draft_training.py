"""The draft's training: the same function as at inference, kept only if better, resumed bit by bit; its examples."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rlhfspec_mega.draft import distillation
from rlhfspec_mega.draft.agreement import agreement
from rlhfspec_mega.draft.buffer import Buffer, batches
from rlhfspec_mega.draft.distillation import STEPS, Learner, Target, accepted_by_depth, initial_draft
from rlhfspec_mega.draft.examples import Example, collect_examples
from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.network import Batch, Network
from rlhfspec_mega.draft.refresh import DraftLearning, Refresher, RefreshReport
from rlhfspec_mega.draft.shape import DraftShape, draft_shape
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Attention, Transformer, causal_attention

TARGET = ModelShape("llama", 32, 5, 4, 2, 8, 48, 23, 64, 10000.0, 1e-5, True)
SHAPE = draft_shape(TARGET)
DEPTH = 4


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_target(seed: int = 0) -> Transformer:
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(TARGET, max_positions=64, dtype=torch.float32, device="cpu")
    for tensor in model.hf_tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + (tensor.dim() == 1))
    return model


MODEL = make_target()


def make_sequences(count: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """(tokens, prompt length) sampled from the target."""
    generator, sequences = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        prompt, response = (int(torch.randint(1, high, (), generator=generator)) for high in (8, 20))
        tokens = torch.randint(TARGET.vocab_size, (1, prompt), generator=generator)
        for _ in range(response):
            hidden = MODEL.hidden(tokens, torch.arange(tokens.shape[1])[None], causal_attention(TARGET))
            p = MODEL.logits(hidden[:, -1]).softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(p, 1, generator=generator)), dim=1)
        sequences.append((tokens[0].tolist(), prompt))
    return sequences


SEQUENCES = make_sequences(48)
EXAMPLES = collect_examples(MODEL, SHAPE, SEQUENCES, batch_tokens=100)


def make_draft(shape: DraftShape = SHAPE, seed: int = 3) -> DraftModel:
    draft = DraftModel(shape, MODEL)
    for name, tensor in initial_draft(shape, MODEL.head[: shape.vocab_size], seed).items():
        draft.tensors()[name].copy_(tensor * torch.linspace(0.8, 1.2, tensor.numel()).view(tensor.shape))
    return draft


def attention_of(visible: torch.Tensor) -> Attention:
    """Attention of entries over entries by a mask [N, N], written out head by head."""

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.split((SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads), dim=1)
        heads = []
        for head in range(SHAPE.num_heads):
            group = head // (SHAPE.num_heads // SHAPE.num_kv_heads)
            scores = (q[:, head] @ k[:, group].T / SHAPE.head_dim**0.5).masked_fill(~visible, float("-inf"))
            heads.append(scores.softmax(-1) @ v[:, group])
        return torch.stack(heads, dim=1)

    return attend


def branch_logits(draft: DraftModel, example: Example, root: int, steps: int) -> torch.Tensor:
    """[steps, V]: what inference predicts along the sequence from entry `root` on, entry by entry of the branch."""
    tokens = example.tokens.tolist()
    read, states = list(draft.fuse(example.features[: root + 1])), []
    for step in range(1, steps + 1):
        count = root + step
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        inputs = torch.tensor(tokens[1 : count + 1])
        out = draft.advance(inputs, torch.stack(read), torch.arange(count), attention_of(visible))
        states.append(out[-1])
        read.append(out[-1])
    return draft.logits(torch.stack(states))


def compare_with_inference() -> list[int]:
    """How many predictions of each step were compared; an AssertionError at the first that differs."""
    draft, examples = make_draft(), [example for example in EXAMPLES[:9] if example.predicted]
    network = Network(SHAPE, draft.tensors(), MODEL.embedding)
    cells = [(example, place) for example in examples for place in range(example.predicted)]
    compared = [0] * DEPTH
    for step, prediction in enumerate(network.unroll(Batch(examples), DEPTH)):
        predicted = network.logits(prediction.states)
        for logits, root, cell in zip(predicted, prediction.roots, prediction.cells, strict=True):
            example, place = cells[int(root)]
            assert int(cell - root) == step and cells[int(cell)][0] is example
            entry = len(example.tokens) - example.predicted + place - 2
            torch.testing.assert_close(logits, branch_logits(draft, example, entry, step + 1)[-1], atol=1e-5, rtol=1e-5)
            compared[step] += 1
    return compared


def test_training_computes_what_inference_computes():
    lengths = [example.predicted for example in EXAMPLES[:9]]
    assert compare_with_inference() == [sum(max(0, length - step) for length in lengths) for step in range(DEPTH)]


def test_a_branch_must_not_see_real_entries_after_its_root(monkeypatch):
    """The comparison has to notice a branch that reads the target's states where it may not know them."""
    right = Batch.grid_bias

    def one_too_many(batch: Batch) -> torch.Tensor:
        return torch.nn.functional.pad(right(batch), (1, 0))[..., :-1]

    monkeypatch.setattr(Batch, "grid_bias", one_too_many)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_inference()


def test_examples_hold_what_the_target_computes_alone():
    for (tokens, prompt), example in zip(SEQUENCES[:6], EXAMPLES, strict=False):
        outputs: dict[int, torch.Tensor] = {}

        def tap(layer: int, output: torch.Tensor, kept: dict[int, torch.Tensor] = outputs) -> None:
            kept[layer] = output.clone()

        positions = torch.arange(len(tokens))[None]
        states = MODEL.hidden(torch.tensor([tokens]), positions, causal_attention(TARGET), tap)[0]
        assert example.tokens.tolist() == tokens and example.prompt_length == prompt
        torch.testing.assert_close(example.states, states, atol=1e-4, rtol=1e-4)
        wanted = torch.cat([outputs[layer] for layer in SHAPE.taps], dim=-1)
        torch.testing.assert_close(example.features, wanted, atol=1e-4, rtol=1e-4)


def make_refresher(seed: int = 0, shape: DraftShape = SHAPE, ids: torch.Tensor | None = None) -> Refresher:
    weights = initial_draft(shape, MODEL.head if ids is None else MODEL.head[ids], seed)
    learning = DraftLearning(4000, learning_rate=3e-3, temperature=1.0, seed=seed, recent_only=False)
    return Refresher(shape, weights, learning, "cpu", ids)


def refresh(refresher: Refresher, steps: int | None = None, seconds: float | None = None) -> RefreshReport:
    return refresher.refresh(MODEL.embedding, MODEL.head, steps=steps, seconds=seconds)


@pytest.mark.parametrize("ids", [None, torch.arange(1, 20, 2)])
def test_a_refresh_raises_expected_accepted_length_and_reports_it(ids):
    shape = SHAPE if ids is None else draft_shape(TARGET, len(ids))
    refresher = make_refresher(shape=shape, ids=ids)
    refresher.add(EXAMPLES)
    first = refresh(refresher, 40)
    assert first.kept and first.after > first.before and first.steps == 40
    target = Target(MODEL.embedding, MODEL.head, ids, 1.0)
    measured = accepted_by_depth(shape, refresher.tensors(), target, refresher._buffer.held_out)
    assert float(measured[-1]) == pytest.approx(first.after, abs=1e-5)
    assert refresh(refresher, 5).before == pytest.approx(first.after, abs=1e-6)


def test_a_refresh_that_makes_it_worse_leaves_everything_as_it_was():
    refresher = make_refresher()
    refresher.add([dataclasses.replace(example) for example in EXAMPLES])
    refresh(refresher, 30)
    before = refresher.state_dict()
    for example in refresher._buffer.learnt_from:  # contradicts what is held out
        example.states = -example.states
    report = refresh(refresher, 20)
    assert not report.kept and report.after < report.before
    after = refresher.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "refreshes")


def test_training_goes_on_bit_by_bit_from_a_saved_state(tmp_path):
    """From a file, which has its own order of names: the norm of the gradient is a sum in the order of the weights."""
    whole, first = make_refresher(), make_refresher()
    for refresher in (whole, first):
        refresher.add(EXAMPLES)
        assert refresh(refresher, 10).kept
    second = make_refresher(seed=0)
    save_file(first.state_dict(), tmp_path / "state")
    second.load_state_dict(load_file(tmp_path / "state"))
    fresh = make_refresher()
    for refresher in (whole, second, fresh):
        refresher._buffer = Buffer(4000)
        refresher.add(EXAMPLES)
        refresh(refresher, 10)
    expected, resumed = whole.state_dict(), second.state_dict()
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert not torch.equal(expected["weight.fc.weight"], fresh.state_dict()["weight.fc.weight"])


def test_a_refresh_needs_a_limit():
    refresher = make_refresher()
    with pytest.raises(RunError, match="steps or seconds"):
        refresh(refresher)
    assert not refresh(refresher, 3).kept  # nothing to learn from yet


class Clock:
    """Seconds that pass with work alone: a batch measured is 0.15, a step of training 0.3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.measured = 0.0, 0
        monkeypatch.setattr("rlhfspec_mega.draft.refresh.time.monotonic", lambda: self.now)
        step, lengths = Learner.step, distillation.accepted_lengths

        def timed_step(*arguments: Any) -> float:
            self.now += 0.3
            return step(*arguments)

        def timed_lengths(*arguments: Any) -> torch.Tensor:
            self.now, self.measured = self.now + 0.15, self.measured + 1
            return lengths(*arguments)

        monkeypatch.setattr(Learner, "step", timed_step)
        monkeypatch.setattr("rlhfspec_mega.draft.refresh.accepted_lengths", timed_lengths)


@pytest.mark.parametrize(
    ("seconds", "measured", "steps"),
    [(4.0, 3, 10), (1.0, 1, 2), (0.1, 1, 1)],  # 4.0: half a second for either measurement, 3.1 to train
)
def test_a_refresh_by_time_trains_most_of_the_time_whatever_is_held_out(monkeypatch, seconds, measured, steps):
    monkeypatch.setattr(distillation, "_MEASURED_TOKENS", 20)
    refresher, clock = make_refresher(), Clock(monkeypatch)
    refresher.add(EXAMPLES)
    report = refresh(refresher, seconds=seconds)
    assert (clock.measured, report.steps) == (2 * measured, steps)
    assert report.seconds == pytest.approx(clock.now) and (report.seconds <= seconds + 1e-6 or steps == 1)


def test_samples_of_one_prompt_are_all_held_out_or_none():
    prompts = torch.arange(60)[:, None] * torch.tensor([1, 7, 11])
    examples = [
        Example(torch.cat((prompt, torch.arange(member + 1))), 3, torch.zeros(4 + member, 3), torch.zeros(4, 1))
        for prompt in prompts
        for member in range(4)
    ]
    buffer = Buffer(10_000)
    for example in examples[:4]:
        buffer.add([example])
        assert not buffer.held_out  # of one prompt: nothing could be learnt from
    for count in range(2, 61):
        buffer.add(examples[4 * count - 4 : 4 * count])
        held_out, learnt = (
            {tuple(e.tokens[:3].tolist()) for e in found} for found in (buffer.held_out, buffer.learnt_from)
        )
        assert held_out and learnt and not held_out & learnt and len(held_out | learnt) == count


def test_about_every_eighth_prompt_is_held_out_whatever_else_there_is():
    states = torch.zeros(4, 1)
    examples = [Example(torch.tensor([a, b, 1, 2]), 2, states, states) for a in range(20) for b in range(50)]
    whole, part = Buffer(10_000), Buffer(10_000)
    whole.add(examples)
    part.add(examples[900:300:-1])
    assert 840 < len(whole.learnt_from) < 910
    assert set(map(id, part.learnt_from)) <= set(map(id, whole.learnt_from))


def test_samples_of_one_prompt_alone_are_not_learnt_from():
    refresher = make_refresher()
    refresher.add([EXAMPLES[0]] * 3)
    before = refresher.tensors()
    report = refresh(refresher, 3)
    assert (report.kept, report.steps, report.before, report.after, report.examples) == (False, 0, None, None, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in refresher.tensors().items())


def test_weights_alone_are_a_beginning():
    refresher, other = make_refresher(), make_refresher(seed=1)
    other.load_state_dict({f"weight.{name}": tensor for name, tensor in refresher.tensors().items()})
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in refresher.tensors().items())


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("ids", [None, torch.arange(1, 20, 2)])
def test_the_measure_is_agreement_along_the_sequence_however_it_is_cut(monkeypatch, ids, temperature):
    shape = SHAPE if ids is None else draft_shape(TARGET, len(ids))
    draft, target = make_draft(shape), Target(MODEL.embedding, MODEL.head, ids, temperature)
    examples = [example for example in EXAMPLES[:6] if example.predicted]
    found = accepted_by_depth(shape, draft.tensors(), target, examples)
    known, lengths = torch.arange(TARGET.vocab_size) if ids is None else ids, []
    for example in examples:
        first = len(example.tokens) - example.predicted - 2
        for place in range(example.predicted):
            depth = min(STEPS, example.predicted - place)
            logits = branch_logits(draft, example, first + place, depth)
            wanted = MODEL.logits(example.states[first + place + 1 :][:depth])
            if temperature:
                chances = agreement(wanted.softmax(-1)[:, known], logits.softmax(-1))
            else:
                chances = (known[logits.argmax(-1)] == wanted.argmax(-1)).float()
            lengths.append(torch.nn.functional.pad(chances, (0, STEPS - depth)).cumprod(0).cumsum(0))
    torch.testing.assert_close(found, torch.stack(lengths).mean(0), atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(distillation, "_MEASURED_LOGITS", 3 * TARGET.vocab_size)
    torch.testing.assert_close(accepted_by_depth(shape, draft.tensors(), target, examples), found)


def test_a_long_example_is_learnt_from_in_windows_that_reach_all_of_it():
    example = Example(torch.arange(102), 10, torch.arange(102)[:, None], torch.arange(102)[:, None])
    rng, seen = random.Random(0), set()
    for _ in range(300):
        ((window,),) = batches([example], 30, rng)
        assert window.predicted == 9 and window.predicted * (len(window.tokens) - 2) <= 30**2
        for cut, whole in ((window.tokens, example.tokens), (window.features, example.features)):
            assert torch.equal(cut, whole[: len(window.tokens)]) and len(window.states) == len(window.tokens)
        seen |= set(window.tokens[window.prompt_length :].tolist())
    assert seen == set(range(10, 102))
    assert batches([example], 100, rng)[0][0] is example


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30), st.integers(10, 60))
@settings(max_examples=50, deadline=None)
def test_the_buffer_is_bounded_and_the_newest_stay(lengths, limit):
    examples = [
        Example(torch.zeros(p + r, dtype=torch.int64), p, torch.zeros(p + r, 3), torch.zeros(p + r, 1))
        for p, r in lengths
    ]
    buffer = Buffer(limit)
    for example in examples:
        buffer.add([example])
    usable = [example for example in examples if example.predicted]
    kept = sorted(map(id, buffer.held_out + buffer.learnt_from))
    assert kept == sorted(id(example) for example in usable[len(usable) - len(buffer) :])
    assert sum(len(example.tokens) for example in usable[len(usable) - len(buffer) :]) <= limit or len(buffer) == 1
    made = batches(buffer.learnt_from, 20, random.Random(0))
    assert sorted(id(e) for batch in made for e in batch) == sorted(map(id, buffer.learnt_from))
    assert all(len(batch) == 1 or len(batch) * max(len(e.tokens) for e in batch) <= 20 for batch in made)
