"""The ledger: what it refuses, in words, and exact restore."""

from __future__ import annotations

import copy
import json
import operator

import pytest

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.types import Prompt, Sample, SampleState

TRAIN, EVALUATE = Purpose
PENDING, GENERATING, FINISHED, SCORED, TRAINED, DROPPED = SampleState


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
    ledger.custody.give(0, names)
    for name in names:
        assert ledger.custody.finished(0, name)
    for state in (SCORED, TRAINED)[: [FINISHED, SCORED, TRAINED].index(last)]:
        ledger.advance(names, state)


def owned(ledger, rank):
    """Ids of an engine's samples in the order of opening."""
    names = [entry["id"] for entry in ledger.state_dict()["open"]]
    return [name for name in names if ledger.custody.owner(name) == rank]


def last_settled(ledger, purpose):
    return ledger.state_dict()["tallies"][purpose]["last_step"]


def everything(ledger):
    """What is saved, and what is not."""
    names = [entry["id"] for entry in ledger.state_dict()["open"]]
    return ledger.state_dict(), [(ledger.state(name), ledger.custody.owner(name)) for name in names]


def refuses(ledger, error, words, method, *arguments):
    """The call raises `error` with these words and changes nothing."""
    before = everything(ledger)
    with pytest.raises(error) as caught:
        operator.attrgetter(method)(ledger)(*arguments)
    for word in words:
        assert word in str(caught.value)
    assert everything(ledger) == before


def test_a_step_from_prompt_to_update():
    ledger, samples = opened()
    names = ids(samples)
    assert {sample.state for sample in samples} == {PENDING}
    ledger.custody.give(1, names[::-1])
    assert {sample.state for sample in samples} == {GENERATING}
    assert owned(ledger, 1) == names and ledger.custody.held(1) == 6
    for name in names:
        assert ledger.custody.finished(1, name)
    assert owned(ledger, 1) == [] and ledger.custody.held(1) == 0
    assert {sample.state for sample in samples} == {FINISHED}
    for state in (SCORED, TRAINED):
        ledger.advance(names, state)
        assert {sample.state for sample in samples} == {state}
        assert {ledger.state(name) for name in names} == {state}
    ledger.settle(0, TRAIN)
    nothing = {"opened": 0, "settled": 0, "dropped": 0, "open": 0}
    assert ledger.counts() == {"train": nothing | {"opened": 6, "settled": 6}, "evaluate": nothing}
    assert (last_settled(ledger, TRAIN), last_settled(ledger, EVALUATE)) == (0, -1)
    refuses(ledger, RunError, ["0.0.0", "not open"], "state", "0.0.0")
    refuses(ledger, RunError, ["Step 0", "no open samples"], "settle", 0, TRAIN)


def test_a_dead_engine_loses_its_samples_and_its_late_results_do_not_count():
    ledger, samples = opened()
    names, custody = ids(samples), ledger.custody
    custody.give(0, names[1::2])
    custody.give(1, names[::2])
    assert custody.finished(1, names[0])
    assert custody.lose(1) == [names[2], names[4]]
    assert [sample.state for sample in samples] == [FINISHED, *[GENERATING, PENDING] * 2, GENERATING]
    refuses(ledger, RunError, [names[2], "never given to engine 1"], "custody.finished", 1, names[2])
    custody.give(0, [names[2]])
    custody.give(1, [names[4]])  # which was started again
    refuses(ledger, RunError, [names[2], "never given to engine 1"], "custody.finished", 1, names[2])
    assert custody.finished(0, names[2])
    refuses(ledger, RunError, [names[2], "came back twice from engine 0"], "custody.finished", 0, names[2])
    assert owned(ledger, 1) == [names[4]]
    assert custody.lose(7) == []  # which has none
    assert owned(ledger, 1) == [names[4]]
    custody.balance(1, 1)
    refuses(ledger, RunError, ["Engine 1 holds 0 samples", names[4], "has lost samples"], "custody.balance", 1, 0)
    custody.end()
    assert ledger.state(names[4]) is PENDING and custody.held(1) == 0


def test_what_ended_is_decoded_again_only_where_batches_are_repeated():
    ledger, samples = opened()
    names, custody = ids(samples), ledger.custody
    bring(ledger, names[:1], FINISHED)
    refuses(ledger, RunError, [f"{names[0]} (finished)", "engine 1"], "custody.give", 1, names)
    custody.give(1, names, True)
    assert custody.owner(names[0]) is None and custody.held(1) == len(names)
    assert not custody.finished(1, names[0]) and samples[0].state is FINISHED
    refuses(ledger, RunError, ["not been told"], "custody.departed", 1, names[1])


def test_states_go_forward_one_by_one():
    ledger, samples = opened(members=1)
    a, b, c = ids(samples)
    for state in SampleState:
        refuses(ledger, RunError, [f"{a} (pending)", f"cannot become {state}"], "advance", [a], state)
    bring(ledger, [a, b], FINISHED)
    for state in (PENDING, GENERATING, FINISHED, TRAINED, DROPPED):
        refuses(ledger, RunError, [f"{a} (finished)"], "advance", [a], state)
    refuses(ledger, RunError, [f"{c} (pending)"], "advance", [a, b, c], SCORED)
    refuses(ledger, RunError, [a, "would become scored twice"], "advance", [a, b, a], SCORED)
    refuses(ledger, RunError, ["nobody", "not open"], "advance", [a, "nobody"], SCORED)
    refuses(ledger, RunError, [f"{a} (finished)", "engine 1"], "custody.give", 1, [c, a])


