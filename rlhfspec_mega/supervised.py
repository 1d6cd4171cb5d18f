"""Supervised tasks, top to bottom: fine-tuning on answers (task=sft), and training of a reward model on pairs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfspec_mega import checkpoints
from rlhfspec_mega.algorithms.demonstrations import Demonstrations
from rlhfspec_mega.algorithms.preferences import Preferences
from rlhfspec_mega.bootstrap.start import start_model, start_tokenizer, untrained_model
from rlhfspec_mega.checkpoints.saving import Saver
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.notes import notes
from rlhfspec_mega.config.output_dir import output_dir
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sizes import shape_and_sizes, size_rows
from rlhfspec_mega.data.examples import Example, ExampleMaker, ExampleStream
from rlhfspec_mega.errors import CheckpointError, RunError, Stopped, UserError, WorkerDied
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.observe.json_lines import read_lines
from rlhfspec_mega.observe.metrics import TIMING
from rlhfspec_mega.observe.plot import plot_curves
from rlhfspec_mega.observe.progress import write_progress
from rlhfspec_mega.observe.run_log import METRICS_FILE, RunLog
from rlhfspec_mega.observe.spans import PhaseTimer
from rlhfspec_mega.observe.summary import supervised_in_words, supervised_summary, write_summary
from rlhfspec_mega.stop import JobEnd, StopSignals
from rlhfspec_mega.system.export import export_model, keep_hf_files
from rlhfspec_mega.system.setup import Setup, import_workers_ahead
from rlhfspec_mega.system.system import System
from rlhfspec_mega.trainer import is_due

BUILT_IN_STEPS = 400  # of the built-in task, which has no end


@dataclass
class SupervisedRun:
    """The parts of a started run. `model`: the directory it started from; `steps`: optimizer steps in all."""

    config: RunConfig
    directory: Path
    model: Path
    steps: int
    examples: ExampleStream
    held_out: list[Example]
    task: Demonstrations | Preferences
    system: System
    console: Console
    phases: PhaseTimer
    log: RunLog
    saver: Saver
    started: float


def run(config: RunConfig) -> None:
    """A whole run, from the data to the exported model and its summary. Raises as trainer.run."""
    with started(config) as run, StopSignals(run.console.note) as signals:
        step = resume(run) if config.trainer.resume else 0
        job_end = JobEnd(config.trainer.save_before_end, config.trainer.time_limit)
        job_end.steps_begin()
        while True:
            run.log.rewind(step)
            try:
                train(run, step, signals, job_end)
                finish(run)
                return
            except WorkerDied as death:
                step = recover(run, death)


def train(run: SupervisedRun, first: int, signals: StopSignals, job_end: JobEnd) -> None:
    """Take steps `first` to the last, with a checkpoint when one is due or a signal asks for it."""
    options = run.config.supervised
    for step in range(first, run.steps):
        metrics = evaluate(run) if is_due(step, options.eval_every) else {}
        with run.phases.measure("update"):
            examples = run.examples.batch(step, options.batch_size, options.epochs)
            metrics |= run.task.update(examples, run.system.actor)
        report(run, step, metrics)
        run.system.step_done(step + 1)
        if step + 1 == run.steps:
            return
        stopped_by = signals.received or ("the end of the job" if job_end.reached() else None)
        if stopped_by:
            save(run, step + 1)
            raise Stopped(step + 1, stopped_by)
        if is_due(step + 1, run.config.trainer.checkpoint_every):
            try:
                save(run, step + 1)
            except CheckpointError as error:
                run.console.note(f"{error} The run goes on; the next checkpoint is tried when it is due.")


def evaluate(run: SupervisedRun) -> dict[str, float]:
    """Loss, and a reward model's accuracy, on the held-out examples; {} without any."""
    with run.phases.measure("evaluate"):
        return run.task.evaluate(run.held_out, run.system.actor) if run.held_out else {}


def report(run: SupervisedRun, step: int, metrics: dict[str, float]) -> None:
    """Record a step, counted from 0, or the last evaluation."""
    seconds = {TIMING + name: value for name, value in run.phases.take_step().items()}
    run.log.log(step, metrics | seconds)
    if step < run.steps:
        run.console.step(step + 1, metrics | seconds)


