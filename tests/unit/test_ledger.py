"""The ledger: what it refuses, in words, and exact restore."""

from __future__ import annotations

import copy
import json

import pytest

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.ledger import Ledger, Purpose
from rlhfspec_mega.types import Prompt, Sample, SampleState

TRAIN, EVALUATE = Purpose
PENDING, GENERATING, FINISHED, SCORED, TRAINED = SampleState


def make(step, prompts, members=2, purpose=TRAIN, first_member=0):
    mark = "eval" if purpose is EVALUATE else ""
    return [
        Sample(f"{mark}{step}.{index}.{member}", step, Prompt(index, "", "", ()), member, state=TRAINED)
        for index in prompts
        for member in range(first_member, first_member + members)
    ]


def ids(samples):
    return [sample.sample_id for sample in samples]


def opened(step=0, prompts=range(3), members=2, purpose=TRAIN, ledger=None):
    ledger = ledger or Ledger()
    samples = make(step, prompts, members, purpose)
    ledger.open(samples, purpose)
    return ledger, samples


def bring(ledger, names, last):
    """Through all states up to `last`."""
    for name in names:
        ledger.assign(name, "engine 0")
    for state in (FINISHED, SCORED, TRAINED)[: [FINISHED, SCORED, TRAINED].index(last) + 1]:
        ledger.advance(names, state)


def owned(ledger, owner):
    """Ids of an owner's samples in the order of opening."""
    return [entry["id"] for entry in ledger.state_dict()["open"] if entry["owner"] == owner]


def last_settled(ledger, purpose):
    return ledger.state_dict()["tallies"][purpose]["last_step"]


def refuses(ledger, error, words, method, *arguments):
    """The call raises `error` with these words and changes nothing."""
    before = ledger.state_dict()
    with pytest.raises(error) as caught:
        getattr(ledger, method)(*arguments)
    for word in words:
        assert word in str(caught.value)
    assert ledger.state_dict() == before


def test_a_step_from_prompt_to_update():
    ledger, samples = opened()
    names = ids(samples)
    assert {sample.state for sample in samples} == {PENDING}
    for name in reversed(names):
        ledger.assign(name, "engine 1")
    assert {sample.state for sample in samples} == {GENERATING}
    assert owned(ledger, "engine 1") == names
    for state in (FINISHED, SCORED, TRAINED):
        ledger.advance(names, state)
        assert {sample.state for sample in samples} == {state}
        assert {ledger.state(name) for name in names} == {state}
        assert owned(ledger, "engine 1") == []
    ledger.settle(0, TRAIN)
    nothing = {"opened": 0, "settled": 0, "open": 0}
    assert ledger.counts() == {"train": {"opened": 6, "settled": 6, "open": 0}, "evaluate": nothing}
    assert (last_settled(ledger, TRAIN), last_settled(ledger, EVALUATE)) == (0, -1)
    refuses(ledger, RunError, ["0.0.0", "not open"], "state", "0.0.0")
    refuses(ledger, RunError, ["Step 0", "no open samples"], "settle", 0, TRAIN)


def test_a_dead_engine_loses_its_samples_and_its_late_results_do_not_count():
    ledger, samples = opened()
    names = ids(samples)
    for place, name in enumerate(reversed(names)):
        ledger.assign(name, f"engine {place % 2}")
    ledger.advance(names[:1], FINISHED, owner="engine 1")
    ledger.release("engine 1")
    assert [sample.state for sample in samples] == [FINISHED, *[GENERATING, PENDING] * 2, GENERATING]
    refuses(ledger, RunError, [f"{names[2]} (pending)"], "advance", [names[2]], FINISHED, "engine 1")
    ledger.assign(names[2], "engine 0")
    ledger.assign(names[4], "engine 1")  # which was started again
    late = f"{names[2]} (generating, engine 0) was returned by engine 1"
    refuses(ledger, RunError, [late], "advance", [names[4], names[2]], FINISHED, "engine 1")
    ledger.advance([names[2]], FINISHED, owner="engine 0")
    assert owned(ledger, "engine 1") == [names[4]]
    ledger.release("engine 7")  # which has none
    assert owned(ledger, "engine 1") == [names[4]]


