"""The draft's training: the same function as at inference, kept only if better, resumed bit by bit; its examples."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.drafting.buffer import ExampleBuffer, batches
from rlhfspec_mega.drafting.collect import collect_examples
from rlhfspec_mega.drafting.example import DraftExample, make_batch
from rlhfspec_mega.drafting.initialize import initial_draft
from rlhfspec_mega.drafting.learner import Target, accepted_by_depth
from rlhfspec_mega.drafting.trainer import DraftTrainer
from rlhfspec_mega.drafting.training import DraftNetwork
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.draft_model import DraftModel
from rlhfspec_mega.models.draft_shape import DraftShape, draft_shape
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


def branch_logits(draft: DraftModel, example: DraftExample, root: int, steps: int) -> torch.Tensor:
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


def test_training_computes_what_inference_computes():
    draft, examples = make_draft(), [example for example in EXAMPLES[:9] if example.predicted]
    network = DraftNetwork(SHAPE, draft.tensors(), MODEL.embedding)
    cells = [(example, place) for example in examples for place in range(example.predicted)]
    compared = [0] * DEPTH
    for step, prediction in enumerate(network.unroll(make_batch(examples), DEPTH)):
        for logits, root, cell in zip(prediction.logits, prediction.roots, prediction.cells, strict=True):
            example, place = cells[int(root)]
            assert int(cell - root) == step and cells[int(cell)][0] is example
            entry = len(example.tokens) - example.predicted + place - 2
            torch.testing.assert_close(logits, branch_logits(draft, example, entry, step + 1)[-1], atol=1e-5, rtol=1e-5)
            compared[step] += 1
    lengths = [example.predicted for example in examples]
    assert compared == [sum(max(0, length - step) for length in lengths) for step in range(DEPTH)]


def test_a_branch_must_not_see_real_entries_after_its_root():
    """The comparison above has to notice a branch that reads the target's states where it may not know them."""
    draft, example = make_draft(), max(EXAMPLES, key=lambda example: example.predicted)
    right = branch_logits(draft, example, 3, 2)[-1]
    read = torch.cat((draft.fuse(example.features[:5]),))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    out = draft.advance(example.tokens[1:6], read, torch.arange(5), attention_of(mask))
    assert (draft.logits(out[-1:])[0] - right).abs().max() > 1e-2


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


def make_trainer(seed: int = 0, shape: DraftShape = SHAPE, ids: torch.Tensor | None = None) -> DraftTrainer:
    trainer = DraftTrainer(
        shape, buffer_tokens=4000, learning_rate=3e-3, temperature=1.0, device="cpu", seed=seed, target_ids=ids
    )
    trainer.set_target(MODEL.embedding, MODEL.head)
    return trainer


@pytest.mark.parametrize("ids", [None, torch.arange(1, 20, 2)])
def test_a_refresh_raises_expected_accepted_length_and_reports_it(ids):
    shape = SHAPE if ids is None else draft_shape(TARGET, len(ids))
    trainer = make_trainer(shape=shape, ids=ids)
    trainer.add(EXAMPLES)
    first = trainer.refresh(steps=40, seconds=None)
    assert first.kept and first.after > first.before and first.steps == 40
    target = Target(MODEL.embedding, MODEL.head, ids, 1.0)
    held_out = [example for number, example in enumerate(e for e in EXAMPLES if e.predicted) if number % 8 == 7]
    measured = accepted_by_depth(shape, trainer.tensors(), target, held_out, 5)
    assert float(measured[-1]) == pytest.approx(first.after, abs=1e-5)
    assert trainer.refresh(steps=5, seconds=None).before == pytest.approx(first.after, abs=1e-6)


def test_a_refresh_that_makes_it_worse_leaves_everything_as_it_was():
    trainer = make_trainer()
    trainer.add([dataclasses.replace(example) for example in EXAMPLES])
    trainer.refresh(steps=30, seconds=None)
    before = trainer.state_dict()
    for number, example in trainer._buffer._examples:
        if number % 8 != 7:  # what is learnt from contradicts what is held out
            example.states = -example.states
    report = trainer.refresh(steps=20, seconds=None)
    assert not report.kept and report.after < report.before
    after = trainer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "refreshes")


def test_training_goes_on_bit_by_bit_from_a_saved_state():
    whole, first = make_trainer(), make_trainer()
    for trainer in (whole, first):
        trainer.add(EXAMPLES)
        assert trainer.refresh(steps=10, seconds=None).kept
    second = make_trainer(seed=0)
    second.load_state_dict(first.state_dict())
    fresh = make_trainer()
    for trainer in (whole, second, fresh):
        trainer._buffer = ExampleBuffer(4000)
        trainer.add(EXAMPLES)
        trainer.refresh(steps=10, seconds=None)
    expected, resumed = whole.state_dict(), second.state_dict()
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected if name != "examples_added")
    assert not torch.equal(expected["weight.fc.weight"], fresh.state_dict()["weight.fc.weight"])


def test_a_refresh_needs_a_target_and_a_limit():
    trainer = DraftTrainer(SHAPE, buffer_tokens=9, learning_rate=1e-3, temperature=1.0, device="cpu", seed=0)
    with pytest.raises(RunError, match="target"):
        trainer.refresh(steps=1, seconds=None)
    trainer.set_target(MODEL.embedding, MODEL.head)
    with pytest.raises(RunError, match="steps or seconds"):
        trainer.refresh(steps=None, seconds=None)
    assert not trainer.refresh(steps=3, seconds=None).kept  # nothing to learn from yet


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30), st.integers(10, 60))
@settings(max_examples=50, deadline=None)
def test_the_buffer_is_bounded_and_the_newest_stay(lengths, limit):
    examples = [
        DraftExample(torch.zeros(p + r, dtype=torch.int64), p, torch.zeros(p + r, 3), torch.zeros(p + r, 1))
        for p, r in lengths
    ]
    buffer = ExampleBuffer(limit)
    for example in examples:
        buffer.add([example])
    usable = [example for example in examples if example.predicted]
    kept = sorted(map(id, buffer.held_out + buffer.learnt_from))
    assert kept == sorted(id(example) for example in usable[len(usable) - len(buffer) :])
    assert sum(len(example.tokens) for example in usable[len(usable) - len(buffer) :]) <= limit or len(buffer) == 1
    assert [id(e) for e in usable if any(e is h for h in buffer.held_out)] == [
        id(e) for number, e in enumerate(usable) if number % 8 == 7 and number >= len(usable) - len(buffer)
    ]
    made = batches(buffer.learnt_from, 20, random.Random(0))
    assert sorted(id(e) for batch in made for e in batch) == sorted(map(id, buffer.learnt_from))
    assert all(len(batch) == 1 or len(batch) * max(len(e.tokens) for e in batch) <= 20 for batch in made)