def finish(run: SupervisedRun) -> None:
    """Save the last checkpoint, evaluate, export, and write the summary."""
    save(run, run.steps)
    metrics = evaluate(run)
    if run.config.trainer.export:
        with run.phases.measure("export"):
            export_model(run.system.training, run.directory / "model", run.model)
    report(run, run.steps, metrics)
    run.log.close()
    summary = {"task": run.config.task, "start_model": str(run.model)}
    rows = read_lines(run.directory / METRICS_FILE)
    summary |= supervised_summary(rows, time.monotonic() - run.started)
    write_summary(run.directory, summary)
    if run.config.logger.plots:
        plot_curves(run.directory, rows)
    drawn = "curves.png, " if run.config.logger.plots else ""
    run.console.note(supervised_in_words(summary))
    run.console.note(f"Everything is in {run.directory}: summary.json, {drawn}metrics.jsonl and the model.")


def save(run: SupervisedRun, step: int) -> None:
    """Save a checkpoint from which the run resumes exactly. Raises CheckpointError."""
    with run.phases.measure("checkpoint"):
        deadline = run.config.launcher.call_timeout
        run.saver.wait(run.system.learners, deadline)
        run.saver.start(step, run.system.learners, {"data": run.examples.fingerprint})
        run.saver.wait(run.system.learners, deadline)


def resume(run: SupervisedRun) -> int:
    """Load the newest good checkpoint, if there is one; returns the number of finished steps.

    Raises UserError if it belongs to other data, or to a longer run.
    """
    state = checkpoints.load_latest(run.directory, run.system.learners, run.console.note)
    if state is None:
        return 0
    if state["data"] != run.examples.fingerprint:
        raise UserError(f"The checkpoint in {run.directory} belongs to other data: restore it, or start another run.")
    done = int(state["step"])
    if done > run.steps:
        raise UserError(f"{run.directory} has done {done} steps: resume it with supervised.max_steps={done} or more.")
    return done


def recover(run: SupervisedRun, death: WorkerDied) -> int:
    """Start the ranks anew and go back to the last checkpoint; returns the step to continue with.

    Raises RunError if they have died too often without a finished step in between.
    """
    run.saver.forget()
    while True:
        run.console.note(f"{death} The ranks are started anew from the last checkpoint.")
        if not run.system.may_restart_actor():
            most = run.config.launcher.max_restarts
            raise RunError(f"{death} It was restarted launcher.max_restarts={most} times without a step between.")
        try:
            run.system.restart_actor()
            run.system.load_start_weights()
            return resume(run)
        except WorkerDied as another:
            death = another


@contextmanager
def started(config: RunConfig) -> Iterator[SupervisedRun]:
    """Start a run in its output directory, which was reserved before; every process it started ends with it.

    Raises:
        UserError: bad data or model.
        RunError: a worker did not start.
    """
    begin, directory = time.monotonic(), output_dir(config)
    import_workers_ahead(config)
    shape, sizes = shape_and_sizes(config)
    examples, held_out = _examples(config, start_tokenizer(config))
    steps = _steps(config, examples)
    with Console(steps, config.logger.console) as console:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        console.table("Sizes of this run", [*size_rows(config, sizes), ("optimizer steps", f"{steps}", "")])
        for note in notes(config):
            console.note(note)
        if config.model.path is None and config.task == "sft":
            model = untrained_model(config, shape, directory)
        else:
            model = start_model(config, model_shape(config.model), directory, console)  # without a value head
        console.phase("starting workers")

        def entered(phase: str) -> None:
            console.phase(phase)
            write_progress(directory, phase)

        with System(Setup(config, sizes, shape, directory, steps, model, with_engines=False)) as system:
            system.load_start_weights()
            keep_hf_files(directory, system.training, model)
            yield SupervisedRun(
                config,
                directory,
                model,
                steps,
                examples,
                held_out,
                Preferences(config.supervised.margin) if config.task == "reward_model" else Demonstrations(),
                system,
                console,
                PhaseTimer(entered=entered),
                RunLog(directory, config.logger, config.name),
                Saver(directory, config.trainer.keep_checkpoints, config.trainer.async_save),
                begin,
            )


def _examples(config: RunConfig, tokenizer: Any) -> tuple[ExampleStream, list[Example]]:
    rollout = config.rollout
    pairs = config.task == "reward_model"
    maker = ExampleMaker(config.data, tokenizer, pairs, rollout.max_prompt_tokens, rollout.max_new_tokens)
    train, held_out = maker.streams(config.seed, held_out=True)
    return train, held_out.first(config.supervised.eval_size) if held_out else []


def _steps(config: RunConfig, examples: ExampleStream) -> int:
    options = config.supervised
    if examples.size is None:
        return options.max_steps or BUILT_IN_STEPS
    of_epochs = -(-options.epochs * examples.size // options.batch_size)
    return min(of_epochs, options.max_steps or of_epochs)
