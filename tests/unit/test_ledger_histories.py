"""Random histories of the ledger against a model that searches plain lists."""

from __future__ import annotations

import copy
import json
from operator import attrgetter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.types import SampleState
from tests.unit.test_ledger import (
    DROPPED,
    EVALUATE,
    FINISHED,
    GENERATING,
    PENDING,
    SCORED,
    TRAIN,
    TRAINED,
    everything,
    ids,
    last_settled,
    make,
    owned,
    restored,
)

OWNERS = range(3)
REPLICAS = range(2)
REASONS = ["overlong", "stale"]
purposes = st.sampled_from(Purpose)


def over(one):
    return one["state"] in (DROPPED, TRAINED if one["purpose"] is TRAIN else SCORED)


def awaits_reference(one):
    return one["reference"] == "waiting" or one["reference"] in REPLICAS


def may_be_dropped(one):
    return one["state"] is not GENERATING and not awaits_reference(one) and not over(one)


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
        before = everything(self.ledger)
        if allowed:
            return attrgetter(method)(self.ledger)(*arguments)
        with pytest.raises(RunError):
            attrgetter(method)(self.ledger)(*arguments)
        assert everything(self.ledger) == before
        return None

    @rule(
        purpose=purposes,
        ahead=st.integers(0, 3),
        places=st.lists(st.integers(-2, 3), min_size=1, max_size=3, unique=True),
        members=st.integers(1, 2),
        first_member=st.integers(0, 2),
        uses=st.integers(1, 2),
    )
    def open_anything(self, purpose, ahead, places, members, first_member, uses):
        step = max(self.last("step", purpose) + ahead, 0)
        prompts = [max(self.next_prompt() + place, 0) for place in places]
        self.open(make(step, prompts, members, purpose, first_member), purpose, uses)

    @rule(purpose=purposes, count=st.integers(1, 3))
    def open_next_step(self, purpose, count):
        step = 1 + max((one["step"] for one in self.ever() if one["purpose"] is purpose), default=-1)
        first = self.next_prompt()
        self.open(make(step, range(first, first + count), 2, purpose), purpose)

    def ever(self):
        return self.open_ones + self.settled

    def next_prompt(self):
        return 1 + max((one["prompt"] for one in self.ever() if one["purpose"] is TRAIN), default=-1)

    def may_be_opened(self, samples, purpose):
        step = samples[0].step
        others = [one["prompt"] for one in self.ever() if one["purpose"] is TRAIN and one["born"] != step]
        return (
            len(set(ids(samples))) == len(samples)
            and not any(self.find(name) for name in ids(samples))
            and step > self.last("step", purpose)
            and (purpose is EVALUATE or all(sample.prompt.index > prompt for sample in samples for prompt in others))
        )

    def open(self, samples, purpose, uses=1):
        allowed = self.may_be_opened(samples, purpose)
        self.attempt(allowed, "open", samples, purpose, uses)
        if allowed:
            self.note(samples, purpose, uses)

    def note(self, samples, purpose, uses):
        self.count += len(samples)
        self.open_ones += [
            {"id": sample.sample_id, "step": sample.step, "purpose": purpose, "prompt": sample.prompt.index,
             "born": sample.step, "group": sample.group_id, "state": PENDING, "owner": None, "holders": set(),
             "reference": None,
             "uses": uses if purpose is TRAIN else 0, "dropped": "", "sample": sample}
            for sample in samples
        ]  # fmt: skip

    def draw_ids(self, data, most, fit=lambda one: True):
        """Of open samples that fit, or of any, some of which are settled or unknown."""
        known = [one["id"] for one in self.open_ones if fit(one)]
        if not known or data.draw(st.booleans()):
            known = [one["id"] for one in self.open_ones + self.settled[-1:]] + ["nobody"]
        return data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=most))

    # At engines

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def give_some(self, data, owner):
        names = self.draw_ids(data, 4)
        ones = [self.find(name) for name in names]
        allowed = all(one is not None and one["state"] in (PENDING, GENERATING) for one in ones)
        self.attempt(allowed, "custody.give", owner, names)
        if allowed:
            for one in ones:
                one.update(state=GENERATING, owner=owner)
                one["holders"].add(owner)

    @rule(data=st.data())
    def give_all_pending(self, data):
        for one in self.open_ones:
            if one["state"] is PENDING:
                one.update(state=GENERATING, owner=data.draw(st.sampled_from(OWNERS)))
                one["holders"].add(one["owner"])
                self.ledger.custody.give(one["owner"], [one["id"]])

    @rule(owner=st.sampled_from(OWNERS))
    def engine_dies(self, owner):
        mine = [one for one in self.open_ones if one["owner"] == owner]
        assert set(self.ledger.custody.lose(owner)) == {one["id"] for one in mine}
        for one in mine:
            one.update(state=PENDING, owner=None)
        for one in self.ever():
            one["holders"].discard(owner)

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def engine_returns_some(self, data, owner):
        for name in self.draw_ids(data, 3, lambda one: owner in one["holders"]):
            self.engine_returns(owner, name)

    def engine_returns(self, owner, name):
        one = next((one for one in self.ever() if one["id"] == name), None)
        held = one is not None and owner in one["holders"]
        counts = self.attempt(held, "custody.finished", owner, name)
        if held:
            assert counts == (one["owner"] == owner)
            one["holders"].discard(owner)
        if counts:
            one.update(state=FINISHED, owner=None)

    @rule()
    def rollout_ends(self):
        self.ledger.custody.end()
        for one in self.ever():
            one["holders"] = set()
            if one["state"] is GENERATING:
                one.update(state=PENDING, owner=None)

    # At the reference

    @rule(data=st.data(), replica=st.sampled_from(REPLICAS))
    def reference_goes_on(self, data, replica):
        """A sample is handed in, given to a replica, or scored by it: whichever is next, and no other."""
        for name in self.draw_ids(data, 3, lambda one: one["state"] in (FINISHED, SCORED)):
            one = self.find(name) or {"state": None, "reference": "unknown"}
            place = one["reference"]
            ended = one["state"] in (FINISHED, SCORED) and place is None
            calls = [
                (ended, "waiting", "ask_reference", name),
                (place == "waiting", replica, "reference_reads", [name], replica),
                (place == replica, "scored", "reference_scored", [name], replica),
            ]
            for allowed, after, method, *arguments in calls:
                if not any(call[0] for call in calls) or allowed:
                    self.attempt(allowed, method, *arguments)
                    one["reference"] = after if allowed else place

    @rule(replica=st.sampled_from(REPLICAS))
    def replica_dies(self, replica):
        read = [one for one in self.open_ones if one["reference"] == replica]
        self.ledger.reference_lost([one["id"] for one in read], replica)
        for one in read:
            one["reference"] = "waiting"

    # To the update, or not

    def advance(self, names, state):
        ones = [self.find(name) for name in names]
        allowed = len(set(names)) == len(names) and all(
            one is not None
            and (one["state"], state) in ((FINISHED, SCORED), (SCORED, TRAINED))
            and not (state is TRAINED and (one["purpose"] is EVALUATE or awaits_reference(one)))
            for one in ones
        )
        self.attempt(allowed, "advance", names, state)
        if allowed:
            for one in ones:
                one["uses"] -= state is TRAINED
                if state is SCORED or not one["uses"]:
                    one["state"] = state

    @rule(data=st.data(), state=st.sampled_from(SampleState))
    def advance_any(self, data, state):
        fits = {SCORED: FINISHED, TRAINED: SCORED}
        self.advance(self.draw_ids(data, 3, lambda one: one["state"] is fits.get(state)), state)

    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def drop_some(self, data, reason):
        names = self.draw_ids(data, 2, may_be_dropped)
        ones = [self.find(name) for name in names]
        allowed = all(one is not None and may_be_dropped(one) for one in ones)
        self.attempt(allowed, "drop", names, reason)
        if allowed:
            for one in ones:
                one.update(state=DROPPED, dropped=reason)

    @precondition(lambda self: any(one["purpose"] is TRAIN for one in self.open_ones))
    @rule(data=st.data(), ahead=st.integers(0, 1), reason=st.sampled_from(REASONS))
    def replace_a_group(self, data, ahead, reason):
        trained = [one for one in self.open_ones if one["purpose"] is TRAIN]
        group = data.draw(st.sampled_from([one["group"] for one in trained]))
        old = [one for one in trained if one["group"] == group]
        step = old[0]["step"] + data.draw(st.sampled_from([0, 0, 1]))
        members = data.draw(st.sampled_from([len(old), 1]))
        fresh = make(step, [self.next_prompt() + ahead], members)
        fits = {one["step"] for one in old} == {step} and len(fresh) == len(old)
        allowed = fits and all(map(may_be_dropped, old)) and self.may_be_opened(fresh, TRAIN)
        self.attempt(allowed, "replace", group, fresh, reason)
        if allowed:
            self.note(fresh, TRAIN, max(one["uses"] for one in old))
            for one in old:
                one.update(state=DROPPED, dropped=reason)

    @rule(data=st.data(), ahead=st.integers(0, 2))
    def carry_some(self, data, ahead):
        names = self.draw_ids(data, 2, lambda one: not over(one))
        ones = [self.find(name) for name in names]
        step = ahead + max((one["step"] for one in ones if one), default=0)
        allowed = all(one is not None and not over(one) and one["step"] < step for one in ones)
        self.attempt(allowed, "carry", names, step)
        if allowed:
            for one in ones:
                one["step"] = step

    @rule(purpose=purposes)
    def carry_what_is_left_and_settle(self, purpose):
        steps = sorted({one["step"] for one in self.open_ones if one["purpose"] is purpose})
        mine = [one for one in self.open_ones if one["purpose"] is purpose and one["step"] in steps[:1]]
        left = [one for one in mine if not over(one)]
        self.attempt(True, "carry", [one["id"] for one in left], steps[0] + 1 if steps else 0)
        for one in left:
            one["step"] += 1
        if len(left) < len(mine):
            self.settle(steps[0], purpose)

    @rule(data=st.data())
    def finish_everything(self, data):
        self.give_all_pending(data)
        for one in self.open_ones:
            if one["owner"] is not None:
                self.engine_returns(one["owner"], one["id"])
            if one["reference"] == "waiting":
                self.ledger.reference_reads([one["id"]], 0)
                one["reference"] = 0
            if one["reference"] in REPLICAS:
                self.ledger.reference_scored([one["id"]], one["reference"])
                one["reference"] = "scored"
        self.advance([one["id"] for one in self.open_ones if one["state"] is FINISHED], SCORED)
        while left := [one["id"] for one in self.open_ones if one["state"] is SCORED and one["purpose"] is TRAIN]:
            self.advance(left, TRAINED)

    @precondition(lambda self: self.open_ones)
    @rule(data=st.data())
    def settle_any(self, data):
        self.settle(*data.draw(st.sampled_from([(one["step"], one["purpose"]) for one in self.open_ones])))

    @rule(purpose=purposes, ahead=st.integers(0, 2))
    def settle_next(self, purpose, ahead):
        self.settle(self.last("step", purpose) + ahead, purpose)

    def settle(self, step, purpose):
        due = [one for one in self.open_ones if one["purpose"] is purpose and one["step"] <= step]
        allowed = all(map(over, due)) and {one["step"] for one in due} == {step}
        self.attempt(allowed, "settle", step, purpose)
        if allowed:
            self.settled += due
            self.open_ones = [one for one in self.open_ones if one not in due]

    # Checkpoints

    def model(self):
        plain = [[one | {"sample": None} for one in ones] for ones in (self.open_ones, self.settled)]
        return copy.deepcopy(plain), self.count

    @rule()
    def save(self):
        self.saved = json.dumps(self.ledger.state_dict()), self.model()

    @rule()
    def go_back(self):
        state, (ones, self.count) = self.saved
        self.ledger.load_state_dict(json.loads(state))
        self.open_ones, self.settled = copy.deepcopy(ones)
        self.nobody_is_at_work()

    @rule()
    def restore(self):
        self.ledger = restored(self.ledger)
        self.nobody_is_at_work()

    def nobody_is_at_work(self):
        for one in self.ever():
            if one["state"] is GENERATING:
                one["state"] = PENDING
            one.update(owner=None, holders=set(), reference=None, sample=None)

    # What always holds

    @invariant()
    def the_balance_holds(self):
        counts = self.ledger.counts()
        for purpose in Purpose:
            mine = [one for one in self.settled if one["purpose"] is purpose]
            reasons = [one["dropped"] for one in mine if one["dropped"]]
            assert counts[purpose]["open"] == sum(one["purpose"] is purpose for one in self.open_ones)
            assert (counts[purpose]["settled"], counts[purpose]["dropped"]) == (len(mine) - len(reasons), len(reasons))
            dropped = self.ledger.state_dict()["tallies"][purpose]["dropped"]
            assert dropped == {reason: reasons.count(reason) for reason in set(reasons)}
            assert last_settled(self.ledger, purpose) == self.last("step", purpose)
        assert sum(count["opened"] for count in counts.values()) == self.count

    @invariant()
    def states_and_owners_are_those_of_the_model(self):
        for one in self.open_ones:
            assert self.ledger.state(one["id"]) is one["state"]
            assert one["sample"] is None or one["sample"].state is one["state"]
        for owner in OWNERS:
            assert set(owned(self.ledger, owner)) == {one["id"] for one in self.open_ones if one["owner"] == owner}
            assert self.ledger.custody.held(owner) == sum(owner in one["holders"] for one in self.ever())

    @invariant()
    def every_id_is_settled_once_and_no_prompt_is_trained_on_in_two_groups(self):
        names = [one["id"] for one in self.settled]
        assert len(set(names)) == len(names)
        groups = {}
        for one in self.settled:
            if one["purpose"] is TRAIN:
                assert groups.setdefault(one["prompt"], one["group"]) == one["group"]


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