def test_states_go_forward_one_by_one():
    ledger, samples = opened(members=1)
    a, b, c = ids(samples)
    for state in SampleState:
        refuses(ledger, RunError, [f"{a} (pending)", f"cannot become {state}"], "advance", [a], state)
    bring(ledger, [a, b], FINISHED)
    for state in (PENDING, GENERATING, FINISHED, TRAINED):
        refuses(ledger, RunError, [f"{a} (finished)"], "advance", [a], state)
    refuses(ledger, RunError, [f"{c} (pending)"], "advance", [a, b, c], SCORED)
    refuses(ledger, RunError, [a, "would become scored twice"], "advance", [a, b, a], SCORED)
    refuses(ledger, RunError, ["nobody", "not open"], "advance", [a, "nobody"], SCORED)
    refuses(ledger, RunError, [f"{a} (finished)", "engine 1"], "assign", a, "engine 1")
    refuses(ledger, ValueError, ["owner"], "assign", c, "")


def test_evaluated_samples_end_scored():
    ledger, samples = opened(purpose=EVALUATE)
    bring(ledger, ids(samples), SCORED)
    refuses(ledger, RunError, ["eval0.0.0 (scored)"], "advance", ids(samples), TRAINED)
    ledger.settle(0, EVALUATE)
    _, again = opened(step=1, purpose=EVALUATE, ledger=ledger)  # the same prompts in another step
    bring(ledger, ids(again), SCORED)
    ledger.settle(1, EVALUATE)
    assert ledger.counts()["evaluate"]["settled"] == 12


def test_nothing_is_trained_on_twice():
    ledger, samples = opened(step=3, prompts=range(4, 6))
    refuses(ledger, RunError, ["3.4.0, 3.4.1", "open twice"], "open", samples, TRAIN)
    refuses(ledger, RunError, ["3.8.0", "open twice"], "open", make(3, [8, 8], members=1), TRAIN)
    refuses(ledger, RunError, ["4.5.0", "next is prompt 6"], "open", make(4, [5, 6]), TRAIN)
    refuses(ledger, ValueError, ["several steps"], "open", make(4, [6]) + make(5, [7]), TRAIN)
    bring(ledger, ids(samples), TRAINED)
    ledger.settle(3, TRAIN)
    for step in (2, 3):
        words = [f"{step}.6.0", f"step {step}", "step 3 of 'train' is settled"]
        refuses(ledger, RunError, words, "open", make(step, [6]), TRAIN)
    old = make(4, range(6))
    words = ["4.0.0, 4.0.1, 4.1.0, 4.1.1, 4.2.0 and more", "next is prompt 6"]
    refuses(ledger, RunError, words, "open", old, TRAIN)
    assert {sample.state for sample in old} == {TRAINED}  # as they were
    opened(step=3, prompts=range(4), purpose=EVALUATE, ledger=ledger)
    opened(step=4, prompts=[6], ledger=ledger)
    opened(step=4, prompts=[6], members=0, ledger=ledger)
    ledger.open(make(4, [8, 7]), TRAIN)  # more of a step that is open
    ledger.open(make(4, [6], first_member=2), TRAIN)
    refuses(ledger, RunError, ["5.8.0", "next is prompt 9"], "open", make(5, [8]), TRAIN)
    assert ledger.counts()["train"] == {"opened": 12, "settled": 4, "open": 8}


def test_a_step_is_settled_only_when_complete_and_in_order():
    ledger, samples = opened(step=1, prompts=range(7), members=1)
    names = ids(samples)
    bring(ledger, names[:1], TRAINED)
    ledger.assign(names[1], "engine 1")
    words = ["6 of 7 samples", "1.1.0 (generating, engine 1), 1.2.0 (pending), ", "1.5.0 (pending) and more"]
    refuses(ledger, RunError, words, "settle", 1, TRAIN)
    refuses(ledger, RunError, ["Step 1 of 'evaluate'"], "settle", 1, EVALUATE)
    _, later = opened(step=2, prompts=[9], ledger=ledger)
    bring(ledger, ids(later), TRAINED)
    refuses(ledger, RunError, ["Step 2", "while step 1 is open"], "settle", 2, TRAIN)
    bring(ledger, names[1:], TRAINED)
    ledger.settle(1, TRAIN)
    ledger.settle(2, TRAIN)