def test_a_sample_that_the_reference_reads_is_not_trained_on():
    ledger, samples = opened()
    names = ids(samples)
    refuses(ledger, RunError, [names[0], "before it had ended"], "ask_reference", names[0])
    bring(ledger, names, SCORED)
    ledger.ask_reference(names[0])
    refuses(ledger, RunError, ["twice"], "ask_reference", names[0])
    refuses(ledger, RunError, [names[1], "not waiting"], "reference_reads", names[:2], 0)
    ledger.reference_reads(names[:1], 0)
    refuses(ledger, RunError, [names[0], "reading at replica 1"], "reference_scored", names[:1], 1)
    refuses(ledger, RunError, [names[0], "has not read it"], "advance", names, TRAINED)
    refuses(ledger, RunError, [names[0], "are being read"], "drop", names, "overlong")
    ledger.reference_lost(names[:1], 0)
    ledger.reference_reads(names[:1], 1)
    ledger.reference_scored(names[:1], 1)
    ledger.advance(names, TRAINED)


def test_a_sample_is_trained_on_once_in_each_epoch():
    ledger = Ledger()
    samples = make(0, range(2))
    ledger.open(samples, TRAIN, uses=2)
    bring(ledger, ids(samples), TRAINED)
    assert {sample.state for sample in samples} == {SCORED}
    ledger.advance(ids(samples)[1:], TRAINED)
    refuses(ledger, RunError, [f"1 of 4 samples are not trained: {ids(samples)[0]} (scored)"], "settle", 0, TRAIN)
    refuses(ledger, RunError, ["cannot become trained"], "advance", ids(samples), TRAINED)
    ledger.advance(ids(samples)[:1], TRAINED)
    ledger.settle(0, TRAIN)


def test_dropped_samples_are_counted_by_reason():
    ledger, samples = opened()
    names = ids(samples)
    ledger.custody.give(0, names[:1])
    refuses(ledger, RunError, [names[0], "are being read"], "drop", names, "overlong")
    refuses(ledger, ValueError, ["reason"], "drop", names[1:2], "")
    ledger.drop(names[1:3], "overlong")
    refuses(ledger, RunError, [names[1], "cannot be dropped"], "drop", names[1:2], "again")
    refuses(ledger, RunError, [f"{names[1]} (dropped)"], "custody.give", 0, names[1:2])
    assert ledger.custody.finished(0, names[0])
    ledger.drop(names[:1], "stale")
    bring(ledger, names[3:], TRAINED)
    ledger.settle(0, TRAIN)
    assert ledger.counts()["train"] == {"opened": 6, "settled": 3, "dropped": 3, "open": 0}
    assert ledger.state_dict()["tallies"]["train"]["dropped"] == {"overlong": 2, "stale": 1}


def test_a_group_is_replaced_as_a_whole():
    ledger, samples = opened()
    names = ids(samples)
    bring(ledger, names, SCORED)
    fresh = make(0, [3])
    refuses(ledger, RunError, ["Group 0.1", "2 samples", "these 1"], "replace", "0.1", fresh[:1], "all alike")
    refuses(ledger, RunError, ["Group 0.9", "0 samples"], "replace", "0.9", fresh, "all alike")
    refuses(ledger, RunError, ["Group 0.1"], "replace", "0.1", make(1, [3]), "all alike")
    refuses(ledger, RunError, ["open twice"], "replace", "0.1", samples[:2], "all alike")
    ledger.replace("0.1", fresh, "all alike")
    refuses(ledger, RunError, ["0.1.0", "cannot be replaced"], "replace", "0.1", make(0, [4]), "all alike")
    assert [sample.state for sample in samples[2:4]] == [DROPPED, DROPPED]
    bring(ledger, ids(fresh), SCORED)
    ledger.advance([*names[:2], *names[4:], *ids(fresh)], TRAINED)
    ledger.settle(0, TRAIN)
    assert ledger.counts()["train"] == {"opened": 8, "settled": 6, "dropped": 2, "open": 0}
    refuses(ledger, RunError, ["next is prompt 4"], "open", make(1, [3]), TRAIN)


