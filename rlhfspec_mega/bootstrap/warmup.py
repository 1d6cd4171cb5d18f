"""Supervised warm-up (SFT) on the built-in task with the actor and engines of RL, until RL can learn something."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.config.sizes import derive_sizes
from rlhfspec_mega.data.chain_sums import demonstration
from rlhfspec_mega.data.prompts import make_prompts
from rlhfspec_mega.data.tokenizer import load_tokenizer
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.generation import SampleGenerator
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.objectives import supervised_objective
from rlhfspec_mega.system.export import export_model
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.system.system import System

WARMUP_SEED = -1  # no run has this seed: the warm-up's prompts differ from those of runs


class WarmUp:
    """Supervised fine-tuning (SFT) that makes an initial model able to do the built-in task before RL.

    It uses the task's default settings and a fixed seed, so that all runs can share its result.

    Args:
        start: directory of the initial model and its tokenizer.
        run_dir: directory of the run that needs the model, for logs.
    """

    def __init__(self, config: RunConfig, shape: ModelShape, start: Path, run_dir: Path, console: Console) -> None:
        self._recipe, default = config.sft_warmup, RunConfig()
        self._config = copy.deepcopy(config)
        self._config.seed = WARMUP_SEED
        # Every model built here is far smaller than a device: pure data parallelism is the fastest layout.
        actor = self._config.actor = default.actor
        actor.tensor_parallel = 1
        optimizer = actor.optimizer
        optimizer.lr, optimizer.warmup_steps = self._recipe.lr, self._recipe.warmup_steps
        optimizer.schedule, optimizer.min_lr_ratio, optimizer.betas = "linear", 0.0, (0.9, 0.95)
        # The model must not depend on the run that happens to build it.
        self._config.rollout, self._config.trainer = default.rollout, default.trainer
        self._config.task, self._config.reward = default.task, default.reward
        self._config.algorithm = AlgorithmConfig(kl_coef=0.0)  # neither a reference nor a critic
        self._config.rollout.engines = config.rollout.engines
        self._sizes = derive_sizes(self._config, shape)
        self._shape, self._start, self._run_dir, self._console = shape, start, run_dir, console
        self._tokenizer = load_tokenizer(start)
        limit = self._config.rollout.max_prompt_tokens
        self._stream, self._held_out = make_prompts(
            default.data, self._tokenizer, limit, self._recipe.eval_prompts, seed=WARMUP_SEED
        )

    def run(self, directory: Path) -> None:
        """Train and write the model.

        Raises RunError if it learns too little.
        """
        updates, tokenizer = self._recipe.max_steps, self._tokenizer
        with System(Setup(self._config, self._sizes, self._shape, self._run_dir, total_updates=updates)) as system:
            system.actor.load_weights(self._start)
            stops = (tokenizer.eos_token_id,)
            generator = SampleGenerator(system.rollout, tokenizer, stops, self._config.rollout, seed=WARMUP_SEED)
            with self._console.bar("warm-up", updates) as advance:
                self._steps(system, generator, advance)
            export_model(system.training, directory, source=self._start)

    def _steps(self, system: System, generator: SampleGenerator, advance: Callable[[int, str], None]) -> None:
        """Take supervised steps until held-out exact answers reach the target or the learning rate reaches zero."""
        recipe, exact = self._recipe, 0.0
        for step in range(1, recipe.max_steps + 1):
            examples = self._stream.next_batch(recipe.examples_per_step)
            answers = [self._tokens(demonstration(prompt.text, prompt.index)) for prompt in examples]
            samples = Experience.of([prompt.tokens for prompt in examples], answers)
            metrics = system.actor.accumulate(samples, supervised_objective, []) | system.actor.step()
            advance(1, f"loss {metrics['loss']:.3f}, held-out exact {exact:.2f}, target {recipe.target_exact}")
            if step % recipe.eval_every == 0:
                system.reshard(step)
                answered = generator.greedy(self._held_out, step)
                exact = sum(sample.response == sample.prompt.answer for sample in answered) / len(answered)
                if exact >= recipe.target_exact:
                    break
        if exact < recipe.least_exact:
            raise RunError(
                f"Warm-up of {self._config.model.name} reached {exact:.2f} of held-out exact answers in "
                f"{recipe.max_steps} steps, less than {recipe.least_exact}: "
                "raise sft_warmup.max_steps or change sft_warmup.lr."
            )
        self._console.note(f"Warm-up ended after {step} steps with {exact:.2f} of held-out answers exact.")

    def _tokens(self, answer: str) -> list[int]:
        return [*self._tokenizer(answer, add_special_tokens=False).input_ids, self._tokenizer.eos_token_id]
