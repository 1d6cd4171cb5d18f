"""The built-in task: prompts by number, true answers, long-tailed lengths, held-out prompts apart."""

from __future__ import annotations

import math
import statistics
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.config.schema.generation import DataConfig
from rlhfspec_mega.data.chain_sums import TERM, ChainSums, answer_text
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.reward.chain_sums import reward

TASK = ChainSums.from_config(DataConfig(), seed=3)


def test_the_worked_solution_of_one_chain():
    assert answer_text("7+5-8+3=") == "7+5=12-8=4+3=7;7"
    with pytest.raises(ValueError, match="no chain"):
        answer_text("7+x=")


@given(st.integers(0, 10**9), st.sampled_from(["train", "eval"]))
def test_answers_agree_with_python(index, split):
    prompt = TASK.prompt_text(split, index)
    working, _, result = answer_text(prompt).partition(";")
    assert int(result) == eval(prompt[:-1])
    sums = [int(step.split("=")[1]) for step in working.replace("-", "+").split("+")[1:]]
    assert sums[-1] == int(result) and all(0 <= total <= TASK.max_sum for total in sums)
    assert _terms(working) + "=" == prompt


def _terms(working):
    """Every "=NN" removed from the working: the terms in order."""
    kept, skipping = "", False
    for character in working:
        skipping = character == "=" or (skipping and character.isdigit())
        kept += "" if skipping else character
    return kept


def test_lengths_have_a_long_tail():
    lengths = sorted(len(answer_text(TASK.prompt_text("train", index))) + 1 for index in range(4000))
    median, p99 = statistics.median(lengths), lengths[len(lengths) * 99 // 100]
    assert p99 > 6 * median
    assert lengths[0] <= 9 and 200 < lengths[-1] <= 300


def _terms_of(split, start, count):
    return [len(TERM.findall(TASK.prompt_text(split, index))) for index in range(start, start + count)]


def test_each_step_has_chains_of_all_lengths():
    """The mean of 16 consecutive log lengths varies less than half as much as that of independent draws."""
    steps = [statistics.fmean(map(math.log, _terms_of("train", 16 * step, 16))) for step in range(100)]
    spread = statistics.stdev(map(math.log, _terms_of("train", 0, 1600)))
    assert statistics.stdev(steps) < spread / 4 / 2


def test_held_out_chains_are_as_long_as_those_trained_on():
    """The same share of each length, within 1%: what is held out is chosen after the length."""
    train, held_out = _terms_of("train", 0, 2000), _terms_of("eval", 0, 2000)
    for terms in range(2, 20):
        assert abs(train.count(terms) - held_out.count(terms)) <= 20


def test_a_length_of_which_a_split_has_no_text_is_left_out():
    """Of ones, there are so few short chains that none may be held out."""
    ones = ChainSums.from_config(DataConfig(max_operand=1, max_sum=1), seed=0)
    for split in ("train", "eval"):
        texts = [ones.prompt_text(split, index) for index in range(20)]
        assert all((zlib.crc32(text.encode()) % 10 == 0) == (split == "eval") for text in texts)
    with pytest.raises(UserError, match="none is held out"):
        ChainSums.from_config(DataConfig(max_operand=1, max_sum=1, max_terms=3), seed=0).prompt_text("eval", 0)


def test_prompts_depend_on_seed_split_and_index_alone():
    again = ChainSums.from_config(DataConfig(), seed=3)
    assert [TASK.prompt_text("train", i) for i in (5, 900, 2)] == [again.prompt_text("train", i) for i in (5, 900, 2)]
    other_seed = replace(TASK, seed=4)
    assert [TASK.prompt_text("train", i) for i in range(20)] != [other_seed.prompt_text("train", i) for i in range(20)]


def test_no_prompt_is_both_trained_and_held_out():
    train = {replace(TASK, seed=seed).prompt_text("train", i) for seed in (3, 4) for i in range(3000)}
    held_out = {replace(TASK, seed=seed).prompt_text("eval", i) for seed in (3, 4) for i in range(1000)}
    assert not train & held_out
    assert len(held_out) > 500


def test_longest_prompt_is_longest():
    short = replace(TASK, max_terms=6)
    assert max(len(short.prompt_text("train", i)) for i in range(500)) == len(short.longest_prompt())


@pytest.mark.parametrize("settings", [{"max_terms": 1}, {"median_terms": 0}, {"max_operand": 9, "max_sum": 16}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(UserError, match=r"data\."):
        ChainSums.from_config(DataConfig(**settings), seed=0)


def test_smallest_allowed_sum_always_finds_a_term():
    task = ChainSums.from_config(DataConfig(max_operand=9, max_sum=17), seed=0)
    assert all(task.prompt_text("train", i).endswith("=") for i in range(300))


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("7+5=12-8=4+3=7;8", 1),
        ("7+5=12-8=4+3=7;77", 1),
        ("7+5=12-8=4", 2 / 3),
        ("7+5=12-8=5+3=8;8", 1 / 3),
        ("7+5=12 -8=4+3=7;7", 1 / 3),
        ("7+5=123-8=4+3=7;7", 0),
        ("5+5=12-8=4+3=7;7", 0),
        ("+5=12-8=4+3=7;7", 0),
        ("7", 0),
        ("", 0),
    ],
)
def test_reward_counts_correct_leading_steps(response, share):
    answer = answer_text("7+5-8+3=")  # 7+5=12-8=4+3=7;7
    assert reward("", answer, answer, partial=0.5) == (1.0, True)
    assert reward("", response, answer, partial=0.5) == (pytest.approx(0.5 * share), False)
    assert reward("", response, answer) == (0.0, False)


@given(st.integers(0, 10**6), st.data())
def test_reward_never_falls_along_the_solution_and_is_exact_only_at_its_end(index, data):
    answer = answer_text(TASK.prompt_text("train", index))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer) - 1), min_size=2, max_size=5)))
    scores = [reward("", answer[:cut], answer, partial=0.5) for cut in cuts]
    assert [score.value for score in scores] == sorted(score.value for score in scores)
    assert not any(score.exact for score in scores) and all(score.value <= 0.5 for score in scores)
