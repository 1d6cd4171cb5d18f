"""What a run starts from: tokenizer, model and draft; those of the tiny and small model are built on first use."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfspec_mega.bootstrap.cache import cache_root, cached, made_once
from rlhfspec_mega.bootstrap.converted import hf_directory_of
from rlhfspec_mega.bootstrap.first_draft import DraftRecipe, make_draft
from rlhfspec_mega.bootstrap.warmup import WarmUp
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.speculation import drafts
from rlhfspec_mega.data.prompts import make_prompts
from rlhfspec_mega.data.tokenizer import load_tokenizer, make_byte_tokenizer
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.generation import stop_tokens
from rlhfspec_mega.models.hf_directory import copy_tokenizer
from rlhfspec_mega.models.initialize import write_initial
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.console import Console

RECIPES = {"small": DraftRecipe(steps=800, learning_rate=2e-3)}  # others: the defaults, which suit the tiny model
_MODEL_VERSION = _DRAFT_VERSION = 3  # parts of the cache keys: to be raised when the task or a recipe's code changes


def start_tokenizer(config: RunConfig) -> Any:
    """The model's tokenizer, or that of built models. Raises UserError if it cannot be read or built."""
    return load_tokenizer(config.model.path or tokenizer_directory(config))


def start_model(config: RunConfig, shape: ModelShape, run_dir: Path, console: Console) -> Path:
    """The Hugging Face directory of the model to start from: the one given, or converted or built here."""
    if config.model.path is None:
        return warm_model(config, shape, run_dir, console)
    return hf_directory_of(config, Path(config.model.path), shape, console)


def untrained_model(config: RunConfig, shape: ModelShape, run_dir: Path) -> Path:
    """A directory with random weights of this shape in the run's directory, kept for a resumed run."""
    directory = run_dir / "initial"
    if not directory.exists():
        write_initial(directory, shape)
        copy_tokenizer(tokenizer_directory(config), directory)
    return directory


def start_draft(config: RunConfig, model: Path, console: Console) -> Path | None:
    """The directory of the draft to start from, built if the model was built; None without drafting."""
    return Path(config.speculation.draft_model_path or first_draft(config, model, console)) if drafts(config) else None


def tokenizer_directory(config: RunConfig) -> Path:
    """The byte-level tokenizer of built models, written on first use.

    Raises UserError if it cannot be written.
    """
    directory = cache_root(config) / "byte_tokenizer"
    if not (directory / "tokenizer.json").exists():
        try:
            made_once(directory, make_byte_tokenizer)
        except OSError as error:
            raise UserError(f"{directory} cannot be made ({error.strerror}): set model.cache_dir=DIR.") from None
    return directory


def warm_model(config: RunConfig, shape: ModelShape, run_dir: Path, console: Console) -> Path:
    """The directory of the model after supervised warm-up, cached. It does not depend on the run's seed.

    Raises RunError if the warm-up learns too little.
    """

    def make(directory: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="rlhfspec_mega.") as temporary:
            start = Path(temporary) / "initial"
            write_initial(start, shape)
            copy_tokenizer(tokenizer_directory(config), start)
            WarmUp(config, shape, start, run_dir, console).run(directory)

    name = config.model.name
    recipe = (_MODEL_VERSION, shape.identity(), asdict(config.sft_warmup), asdict(RunConfig().data))
    return cached(config, name, recipe, make, console.note, f"Model {name}")


def first_draft(config: RunConfig, model: Path, console: Console) -> Path:
    """The directory of the draft of a built model, cached."""
    name = config.model.name
    recipe = RECIPES.get(name, DraftRecipe())

    def make(directory: Path) -> None:
        tokenizer = load_tokenizer(model)
        default = RunConfig()  # the built-in task's settings: the draft must not depend on the run that builds it
        stream, _ = make_prompts(default.data, tokenizer, default.rollout.max_prompt_tokens, 0, seed=recipe.seed)
        prompts = [prompt.tokens for prompt in stream.next_batch(recipe.prompts)]
        make_draft(model, directory, prompts, stop_tokens(tokenizer, model), recipe, console)

    key = (_DRAFT_VERSION, model.name, asdict(recipe))
    return cached(config, f"{name}-draft", key, make, console.note, f"The draft of model {name}")
