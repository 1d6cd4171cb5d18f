"""Liveness: the whole transition table written out, and what must hold whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rlhfspec_mega.cluster.liveness import Health, Liveness, WorkerState

STARTING, REJOINING, SERVING, SUSPECT, DEAD = WorkerState
SUSPECT_SECONDS, DEAD_SECONDS = 3, 10
CURRENT, OTHER = 5, 4


def engine_in(state: WorkerState) -> Liveness:
    """An engine, rank 0, brought into `state` at time 0 with CURRENT published (and confirmed, where it serves)."""
    record = Liveness(SUSPECT_SECONDS, DEAD_SECONDS)
    record.publish(CURRENT)
    record.launched("engine", 0, -4, needs_weights=True)
    if state is STARTING:
        record.heard("engine", 0, 0)
        return record
    record.started("engine", 0, -4 if state is SUSPECT else 0)
    if state is REJOINING:
        return record
    record.confirm("engine", 0, CURRENT)
    if state is SUSPECT:
        assert record.look(0) == []
    if state is DEAD:
        record.exited("engine", 0, "exit status -9")
    return record


EVENTS = {
    "launched": lambda record: record.launched("engine", 0, 1, needs_weights=True),
    "started": lambda record: record.started("engine", 0, 1),
    "heard": lambda record: record.heard("engine", 0, 1),
    "look early": lambda record: record.look(-1),
    "look late": lambda record: record.look(5),
    "look very late": lambda record: record.look(20),
    "exited": lambda record: record.exited("engine", 0, "exit status 1"),
    "publish same": lambda record: record.publish(CURRENT),
    "publish other": lambda record: record.publish(OTHER),
    "confirm current": lambda record: record.confirm("engine", 0, CURRENT),
    "confirm other": lambda record: record.confirm("engine", 0, OTHER),
}
ERROR = None
# A suspect serving engine is in column SUSPECT; "look early" leaves it, as it has been suspect before.
TABLE = {
    #                   STARTING   REJOINING  SERVING    SUSPECT    DEAD
    "launched":        (ERROR,     ERROR,     ERROR,     ERROR,     STARTING),
    "started":         (REJOINING, ERROR,     ERROR,     ERROR,     DEAD),
    "heard":           (STARTING,  REJOINING, SERVING,   SERVING,   DEAD),
    "look early":      (STARTING,  REJOINING, SERVING,   SUSPECT,   DEAD),
    "look late":       (STARTING,  SUSPECT,   SUSPECT,   SUSPECT,   DEAD),
    "look very late":  (STARTING,  DEAD,      DEAD,      DEAD,      DEAD),
    "exited":          (DEAD,      DEAD,      DEAD,      DEAD,      DEAD),
    "publish same":    (STARTING,  REJOINING, SERVING,   SUSPECT,   DEAD),
    "publish other":   (STARTING,  REJOINING, REJOINING, SUSPECT,   DEAD),
    "confirm current": (STARTING,  SERVING,   SERVING,   SUSPECT,   DEAD),
    "confirm other":   (STARTING,  REJOINING, REJOINING, SUSPECT,   DEAD),
}  # fmt: skip


@pytest.mark.parametrize("event", TABLE)
@pytest.mark.parametrize("state", WorkerState)
def test_every_event_in_every_state(state, event):
    record = engine_in(state)
    before = record.health("engine", 0)
    assert before.state is state
    expected = TABLE[event][list(WorkerState).index(state)]
    if expected is ERROR:
        with pytest.raises(RuntimeError, match=rf"engine rank 0 is {state}: only .*"):
            EVENTS[event](record)
        assert record.health("engine", 0) == before
    else:
        EVENTS[event](record)
        assert record.health("engine", 0).state is expected


@pytest.mark.parametrize(
    ("events", "back"),
    [
        ([], SERVING),
        (["publish other"], REJOINING),
        (["publish other", "confirm other"], SERVING),
        (["publish other", "publish same"], REJOINING),  # the update to `other` may have overwritten a part
        (["publish other", "publish same", "confirm current"], SERVING),
        (["confirm other"], REJOINING),
    ],
)
def test_a_suspect_engine_comes_back_serving_only_with_current_weights(events, back):
    record = engine_in(SUSPECT)
    for event in events:
        EVENTS[event](record)
    assert record.health("engine", 0).state is SUSPECT
    record.heard("engine", 0, 1)
    assert record.health("engine", 0).state is back


def test_actor_ranks_serve_without_weights_through_every_publish():
    record = Liveness(SUSPECT_SECONDS, DEAD_SECONDS)
    record.launched("actor", 0, 0, needs_weights=False)
    record.publish(0)
    record.started("actor", 0, 1)
    record.publish(1)
    assert record.health("actor", 0) == Health(SERVING, 1, needs_weights=False)


def test_causes_of_death():
    record = engine_in(SERVING)
    assert record.look(61) == [("engine", 0)]
    assert record.health("engine", 0).why == "silent for 61 s"
    record.exited("engine", 0, "exit status -9")
    assert record.health("engine", 0).why == "silent for 61 s"
    assert record.look(100) == []


def test_silence_of_just_a_limit_is_borne():
    record = engine_in(SERVING)
    for silence, state in ((SUSPECT_SECONDS, SERVING), (DEAD_SECONDS, SUSPECT)):
        assert record.look(silence) == []
        assert record.health("engine", 0).state is state
    assert record.look(DEAD_SECONDS + 1) == [("engine", 0)]


def test_deaths_come_sorted():
    record = engine_in(SERVING)
    for role, rank in (("engine", 2), ("actor", 1), ("engine", 1)):
        record.launched(role, rank, 0, needs_weights=False)
        record.started(role, rank, 0)
    assert record.look(11) == [("actor", 1), ("engine", 0), ("engine", 1), ("engine", 2)]
    assert record.ranks("engine", DEAD) == [0, 1, 2]


def test_a_forgotten_role_leaves_the_record_and_its_last_reports_are_ignored():
    record = engine_in(SERVING)
    record.launched("actor", 0, 0, needs_weights=False)
    record.forget("engine")
    record.heard("engine", 0, 1)
    record.started("engine", 0, 1)
    record.confirm("engine", 0, CURRENT)
    record.exited("engine", 0, "exit status 0")
    assert record.ranks("engine") == []
    assert record.ranks("actor") == [0]
    with pytest.raises(RuntimeError, match="engine rank 0 is not in the record"):
        record.health("engine", 0)
    record.launched("engine", 0, 2, needs_weights=True)
    assert record.health("engine", 0) == Health(STARTING, 2, needs_weights=True)


@pytest.mark.parametrize(("suspect", "dead"), [(0, 1), (-1, 1), (2, 2), (3, 2)])
def test_limits_in_the_wrong_order_are_refused(suspect, dead):
    with pytest.raises(ValueError, match="suspect_seconds"):
        Liveness(suspect, dead)


@given(st.lists(st.tuples(st.integers(0, SUSPECT_SECONDS), st.booleans()), max_size=30))
def test_a_worker_heard_often_enough_is_never_suspected(beats):
    record = Liveness(SUSPECT_SECONDS, DEAD_SECONDS)
    record.launched("actor", 0, 0, needs_weights=False)
    record.started("actor", 0, 0)
    now = 0
    for gap, look_twice in beats:
        for moment in (now + gap // 2, now + gap) if look_twice else (now + gap,):
            assert record.look(moment) == []
            assert record.health("actor", 0).state is SERVING
        now += gap
        record.heard("actor", 0, now)


WORKERS = [("engine", 0), ("engine", 1), ("actor", 0)]
workers = st.sampled_from(WORKERS)
versions = st.integers(0, 3)


class LivenessMachine(RuleBasedStateMachine):
    """Random events; `act` checks what each of them may change, the invariants what must always hold.

    `signs` are the last signs of life; `held` is the version that an engine's memory surely holds in full: what it
    confirmed, void as soon as an update to another version begins.
    """

    @initialize(version=versions)
    def begin(self, version):
        self.record = Liveness(SUSPECT_SECONDS, DEAD_SECONDS)
        self.now = 0
        self.signs = {}
        self.held = {}
        for worker in WORKERS:
            self.launch(worker)
            self.start(worker)
        self.update(version, WORKERS[:2])

    def snapshot(self):
        return {(role, rank): self.record.health(role, rank) for role in ("engine", "actor")
                for rank in self.record.ranks(role)}  # fmt: skip

    def act(self, event, *workers, **arguments):
        """One event on the named workers (none: all); what follows is (worker, before, after) of those it changed."""
        before = self.snapshot()
        try:
            result = getattr(self.record, event)(*(workers[0] if workers else ()), **arguments)
        except RuntimeError:
            assert event in ("launched", "started")
            assert self.snapshot() == before
            return None
        after = self.snapshot()
        for worker in WORKERS:
            old, new = before.get(worker), after.get(worker)
            if old != new:
                assert not workers or worker in workers
                if old and new and old.state is not new.state:
                    self.check_change(event, worker, old, new)
        if event == "look":
            died = [w for w in after if after[w].state is DEAD and before[w].state is not DEAD]
            assert result == sorted(died)
        else:
            assert result is None
        return after

    def check_change(self, event, worker, old, new):
        silence = self.now - self.signs[worker]
        if old.state is DEAD:
            assert (event, new.state) == ("launched", STARTING)
        if old.state is STARTING:
            assert event in ("started", "exited")
        if old.state is SUSPECT:
            assert event in ("heard", "look", "exited")
            assert (event == "heard") == (new.state is not DEAD)
        if new.state is SUSPECT:
            assert event == "look"
            assert SUSPECT_SECONDS < silence <= DEAD_SECONDS
        if new.state is DEAD:
            assert event == "exited" or (event == "look" and silence > DEAD_SECONDS)
        if old.state is REJOINING and new.state is SERVING:
            assert event == "confirm"
        if event == "publish":
            assert new.state is REJOINING
            assert worker[0] == "engine"

    @rule(seconds=st.integers(0, 6))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(seconds=st.integers(SUSPECT_SECONDS + 1, DEAD_SECONDS + 1), silent=st.sets(workers))
    def some_are_silent(self, seconds, silent):
        self.now += seconds
        for worker in WORKERS:
            if worker not in silent:
                self.hear(worker, 0)
        self.look()

    @rule(version=versions, reached=st.sets(st.sampled_from(WORKERS[:2])))
    def update(self, version, reached):
        self.publish(version)
        for worker in reached:
            self.confirm(worker, version)

    @rule()
    def restart_the_dead(self):
        for worker, health in self.snapshot().items():
            if health.state is DEAD:
                self.launch(worker)
                self.start(worker)

    @rule(worker=workers)
    def launch(self, worker):
        if self.act("launched", worker, now=self.now, needs_weights=worker[0] == "engine"):
            self.signs[worker] = self.now
            self.held[worker] = None

    @rule(worker=workers)
    def start(self, worker):
        after = self.act("started", worker, now=self.now)
        if after and worker in after and after[worker].state is not DEAD:
            self.signs[worker] = self.now

    @rule(worker=workers, ago=st.integers(0, 4))
    def hear(self, worker, ago):
        after = self.act("heard", worker, now=self.now - ago)
        if worker in after and after[worker].state is not DEAD:
            assert after[worker].state is not SUSPECT
            self.signs[worker] = max(self.signs[worker], self.now - ago)

    @rule()
    def look(self):
        before = self.snapshot()
        after = self.act("look", now=self.now)
        for worker, health in after.items():
            silence = self.now - self.signs[worker]
            if before[worker].state in (STARTING, DEAD) or silence <= SUSPECT_SECONDS:
                assert health == before[worker]
            else:
                assert health.state is (SUSPECT if silence <= DEAD_SECONDS else DEAD)

    @rule(worker=workers, why=st.sampled_from(["exit status -9", "exit status 1"]))
    def exit(self, worker, why):
        before = self.snapshot().get(worker)
        after = self.act("exited", worker, why=why).get(worker)
        if before:
            assert after.state is DEAD
            assert after.why == (before.why if before.state is DEAD else why)

    @rule(version=versions)
    def publish(self, version):
        self.act("publish", version=version)
        assert self.record.version == version
        self.held = {worker: held if held == version else None for worker, held in self.held.items()}

    @rule(worker=st.sampled_from(WORKERS[:2]), version=versions)
    def confirm(self, worker, version):
        after = self.act("confirm", worker, version=version).get(worker)
        if after and after.state not in (STARTING, DEAD):
            assert after.version == version
            self.held[worker] = version

    @rule(role=st.sampled_from(["engine", "actor"]))
    def replace_on_purpose(self, role):
        self.record.forget(role)
        assert self.record.ranks(role) == []
        for worker in WORKERS:
            if worker[0] == role:
                self.launch(worker)

    @invariant()
    def only_current_weights_serve(self):
        for worker, health in self.snapshot().items():
            if health.needs_weights and SERVING in (health.state, health.resumes):
                assert self.record.version is not None
                assert health.version == self.record.version == self.held[worker]

    @invariant()
    def fields_fit_the_state(self):
        for worker, health in self.snapshot().items():
            assert (health.resumes is not None) == (health.state is SUSPECT)
            assert health.resumes not in (STARTING, SUSPECT, DEAD)
            assert bool(health.why) == (health.state is DEAD)
            assert health.heard == self.signs[worker]
            assert health.version is None or health.state is not STARTING
            assert health.needs_weights or REJOINING not in (health.state, health.resumes)

    @invariant()
    def ranks_are_those_of_health(self):
        for state in WorkerState:
            expected = [rank for role, rank in WORKERS[:2] if self.snapshot().get((role, rank), None) is not None
                        and self.record.health(role, rank).state is state]  # fmt: skip
            assert self.record.ranks("engine", state) == expected
        some = self.record.ranks("engine", SERVING, SUSPECT)
        assert some == sorted(self.record.ranks("engine", SERVING) + self.record.ranks("engine", SUSPECT))


TestLivenessMachine = LivenessMachine.TestCase
TestLivenessMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
