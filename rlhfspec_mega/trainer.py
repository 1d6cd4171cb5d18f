"""The training loop, top to bottom: generate, log-probs, score, reference, advantages, update, draft, reshard, save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rlhfspec_mega.checkpoints.directory import CheckpointDirectory
from rlhfspec_mega.checkpoints.recovery import driver_state, recover, resume
from rlhfspec_mega.config.output_dir import CHECKPOINTS
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.draft.refresh import RefreshReport
from rlhfspec_mega.errors import CheckpointError, RewardServiceAway, Stopped, WorkerDied
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.observe.figures import collapse_notes, drafting_metrics, tail_metrics
from rlhfspec_mega.observe.metrics import VAL
from rlhfspec_mega.observe.reporter import Reporter, sample_metrics
from rlhfspec_mega.planning.placement import CRITIC, REFERENCE, REWARD
from rlhfspec_mega.reward.rewards import PendingRewards
from rlhfspec_mega.rl.experience import ending_values
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.run import Run
from rlhfspec_mega.startup import started
from rlhfspec_mega.stop import JobEnd, StopSignals
from rlhfspec_mega.system.export import export_draft, export_model, export_saved, keep_hf_files
from rlhfspec_mega.types import Prompt, Sample, SampleState


def run(config: RunConfig) -> None:
    """A whole run, from the prompts to the exported model and its summary.

    Raises:
        UserError: bad data, reward function or model, found before training.
        RunError: a worker went silent or returned something inconsistent, or died too often.
        Stopped: a signal asked for it; the run can be resumed.
    """
    with started(config) as run, StopSignals(run.console.note) as signals:
        step = resume(run) if config.trainer.resume else 0
        keep_hf_files(run.directory, run.system.training, run.model)
        job_end = JobEnd(config.trainer.save_before_end, config.trainer.time_limit)
        with Reporter(run.directory, config, run.console, run.phases, run.timeline, first_step=step) as reporter:
            while True:
                try:
                    train(run, reporter, step, signals, job_end)
                    finish(run, reporter)
                    break
                except WorkerDied as death:
                    step = recover(run, reporter, death)


def train(run: Run, reporter: Reporter, first: int, signals: StopSignals, job_end: JobEnd) -> None:
    """Run steps `first` to the last, with a checkpoint when one is due or a signal asks for it."""
    trainer = run.config.trainer
    with run.phases.measure("reshard"):
        run.system.reshard(first)
    job_end.steps_begin()
    for step in range(first, trainer.steps):
        with saved_without_rewards(run, step):
            metrics = evaluate(run, step) if is_due(step, trainer.eval_every) else {}
            samples, learnt = train_step(run, step)
        seconds = reporter.step(step, samples, metrics | learnt)
        for note in run.system.draft.schedule.observe(seconds, learnt):
            run.console.note(note)
        run.system.step_done(step + 1)
        if step + 1 == trainer.steps:
            return
        settle_save(run)
        stopped_by = signals.received or ("the end of the job" if job_end.reached() else None)
        if stopped_by:
            save(run, step + 1)
            wait_for_save(run)
            raise Stopped(step + 1, stopped_by)
        if is_due(step + 1, trainer.export_every):
            export(run, step + 1)
        if is_due(step + 1, trainer.checkpoint_every):
            try:
                save(run, step + 1)
            except CheckpointError as error:
                run.console.note(f"{error} The run goes on; the next checkpoint is tried when it is due.")


def train_step(run: Run, step: int) -> tuple[list[Sample], dict[str, float]]:
    """One step of RL: every sample generated is trained on exactly once."""
    system, algorithm, phases = run.system, run.algorithm, run.phases
    refreshes = system.draft.schedule.due(step)
    made = rollout(run, step, refreshes)
    samples, metrics = made.samples, dict(made.metrics)
    experience = algorithm.experience(samples)
    with phases.measure("draft"):
        refreshed = system.draft.take_freed() if refreshes else None  # the actor must be free from here on
    settle_save(run)  # most of it was written while the engines generated
    with beside_scoring(run, made.scoring):
        with phases.measure("logprobs"):
            system.rest_engines()  # the actor needs their memory from here on
            if system.draft.schedule.needs_states(step) or not algorithm.update_gives_logprobs(experience, step):
                metrics |= algorithm.add_old_logprobs(experience, system.actor, refreshes)
        if system.critic is not None:
            with phases.measure("values"):
                algorithm.add_values(experience, system.critic)
    with phases.measure("score"):
        metrics |= score(run, made)
    algorithm.add_rewards(samples, experience)
    with phases.measure("reference"):
        if made.scoring is not None and REFERENCE in made.scoring.models:
            algorithm.take_reference(samples, experience, made.scoring.results)
        elif system.reference is not None:
            algorithm.add_reference(experience, system.reference)
    with phases.measure("update"):
        generator = step_generator(run.config, step)
        metrics |= algorithm.add_advantages(experience, generator)
        metrics |= algorithm.update(experience, system.learners, step, generator, system.fused)
    algorithm.note_on_samples(samples, experience)
    without = [sample.sample_id for sample in samples if sample.failure]
    run.ledger.drop(without, "no reward")
    run.ledger.advance([sample.sample_id for sample in samples if not sample.failure], SampleState.TRAINED)
    run.ledger.settle(step, Purpose.TRAIN)
    if refreshes:
        with phases.measure("draft"):
            metrics |= refresh_draft(run, refreshed)
    with phases.measure("reshard"):
        system.reshard(step + 1)
    for rank, spans in enumerate(system.actor.take_spans()):
        run.timeline.actor(rank, spans)
    return samples, metrics


@dataclass(frozen=True)
class Rollout:
    """What the engines have generated, with scores that are still on their way.

    Attributes:
        rewards: those of functions and services.
        scoring: by frozen models on generation devices; None if there are none.
        metrics: of generation.
    """

    samples: list[Sample]
    rewards: PendingRewards
    scoring: Scoring | None
    metrics: dict[str, float]


def rollout(run: Run, step: int, refreshes: bool, prompts: list[Prompt] | None = None) -> Rollout:
    """Generate the samples of a step, of the next prompts unless others are given."""
    trainer, system = run.config.trainer, run.system
    with run.phases.measure("generate"):
        prompts = prompts or run.prompts.next_batch(trainer.prompts_per_step)
        scoring = new_scoring(run, prompts, system.scorers.models) if system.scorers else None
        if refreshes:
            system.draft.allow_freed()
        rewards = run.rewards.begin()
        samples = run.generator.sample(
            prompts, trainer.samples_per_prompt, step, run.console.progress, scoring, rewards.add
        )
        system.texts.add([sample.finished_text for sample in samples], "generate")
        tallies = system.rollout.take_tallies("generate")
    for note in collapse_notes(tallies):
        run.console.note(note)
    return Rollout(samples, rewards, scoring, drafting_metrics(tallies))


@contextmanager
def beside_scoring(run: Run, scoring: Scoring | None) -> Iterator[None]:
    """Context in which the actor's ranks work on a rollout whose scoring by frozen models has not ended.

    Frozen models with devices of their own go on meanwhile; on the actor's devices they end before it begins.
    """
    if scoring is None:
        yield
        return
    if run.system.scores_beside_actor:
        with run.system.scoring_beside(scoring):
            yield
    with run.phases.measure("reference"):
        run.system.rollout.finish_scoring(scoring, "reference")
    if not run.system.scores_beside_actor:
        yield


def refresh_draft(run: Run, done: RefreshReport | None) -> dict[str, float]:
    """Train the draft on the actor's recent samples; a refresh that does not raise acceptance is discarded.

    Args:
        done: report of a refresh that already took place during the rollout; None: refresh now.
    """
    speculation = run.config.speculation
    if done is not None:
        report = done
    elif run.config.trainer.deterministic:
        report = run.system.draft.now(steps=speculation.refresh_steps)
    else:
        report = run.system.draft.now(seconds=speculation.refresh_seconds)
    lengths = {"draft/expected_length_before": report.before, "draft/expected_length_after": report.after}
    measured = {name: length for name, length in lengths.items() if length is not None}
    fused_seconds = 0.0 if done is None else report.seconds
    return measured | {"draft/refresh_kept": float(report.kept), "draft/fused_refresh_seconds": fused_seconds}


def new_scoring(run: Run, prompts: list[Prompt], models: Sequence[str]) -> Scoring:
    """Scoring of these prompts' samples by frozen models on generation devices."""
    assert run.system.scorers is not None
    if run.encode:
        run.encode.remember(prompts)
    return run.system.scorers.new_scoring(run.ledger, models, run.encode)


