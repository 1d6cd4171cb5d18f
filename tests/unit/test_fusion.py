"""The queue of samples to score: whatever finishes, dies or misbehaves, each sample is scored, and counted once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlhfspec_mega.algorithm.experience import Experience, Floats
from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.config.schema import AlgorithmConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.rollout.fusion import ScoreReport, ScoringQueue, ScoringTask
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, Prompt, Sample, Span

RANKS = st.integers(0, 2)
ALGORITHM = make_algorithm(AlgorithmConfig(), members=1, samples_per_update=1)
HALF_SECOND = Span("score", 100.0, 0.5, {})


def finished(name: str, prompt: int, response: int) -> tuple[GenerationRequest, GenerationResult]:
    request = GenerationRequest(name, "g", tuple(range(1, prompt + 1)), seed=0, max_new_tokens=30)
    tokens = [(7 * position + prompt) % 31 for position in range(response)]
    return request, GenerationResult(name, tokens, [0.0] * response, [0] * response, FinishReason.STOP)


def scored(replica: int, batch: list[ScoringTask]) -> ScoreReport:
    """An answer whose numbers tell whose it is."""
    return ScoreReport(
        replica, {task.sample_id: marks(task.sample_id, len(task.response_tokens)) for task in batch}, HALF_SECOND
    )


def marks(name: str, response: int) -> Floats:
    return np.array([-float(name) - position / 100 for position in range(response)], np.float32)


class QueueMachine(RuleBasedStateMachine):
    """The model: where each sample is, by its name (a number), and the queue as a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ScoringQueue()
        self.lengths: list[tuple[int, int]] = []  # of prompt and response
        self.place: list[int | str] = []  # "waiting", "scored" or a rank
        self.waiting: list[int] = []
        self.batches: dict[int, list[ScoringTask]] = {}
        self.answers = 0

    def at(self, place: int | str) -> list[int]:
        return [number for number, now in enumerate(self.place) if now == place]

    @rule(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4))
    def finish(self, lengths: list[tuple[int, int]]) -> None:
        for prompt, response in lengths:
            self.queue.add(*finished(str(len(self.place)), prompt, response))
            self.lengths.append((prompt, response))
            self.waiting.append(len(self.place))
            self.place.append("waiting")

    @precondition(lambda self: self.place)
    @rule(data=st.data())
    def finish_again(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.place) - 1))
        with pytest.raises(RunError, match="twice"):
            self.queue.add(*finished(str(number), 1, 1))

    @rule(rank=RANKS, budget=st.integers(1, 60))
    def take(self, rank: int, budget: int) -> None:
        if rank in self.batches:
            with pytest.raises(RunError, match="before it returned"):
                self.queue.take(rank, budget)
            return
        waiting, batch = self.waiting, self.queue.take(rank, budget)
        assert [int(task.sample_id) for task in batch] == waiting[: len(batch)], "those that have waited longest"
        for task in batch:
            number = int(task.sample_id)
            request, result = finished(task.sample_id, *self.lengths[number])
            assert (task.prompt_tokens, list(task.response_tokens)) == (request.prompt_tokens, result.tokens)
            self.place[number] = rank
        sizes = [sum(self.lengths[number]) for number in waiting]
        assert sum(sizes[: len(batch)]) <= budget or len(batch) == 1
        assert len(batch) == len(waiting) or (batch and sum(sizes[: len(batch) + 1]) > budget), "no room is left"
        if batch:
            self.batches[rank] = batch
        self.waiting = waiting[len(batch) :]

    @rule(rank=RANKS)
    def answer(self, rank: int) -> None:
        batch = self.batches.pop(rank, None)
        if batch is None:
            with pytest.raises(RunError, match="given none"):
                self.queue.report(ScoreReport(rank, {}, HALF_SECOND))
            return
        self.queue.report(scored(rank, batch))
        self.answers += 1
        for task in batch:
            self.place[int(task.sample_id)] = "scored"

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), spoil=st.sampled_from(["drop", "foreign", "short", "nan"]))
    def answer_wrongly(self, data: st.DataObject, spoil: str) -> None:
        rank = data.draw(st.sampled_from(sorted(self.batches)))
        report = scored(rank, self.batches[rank])
        name = data.draw(st.sampled_from(sorted(report.logprobs)))
        numbers = report.logprobs[name]
        if spoil == "drop":
            del report.logprobs[name]
        elif spoil == "foreign":
            report.logprobs["foreign"] = np.zeros(1, np.float32)
        else:
            wrong = [*numbers, 0.0] if spoil == "short" else [*numbers[1:], float("nan")]
            report.logprobs[name] = np.array(wrong, np.float32)
        with pytest.raises(RunError, match=rf"Replica {rank} "):
            self.queue.report(report)

    @rule(rank=RANKS)
    def die(self, rank: int) -> None:
        """Also between two batches."""
        self.queue.lose(rank)
        lost = [int(task.sample_id) for task in self.batches.pop(rank, [])]
        self.waiting = lost + self.waiting
        for number in lost:
            self.place[number] = "waiting"

    @invariant()
    def every_sample_is_in_one_place(self) -> None:
        done = self.at("scored")
        assert self.queue.results.keys() == {str(number) for number in done}
        for number in done:
            assert np.array_equal(self.queue.results[str(number)], marks(str(number), self.lengths[number][1]))
        unscored = [number for number in range(len(self.place)) if number not in done]
        assert self.queue.unscored_tokens == sum(sum(self.lengths[number]) for number in unscored)
        assert self.queue.scored_tokens == sum(sum(self.lengths[number]) for number in done)
        assert self.queue.seconds == self.answers / 2
        assert self.queue.done == (len(done) == len(self.place))

    def teardown(self) -> None:
        """After any history, one replica that lives scores what is left."""
        for rank in list(self.batches):
            self.die(rank)
        while not self.queue.done:
            self.take(0, 10)
            self.answer(0)
        self.every_sample_is_in_one_place()


TestQueue = QueueMachine.TestCase
TestQueue.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


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
