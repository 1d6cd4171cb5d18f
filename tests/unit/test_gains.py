"""Gains by mode and batch size, and what the best mode would have saved."""

from __future__ import annotations

import pytest

from rlhfspec_mega.observe.figures import drafting_metrics
from rlhfspec_mega.observe.gains import SIZES, gain_figures, gain_metrics, gains_in_words
from rlhfspec_mega.observe.metrics import known
from rlhfspec_mega.types import BATCH_BUCKETS, DECODE_MODES, DraftingTally, batch_bucket


def tally(**sums: tuple[int, float, float]) -> DraftingTally:
    """Sums by mode: batch size, tokens, seconds."""
    made = DraftingTally(sample_steps=10)
    for mode, (size, tokens, seconds) in sums.items():
        place = batch_bucket(size) * len(DECODE_MODES) + DECODE_MODES.index(mode)
        made.mode_tokens[place] += tokens
        made.mode_seconds[place] += seconds
    return made


def test_buckets_have_names() -> None:
    assert len(SIZES) == BATCH_BUCKETS
    for size, name in (
        (1, "1"),
        (2, "2"),
        (3, "3-4"),
        (8, "5-8"),
        (256, "129-256"),
        (257, "over_256"),
        (9999, "over_256"),
    ):
        assert SIZES[batch_bucket(size)] == name


def test_regret_is_the_time_that_the_best_mode_would_have_saved() -> None:
    metrics = gain_metrics([tally(plain=(8, 50.0, 50.0)), tally(draft=(7, 60.0, 40.0), history=(1, 5.0, 4.0))])
    assert all(known(name) for name in metrics)
    assert metrics["speculation/tokens_draft_batch_5-8"] == 60.0
    figures = gain_figures([metrics])
    assert figures["gains"] == {"1": {"history": 1.25}, "5-8": {"plain": 1.0, "draft": 1.5}}
    # 110 tokens at 1.5 take 73.3 of the 90; at batch size 1 too little was measured to compare.
    assert figures["regret_by_batch"] == {"5-8": pytest.approx(1 - 110 / 1.5 / 90)}
    assert figures["regret"] == pytest.approx((90 - 110 / 1.5) / 94)
    assert "5-8: plain 1.00, draft 1.50" in gains_in_words(figures)


def test_a_mode_of_which_little_was_seen_is_no_yardstick() -> None:
    figures = gain_figures([gain_metrics([tally(plain=(2, 100.0, 100.0), draft=(2, 9.0, 3.0))])])
    assert figures["regret"] == 0.0


def test_nothing_is_said_without_modes() -> None:
    assert gain_figures([{}]) == {}
    assert "speculation/regret" not in drafting_metrics([DraftingTally(sample_steps=10)])