def score(run: Run, made: Rollout) -> dict[str, float]:
    """Fill in reward and exactness of each sample, once the frozen models' scoring has ended; returns metrics."""
    samples, of_model = made.samples, None
    tail = run.system.rollout.take_tail()
    if run.encode and made.scoring:
        of_model = made.scoring.rewards
    elif run.encode:
        assert run.system.reward_model is not None
        run.encode.remember([sample.prompt for sample in samples])
        read = [run.encode(sample.prompt.tokens, sample.response_tokens) for sample in samples]
        values = run.system.reward_model.values(ending_values(read), "score")
        of_model = {sample.sample_id: float(value) for sample, value in zip(samples, values, strict=True)}
    metrics = made.rewards.finish(samples, of_model)
    run.ledger.advance([sample.sample_id for sample in samples], SampleState.SCORED)
    # Under trainer.deterministic no sample moves, and the other figures depend on the clock.
    return metrics if run.config.trainer.deterministic else metrics | tail_metrics(tail)


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Decode the held-out prompts greedily with the current weights and score the answers."""
    with run.phases.measure("evaluate"):
        rewards = run.rewards.begin()
        scoring = new_scoring(run, run.held_out, [REWARD]) if run.encode and run.system.scorers else None
        samples = run.generator.greedy(run.held_out, step, scoring, rewards.add)
        if scoring is not None:
            run.system.rollout.finish_scoring(scoring, "evaluate")
        run.system.rollout.take_tallies("evaluate")  # the figures of a step cover its training samples only
        run.timeline.take_live()
        score(run, Rollout(samples, rewards, scoring, {}))
        run.ledger.settle(step, Purpose.EVALUATE)
    return sample_metrics(samples, VAL)


def finish(run: Run, reporter: Reporter) -> None:
    """Save the last checkpoint, evaluate, export, and write the summary."""
    trainer = run.config.trainer
    save(run, trainer.steps)
    wait_for_save(run)
    with saved_without_rewards(run, trainer.steps):
        metrics = evaluate(run, trainer.steps) if trainer.eval_every else {}
    if trainer.export:
        with run.phases.measure("export"):
            export_model(run.system.training, run.directory / "model", run.model)
            if run.system.critic is not None:
                saved = CheckpointDirectory(run.directory / CHECKPOINTS).path(trainer.steps)
                export_saved(saved / CRITIC, run.directory / "critic")
            if run.system.training.draft is not None:
                export_draft(run.system.training, run.directory / "draft")
    reporter.finish(trainer.steps, metrics, run.started, str(run.model))


def export(run: Run, step: int) -> None:
    """Write the weights after so many steps as a Hugging Face directory; if that fails, the run goes on."""
    path = run.directory / "exports" / f"step_{step}"
    with run.phases.measure("export"):
        try:
            export_model(run.system.training, path, run.model)
        except OSError as error:
            run.console.note(f"{path} was not written ({error.strerror}); the run goes on.")


def step_generator(config: RunConfig, step: int) -> torch.Generator:
    """Generator for the order of samples in later epochs, and for the control run with shuffled advantages.

    It is a function of seed and step, so that checkpoints need not hold its state.
    """
    return torch.Generator().manual_seed(config.seed * 1_000_003 + step)


@contextmanager
def saved_without_rewards(run: Run, step: int) -> Iterator[None]:
    """Context of what follows `step` finished steps: if the reward service stays away, these are saved.

    Raises Stopped then: the run can be resumed when the service is back.
    """
    state = driver_state(run)
    try:
        yield
    except RewardServiceAway as away:
        save(run, step, state)
        wait_for_save(run)
        raise Stopped(step, f"a reward that does not come ({str(away).removesuffix('.')})") from None


def save(run: Run, step: int, state: dict[str, Any] | None = None) -> None:
    """Save a checkpoint from which the run resumes exactly. Raises CheckpointError.

    Args:
        state: the driver's part; None: as it is now.
    """
    with run.phases.measure("checkpoint"):
        settle_save(run, run.config.launcher.call_timeout)
        run.saver.start(step, run.system.learners, state or driver_state(run))
        try:
            run.system.save_learnt()
        except OSError as error:
            run.console.note(
                f"What was learnt of drafting and lengths could not be written: {error}; a resumed run learns it anew."
            )


def wait_for_save(run: Run) -> None:
    """Wait for the checkpoint that is being written in the background, if there is one. Raises CheckpointError."""
    with run.phases.measure("checkpoint"):
        run.saver.wait(run.system.learners, run.config.launcher.call_timeout)


def settle_save(run: Run, deadline: float = 0.0) -> None:
    """Commit the checkpoint that is being written, once all ranks are done; if it failed, the run goes on.

    Args:
        deadline: longest wait in seconds; 0: do not wait.
    """
    with run.phases.measure("checkpoint"):
        try:
            if deadline > 0:
                run.saver.wait(run.system.learners, deadline)
            else:
                run.saver.poll(run.system.learners)
        except CheckpointError as error:
            run.console.note(f"{error} The run goes on; the next checkpoint is tried when it is due.")


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due."""
    return every > 0 and step % every == 0
