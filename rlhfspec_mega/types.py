"""Plain data that travels between layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class SampleState(StrEnum):
    """Stage of a sample between prompt and update."""

    PENDING = "pending"
    GENERATING = "generating"
    FINISHED = "finished"
    SCORED = "scored"
    TRAINED = "trained"
    DROPPED = "dropped"


class FinishReason(StrEnum):
    """Why the generation of a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Prompt:
    """One prompt of the dataset. `index` is its place in the (infinite or epoch-wise) stream of prompts."""

    index: int
    text: str
    answer: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """What an engine needs to decode one sample.

    Attributes:
        sample_id: unique within the run.
        group_id: samples with the same group id have the same prompt tokens and may share their KV.
        seed: 63-bit seed of the sample's noise (sampling.noise.sample_seed).
        temperature: 0 means greedy.
        stop_tokens: the first of these ends the sample and is its last token.
        ignore_stop: benchmarks only: stop tokens are masked before the noise, so that lengths are forced.
    """

    sample_id: str
    group_id: str
    prompt_tokens: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    ignore_stop: bool = False


@dataclass
class GenerationResult:
    """What an engine returns for one sample; tokens, log-probs and versions have equal length.

    Attributes:
        tokens: response tokens, the stop token included.
        logprobs: log_softmax(logits / T) of each token over the full vocabulary (T = 1 if greedy).
        versions: policy version that produced each token.
    """

    sample_id: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


@dataclass
class SampleProgress:
    """New tokens of an unfinished sample since the last report; the lists have equal length."""

    sample_id: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


class Span(NamedTuple):
    """An interval of a worker's time and what it was spent on.

    Attributes:
        start: seconds since the epoch, as time.time() gives them.
        seconds: duration.
        arguments: shown in the timeline, e.g. {"batch": 8, "steps": 40, "draft_tokens": 960}.
    """

    name: str
    start: float
    seconds: float
    arguments: dict[str, float | int | str]


class MigrationEvent(NamedTuple):
    """A sample that has migrated from one engine to another.

    Attributes:
        source, destination: ranks of the engines.
        departed, arrived: end of its last step on the source, start of its first step on the destination; seconds since
            the epoch.
        settled_bytes, delta_bytes: KV copied in stage one, while the sample was still decoded, and in stage two, while
            it was not; 0 if it is prefilled again.
        begun: whether it had response tokens; a sample without any only changes the queue it waits in.
    """

    sample_id: str
    source: int
    destination: int
    departed: float
    arrived: float
    settled_bytes: int
    delta_bytes: int
    begun: bool = True

    @property
    def downtime(self) -> float:
        """Seconds in which no engine decoded the sample."""
        return self.arrived - self.departed


class Landing(NamedTuple):
    """A sample from another engine that has been decoded here.

    Attributes:
        source: name of the engine process it came from.
        departed, arrived, settled_bytes, delta_bytes, begun: see MigrationEvent.
        step_seconds: duration of its first step here.
    """

    sample_id: str
    source: str
    departed: float
    arrived: float
    settled_bytes: int
    delta_bytes: int
    step_seconds: float
    begun: bool = True


@dataclass
class MigrationReport:
    """Outcomes of an engine's migrations since its last report.

    Attributes:
        departed: samples that their destinations have taken over.
        kept: samples that were ordered to leave and did not: they finished, took too long, or their destination is
            gone.
        arrived: samples taken over from other engines, with all their tokens so far.
        landings: one for each sample that has made its first decode step here; it may have arrived before the last
            report.
        called_off: numbers of orders by which samples were to come here and do not, as their sources have told.
    """

    departed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    arrived: list[SampleProgress] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)
    called_off: list[int] = field(default_factory=list)


@dataclass
class EngineReport:
    """What an engine worker returns after decoding for a while.

    Attributes:
        unfinished: samples that the engine still holds.
        migration: outcomes of migrations from and to other engines.
        spans: what the engine's time was spent on since the last report.
    """

    finished: list[GenerationResult]
    progress: list[SampleProgress]
    unfinished: int
    migration: MigrationReport = field(default_factory=MigrationReport)
    spans: list[Span] = field(default_factory=list)


# Ways to make a decode step: without draft tokens; with those that history gives; with the draft model, too.
DECODE_MODES = ("plain", "history", "draft")
BATCH_BUCKETS = 10  # of batch sizes: 1, 2, 3-4, 5-8, ... above
TALLY_EDGES = (0, 1, 2, 4, 8, 16)  # classes of draft tokens verified for a sample in a step: 0, 1, 2, 3-4, ... above


