"""Plain data that travels between layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class SampleState(StrEnum):
    """Where a sample is on its way from prompt to update."""

    PENDING = "pending"
    GENERATING = "generating"
    FINISHED = "finished"
    SCORED = "scored"
    TRAINED = "trained"
    DROPPED = "dropped"


class FinishReason(StrEnum):
    """Why generation of a sample ended."""

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
    """What an unfinished sample has gained since it was last reported; the lists have equal length."""

    sample_id: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


class Span(NamedTuple):
    """A stretch of a worker's time and what filled it.

    Attributes:
        start: seconds since the epoch, as time.time() gives them.
        seconds: how long it took.
        arguments: shown with it, e.g. {"batch": 8, "steps": 40, "draft_tokens": 960}.
    """

    name: str
    start: float
    seconds: float
    arguments: dict[str, float | int | str]


class MigrationEvent(NamedTuple):
    """A sample that has moved from one engine to another.

    Attributes:
        source, destination: ranks of the engines.
        departed, arrived: end of its last step there, start of its first step here; seconds since the epoch.
        settled_bytes, delta_bytes: copied in stage one, while it was decoded, and in stage two, while it was not; 0 of
            one that is prefilled again.
        begun: it had tokens; others wait here for their first as they would have waited there.
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
        """Seconds in which the sample was decoded nowhere."""
        return self.arrived - self.departed


class Landing(NamedTuple):
    """A sample from another engine that has been decoded here.

    Attributes:
        source: name of the engine process it came from.
        departed, arrived: end of its last step there, start of its first step here; seconds since the epoch.
        settled_bytes, delta_bytes: copied in stage one, while it was decoded, and in stage two, while it was not.
        step_seconds: how long its first step here took.
        begun: see MigrationEvent.
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
    """What became of an engine's migrations since its last report.

    Attributes:
        departed: samples that their destinations have taken.
        kept: samples whose order came to nothing: they ended, took too long, or their destination is gone.
        arrived: samples taken from others, with all their tokens so far.
        landings: of samples that arrived, now or earlier.
    """

    departed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    arrived: list[SampleProgress] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)


@dataclass
class EngineReport:
    """What an engine answers after decoding for a while.

    Attributes:
        unfinished: samples that it still holds.
        migration: what became of samples sent to and from other engines.
        spans: what the time went into since the last report.
    """

    finished: list[GenerationResult]
    progress: list[SampleProgress]
    unfinished: int
    migration: MigrationReport = field(default_factory=MigrationReport)
    spans: list[Span] = field(default_factory=list)


TALLY_EDGES = (0, 1, 2, 4, 8, 16)  # classes of draft tokens verified for a sample in a step: 0, 1, 2, 3-4, ... above


@dataclass
class DraftingTally:
    """What speculation did on an engine over a while; sums, so that tallies of engines and steps add up.

    Attributes:
        sample_steps: decode steps, counted once per sample.
        drafted_sample_steps: those that verified a draft token.
        verified, accepted: draft tokens.
        sample_steps_by_verified: sample steps by class of draft tokens verified, see TALLY_EDGES.
        paired_seconds, paired_plain_seconds: of steps before a control of plain steps, and what their tokens would
            have taken at the pace of its last one.
        calibration_error: of the predicted probabilities of acceptance, so far; None before the first outcome.
        predicted_accepted, realised_accepted: draft tokens accepted per step with drafting, lately.
        collapsed_rate: acceptance of first draft tokens that stopped drafting; None while it goes on.
        usual_rate: of first draft tokens, before.
    """

    sample_steps: int = 0
    drafted_sample_steps: int = 0
    verified: int = 0
    accepted: int = 0
    sample_steps_by_verified: list[int] = field(default_factory=lambda: [0] * (len(TALLY_EDGES) + 1))
    paired_seconds: float = 0.0
    paired_plain_seconds: float = 0.0
    calibration_error: float | None = None
    predicted_accepted: float = 0.0
    realised_accepted: float = 0.0
    collapsed_rate: float | None = None
    usual_rate: float | None = None


@dataclass
class TailTally:
    """What was done about the long tail of rollouts.

    Attributes:
        downtimes: seconds in which each sample that moved with its KV was decoded nowhere.
        freed_device_seconds: engines spent without samples while others still had some.
        fused_tasks: samples that engines scored in that time, the last of them perhaps beyond its end.
        fused_seconds: of that time that it took.
    """

    migrations: int = 0
    downtimes: list[float] = field(default_factory=list)
    freed_device_seconds: float = 0.0
    fused_tasks: int = 0
    fused_seconds: float = 0.0


@dataclass(frozen=True)
class EngineLoad:
    """Load figures of one engine, the manager's input for decisions."""

    running: int
    waiting: int
    kv_tokens: int
    slots: int
    decode_steps: int
    generated_tokens: int
    policy_version: int


class WeightTarget(StrEnum):
    """Whose weights an update brings to the engines."""

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
    """One response to one prompt with its history, from generation to update."""

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
    advantage: float = 0.0
    old_logprobs: list[float] = field(default_factory=list)
    reference_logprobs: list[float] = field(default_factory=list)

    @property
    def group_id(self) -> str:
        return f"{self.step}.{self.prompt.index}"

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH
