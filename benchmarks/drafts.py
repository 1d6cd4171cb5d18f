"""Drafts of the benchmarks' targets: distilled from the target's own samples, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.samples import PROGRESS_SECONDS, Target, sample
from rlhfspec_mega.bootstrap.cache import cache_root
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.draft.directory import load_draft, load_target_ids, write_draft
from rlhfspec_mega.draft.distillation import initial_draft
from rlhfspec_mega.draft.examples import collect_examples
from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.refresh import DraftLearning, Refresher
from rlhfspec_mega.draft.shape import DraftShape, draft_shape

PHASES = ((2e-3, 0.6), (6e-4, 0.25), (2e-4, 0.15))  # learning rate and share of the steps
TRAINED_ON = ((6e-4, 0.6), (2e-4, 0.4))  # of a draft that was trained before
SAMPLING_SEED = 5
_RECIPE_VERSION = 1  # part of the cache key: raise it when the recipe's code changes


def draft_of(
    target: Target, prompts: Sequence[tuple[int, ...]], *, tokens: int, steps: int, forced: bool
) -> DraftModel:
    """`own_draft`, loaded."""
    return load_own(own_draft(target, prompts, tokens=tokens, steps=steps, forced=forced), target)


def load_own(directory: Path, target: Target) -> DraftModel:
    """The draft in `own_draft`'s directory, ready to run beside the target."""
    shape, weights = load_draft(directory, target.shape)
    draft = DraftModel(shape, target.model)
    draft.target_ids = load_target_ids(directory, shape)
    for name, tensor in draft.tensors().items():
        tensor.copy_(weights[name])
    draft.weights_changed()
    return draft


def own_draft(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    *,
    tokens: int,
    steps: int,
    forced: bool,
    ffn_size: int | None = None,
    start: tuple[DraftShape, Path] | None = None,
) -> Path:
    """Directory of a draft trained on the target's samples at temperature 1, from the cache or made now.

    Args:
        tokens: longest response; every response has so many if `forced`.
        steps: of training.
        ffn_size: width of the draft's feed-forward network; None: the target's.
        start: shape of the draft, and the directory of one with the same tensors whose training goes on.
    """
    shape, phases = (start[0], TRAINED_ON) if start else (draft_shape(target.shape, ffn_size=ffn_size), PHASES)
    origin = (start[1].name,) if start else ()
    recipe = (_RECIPE_VERSION, target.directory.name, list(prompts), tokens, steps, forced, shape, phases, *origin)
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:10]
    directory = cache_root(load_config([])) / f"{target.directory.name}-draft-{key}"
    if not (directory / "config.json").exists():
        print(f"a draft of {target.directory.name} is made, once, and kept in {directory}", flush=True)
        with _all_cores():
            samples = sample(target, prompts, temperature=1.0, max_new_tokens=tokens, seed=SAMPLING_SEED, forced=forced)
            sequences = [(list(s.tokens), s.prompt_length) for s in samples]
            tensors = load_draft(start[1], target.shape)[1] if start else initial_draft(shape, target.model.head, 0)
            write_draft(directory, shape, _train(target, shape, tensors, sequences, steps, phases))
    return directory


@contextmanager
def _all_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(
    target: Target,
    shape: DraftShape,
    tensors: dict[str, torch.Tensor],
    sequences: Sequence[tuple[Sequence[int], int]],
    steps: int,
    phases: Sequence[tuple[float, float]],
) -> dict[str, torch.Tensor]:
    """The draft's tensors after `steps` steps from the given ones."""
    embedding, head = target.model.embedding, target.model.head
    examples = collect_examples(target.model, shape, sequences)
    kept = sum(len(tokens) for tokens, _ in sequences)
    for rate, share in phases:
        learning = DraftLearning(kept, learning_rate=rate, temperature=1.0, seed=0, recent_only=False)
        refresher = Refresher(shape, tensors, learning, "cpu", None)
        refresher.add(examples)
        count = round(share * steps)
        report = refresher.refresh(embedding, head, steps=count, seconds=None, progress=_Progress(count))
        print(
            f"draft of {target.directory.name}: {report.steps} steps in {report.seconds:.0f} s, accepted length on "
            f"held-out samples {report.before:.2f} -> {report.after:.2f}",
            flush=True,
        )
        tensors = refresher.tensors()
    return tensors


class _Progress:
    """Prints a line now and then."""

    def __init__(self, steps: int) -> None:
        self._steps, self._next = steps, time.monotonic() + PROGRESS_SECONDS

    def __call__(self, taken: int) -> None:
        if time.monotonic() >= self._next:
            self._next += PROGRESS_SECONDS
            print(f"  {taken} of {self._steps} steps", flush=True)
