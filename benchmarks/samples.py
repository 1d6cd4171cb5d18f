"""Targets of the benchmarks and their own samples, decoded by the torch engine without drafts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.deep_target import deep_target
from rlhfspec_mega.bootstrap.start import warm_model
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.schema.generation import DataConfig
from rlhfspec_mega.data.chain_sums import TERM, ChainSums
from rlhfspec_mega.data.prompts import encode_prompts
from rlhfspec_mega.data.tokenizer import load_tokenizer
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest, GenerationResult, TensorInfo

SLOTS, PREFILL_CHUNK = 64, 512
PROGRESS_SECONDS = 30.0  # between two lines that tell how far long work has come
PROMPT_SEED = 4  # of chain sums: another stream than a run's
MEDIAN_TERMS = 12.0  # longer chains than a run's: a response takes several steps of any rule


@dataclass(frozen=True)
class Target:
    """A model directory, loaded in float32 on the CPU."""

    directory: Path
    model: Transformer
    tokenizer: Any

    @property
    def shape(self) -> ModelShape:
        return self.model.shape


@dataclass(frozen=True)
class Sampled:
    """One finished sequence of the target; `seed` keyed its noise."""

    tokens: tuple[int, ...]
    prompt_length: int
    seed: int

    @property
    def response(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_length :]


def words_target(name: str) -> Path:
    """Directory of the built-in model `name` (tiny or small), or of "deep", from the cache or made now."""
    if name == "deep":
        return deep_target()
    config = load_config([f"model={name}"])
    shape = model_shape(config.model)
    with tempfile.TemporaryDirectory(prefix="benchmark.") as run_dir, Console(0) as console:
        return warm_model(config, shape, Path(run_dir), console)


def word_prompts(count: int, tokenizer: Any, split: str) -> list[tuple[int, ...]]:
    """The first `count` chain sums of "train" or "eval", each with the first term of its working.

    Without that term the warmed-up models answer most long chains at once (data.demonstrations).
    """
    task = ChainSums.from_config(DataConfig(median_terms=MEDIAN_TERMS), PROMPT_SEED)
    texts = [task.prompt_text(split, number) for number in range(count)]
    return encode_prompts(tokenizer, [text + TERM.findall(text)[0] for text in texts], False)


def load_target(directory: Path) -> Target:
    """Raises UserError for a directory that is incomplete or damaged."""
    shape, weights = read_shape(directory), HfWeights(directory)
    model = Transformer(shape, max_positions=shape.max_positions, dtype=torch.float32, device="cpu")
    model.load({name: weights.get(name) for name in weights.names()})
    return Target(directory, model, load_tokenizer(directory))


def plain_engine(target: Target, *, slots: int, positions: int) -> TorchEngine:
    """An engine that decodes without drafts, with the target's weights."""
    weights = target.model.hf_tensors()
    engine = TorchEngine(
        target.shape,
        slots=slots,
        max_positions=positions,
        prefill_chunk=PREFILL_CHUNK,
        dtype=torch.float32,
        device="cpu",
    )
    engine.begin_update(0, [TensorInfo(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()])
    engine.update_weights([(name, 0, tensor.flatten()) for name, tensor in weights.items()])
    engine.end_update(0)
    return engine


def sample(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    forced: bool = False,
) -> list[Sampled]:
    """One finished sequence per prompt, in order.

    Args:
        forced: <eos> is masked, so that every response has `max_new_tokens` tokens.
    """
    requests = [
        GenerationRequest(
            sample_id=str(number),
            group_id=str(number),
            prompt_tokens=prompt,
            seed=sample_seed(seed, 0, number, 0),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_tokens=(target.tokenizer.eos_token_id,),
            ignore_stop=forced,
        )
        for number, prompt in enumerate(prompts)
    ]
    longest = max(map(len, prompts)) + max_new_tokens
    engine = plain_engine(target, slots=min(SLOTS, len(prompts)), positions=longest)
    engine.submit(requests)
    results: dict[str, GenerationResult] = {}
    while len(results) < len(requests):
        results |= {result.sample_id: result for result in engine.poll(PROGRESS_SECONDS)}
        if len(results) < len(requests):
            print(f"  {len(results)} of {len(requests)} samples", flush=True)
    return [
        Sampled((*request.prompt_tokens, *results[request.sample_id].tokens), len(request.prompt_tokens), request.seed)
        for request in requests
    ]
