"""Experience and its micro-batches: every response token's values land at the input that predicts it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.cluster.message import pack, unpack
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import WEIGHTS, Shard, same_shape


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    """A few samples, some without a response, with two columns."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=6))

    def tokens(count: int) -> list[int]:
        return draw(st.lists(st.integers(1, 90), min_size=count, max_size=count))

    made = Experience.of([tokens(prompt) for prompt, _ in sizes], [tokens(response) for _, response in sizes])
    values = [draw(st.lists(st.floats(-5, 0, width=32), min_size=n, max_size=n)) for _, n in sizes]
    made.columns["old_logprobs"] = made.joined(values)
    made.columns["advantages"] = made.spread(np.arange(1, len(sizes) + 1))
    return made


def sample(experience: Experience, index: int) -> tuple[list[int], int, dict[str, list[float]]]:
    """Tokens, prompt length and columns of one sample, read off one by one."""
    first, last = experience.offsets[index], experience.offsets[index + 1]
    begin = sum(int(n) for n in experience.response_lengths[:index])
    end = begin + int(experience.response_lengths[index])
    columns = {name: column[begin:end].tolist() for name, column in experience.columns.items()}
    return experience.tokens[first:last].tolist(), int(experience.prompt_lengths[index]), columns


@st.composite
def plans(draw: st.DrawFn, count: int) -> list[list[int]]:
    """Some of the samples in some order, cut into micro-batches, some of them empty."""
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


@given(experiences(), st.sampled_from([1, 2, 8]), st.booleans(), st.data())
def test_response_tokens_are_aligned(experience: Experience, multiple: int, packed: bool, data: st.DataObject) -> None:
    plan = data.draw(plans(len(experience)))
    cut = Shard.cut(experience, plan, multiple, packed=packed)
    shard = unpack([bytearray(part) for part in pack(cut)])
    batches = shard.batches()
    assert [batch.indices for batch in batches] == plan
    assert shard.positions == sum(batch.inputs.numel() for batch in batches)
    assert shard.inputs == int((experience.lengths - 1).sum()) <= shard.positions
    for batch in batches:
        rows, length = batch.inputs.shape
        assert length % multiple == 0 and (rows == 1 or not packed)
        assert batch.loss_tokens == sum(int(experience.response_lengths[index]) for index in batch.indices)
        assert not packed or (sum(batch.parts) == length and batch.parts[: len(batch.lengths)] == batch.lengths)
        used = torch.zeros_like(batch.mask)
        for index, (row, first), inputs in zip(batch.indices, batch.places, batch.lengths, strict=True):
            tokens, prompt, columns = sample(experience, index)
            own = slice(first, first + inputs)
            mask = batch.mask[row, own]
            assert batch.inputs[row, own].tolist() == tokens[:-1] and batch.targets[row, own].tolist() == tokens[1:]
            assert mask.tolist() == [False] * (prompt - 1) + [True] * (len(tokens) - prompt)
            for name, values in columns.items():
                assert batch.columns[name][row, own][mask].tolist() == values
            assert not used[row, own].any()
            used[row, own] = True
        assert not batch.mask[~used].any()
        assert all(not column[~batch.mask].any() for column in batch.columns.values())


@given(experiences(), st.data())
def test_what_is_cut_can_be_put_back(experience: Experience, data: st.DataObject) -> None:
    plan = data.draw(plans(len(experience)))
    column = experience.columns["old_logprobs"]
    back = np.full_like(column, np.nan)
    shard = Shard.cut(experience, plan)
    experience.place(back, shard.indices, shard.samples.columns["old_logprobs"])
    assert np.array_equal(back, column)
    sums = experience.summed(column)
    assert sums == pytest.approx(
        [sum(sample(experience, index)[2]["old_logprobs"]) for index in range(len(experience))]
    )


@given(experiences(), st.booleans())
def test_same_shape_adds_only_padding(experience: Experience, packed: bool) -> None:
    batches = Shard.cut(experience, [[row] for row in range(len(experience))] + [[]], packed=packed).batches()
    padded = same_shape(batches)
    assert len({batch.inputs.shape for batch in padded}) == 1
    for before, after in zip(batches, padded, strict=True):
        assert after.indices == before.indices and after.loss_tokens == before.loss_tokens
        assert after.places == before.places and (not packed or sum(after.parts) == after.inputs.shape[1])
        rows, length = before.inputs.shape
        assert torch.equal(after.targets[:rows, :length], before.targets)
        assert not after.mask[rows:].any() and not after.mask[:, length:].any()


def test_padding_micro_batch_has_no_loss() -> None:
    (batch,) = Shard.cut(Experience.of([], []), [[]]).batches()
    assert batch.loss_tokens == 0 and batch.indices == [] and batch.inputs.numel() == 1


def test_loss_weights_are_the_columns_where_there_is_one() -> None:
    experience = Experience.of([[1], [2]], [[3, 4], [5]])
    experience.columns[WEIGHTS] = experience.spread([0.5, 0.0])
    (batch,) = Shard.cut(experience, [[0, 1]]).batches()
    assert batch.loss_tokens == 2 and float(batch.weights.sum()) == 1.0


def test_a_column_of_other_lengths_is_refused() -> None:
    experience = Experience.of([[1], [2]], [[3, 4], [5]])
    with pytest.raises(ValueError, match="one value for every response token"):
        experience.joined([[0.0], [0.0, 0.0]])
