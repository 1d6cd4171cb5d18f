"""What whole rollouts keep of the gains of their steps: counted by hand, against a simulation, and in an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.forecast import StepView
from rlhfspec_mega.planning.modes import DRAFTED, PLAIN, ModeChoice
from rlhfspec_mega.planning.tree import DraftTree, Floats, Ints, StepRecord
from rlhfspec_mega.planning.whole_rollouts import MOST_SAMPLES, PRIOR_ROLLOUTS, WholeRollouts, plain_steps
from rlhfspec_mega.types import batch_bucket
from tests.random_trees import RandomTrees
from tests.synthetic_drafts import make_batch
from tests.unit.test_losslessness import make_engine, request
from tests.unit.test_strategy import cost_of


def decoded(samples: Sequence[tuple[int, int]], slots: int) -> list[int]:
    """Batch sizes of plain steps, one after the other, of samples (length, steps before it) in order."""
    waiting, running, sizes, now = [one for one in samples if one[0]], list[int](), list[int](), 0
    while waiting or running:
        while waiting and len(running) < slots and waiting[0][1] <= now:
            running.append(waiting.pop(0)[0])
        if running:
            sizes.append(len(running))
        running = [left - 1 for left in running if left > 1]
        now += 1
    return sizes


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=12), st.integers(1, 6))
def test_plain_steps_are_those_of_a_simulation(samples: list[tuple[int, int]], slots: int) -> None:
    came = np.cumsum([pause for _, pause in samples])
    lengths = np.array([length for length, _ in samples])
    sizes, steps = plain_steps(lengths, came, slots)
    assert np.repeat(sizes, steps).tolist() == decoded(list(zip(lengths.tolist(), came.tolist(), strict=True)), slots)


def end(whole: WholeRollouts, samples: Ints, tokens: Ints, left: int) -> None:
    """Of samples that came together."""
    whole.ended(samples, tokens, np.zeros(len(samples)), left)


def test_kept_by_hand() -> None:
    """Two samples of four tokens: three steps in which one gets three tokens, the other one; and its last two alone."""
    cost = cost_of(1e-2, 1e-3, 1e-3, 1e-4)
    whole = WholeRollouts(cost)
    both, one = cost.plain_seconds(2, 0), cost.plain_seconds(1, 0)
    whole.add_step(2, 0, 2.0, 1.1 * both, 0.1 * both, drafted=True)
    end(whole, np.array([7]), np.array([4]), 1)
    assert whole.kept(1) == whole.kept(2) == 1.0, "the rollout has not ended"
    whole.add_step(1, 0, 3.0, 1.1 * one, 0.0, drafted=True)
    end(whole, np.array([8]), np.array([4]), 0)
    kept = 4 * both / (2 * both + 3 * one)
    assert kept < 1.0
    kept *= 1.0 - 0.1 * both / (1.1 * both + 1.1 * one)
    assert whole.kept(2) == pytest.approx((PRIOR_ROLLOUTS + kept) / (PRIOR_ROLLOUTS + 1.0))
    assert whole.kept(1) == 1.0, "no rollout had one sample at most"
    assert whole.shares(2).tolist() == np.eye(1, len(whole.shares(2)), batch_bucket(2))[0].tolist()


@pytest.mark.parametrize(
    ("lengths", "least", "most"), [([32] * 32, 0.0, 0.9), ([4 * 2 ** (n // 4) for n in range(32)], 0.95, 1.0)]
)
def test_little_is_kept_where_all_have_the_same_length(lengths: list[int], least: float, most: float) -> None:
    cost, rng = cost_of(5e-3, 5e-5, 1e-3, 1e-5), np.random.default_rng(0)
    whole, left = WholeRollouts(cost), np.array(lengths)
    for _ in range(20):
        left[:] = lengths
        while (alive := np.flatnonzero(left > 0)).size:
            new = np.minimum(rng.choice((1, 2, 3, 4), len(alive)), left[alive])
            plain = cost.plain_seconds(len(alive), 0)
            whole.add_step(len(alive), 0, new.sum() / len(alive), plain, 0.0, drafted=True)
            left[alive] -= new
            gone = alive[left[alive] == 0]
            if len(gone):
                end(whole, gone, np.array(lengths)[gone], int((left > 0).sum()))
    assert least <= whole.kept(32) <= most


def test_plain_rollouts_keep_everything_and_what_was_lost_is_forgotten_slowly() -> None:
    cost = cost_of(1e-2, 1e-3, 1e-3, 1e-4)
    whole = WholeRollouts(cost)

    def rollout(counted: float, drafted: bool) -> float:
        whole.add_step(4, 0, counted, 1.0, 0.0, drafted=drafted)
        end(whole, np.arange(4), np.full(4, 8), 0)
        return whole.kept(4)

    assert rollout(8.0, drafted=False) == 1.0
    for _ in range(5):
        lost = rollout(16.0, drafted=True)
    assert lost < 0.6
    later = [rollout(8.0, drafted=False) for _ in range(300)]
    assert later == sorted(later) and later[0] < 0.65 and later[-1] > 0.8


@pytest.mark.parametrize(("lengths", "least", "most"), [([8] * 4, 0.5, 0.6), ([1, 1, 1, 64], 0.75, 0.97)])
def test_what_other_lengths_kept_counts_less(lengths: list[int], least: float, most: float) -> None:
    """After rollouts of samples of eight tokens each, of whose gains half was kept, one of these lengths."""
    whole = WholeRollouts(cost_of(1e-2, 1e-3, 1e-3, 1e-4))
    for some, drafted in (*[([8] * 4, True)] * 5, (lengths, False)):
        whole.add_step(4, 0, 16.0, 1.0, 0.0, drafted=drafted)
        end(whole, np.arange(4), np.array(some), 0)
    assert least < whole.kept(4) < most


def test_batches_that_fill_slowly_are_not_blamed_on_drafts() -> None:
    """One sample comes with each step; each has 64 tokens, and steps give one token a sample."""
    cost, whole, came = cost_of(5e-3, 5e-5, 1e-3, 1e-5), WholeRollouts(cost_of(5e-3, 5e-5, 1e-3, 1e-5)), np.arange(32)
    for now in range(64 + 31):
        size = int(((came <= now) & (now < came + 64)).sum())
        plain = cost.plain_seconds(size, 0)
        whole.add_step(size, 0, 1.0, plain, 0.0, drafted=True)
        if (gone := np.flatnonzero(came + 64 == now + 1)).size:
            whole.ended(gone, np.full(len(gone), 64), came[gone].astype(float), int((came + 64 > now + 1).sum()))
    assert whole.kept(32) == pytest.approx(1.0)


def test_what_is_lost_is_that_of_the_drafted_steps() -> None:
    """Of 100 plain steps' time ten are drafted, at the end, and a tenth of their tokens' time is lost."""
    cost = cost_of(1e-2, 0.0, 1e-3, 1e-4)
    whole, plain = WholeRollouts(cost), cost.plain_seconds(2, 0)
    whole.add_step(2, 0, 90.0, 90 * plain, 0.0, drafted=False, steps=90)
    whole.add_step(2, 0, 10.0, 8 * plain, 0.0, drafted=True, steps=5)
    end(whole, np.arange(2), np.full(2, 99), 0)
    assert whole._kept[batch_bucket(2)].tolist() == pytest.approx([8 / 98, 8 / 98 * 0.9])


def test_rollouts_without_end_take_no_memory_and_teach_nothing() -> None:
    cost = cost_of(1e-2, 1e-3, 1e-3, 1e-4)
    whole = WholeRollouts(cost)
    for number in range(3 * MOST_SAMPLES):
        whole.add_step(4, 0, 2.0, 1.0, 0.0, drafted=True)
        end(whole, np.array([number]), np.array([8]), 4)
        assert len(whole._ended) <= MOST_SAMPLES
    end(whole, np.arange(4) + 3 * MOST_SAMPLES, np.full(4, 8), 0)
    assert whole.kept(4) == 1.0 and not whole.shares(4).any()


def test_modes_go_by_what_is_kept_and_nobody_is_followed_in_vain() -> None:
    """Steps of 32 samples gain a tenth by drafting, of which whole rollouts keep nothing: all samples end together."""
    cost, rng = cost_of(1e-2, 1e-4, 2e-3, 1e-4), np.random.default_rng(0)
    cost.frozen = False
    choice, modes = ModeChoice(AcceptanceModel(), cost, 4, 8, 32, fixed_depth=False), list[int]()
    for rollout in range(40):
        for _ in range(16):
            batch = make_batch(32, rng)
            step = StepView(batch, cost)
            if choice.rests(32, True):
                choice.rested(32, batch.kv_tokens, [step.plain_seconds])
                modes.append(PLAIN)
                continue
            modes.append(choice.choose(step, 8, False))
            accepted, seconds = np.zeros(64, bool), step.plain_seconds * (1.0 if modes[-1] == PLAIN else 2.0 / 1.1)
            accepted[: 0 if modes[-1] == PLAIN else 32] = True
            record = StepRecord(batch, DraftTree(), np.arange(64), accepted, 0, 0.0, seconds)
            choice.observe(record, modes[-1], step)
        choice.ended(
            np.arange(32) + 32 * rollout, np.full(32, 16), np.zeros(32), 0
        )  # half of what drafted steps count is not real
    assert modes[:16].count(DRAFTED) > 8 and modes[-320:].count(PLAIN) > 300
    choice._due[DRAFTED] = 10**9
    assert not choice.follows(32)


def test_an_engine_tells_of_every_sample_once() -> None:
    class Listening(RandomTrees):
        def __init__(self) -> None:
            super().__init__(0)
            self.left: list[int] = []
            self.tokens: Counter[int] = Counter()

        def ended(self, samples: Ints, tokens: Ints, joined: Floats, left: int) -> None:
            assert not self.tokens.keys() & set(samples.tolist())
            self.tokens.update(dict(zip(samples.tolist(), tokens.tolist(), strict=True)))
            self.left.append(left)

    policy = Listening()
    engine = make_engine(4, policy)
    engine.submit([request(number) for number in range(11)])
    results = []
    while not engine.idle:
        results += engine.poll(0.0)
    assert sorted(policy.tokens.values()) == sorted(len(result.tokens) for result in results)
    assert policy.left[-1] == 0 and len(policy.tokens) == 11


def test_plain_steps_in_a_row_are_told_of_once_and_of_the_same_samples() -> None:
    class Resting(RandomTrees):
        """Always rests; `told` counts the steps of each sample, as they stand when it ends."""

        def __init__(self) -> None:
            super().__init__(0)
            self.told: Counter[int] = Counter()
            self.steps = self.asked = 0
            self.able: list[bool] = []

        def rests(self, size: int, able: bool) -> int:
            self.asked += 1
            self.able.append(able)
            return 5

        def rested(self, samples: Ints, kv_tokens: int, seconds: Sequence[float]) -> None:
            assert 1 <= len(seconds) <= 5 and min(seconds) > 0 and kv_tokens >= len(samples)
            self.steps += len(seconds)
            for number in samples.tolist():
                self.told[number] += len(seconds)

        def ended(self, samples: Ints, tokens: Ints, joined: Floats, left: int) -> None:
            for number, count in zip(samples.tolist(), tokens.tolist(), strict=True):
                assert self.told.pop(number) == count, "a row ends where a sample joins, ends or leaves"

    policy = Resting()
    engine = make_engine(4, policy)
    engine.submit([request(number) for number in range(11)])
    for _ in range(7):
        engine.poll(0.0)
    engine.abort([request(2).sample_id])  # in the middle of a row
    while not engine.idle:
        engine.poll(0.0)
    assert not policy.told
    assert policy.steps == engine.stats()["decode_steps"] > 2 * policy.asked
    assert any(policy.able)


@pytest.mark.parametrize("follows", [True, False])
def test_a_policy_is_told_whether_there_is_anything_to_draft_from(follows: bool) -> None:
    class Asked(RandomTrees):
        able: bool | None = None

        def follows(self, size: int) -> bool:
            return follows

        def rests(self, size: int, able: bool) -> int:
            assert self.able in (None, able)
            self.able = able
            return 1

    policy = Asked(0)
    engine = make_engine(4, policy)
    engine.submit([request(number) for number in range(3)])
    while not engine.idle:
        engine.poll(0.0)
    assert policy.able is (follows or engine.history is not None)