class FinishedText(NamedTuple):
    """Tokens of a finished sample."""

    sample_id: str
    prompt: Sequence[int]
    response: Sequence[int]


def batch_bucket(size: int) -> int:
    """The bucket of a batch size."""
    return min((size - 1).bit_length(), BATCH_BUCKETS - 1)


@dataclass
class DraftingTally:
    """Sums over an engine's decode steps that describe speculation; tallies of engines and steps can be added.

    Attributes:
        sample_steps: decode steps, counted once per sample.
        drafted_sample_steps: those that verified at least one draft token.
        verified, accepted: numbers of draft tokens.
        recalled: accepted draft tokens that history gave and the draft model did not.
        sample_steps_by_verified: sample steps by class of draft tokens verified, see TALLY_EDGES.
        paired_seconds, paired_plain_seconds: seconds of drafted steps just before a control of plain steps, and the
            seconds that plain steps at the control's speed would have needed for the same tokens.
        mode_tokens, mode_seconds: by bucket of batch sizes and mode, one after another: tokens over those that plain
            steps would give, and seconds over what they would take, sums over steps.
        calibration_error: error of predicted acceptance probabilities so far; None before the first outcome.
        predicted_accepted, realised_accepted: recent means of draft tokens accepted per drafted step.
        collapsed_rate: acceptance rate of first draft tokens that made drafting stop; None while drafting goes on.
        usual_rate: usual acceptance rate of first draft tokens before that.
    """

    sample_steps: int = 0
    drafted_sample_steps: int = 0
    verified: int = 0
    accepted: int = 0
    recalled: int = 0
    sample_steps_by_verified: list[int] = field(default_factory=lambda: [0] * (len(TALLY_EDGES) + 1))
    paired_seconds: float = 0.0
    paired_plain_seconds: float = 0.0
    mode_tokens: list[float] = field(default_factory=lambda: [0.0] * (BATCH_BUCKETS * len(DECODE_MODES)))
    mode_seconds: list[float] = field(default_factory=lambda: [0.0] * (BATCH_BUCKETS * len(DECODE_MODES)))
    calibration_error: float | None = None
    predicted_accepted: float = 0.0
    realised_accepted: float = 0.0
    collapsed_rate: float | None = None
    usual_rate: float | None = None


@dataclass
class TailTally:
    """Sums that describe the long tail of rollouts.

    Attributes:
        downtimes: for each sample that migrated with its KV, seconds in which no engine decoded it.
        freed_device_seconds: time that engines had no samples while others still had some.
        fused_tasks: samples scored in that time; the last of them may have ended later.
        fused_seconds: part of that time spent on scoring.
    """

    migrations: int = 0
    downtimes: list[float] = field(default_factory=list)
    freed_device_seconds: float = 0.0
    fused_tasks: int = 0
    fused_seconds: float = 0.0


@dataclass(frozen=True)
class EngineLoad:
    """Load of one engine, which the rollout manager's decisions are based on."""

    running: int
    waiting: int
    kv_tokens: int
    slots: int
    decode_steps: int
    generated_tokens: int
    policy_version: int


class WeightTarget(StrEnum):
    """The model that a weight update is for: the policy or the draft."""

    ACTOR = "actor"
    DRAFT = "draft"


@dataclass(frozen=True)
class TensorInfo:
    """Name (Hugging Face spelling), shape and dtype (e.g. "float32") of one full weight tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Sample:
    """One response to one prompt with its history, from generation to update.

    Attributes:
        failure: why the sample has no reward (reward.score.FailureKind); it is not trained on. "": it has one.
    """

    sample_id: str
    step: int
    prompt: Prompt
    member: int
    state: SampleState = SampleState.PENDING
    response_tokens: list[int] = field(default_factory=list)
    response: str = ""
    engine_logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reward: float = 0.0
    exact: bool = False
    failure: str = ""
    advantage: float = 0.0
    old_logprobs: list[float] = field(default_factory=list)
    reference_logprobs: list[float] = field(default_factory=list)

    @property
    def group_id(self) -> str:
        return f"{self.step}.{self.prompt.index}"

    @property
    def finished_text(self) -> FinishedText:
        return FinishedText(self.sample_id, self.prompt.tokens, self.response_tokens)

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH
