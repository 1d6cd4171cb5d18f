"""A small random model, requests, what their samples are by whole-sequence passes, and engines driven to them."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer, causal_attention
from rlhfspec_mega.rollout.protocol import RolloutEngine, SampleSnapshot
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import EngineReport, FinishReason, GenerationRequest, GenerationResult, TensorInfo
from tests.near_tie import Logits, assert_same, perturbed_scores

SHAPE = ModelShape("qwen3", 32, 2, 4, 2, 12, 48, 29, 96, 10000.0, 1e-6, True)
MAX_POSITIONS = 72
SHORTEST_POLL = 0.001  # seconds: about a step of the torch engine; SGLang decodes all the time
Results = Mapping[str, GenerationResult]


def random_weights(seed: int, shape: ModelShape = SHAPE) -> dict[str, torch.Tensor]:
    """Weights large enough that the next token is far from uniform and depends on the whole context."""
    generator = torch.Generator().manual_seed(seed)
    names = Transformer(shape, max_positions=1, dtype=torch.float32, device="cpu").hf_tensors()
    return {
        name: torch.randn(t.shape, generator=generator) * (0.35 if t.dim() == 2 else 0.2) + (t.dim() == 1)
        for name, t in names.items()
    }


WEIGHTS, OTHER_WEIGHTS = random_weights(0), random_weights(1)


def infos(**changes: tuple[int, ...]) -> list[TensorInfo]:
    """Of the weights, with other shapes for some."""
    return [TensorInfo(name, changes.get(name, tuple(t.shape)), "float32") for name, t in WEIGHTS.items()]


def send_weights(
    engine: RolloutEngine, weights: Mapping[str, torch.Tensor] = WEIGHTS, version: int = 1, piece: int = 500
) -> None:
    engine.begin_update(version, [TensorInfo(name, tuple(t.shape), "float32") for name, t in weights.items()])
    for name, tensor in weights.items():
        for first in reversed(range(0, tensor.numel(), piece)):
            engine.update_weights([(name, first, tensor.flatten()[first : first + piece])])
    engine.end_update(version)


def make_requests(groups: int = 7, members: int = 3, forced: float = 0.0) -> list[GenerationRequest]:
    """Groups with prompts of 1 to 37 tokens; members differ in seed, temperature, limit and stop tokens.

    Args:
        forced: share of samples whose stop tokens are masked.
    """
    rng = random.Random(0)
    requests = []
    for group in range(groups):
        prompt = tuple(rng.randrange(SHAPE.vocab_size) for _ in range(1 + 6 * group % 43))
        for member in range(members):
            requests.append(
                GenerationRequest(
                    sample_id=f"{group}.{member}",
                    group_id=str(group),
                    prompt_tokens=prompt,
                    seed=sample_seed(0, 0, group, member),
                    max_new_tokens=rng.choice((1, 5, 20, 35)),
                    temperature=rng.choice((0.0, 0.8, 1.0)),
                    stop_tokens=rng.choice(((), (3,), (3, 17))),
                    ignore_stop=rng.random() < forced,
                )
            )
    return requests


REQUESTS = make_requests()


def long_requests(count: int, most: int = 60) -> list[GenerationRequest]:
    """Samples of one group that only their limit ends."""
    return [GenerationRequest(f"s{i}", "g", (4, 9, 2, 8), seed=i, max_new_tokens=most) for i in range(count)]


def make_judge(weights: Mapping[str, torch.Tensor]) -> Logits:
    """Logits after a token sequence, by the whole-sequence forward in float64."""
    model = Transformer(SHAPE, max_positions=MAX_POSITIONS, dtype=torch.float64, device="cpu")
    model.load(weights)

    def logits(tokens: list[int]) -> torch.Tensor:
        hidden = model.hidden(torch.tensor([tokens]), torch.arange(len(tokens))[None], causal_attention(SHAPE))
        return model.logits(hidden)[0, -1]

    return logits


JUDGE, OTHER_JUDGE = make_judge(WEIGHTS), make_judge(OTHER_WEIGHTS)


@functools.cache
def reference(request: GenerationRequest, judge: Logits = JUDGE) -> GenerationResult:
    """What a sample is: token by token, by whole-sequence passes and the noise in plain Python."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < request.max_new_tokens:
        sequence = [*request.prompt_tokens, *tokens]
        logits = judge(sequence)
        tokens.append(int(perturbed_scores(logits, request, len(sequence) - 1).argmax()))
        logprobs.append(float((logits / (request.temperature or 1.0)).log_softmax(dim=-1)[tokens[-1]]))
        if tokens[-1] in request.stop_tokens:
            return GenerationResult(request.sample_id, tokens, logprobs, [], FinishReason.STOP)
    return GenerationResult(request.sample_id, tokens, logprobs, [], FinishReason.LENGTH)


def references(requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    return {request.sample_id: reference(request) for request in requests}


def assert_right(
    found: Results, requests: Sequence[GenerationRequest], judge: Logits = JUDGE, whole: bool = True
) -> None:
    """These results are what the samples are; of one that was aborted, as far as it goes, or none may be."""
    wanted = {}
    for request in requests:
        one, result = reference(request, judge), found[request.sample_id]
        assert len(result.tokens) == len(result.logprobs) == len(result.versions)
        if result.finish_reason is FinishReason.ABORTED:
            assert not whole
            first = slice(0, len(result.tokens))
            one = dataclasses.replace(
                one, tokens=one.tokens[first], logprobs=one.logprobs[first], finish_reason=FinishReason.ABORTED
            )
        wanted[request.sample_id] = one
    assert_same(wanted, found, requests, judge)


def busy(engine: RolloutEngine) -> bool:
    load = engine.load()
    return bool(load.running or load.waiting)


def finish(engine: RolloutEngine) -> dict[str, GenerationResult]:
    results = []
    while busy(engine):
        results += engine.poll(0.05)
    return {result.sample_id: result for result in results + engine.poll(0)}


def generate(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    engine.submit(requests)
    return finish(engine)


def begun(engine: RolloutEngine, sample_id: str) -> bool:
    return engine.has_sample(sample_id) and not engine.is_waiting(sample_id)


def decode(engine: RolloutEngine, until: Callable[[], Any]) -> dict[str, GenerationResult]:
    """Poll for as short as can be until this holds; samples that have ended meanwhile."""
    found: dict[str, GenerationResult] = {}
    while not until():
        assert busy(engine), "all samples have ended before"
        found |= {result.sample_id: result for result in engine.poll(SHORTEST_POLL)}
    return found


def hand_over(source: RolloutEngine, target: RolloutEngine, sample_id: str, with_kv: bool) -> SampleSnapshot | None:
    """Move a sample as migration does: its settled KV is copied, then the rest is exported; None: it has just ended."""
    settled = (source.committed_positions(sample_id) if with_kv else None) or {}
    kv = {part: source.committed_kv(sample_id, part, 0, last).clone() for part, last in settled.items()}
    try:
        snapshot = source.export_sample(sample_id, with_kv=False)
    except RunError:
        return None
    snapshot.kv = kv["target"] if kv and kv["target"].shape[3] else None
    target.import_sample(snapshot)
    return snapshot


class Driven:
    """An engine as the manager calls its worker."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def advance(
        self, samples: list[SampleSnapshot], seconds: float, orders: None, forget: bool, others_wait: bool
    ) -> EngineReport:
        if forget:
            self._engine.clear()
        for sample in samples:
            self._engine.import_sample(sample)
        finished, load = self._engine.poll(seconds), self._engine.load()
        return EngineReport(finished, self._engine.progress(), load.running + load.waiting)

    def clear(self) -> None:
        self._engine.clear()

    def leave(self) -> None: ...