def test_a_lost_sample_is_noticed_when_a_step_is_settled():
    ledger, samples = opened()
    ledger._tallies[TRAIN].opened += 1  # no public call can lose one
    bring(ledger, ids(samples), TRAINED)
    with pytest.raises(RunError, match="'train' are lost or counted twice"):
        ledger.settle(0, TRAIN)


def test_the_highest_prompt_counts_in_whatever_order_steps_were_opened():
    ledger, late = opened(step=2, prompts=[0, 1])
    _, early = opened(step=1, prompts=[5, 4], ledger=ledger)
    for step, samples in ((1, early), (2, late)):
        bring(ledger, ids(samples), TRAINED)
        ledger.settle(step, TRAIN)
        refuses(ledger, RunError, ["next is prompt 6"], "open", make(3, [5]), TRAIN)


def restored(ledger):
    other, _ = opened(step=9)  # what it held before must not matter
    other.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    return other


def test_a_restored_ledger_goes_on_where_it_was():
    ledger, samples = opened()
    bring(ledger, ids(samples), TRAINED)
    ledger.settle(0, TRAIN)
    _, samples = opened(step=1, prompts=range(3, 6), ledger=ledger)
    names = ids(samples)
    for name in reversed(names[:3]):
        ledger.assign(name, "engine 1")
    ledger.advance(names[:1], FINISHED)
    other = restored(ledger)
    assert other.state_dict() == ledger.state_dict()
    assert other.counts() == ledger.counts()
    other.release("engine 1")
    assert [other.state(name) for name in names[:3]] == [FINISHED, PENDING, PENDING]
    assert samples[1].state is GENERATING  # the Sample objects are not those of the restored ledger
    refuses(other, RunError, ["next is prompt 6"], "open", make(2, [5]), TRAIN)
    other.advance(names[:1], SCORED)
    bring(other, names[1:], TRAINED)
    other.advance(names[:1], TRAINED)
    other.settle(1, TRAIN)
    assert other.counts()["train"] == {"opened": 12, "settled": 12, "open": 0}


def broken_state_dicts():
    ledger, samples = opened(step=2)
    ledger.assign(ids(samples)[0], "engine 0")
    good = ledger.state_dict()
    restored(ledger)

    def broken(change):
        state = copy.deepcopy(good)
        change(state)
        return state

    return {
        "there is none": None,
        "'tallies' is missing": {},
        "'open' is missing": broken(lambda state: state.pop("open")),
        "'evaluate' is missing": broken(lambda state: state["tallies"].pop("evaluate")),
        "'settled' is missing": broken(lambda state: state["tallies"]["train"].pop("settled")),
        "'owner' is missing": broken(lambda state: state["open"][1].pop("owner")),
        "'7' is not a whole number": broken(lambda state: state["tallies"]["train"].update(last_step="7")),
        "True is not a whole number": broken(lambda state: state["open"][0].update(step=True)),
        "'lost' is not a valid SampleState": broken(lambda state: state["open"][0].update(state="lost")),
        "'play' is not a valid Purpose": broken(lambda state: state["open"][0].update(purpose="play")),
        "2.0.0 is open twice": broken(lambda state: state["open"].append(state["open"][0])),
        "2.0.0 is generating, and its owner is ''": broken(lambda state: state["open"][0].update(owner="")),
        "2.0.1 is pending, and its owner is 'x'": broken(lambda state: state["open"][1].update(owner="x")),
        "step 2 is settled": broken(lambda state: state["tallies"]["train"].update(last_step=2)),
        "lost or counted twice": broken(lambda state: state["open"].pop()),
        "counted twice: {'opened': 6, 'settled': 1": broken(lambda state: state["tallies"]["train"].update(settled=1)),
    }


BROKEN = broken_state_dicts()


@pytest.mark.parametrize("words", BROKEN)
def test_a_checkpoint_without_a_usable_ledger_is_refused(words):
    ledger, _ = opened()
    refuses(ledger, UserError, [words, "start a new run"], "load_state_dict", BROKEN[words])
