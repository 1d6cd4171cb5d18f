"""Builds the first draft of a model: samples of the model, their hidden states, distillation, a directory."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhfspec_mega.config.schema.generation import RolloutConfig
from rlhfspec_mega.draft.buffer import Buffer, endless_batches
from rlhfspec_mega.draft.directory import write_draft
from rlhfspec_mega.draft.distillation import STEPS, Learner, Target, accepted_by_depth, initial_draft
from rlhfspec_mega.draft.examples import collect_examples
from rlhfspec_mega.draft.shape import DraftShape, draft_shape
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest

Sequences = list[tuple[list[int], int]]  # tokens of prompt and response, and how many of them are the prompt's

DRAFT_SEED = -2  # differs from the seeds of runs and of the warm-up, so that prompts and noise differ, too
_SLOTS = 64
_PREFILL_CHUNK = 512
_POLL_SECONDS = 1.0
_SHOW_EVERY = 20  # training steps


@dataclass(frozen=True)
class DraftRecipe:
    """How a first draft is built.

    Attributes:
        prompts: number of prompts of the built-in task.
        members: samples of each prompt.
        steps: training steps; the learning rate rises over `warmup_steps` and then falls to zero by a cosine.
        batch_tokens: tokens of one step, padding included.
        draft_vocab: size of the draft's vocabulary, the samples' most frequent tokens; None: the whole vocabulary.
        ffn_size: width of the draft's feed-forward network; None: the target's.
    """

    prompts: int = 2048
    members: int = 2
    temperature: float = 1.0
    max_new_tokens: int = RolloutConfig.max_new_tokens
    steps: int = 1200
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    batch_tokens: int = 512
    draft_vocab: int | None = None
    ffn_size: int | None = None
    seed: int = DRAFT_SEED


def make_draft(
    model: Path,
    directory: Path,
    prompts: Sequence[tuple[int, ...]],
    stops: tuple[int, ...],
    recipe: DraftRecipe,
    console: Console,
    device: torch.device | str = "cpu",
) -> None:
    """Train a draft on samples of the model in directory `model` for these prompts, and write its directory."""
    shape, weights = read_shape(model), HfWeights(model)
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16  # bfloat16 is slow on a CPU
    longest = max(map(len, prompts)) + recipe.max_new_tokens
    sequences = _sampled(
        TorchEngine(
            shape, slots=_SLOTS, max_positions=longest, prefill_chunk=_PREFILL_CHUNK, dtype=dtype, device=device
        ),
        weights,
        prompts,
        stops,
        recipe,
        console,
    )
    longest = max(len(tokens) for tokens, _ in sequences)
    target = Transformer(shape, max_positions=longest, dtype=dtype, device=device)
    target.load({name: weights.get(name) for name in weights.names()})
    target_ids = _frequent(sequences, stops, recipe.draft_vocab, shape.vocab_size)
    draft = draft_shape(shape, None if target_ids is None else len(target_ids), recipe.ffn_size)
    write_draft(directory, draft, _trained(draft, target, sequences, target_ids, recipe, console), target_ids)


def _sampled(
    engine: TorchEngine,
    weights: HfWeights,
    prompts: Sequence[tuple[int, ...]],
    stops: tuple[int, ...],
    recipe: DraftRecipe,
    console: Console,
) -> Sequences:
    """Samples from plain decoding, ordered by prompt and member."""
    names = weights.names()
    engine.begin_update(0, [weights.info(name) for name in names])
    for name in names:
        engine.update_weights([(name, 0, weights.get(name).flatten())])
    engine.end_update(0)
    requests = [
        GenerationRequest(
            sample_id=f"{index}.{member}",
            group_id=str(index),
            prompt_tokens=prompt,
            seed=sample_seed(recipe.seed, 0, index, member),
            max_new_tokens=recipe.max_new_tokens,
            temperature=recipe.temperature,
            stop_tokens=stops,
        )
        for index, prompt in enumerate(prompts)
        for member in range(recipe.members)
    ]
    engine.submit(requests)
    responses: dict[str, list[int]] = {}
    with console.bar("draft samples", len(requests)) as advance:
        while len(responses) < len(requests):
            finished = engine.poll(_POLL_SECONDS)
            responses |= {result.sample_id: result.tokens for result in finished}
            advance(len(finished), f"{engine.load().generated_tokens} tokens")
    return [([*r.prompt_tokens, *responses[r.sample_id]], len(r.prompt_tokens)) for r in requests]


def _trained(
    shape: DraftShape,
    model: Transformer,
    sequences: Sequences,
    target_ids: torch.Tensor | None,
    recipe: DraftRecipe,
    console: Console,
) -> dict[str, torch.Tensor]:
    """The draft's weights after distillation from `target`, on its device."""
    buffer = Buffer(sum(len(tokens) for tokens, _ in sequences))
    buffer.add(collect_examples(model, shape, sequences))
    ids = None if target_ids is None else target_ids.to(model.embedding.device)
    target = Target(model.embedding, model.head, ids, recipe.temperature)
    learner = Learner(shape, initial_draft(shape, target.draft_head, seed=0), recipe.learning_rate)
    batches = endless_batches(buffer.learnt_from, recipe.batch_tokens, random.Random(recipe.seed))
    losses: list[float] = []
    with console.bar("draft training", recipe.steps) as advance:
        for step, batch in zip(range(1, recipe.steps + 1), batches, strict=False):
            learner.set_learning_rate(recipe.learning_rate * _share(step, recipe))
            losses.append(learner.step(target, batch))
            if step % _SHOW_EVERY == 0:
                advance(_SHOW_EVERY, f"loss {sum(losses[-_SHOW_EVERY:]) / _SHOW_EVERY:.3f}")
    accepted = float(accepted_by_depth(shape, learner.weights, target, buffer.held_out)[-1])
    console.note(f"The draft's expected accepted length on held-out samples is {accepted:.2f} at depth {STEPS}.")
    return learner.weights


def _share(step: int, recipe: DraftRecipe) -> float:
    """The learning-rate schedule: the factor on the peak learning rate at a step, counted from 1."""
    return min(1.0, step / recipe.warmup_steps) * 0.5 * (1 + math.cos(math.pi * (step - 1) / recipe.steps))


def _frequent(sequences: Sequences, stops: tuple[int, ...], count: int | None, vocab_size: int) -> torch.Tensor | None:
    """Target ids of a reduced draft vocabulary, ascending: stop tokens and the responses' most frequent tokens.

    None for the whole vocabulary.
    """
    if count is None or count >= vocab_size:
        return None
    counts = Counter(token for tokens, prompt in sequences for token in tokens[prompt:])
    order = sorted(range(vocab_size), key=lambda token: (token not in stops, -counts[token], token))
    return torch.tensor(sorted(order[:count]))
