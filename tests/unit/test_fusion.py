"""The queue of samples to score: whatever finishes, dies or misbehaves, each sample is scored, and counted once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlhfspec_mega.algorithm.experience import Experience
from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.config.schema import AlgorithmConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rollout.fusion import ScoreReport, ScoringQueue, ScoringTask
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, Prompt, Sample, Span
from rlhfspec_mega.workers.scoring import ReferenceScoring, ReferenceSettings

SHAPE = ModelShape("llama", 16, 1, 2, 1, 8, 32, 31, 64, 1e4, 1e-5, True)
RANKS = st.integers(0, 2)
ALGORITHM = make_algorithm(AlgorithmConfig(), members=1, samples_per_update=1)
HALF_SECOND = Span("score", 100.0, 0.5, {})


def finished(name: str, prompt: int, response: int) -> tuple[GenerationRequest, GenerationResult]:
    request = GenerationRequest(name, "g", tuple(range(1, prompt + 1)), seed=0, max_new_tokens=30)
    tokens = [(7 * position + prompt) % 31 for position in range(response)]
    return request, GenerationResult(name, tokens, [0.0] * response, [0] * response, FinishReason.STOP)


def scored(batch: list[ScoringTask]) -> ScoreReport:
    """An answer whose numbers tell whose it is."""
    return ScoreReport(
        {task.sample_id: marks(task.sample_id, len(task.response_tokens)) for task in batch}, HALF_SECOND
    )


def marks(name: str, response: int) -> list[float]:
    return [-float(name) - position / 100 for position in range(response)]


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
                self.queue.report(rank, ScoreReport({}, HALF_SECOND))
            return
        self.queue.report(rank, scored(batch))
        self.answers += 1
        for task in batch:
            self.place[int(task.sample_id)] = "scored"

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), spoil=st.sampled_from(["drop", "foreign", "short", "nan"]))
    def answer_wrongly(self, data: st.DataObject, spoil: str) -> None:
        rank = data.draw(st.sampled_from(sorted(self.batches)))
        report = scored(self.batches[rank])
        name = data.draw(st.sampled_from(sorted(report.logprobs)))
        numbers = report.logprobs[name]
        if spoil == "drop":
            del report.logprobs[name]
        elif spoil == "foreign":
            report.logprobs["foreign"] = [0.0]
        else:
            report.logprobs[name] = [*numbers, 0.0] if spoil == "short" else [*numbers[1:], float("nan")]
        with pytest.raises(RunError, match=rf"Engine {rank} "):
            self.queue.report(rank, report)

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
        assert self.queue.results == {str(number): marks(str(number), self.lengths[number][1]) for number in done}
        unscored = [number for number in range(len(self.place)) if number not in done]
        assert self.queue.unscored_tokens == sum(sum(self.lengths[number]) for number in unscored)
        assert self.queue.scored_tokens == sum(sum(self.lengths[number]) for number in done)
        assert self.queue.seconds == self.answers / 2
        assert sorted(self.queue.holders()) == sorted(self.batches)
        assert self.queue.done == (len(done) == len(self.place))

    def teardown(self) -> None:
        """After any history, one engine that lives scores what is left."""
        for rank in list(self.batches):
            self.die(rank)
        while not self.queue.done:
            self.take(0, 10)
            self.answer(0)
        self.every_sample_is_in_one_place()


TestQueue = QueueMachine.TestCase
TestQueue.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "model"
    tensors = mapping_for("llama").hf_tensors(SHAPE)
    write_directory(path, SHAPE, initial_tensors(tensors, SHAPE.num_layers, seed=2))
    return path


def engine(path: Path) -> ReferenceScoring:
    scoring = ReferenceScoring()
    settings = ReferenceSettings(path, "float32", temperature=0.7, max_tokens=64, logit_chunk=16)
    scoring.hold_reference(settings, max_positions=40, device="cpu")
    return scoring


def sample_of(request: GenerationRequest, result: GenerationResult) -> Sample:
    prompt = Prompt(0, "", "", request.prompt_tokens)
    return Sample(request.sample_id, 0, prompt, 0, response_tokens=result.tokens)


def unscored(samples: Sequence[Sample]) -> Experience:
    return Experience.of([one.prompt.tokens for one in samples], [one.response_tokens for one in samples])


@pytest.mark.parametrize("dies_at", [None, 0, 3])
def test_samples_get_the_reference_whoever_dies(reference: Path, dies_at: int | None) -> None:
    """Two real engines take turns; at one batch the engine dies and the next goes on."""
    pairs = [finished(str(number), 1 + number % 5, 3 + 2 * number) for number in range(11)]
    queue, engines = ScoringQueue(), [engine(reference), engine(reference)]
    for turn, pair in enumerate(pairs):
        queue.add(*pair)
        batch = queue.take(turn % 2, 40)
        if turn == dies_at:
            queue.lose(turn % 2)
        else:
            queue.report(turn % 2, engines[turn % 2].score(batch))
    while not queue.done:
        queue.report(0, engines[0].score(queue.take(0, 100)))
    samples = [sample_of(*pair) for pair in pairs]
    experience = unscored(samples)
    ALGORITHM.take_reference(samples, experience, queue.results)
    for sample, scored in zip(samples, experience.by_sample(experience.columns["reference_logprobs"]), strict=True):
        task = ScoringTask("alone", sample.prompt.tokens, tuple(sample.response_tokens))
        alone = engine(reference).score([task]).logprobs["alone"]
        assert scored == pytest.approx(alone, abs=1e-5)
        assert len(set(alone)) > 1


@pytest.mark.parametrize("spoil", [lambda found: found.pop("1"), lambda found: found["1"].pop()])
def test_a_step_does_not_go_on_with_a_sample_that_was_not_scored(spoil: Callable[[dict], object]) -> None:
    samples = [sample_of(*finished(str(number), 2, 3)) for number in range(2)]
    found = {sample.sample_id: [-1.0] * 3 for sample in samples}
    spoil(found)
    with pytest.raises(RunError, match=r"of the 3 response tokens of sample 1"):
        ALGORITHM.take_reference(samples, unscored(samples), found)


def test_an_engine_without_a_reference_says_so() -> None:
    with pytest.raises(RunError, match="before it was given a reference"):
        ReferenceScoring().score([ScoringTask("0", (1,), (2,))])
