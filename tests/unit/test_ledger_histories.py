"""Random histories of the ledger against a model that searches plain lists."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger import Ledger, Purpose
from tests.unit.test_ledger import (
    EVALUATE,
    FINISHED,
    GENERATING,
    PENDING,
    SCORED,
    TRAIN,
    TRAINED,
    ids,
    last_settled,
    make,
    owned,
    restored,
)

OWNERS = ["engine 0", "engine 1", "engine 2"]
STATES = [PENDING, GENERATING, FINISHED, SCORED, TRAINED]
purposes = st.sampled_from(Purpose)


class LedgerMachine(RuleBasedStateMachine):
    """The model: two lists of plain records, open and settled, searched anew for every question."""

    @initialize()
    def begin(self):
        self.ledger = Ledger()
        self.open_ones, self.settled, self.count = [], [], 0
        self.save()

    def last(self, key, purpose):
        return max((one[key] for one in self.settled if one["purpose"] is purpose), default=-1)

    def find(self, name):
        return next((one for one in self.open_ones if one["id"] == name), None)

    def attempt(self, allowed, method, *arguments):
        """The call, which must succeed exactly if the model allows it, and change nothing if not."""
        before = self.ledger.state_dict()
        if allowed:
            return getattr(self.ledger, method)(*arguments)
        with pytest.raises(RunError):
            getattr(self.ledger, method)(*arguments)
        assert self.ledger.state_dict() == before
        return None

    @rule(
        purpose=purposes,
        ahead=st.integers(0, 3),
        places=st.lists(st.integers(-2, 3), min_size=1, max_size=3, unique=True),
        members=st.integers(1, 2),
        first_member=st.integers(0, 2),
    )
    def open_anything(self, purpose, ahead, places, members, first_member):
        step = max(self.last("step", purpose) + ahead, 0)
        prompts = [max(self.next_prompt() + place, 0) for place in places]
        self.open(make(step, prompts, members, purpose, first_member), purpose)

    @rule(purpose=purposes, count=st.integers(1, 3))
    def open_next_step(self, purpose, count):
        step = 1 + max((one["step"] for one in self.ever() if one["purpose"] is purpose), default=-1)
        first = self.next_prompt()
        self.open(make(step, range(first, first + count), 2, purpose), purpose)

    def ever(self):
        return self.open_ones + self.settled

    def next_prompt(self):
        return 1 + max((one["prompt"] for one in self.ever() if one["purpose"] is TRAIN), default=-1)

    def open(self, samples, purpose):
        step = samples[0].step
        others = [one["prompt"] for one in self.ever() if one["purpose"] is TRAIN and one["step"] != step]
        allowed = (
            len(set(ids(samples))) == len(samples)
            and not any(self.find(name) for name in ids(samples))
            and step > self.last("step", purpose)
            and (purpose is EVALUATE or all(sample.prompt.index > prompt for sample in samples for prompt in others))
        )
        self.attempt(allowed, "open", samples, purpose)
        if allowed:
            self.count += len(samples)
            self.open_ones += [
                {"id": sample.sample_id, "step": step, "purpose": purpose, "prompt": sample.prompt.index,
                 "state": PENDING, "owner": "", "sample": sample}
                for sample in samples
            ]  # fmt: skip

    def draw_ids(self, data, most):
        known = [one["id"] for one in self.open_ones] + [one["id"] for one in self.settled[-1:]] + ["nobody"]
        return data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=most))

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def assign_some(self, data, owner):
        for name in self.draw_ids(data, 4):
            one = self.find(name)
            allowed = one is not None and one["state"] in (PENDING, GENERATING)
            self.attempt(allowed, "assign", name, owner)
            if allowed:
                one.update(state=GENERATING, owner=owner)

    @rule(data=st.data())
    def assign_all_pending(self, data):
        for one in self.open_ones:
            if one["state"] is PENDING:
                one.update(state=GENERATING, owner=data.draw(st.sampled_from(OWNERS)))
                self.ledger.assign(one["id"], one["owner"])

    @rule(owner=st.sampled_from(OWNERS))
    def engine_dies(self, owner):
        self.ledger.release(owner)
        for one in self.open_ones:
            if one["owner"] == owner:
                one.update(state=PENDING, owner="")

    def advance(self, names, state, owner):
        ones = [self.find(name) for name in names]
        allowed = len(set(names)) == len(names) and all(
            one is not None
            and one["state"] is not PENDING
            and STATES.index(one["state"]) + 1 == STATES.index(state)
            and not (state is TRAINED and one["purpose"] is EVALUATE)
            and owner in ("", one["owner"])
            for one in ones
        )
        self.attempt(allowed, "advance", names, state, owner)
        if allowed:
            for one in ones:
                one.update(state=state, owner="")

    @rule(data=st.data(), state=st.sampled_from(STATES), owner=st.sampled_from(["", *OWNERS]))
    def advance_any(self, data, state, owner):
        self.advance(self.draw_ids(data, 3), state, owner)

    def engine_returns_all_it_has(self, owner):
        names = [one["id"] for one in self.open_ones if one["owner"] == owner]
        self.advance(names, FINISHED, owner)

    def advance_all(self, state):
        before = STATES[STATES.index(state) - 1]
        ones = [one for one in self.open_ones if one["state"] is before]
        self.advance([one["id"] for one in ones if state is SCORED or one["purpose"] is TRAIN], state, "")

    @rule(data=st.data())
    def finish_everything(self, data):
        self.assign_all_pending(data)
        for owner in OWNERS:
            self.engine_returns_all_it_has(owner)
        for state in (SCORED, TRAINED):
            self.advance_all(state)

    @precondition(lambda self: self.open_ones)
    @rule(data=st.data())
    def settle_any(self, data):
        self.settle(*data.draw(st.sampled_from([(one["step"], one["purpose"]) for one in self.open_ones])))

    @rule(purpose=purposes, ahead=st.integers(0, 2))
    def settle_next(self, purpose, ahead):
        self.settle(self.last("step", purpose) + ahead, purpose)

    def settle(self, step, purpose):
        due = [one for one in self.open_ones if one["purpose"] is purpose and one["step"] <= step]
        complete = all(one["state"] is (TRAINED if purpose is TRAIN else SCORED) for one in due)
        allowed = complete and {one["step"] for one in due} == {step}
        self.attempt(allowed, "settle", step, purpose)
        if allowed:
            self.settled += due
            self.open_ones = [one for one in self.open_ones if one not in due]

    def model(self):
        plain = [[one | {"sample": None} for one in ones] for ones in (self.open_ones, self.settled)]
        return plain, self.count

    @rule()
    def save(self):
        self.saved = json.dumps(self.ledger.state_dict()), self.model()

    @rule()
    def go_back(self):
        state, (ones, self.count) = self.saved
        self.ledger.load_state_dict(json.loads(state))
        self.open_ones, self.settled = copy.deepcopy(ones)

    @rule()
    def restore(self):
        self.ledger = restored(self.ledger)
        for one in self.open_ones:
            one["sample"] = None

    @invariant()
    def the_balance_holds(self):
        counts = self.ledger.counts()
        for purpose in Purpose:
            for name, ones in (("open", self.open_ones), ("settled", self.settled)):
                assert counts[purpose][name] == sum(one["purpose"] is purpose for one in ones)
            assert last_settled(self.ledger, purpose) == self.last("step", purpose)
        assert sum(count["opened"] for count in counts.values()) == self.count

    @invariant()
    def states_and_owners_are_those_of_the_model(self):
        for one in self.open_ones:
            assert self.ledger.state(one["id"]) is one["state"]
            assert one["sample"] is None or one["sample"].state is one["state"]
        for owner in OWNERS:
            assert owned(self.ledger, owner) == [one["id"] for one in self.open_ones if one["owner"] == owner]

    @invariant()
    def every_id_is_settled_once_and_no_prompt_is_trained_on_in_two_steps(self):
        names = [one["id"] for one in self.settled]
        assert len(set(names)) == len(names)
        steps = {}
        for one in self.settled:
            if one["purpose"] is TRAIN:
                assert steps.setdefault(one["prompt"], one["step"]) == one["step"]


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
