"""Accepted tokens wait for the draft where the target's pass left them, whatever becomes of their slots."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.rollout.torch_engine import unread as module
from rlhfspec_mega.rollout.torch_engine.unread import Features, Unread

SLOTS, MOST, HIDDEN, TAPS = 4, 64, 2, (0, 2)


def states_of(marks):
    """What two layers put out for inputs that are told apart by a number each."""
    marks = torch.as_tensor(marks, dtype=torch.float32)
    return [torch.stack((marks, marks + 0.25), dim=1), torch.stack((marks + 0.5, marks + 0.75), dim=1)]


def features_of(marks):
    return torch.cat(states_of(marks), dim=1)


class Naive:
    """The same, written down at once."""

    def __init__(self):
        self.slots = [None] * SLOTS  # of a followed sample: its marks

    def add(self, marks):
        for slot, new in enumerate(marks):
            if self.slots[slot] is not None:
                self.slots[slot] += new


def check(unread, naive):
    unread.gather()
    for slot, marks in enumerate(naive.slots):
        assert unread.counts[slot] == len(marks or ())
        if marks:
            assert torch.equal(unread.features[slot, : len(marks)], features_of(marks))
            assert unread.tokens[slot, : len(marks)].tolist() == marks


def check_taken(unread, naive, counts):
    """Take the first tokens of each slot, as many as are given."""
    rows, columns = np.repeat(np.arange(len(counts)), counts), np.concatenate([[], *map(np.arange, counts)])
    tokens, features = unread.take(rows, columns.astype(np.int64), counts)
    marks = [mark for slot, count in zip(naive.slots, counts, strict=False) for mark in (slot or [])[:count]]
    assert tokens.tolist() == marks and torch.equal(features, features_of(marks))
    for slot, count in enumerate(counts):
        naive.slots[slot] = naive.slots[slot] and naive.slots[slot][count:]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([2, 64]))
def test_tokens_are_found_again(data, kept):
    unread = Unread(SLOTS, MOST, len(TAPS) * HIDDEN, dtype=torch.float32, device=torch.device("cpu"))
    naive, used, mark = Naive(), 0, 0
    known, module.STEPS_KEPT = module.STEPS_KEPT, kept
    try:
        for _ in range(data.draw(st.integers(1, 12))):
            action = data.draw(st.sampled_from(["add", "begin", "retire", "read", "check"]))
            if action == "begin" and used < SLOTS:
                marks = list(range(mark, mark + data.draw(st.integers(0, 2))))
                mark += len(marks)
                followed = data.draw(st.booleans())
                unread.end(used)
                if followed:
                    unread.begin(used, features_of(marks), [-1, *marks])
                naive.slots[used] = marks if followed else None
                used += 1
            elif action == "retire" and used:
                gone, used = data.draw(st.integers(0, used - 1)), used - 1
                if gone < used:
                    unread.move(used, gone)
                    naive.slots[gone] = naive.slots[used]
                else:
                    unread.end(used)
                naive.slots[used] = None
            elif action == "add" and used:
                counts = np.array(data.draw(st.lists(st.integers(1, 3), min_size=used, max_size=used)))
                rejected = data.draw(st.booleans())
                inputs = np.arange(mark, mark + counts.sum() * (2 if rejected else 1))
                taken = np.arange(len(inputs)) % 2 == 0 if rejected else None
                chosen = inputs[::2] if rejected else inputs
                unread.add(states_of(inputs), taken, chosen, counts)
                naive.add([part.tolist() for part in np.split(chosen, np.cumsum(counts)[:-1])])
                mark += len(inputs)
            elif action == "read":
                everything = data.draw(st.booleans())
                lengths = [len(marks or ()) for marks in naive.slots[:used]]
                counts = np.array([n if everything else data.draw(st.integers(0, n)) for n in lengths], np.int64)
                check_taken(unread, naive, counts)
            elif action == "check":
                check(unread, naive)
        check(unread, naive)
    finally:
        module.STEPS_KEPT = known


def test_what_one_step_added_is_not_put_in_order_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as drafting goes on; else it is, and comes out the same."""
    unread, naive = Unread(SLOTS, MOST, len(TAPS) * HIDDEN, dtype=torch.float32, device=torch.device("cpu")), Naive()
    for slot in range(3):
        unread.begin(slot, features_of([]), [-1])
        naive.slots[slot] = []
    gathered = 0

    def gather() -> None:
        nonlocal gathered
        gathered += 1
        Unread.gather(unread)

    monkeypatch.setattr(unread, "gather", gather)
    for number, moved in enumerate((False, False, True)):
        inputs = np.arange(10 * number, 10 * number + 8)
        taken, counts = inputs % 2 == 0, np.array([2, 1, 1])
        unread.add(states_of(inputs), taken, inputs[taken], counts)
        naive.add([part.tolist() for part in np.split(inputs[taken], np.cumsum(counts)[:-1])])
        if moved:
            unread.move(2, 0)
            naive.slots[0], naive.slots[2], counts = naive.slots[2], None, counts[1:]
        check_taken(unread, naive, counts)
        assert gathered == moved


@pytest.mark.parametrize("case", ["all", "some", "not all of it new", "moved", "ended", "two steps", "fewer slots"])
def test_what_waits_is_taken_as_it_came(case: str) -> None:
    """Whether or not it is all of what one step has added."""
    unread, naive = Unread(SLOTS, MOST, len(TAPS) * HIDDEN, dtype=torch.float32, device=torch.device("cpu")), Naive()
    for slot in range(3):
        marks = [90 + slot] if case == "not all of it new" else []
        unread.begin(slot, features_of(marks), [-1, *marks])
        naive.slots[slot] = marks
    counts = np.array([2, 1, 2])
    for first in (0, 20) if case == "two steps" else (0,):
        inputs = np.arange(first, first + 10)
        taken = inputs % 2 == 1
        unread.add(states_of(inputs), taken, inputs[taken], counts)
        naive.add([part.tolist() for part in np.split(inputs[taken], np.cumsum(counts)[:-1])])
    if case == "moved":
        unread.move(2, 0)
        naive.slots[0], naive.slots[2] = naive.slots[2], None
    elif case == "ended":
        unread.end(2)
        naive.slots[2] = None
    used = 2 if case in ("moved", "ended", "fewer slots") else 3
    lengths = np.array([len(marks or ()) for marks in naive.slots[:used]])
    check_taken(unread, naive, np.minimum(lengths, 1) if case == "some" else lengths)
    check(unread, naive)


def test_features_are_the_tapped_layers_in_their_order():
    features = Features((2, 0, 2))
    for layer in range(3):
        features(layer, torch.full((1, 1), float(layer)))
    assert [float(output) for output in features.outputs()] == [2.0, 0.0, 2.0]


def test_nobody_has_unread_tokens_where_nobody_is_followed() -> None:
    unread = Unread(2, 8, 3, dtype=torch.float32, device=torch.device("cpu"))
    for slot in range(2):
        unread.begin(slot, torch.zeros(4, 3), range(4))
    unread.end(0)
    assert unread.longest == 4 and unread.following == 1
    unread.end(1)
    assert unread.longest == unread.following == 0
