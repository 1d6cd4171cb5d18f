"""The scoring of samples: whatever finishes, dies or misbehaves, each sample is scored, and counted once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.rl.experience import Experience, Floats
from rlhfspec_mega.rollout.scoring import ScoreReport, Scoring, ScoringTask
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, Prompt, Sample, Span
from tests.engine_pool import Answered
from tests.ledgers import finish_more, finished_ledger

REPLICAS = range(3)
SOME = st.sets(st.sampled_from(REPLICAS))
ALGORITHM = make_algorithm(AlgorithmConfig(), members=1, samples_per_update=1)
HALF_SECOND = Span("score", 100.0, 0.5, {})
MOST = 30  # tokens of a batch


def finished(name: str, prompt: int, response: int) -> tuple[GenerationRequest, GenerationResult]:
    request = GenerationRequest(name, "g", tuple(range(1, prompt + 1)), seed=0, max_new_tokens=30)
    tokens = [(7 * position + prompt) % 31 for position in range(response)]
    return request, GenerationResult(name, tokens, [0.0] * response, [0] * response, FinishReason.STOP)


def marks(name: str, response: int) -> Floats:
    """Numbers that tell whose they are."""
    return np.array([-float(name) - position / 100 for position in range(response)], np.float32)


class MadeUp:
    """Implements rollout.scoring.Replicas: two ranks each, on the device of the engine of the same number."""

    devices = 2

    def __init__(self) -> None:
        self.down, self.spoilt = set[int](), ""
        self.given: list[list[ScoringTask]] = []
        self.calls: dict[int, list[Answered]] = {}  # newest, by replica

    def serving(self) -> list[int]:
        return [replica for replica in REPLICAS if replica not in self.down]

    def engines(self, replica: int) -> Collection[int]:
        return [replica]

    def start(self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str]) -> list[Answered]:
        self.given.append(list(tasks))
        self.calls[replica] = [Answered(replica, None), Answered(replica, None)]
        return list(self.calls[replica])

    def lost(self, calls: Sequence[Answered]) -> bool:
        return any(call.dead for call in calls)

    def report(
        self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str], answers: Sequence[None]
    ) -> ScoreReport:
        assert len(answers) == 2
        found = {task.sample_id: marks(task.sample_id, len(task.response_tokens)) for task in tasks}
        name = tasks[-1].sample_id
        if self.spoilt == "drop":
            del found[name]
        elif self.spoilt == "foreign":
            found["foreign"] = np.zeros(1, np.float32)
        elif self.spoilt:
            wrong = [*found[name], 0.0] if self.spoilt == "long" else [*found[name][1:], float("nan")]
            found[name] = np.array(wrong, np.float32)
        return ScoreReport(replica, found, HALF_SECOND)

    def revive(self) -> None:
        self.down.clear()


class ScoringMachine(RuleBasedStateMachine):
    """The model: where each sample is, by its name (a number), and the queue as a plain list."""

    @initialize()
    def begin(self) -> None:
        self.replicas, self.ledger = MadeUp(), Ledger()
        self.scoring = Scoring(self.replicas, MOST, self.ledger)
        self.lengths: list[tuple[int, int]] = []  # of prompt and response
        self.waiting: list[int] = []
        self.batches: dict[int, list[int]] = {}  # by replica
        self.scored: list[int] = []
        self.answers = 0

    @rule(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=4))
    def finish(self, lengths: list[tuple[int, int]]) -> None:
        for prompt, response in lengths:
            number = len(self.lengths)
            finish_more(self.ledger, [str(number)])
            self.scoring.add(*finished(str(number), prompt, response))
            self.lengths.append((prompt, response))
            self.waiting.append(number)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def finish_again(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.lengths) - 1))
        with pytest.raises(RunError, match="twice"):
            self.scoring.add(*finished(str(number), 1, 1))

    @rule(busy=SOME)
    def start(self, busy: set[int]) -> None:
        self.replicas.given.clear()
        self.scoring.start(busy)
        free = [one for one in self.replicas.serving() if one not in busy and one not in self.batches]
        given = [[int(task.sample_id) for task in batch] for batch in self.replicas.given]
        in_order, sizes = list(self.waiting), [sum(one) for one in self.lengths]
        for replica, batch in zip(free, given, strict=False):
            assert batch == in_order[: len(batch)], "those that have waited longest"
            assert sum(sizes[number] for number in batch) <= MOST or len(batch) == 1
            following = in_order[len(batch) : len(batch) + 1]
            assert not following or sum(sizes[number] for number in batch + following) > MOST, "no room is left"
            self.batches[replica] = batch
            in_order = in_order[len(batch) :]
        assert len(given) == len(free) or not in_order, "none waits while a replica is free"
        for task in (task for batch in self.replicas.given for task in batch):
            request, result = finished(task.sample_id, *self.lengths[int(task.sample_id)])
            assert (task.prompt_tokens, list(task.response_tokens)) == (request.prompt_tokens, result.tokens)
        self.waiting = in_order

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), spoilt=st.sampled_from(["", "", "", "drop", "foreign", "long", "nan"]))
    def answer(self, data: st.DataObject, spoilt: str) -> None:
        call = data.draw(st.sampled_from(self.scoring.calls()))
        last = len([one for one in self.scoring.calls() if one.rank == call.rank]) == 1
        if last and spoilt:
            self.replicas.spoilt = spoilt
            with pytest.raises(RunError, match=rf"Replica {call.rank} "):
                self.scoring.handle_answer(call)
            self.replicas.spoilt = ""
            return self.begin()  # a run ends with it
        report = self.scoring.handle_answer(call)
        assert (report is not None) == last
        if last:
            self.answers += 1
            self.scored += self.batches.pop(call.rank)
        return None

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """A rank that has not answered, or that has: then its peer fails for want of it."""
        replica = data.draw(st.sampled_from(sorted(self.batches)))
        data.draw(st.sampled_from(self.replicas.calls[replica])).dead = True
        peers = [one for one in self.scoring.calls() if one.rank == replica]
        assert self.scoring.handle_answer(data.draw(st.sampled_from(peers))) is None
        assert all(self.scoring.handle_answer(peer) is None for peer in peers), "of a batch that is given up"
        self.waiting = self.batches.pop(replica) + self.waiting

    @rule(down=SOME)
    def go_down(self, down: set[int]) -> None:
        """Between two batches."""
        self.replicas.down = down - self.batches.keys()

    @invariant()
    def every_sample_is_in_one_place(self) -> None:
        assert self.scoring.results.keys() == {str(number) for number in self.scored}
        for number in self.scored:
            assert np.array_equal(self.scoring.results[str(number)], marks(str(number), self.lengths[number][1]))
        sizes = [sum(one) for one in self.lengths]
        scored = sum(sizes[number] for number in self.scored)
        assert self.scoring.unscored_tokens == sum(sizes) - scored
        assert self.scoring.seconds == self.answers / 2
        assert self.scoring.seconds_per_token == pytest.approx(self.answers / max(scored, 1))
        assert self.scoring.done == (len(self.scored) == len(self.lengths))

    def teardown(self) -> None:
        """After any history, what is left is scored."""
        while not self.scoring.done:
            self.scoring.start_or_revive()
            for call in self.scoring.calls():
                self.scoring.handle_answer(call)
        assert len(self.scoring.results) == len(self.lengths)


TestScoring = ScoringMachine.TestCase
TestScoring.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_has_not_ended_is_not_scored() -> None:
    ledger = finished_ledger(["0"])
    scoring = Scoring(MadeUp(), MOST, ledger)
    with pytest.raises(RunError, match="not open"):
        scoring.add(*finished("1", 1, 1))


def sample_of(request: GenerationRequest, result: GenerationResult) -> Sample:
    prompt = Prompt(0, "", "", request.prompt_tokens)
    return Sample(request.sample_id, 0, prompt, 0, response_tokens=result.tokens)


def unscored(samples: Sequence[Sample]) -> Experience:
    return Experience.of([one.prompt.tokens for one in samples], [one.response_tokens for one in samples])


@pytest.mark.parametrize("spoil", [lambda found: found.pop("1"), lambda found: found.update({"1": found["1"][:2]})])
def test_a_step_does_not_go_on_with_a_sample_that_was_not_scored(spoil: Callable[[dict], object]) -> None:
    samples = [sample_of(*finished(str(number), 2, 3)) for number in range(2)]
    found = {sample.sample_id: np.full(3, -1.0, np.float32) for sample in samples}
    spoil(found)
    with pytest.raises(RunError, match=r"of the 3 response tokens of sample 1"):
        ALGORITHM.take_reference(samples, unscored(samples), found)
