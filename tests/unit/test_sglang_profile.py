"""The profile of SGLang's steps: which batches are measured in the time that there is, and what is between them."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhfspec_mega.rollout.sglang_engine.profile import (
    HASTY_STEPS,
    STEPS,
    _step_seconds,
    _table,
    _widely_spaced,
    batches_up_to,
    measure,
)
from tests.sglang_fake import VOCABULARY, FakeEngine


@pytest.mark.parametrize(("seconds", "requests"), [(0.0, 1 + 8 + 1), (60.0, 1 + 8 + 1 + 2 + 4)])
def test_the_smallest_and_the_largest_batch_come_first(seconds: float, requests: int) -> None:
    """With every number of draft tokens; the others while there is time."""
    engine, forced = FakeEngine(), list[int]()
    found = measure(engine, (0, 2), forced.append, slots=8, length=10, vocabulary=VOCABULARY, seconds=seconds)
    assert len(engine.requests) == 2 * requests and forced[:2] == [0, 2]
    assert found.table.batches == (1, 2, 4, 8) and found.table.counts == (0, 2)
    assert all(step > 0 for row in found.table.seconds for step in row)
    prompts = Counter(tuple(given["input_ids"]) for given in engine.requests if len(given["input_ids"]) == 10)
    assert len(prompts) == 8, "those of a batch are the same every time, and differ from each other"
    tokens = {given["sampling_params"]["max_new_tokens"] for given in engine.requests}
    assert tokens == {STEPS if seconds else HASTY_STEPS}


def test_batches_between_are_on_straight_lines() -> None:
    batches = batches_up_to(12)
    assert batches == (1, 2, 4, 8, 12)
    table = _table(batches, (0, 3), {(1, 0): 1.0, (12, 0): 12.0, (1, 3): 2.0, (12, 3): 2.0})
    assert [row[0] for row in table.seconds] == pytest.approx([1, 2, 4, 8, 12])
    assert [row[1] for row in table.seconds] == [2.0] * 5
    assert list(_widely_spaced((1, 2, 4, 8, 16, 32))) == [4, 2, 8, 16]


def test_steps_are_those_in_which_all_requests_decode() -> None:
    """The second begins later; outputs of the first before and after do not count."""
    first, second = [1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5], [4.0, 4.5, 5.0, 5.5, 6.5]
    assert _step_seconds([first, second]) == pytest.approx(0.5)
    assert _step_seconds([[1.0, 2.0], [3.0, 4.0]]) == pytest.approx(3.0), "never at once: what there is"
