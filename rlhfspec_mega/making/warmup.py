"""Makes the tiny and small models: supervised warm-up on the built-in task, until RL has something to learn."""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfspec_mega.algorithm.experience import Experience
from rlhfspec_mega.algorithm.objectives import supervised_objective
from rlhfspec_mega.config.schema import ActorConfig, DataConfig, RolloutConfig, RunConfig, TrainerConfig
from rlhfspec_mega.config.sizes import derive_sizes
from rlhfspec_mega.data.demonstrations import demonstration
from rlhfspec_mega.data.prompts import PromptStream, make_prompts
from rlhfspec_mega.data.tokenizer import load_tokenizer, make_byte_tokenizer
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.generation import SampleGenerator
from rlhfspec_mega.ledger import Ledger
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.made_once import made_once
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.system.system import System
from rlhfspec_mega.types import Prompt

WARMUP_SEED = -1  # no run has it: prompts of a run are never those of the warm-up
_RECIPE_VERSION = 2  # part of the cache key: raise it when the task or the recipe's code changes


def cache_root(config: RunConfig) -> Path:
    """Where models made here are kept."""
    if config.model.cache_dir:
        return Path(config.model.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhfspec_mega"


def tokenizer_directory(config: RunConfig) -> Path:
    """The byte-level tokenizer of models made here, written on first use."""
    directory = cache_root(config) / "byte_tokenizer"
    if not (directory / "tokenizer.json").exists():
        try:
            made_once(directory, make_byte_tokenizer)
        except OSError as error:
            raise UserError(f"{directory} cannot be made ({error.strerror}): set model.cache_dir=DIR.") from None
    return directory


def warm_model(config: RunConfig, shape: ModelShape, run_dir: Path, console: Console) -> Path:
    """The directory of the warmed-up model, from the cache or made now. The seed of the run plays no part in it."""
    recipe = (_RECIPE_VERSION, asdict(shape), asdict(config.warmup), asdict(_task()))
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:10]
    directory = cache_root(config) / f"{config.model.name}-{key}"
    if not (directory / "config.json").exists():
        console.note(f"Model {config.model.name} is made here on first use and kept in {directory}.")
        made_once(directory, _WarmUp(config, shape, run_dir, console).run, console.note)
    return directory


def _task() -> DataConfig:
    """The built-in task as it stands by default: a model's warm-up does not depend on the data of a run."""
    return DataConfig()


class _WarmUp:
    """Supervised steps through the same actor, evaluated through the same engines as RL."""

    def __init__(self, config: RunConfig, shape: ModelShape, run_dir: Path, console: Console) -> None:
        self._recipe = config.warmup
        self._config = copy.deepcopy(config)
        self._config.seed = WARMUP_SEED
        # Every model made here fits one device many times over: pure data parallelism is the quickest layout.
        actor = self._config.actor = ActorConfig(tensor_parallel=1)
        optimizer = actor.optimizer
        optimizer.lr, optimizer.warmup_steps = self._recipe.lr, self._recipe.warmup_steps
        optimizer.schedule, optimizer.min_lr_ratio, optimizer.betas = "linear", 0.0, (0.9, 0.95)
        # The model must not depend on the run that happens to make it.
        self._config.rollout = RolloutConfig(engines=config.rollout.engines)
        self._config.trainer = TrainerConfig()
        self._sizes = derive_sizes(self._config, shape)
        self._shape, self._run_dir, self._console = shape, run_dir, console
        self._source = tokenizer_directory(config)

    def run(self, directory: Path) -> None:
        tokenizer = load_tokenizer(self._source)
        limit = self._config.rollout.max_prompt_tokens
        stream, held_out = make_prompts(_task(), tokenizer, limit, self._recipe.eval_prompts, seed=WARMUP_SEED)
        updates = self._recipe.max_steps
        with (
            tempfile.TemporaryDirectory(prefix="rlhfspec_mega.") as temporary,
            System(Setup(self._config, self._sizes, self._shape, self._run_dir, total_updates=updates)) as system,
        ):
            start = self._initial_model(Path(temporary) / "initial")
            system.actor.load_weights(start)
            generator = SampleGenerator(
                system.rollout,
                Ledger(),
                tokenizer,
                (tokenizer.eos_token_id,),
                self._config.rollout,
                seed=WARMUP_SEED,
            )
            with self._console.bar("warm-up", updates) as advance:
                self._steps(system, generator, tokenizer, stream, held_out, advance)
            system.export(directory, source=start)

    def _steps(
        self,
        system: System,
        generator: SampleGenerator,
        tokenizer: Any,
        stream: PromptStream,
        held_out: Sequence[Prompt],
        advance: Callable[[int, str], None],
    ) -> None:
        """Supervised steps until the held-out exact reward reaches the target or the learning rate zero."""
        recipe, exact = self._recipe, 0.0
        for step in range(1, recipe.max_steps + 1):
            examples = stream.next_batch(recipe.examples_per_step)
            answers = [self._worked(prompt, tokenizer) for prompt in examples]
            samples = Experience.of([prompt.tokens for prompt in examples], answers)
            metrics = system.actor.accumulate(samples, supervised_objective, []) | system.actor.step()
            advance(1, f"loss {metrics['loss']:.3f}, held-out exact {exact:.2f}, target {recipe.target_exact}")
            if step % recipe.eval_every == 0:
                system.reshard(step)
                answered = generator.greedy(held_out, step)
                exact = sum(sample.response == sample.prompt.answer for sample in answered) / len(answered)
                if exact >= recipe.target_exact:
                    break
        if exact < recipe.least_exact:
            raise RunError(
                f"Warm-up of {self._config.model.name} reached {exact:.2f} of held-out exact answers in "
                f"{recipe.max_steps} steps, less than {recipe.least_exact}: raise warmup.max_steps or change warmup.lr."
            )
        self._console.note(f"Warm-up ended after {step} steps with {exact:.2f} of held-out answers exact.")

    @staticmethod
    def _worked(prompt: Prompt, tokenizer: Any) -> list[int]:
        text = demonstration(prompt.text, prompt.index)
        return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]

    def _initial_model(self, directory: Path) -> Path:
        """Random weights and the tokenizer as an ordinary model directory, loaded through the mapping like any."""
        tensors = mapping_for(self._shape.architecture).hf_tensors(self._shape)
        write_directory(directory, self._shape, initial_tensors(tensors, self._shape.num_layers, seed=0))
        for file in self._source.iterdir():
            shutil.copy(file, directory / file.name)
        return directory