def test_a_sample_lives_over_the_end_of_its_step():
    ledger, samples = opened()
    names = ids(samples)
    ledger.custody.give(0, names[:1])
    bring(ledger, names[1:], TRAINED)
    refuses(ledger, RunError, [names[1], "nothing is to become"], "carry", names, 1)
    refuses(ledger, RunError, [names[0], "to step 0"], "carry", names[:1], 0)
    ledger.carry(names[:1], 1)
    ledger.settle(0, TRAIN)
    _, more = opened(step=1, prompts=[3], ledger=ledger)
    bring(ledger, ids(more), TRAINED)
    refuses(
        ledger, RunError, [f"1 of 3 samples are not trained: {names[0]} (generating, engine 0)"], "settle", 1, TRAIN
    )
    assert ledger.custody.finished(0, names[0])
    ledger.advance(names[:1], SCORED)
    ledger.advance(names[:1], TRAINED)
    ledger.settle(1, TRAIN)
    assert ledger.counts()["train"] == {"opened": 8, "settled": 8, "dropped": 0, "open": 0}


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
    assert ledger.counts()["train"] == {"opened": 12, "settled": 4, "dropped": 0, "open": 8}


def test_a_step_is_settled_only_when_complete_and_in_order():
    ledger, samples = opened(step=1, prompts=range(7), members=1)
    names = ids(samples)
    bring(ledger, names[:1], TRAINED)
    ledger.custody.give(1, names[1:2])
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
    ledger.custody.give(1, names[:3])
    assert ledger.custody.finished(1, names[0])
    other = restored(ledger)
    assert other.state_dict() == ledger.state_dict()
    assert other.counts() == ledger.counts()
    assert [other.state(name) for name in names[:3]] == [FINISHED, PENDING, PENDING], "no engine has any"
    assert samples[1].state is GENERATING  # the Sample objects are not those of the restored ledger
    refuses(other, RunError, ["next is prompt 6"], "open", make(2, [5]), TRAIN)
    other.advance(names[:1], SCORED)
    bring(other, names[1:], TRAINED)
    other.advance(names[:1], TRAINED)
    other.settle(1, TRAIN)
    assert other.counts()["train"] == {"opened": 12, "settled": 12, "dropped": 0, "open": 0}


def test_a_restored_ledger_knows_uses_groups_and_what_was_dropped():
    ledger = Ledger()
    ledger.open(make(0, range(3)), TRAIN, uses=2)
    ledger.drop(["0.0.0", "0.0.1"], "stale")
    bring(ledger, ["0.1.0", "0.1.1"], TRAINED)
    ledger.carry(["0.2.0", "0.2.1"], 1)
    ledger.advance(["0.1.0", "0.1.1"], TRAINED)
    other = restored(ledger)
    assert other.state_dict() == ledger.state_dict()
    other.settle(0, TRAIN)
    other = restored(other)
    assert other.counts()["train"] == {"opened": 6, "settled": 2, "dropped": 2, "open": 2}
    other.replace("0.2", make(1, [7]), "stale")
    bring(other, ["1.7.0", "1.7.1"], TRAINED)
    other.advance(["1.7.0", "1.7.1"], TRAINED)
    other.settle(1, TRAIN)
    assert other.state_dict()["tallies"]["train"]["dropped"] == {"stale": 4}


def test_a_ledger_of_an_older_checkpoint_is_read():
    tally = {"opened": 4, "settled": 2, "last_step": 0, "last_prompt": 0}
    nothing = {"opened": 0, "settled": 0, "last_step": -1, "last_prompt": -1}
    sample = {"id": "1.1.0", "step": 1, "purpose": "train", "prompt": 1, "state": "generating", "owner": "engine 0"}
    ledger = Ledger()
    entries = [sample, sample | {"id": "1.1.1", "state": "pending", "owner": ""}]
    ledger.load_state_dict({"tallies": {"train": tally, "evaluate": nothing}, "open": entries})
    refuses(ledger, RunError, ["next is prompt 2"], "open", make(2, [0]), TRAIN)
    bring(ledger, ["1.1.0", "1.1.1"], TRAINED)
    ledger.settle(1, TRAIN)
    assert ledger.counts()["train"] == {"opened": 4, "settled": 4, "dropped": 0, "open": 0}


def broken_state_dicts():
    ledger, _ = opened(step=2)
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
        "'prompt' is missing": broken(lambda state: state["open"][1].pop("prompt")),
        "'many' is not a whole number": broken(lambda state: state["open"][1].update(uses_left="many")),
        "None is not a whole number": broken(lambda state: state["tallies"]["train"].update(dropped={"stale": None})),
        "'7' is not a whole number": broken(lambda state: state["tallies"]["train"].update(last_step="7")),
        "True is not a whole number": broken(lambda state: state["open"][0].update(step=True)),
        "'lost' is not a valid SampleState": broken(lambda state: state["open"][0].update(state="lost")),
        "'play' is not a valid Purpose": broken(lambda state: state["open"][0].update(purpose="play")),
        "2.0.0 is open twice": broken(lambda state: state["open"].append(state["open"][0])),
        "step 2 is settled": broken(lambda state: state["tallies"]["train"].update(last_step=2)),
        "lost or counted twice": broken(lambda state: state["open"].pop()),
        "counted twice: {'opened': 6, 'settled': 1": broken(lambda state: state["tallies"]["train"].update(settled=1)),
    }


BROKEN = broken_state_dicts()


@pytest.mark.parametrize("words", BROKEN)
def test_a_checkpoint_without_a_usable_ledger_is_refused(words):
    ledger, _ = opened()
    refuses(ledger, UserError, [words, "start a new run"], "load_state_dict", BROKEN[words])
