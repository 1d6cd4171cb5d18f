"""The training loop, readable top to bottom: generate, score, reference, advantages, update, reshard, log, save."""

from __future__ import annotations

import torch

from rlhfspec_mega import checkpoints, learning
from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.observe.reporter import Reporter, sample_metrics
from rlhfspec_mega.startup import Run, started
from rlhfspec_mega.types import Sample, SampleState


def run(config: RunConfig) -> None:
    """A whole run, from the prompts to the exported model and its summary.

    Raises:
        UserError: bad data, reward function or model, found before training.
        RunError: a worker died, went silent or returned something inconsistent.
    """
    with started(config) as run:
        first = resume(run) if config.trainer.resume else 0
        with Reporter(run.directory, config, run.console, run.phases, first_step=first) as reporter:
            with run.phases.measure("reshard"):
                run.system.reshard(first)
            for step in range(first, config.trainer.steps):
                metrics = evaluate(run, step) if is_due(step, config.trainer.eval_every) else {}
                samples, learnt = train_step(run, step)
                reporter.step(step, samples, metrics | learnt)
                if is_due(step + 1, config.trainer.checkpoint_every) and step + 1 < config.trainer.steps:
                    save(run, step + 1)
            metrics = evaluate(run, config.trainer.steps) if config.trainer.eval_every else {}
            save(run, config.trainer.steps)
            if config.trainer.export:
                with run.phases.measure("export"):
                    run.system.export(run.directory / "model", run.model)
            reporter.finish(config.trainer.steps, metrics, run.started, str(run.model))


def train_step(run: Run, step: int) -> tuple[list[Sample], dict[str, float]]:
    """One step of RL: every sample generated is trained on exactly once."""
    trainer, algorithm, actor, phases = run.config.trainer, run.config.algorithm, run.system.actor, run.phases
    with phases.measure("generate"):
        prompts = run.prompts.next_batch(trainer.prompts_per_step)
        samples = run.generator.sample(prompts, trainer.samples_per_prompt, step, run.console.progress)
    with phases.measure("score"):
        score(run, samples)
    if algorithm.kl_coef > 0:
        with phases.measure("reference"):
            learning.add_reference_logprobs(actor, samples)
    with phases.measure("logprobs"):
        metrics = learning.add_old_logprobs(actor, samples)
    with phases.measure("update"):
        learning.assign_advantages(samples, trainer.samples_per_prompt, algorithm, shuffle_generator(run.config, step))
        metrics |= learning.update(actor, samples, run.sizes.samples_per_update, algorithm)
    with phases.measure("reshard"):
        run.system.reshard(step + 1)
    return samples, metrics


def score(run: Run, samples: list[Sample]) -> None:
    """Fill reward and exactness."""
    for sample, result in zip(samples, run.rewards.score(samples), strict=True):
        sample.reward, sample.exact = result.value, result.exact
        sample.state = SampleState.SCORED


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Greedy answers to the held-out prompts with the weights of now."""
    with run.phases.measure("evaluate"):
        samples = run.generator.greedy(run.held_out, step)
        score(run, samples)
    return {f"eval_{name}": value for name, value in sample_metrics(samples).items()}


def shuffle_generator(config: RunConfig, step: int) -> torch.Generator:
    """Random numbers of the shuffle control: a function of seed and step, so that a checkpoint need not hold them."""
    return torch.Generator().manual_seed(config.seed * 1_000_003 + step)


def save(run: Run, step: int) -> None:
    """A checkpoint from which the run goes on as if it had not stopped."""
    with run.phases.measure("checkpoint"):
        state = {"prompts": run.prompts.state_dict()}
        checkpoints.save(run.directory, step, run.system.actor, state, run.config.trainer.keep_checkpoints)


def resume(run: Run) -> int:
    """Load the newest checkpoint; the number of steps done."""
    state = checkpoints.load_latest(run.directory, run.system.actor)
    run.prompts.load_state_dict(state["prompts"])
    done = int(state["step"])
    if done > run.config.trainer.steps:
        raise UserError(f"{run.directory} has done {done} steps: resume it with trainer.steps={done} or more.")
    return done


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due."""
    return every > 0 and step % every == 0
