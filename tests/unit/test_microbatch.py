"""Collation: every response token lands at the input that predicts it, padding carries no weight."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.algorithm.microbatch import TrainSequence, collate, same_shape


@st.composite
def sequences(draw: st.DrawFn) -> list[TrainSequence]:
    made = []
    for _ in range(draw(st.integers(1, 5))):
        prompt, response = draw(st.integers(1, 6)), draw(st.integers(1, 9))
        values = draw(st.lists(st.floats(-5, 0, width=32), min_size=response, max_size=response))
        tokens = draw(st.lists(st.integers(1, 90), min_size=prompt + response, max_size=prompt + response))
        made.append(TrainSequence(tokens, prompt, 0.5, 2.0, old_logprobs=values))
    return made


@given(sequences(), st.sampled_from([1, 2, 8]))
def test_response_tokens_are_aligned(given_sequences: list[TrainSequence], multiple: int) -> None:
    rows = list(range(len(given_sequences)))
    batch = collate(given_sequences, rows, multiple)
    assert batch.inputs.shape[1] % multiple == 0
    assert batch.loss_tokens == sum(sequence.response_length for sequence in given_sequences)
    for row, sequence in enumerate(given_sequences):
        mask = batch.mask[row]
        assert batch.targets[row][mask].tolist() == list(sequence.tokens[sequence.prompt_length :])
        assert batch.old_logprobs[row][mask].tolist() == list(sequence.old_logprobs)
        assert batch.inputs[row][mask][0] == sequence.tokens[sequence.prompt_length - 1]
        assert not batch.weight[row][~mask].any() and not batch.advantage[row][~mask].any()


@given(sequences())
def test_same_shape_adds_only_padding(given_sequences: list[TrainSequence]) -> None:
    batches = [collate(given_sequences, [row]) for row in range(len(given_sequences))] + [collate(given_sequences, [])]
    padded = same_shape(batches)
    assert len({batch.inputs.shape for batch in padded}) == 1
    for before, after in zip(batches, padded, strict=True):
        assert after.indices == before.indices and after.loss_tokens == before.loss_tokens
        rows, length = before.inputs.shape
        assert torch.equal(after.targets[:rows, :length], before.targets)
        assert not after.mask[rows:].any() and not after.mask[:, length:].any()


def test_padding_micro_batch_has_no_loss() -> None:
    batch = collate([], [])
    assert batch.loss_tokens == 0 and batch.indices == [] and batch.inputs.numel() == 1
