"""Everything a run needs, built in the order in which bad input is found most cheaply: data, reward, model, workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.bootstrap.start import start_draft, start_model, start_tokenizer
from rlhfspec_mega.config.notes import notes
from rlhfspec_mega.config.output_dir import output_dir
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sizes import shape_and_sizes, size_rows
from rlhfspec_mega.data.prompts import make_prompts
from rlhfspec_mega.generation import SampleGenerator, stop_tokens
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.observe.timeline import TIMELINE_FILE, Timeline
from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.run import Run
from rlhfspec_mega.system.setup import Setup, import_workers_ahead
from rlhfspec_mega.system.system import System


@contextmanager
def started(config: RunConfig) -> Iterator[Run]:
    """Start a run in its output directory, which was reserved before; every process it started ends with it.

    Raises:
        UserError: bad data, reward function or model.
        RunError: a worker did not start.
    """
    begin, directory = time.monotonic(), output_dir(config)
    import_workers_ahead(config)
    shape, sizes = shape_and_sizes(config)
    with Console(config.trainer.steps, config.logger.console) as console:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        console.table("Sizes of this run", size_rows(config, sizes))
        for note in notes(config):
            console.note(note)
        tokenizer = start_tokenizer(config)
        wanted = config.trainer.eval_prompts if config.trainer.eval_every else 0
        prompts, held_out = make_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens, wanted, config.seed)
        algorithm = make_algorithm(
            config.algorithm, config.trainer.samples_per_prompt, sizes.samples_per_update, config.critic
        )
        reward = config.reward
        with RewardRunner(reward.function, reward.time_limit, reward.arguments) as rewards:
            model = start_model(config, shape, directory, console)
            draft = start_draft(config, model, console)
            reference = model if algorithm.needs_reference else None
            console.phase("starting workers")
            timeline = Timeline(directory / TIMELINE_FILE)
            setup = Setup(config, sizes, shape, directory, sizes.total_updates, model, draft, reference)
            with System(setup, timeline) as system:
                system.load_start_weights()
                stops = stop_tokens(tokenizer, model)
                generator = SampleGenerator(system.rollout, tokenizer, stops, config.rollout, config.seed)
                yield Run(
                    config,
                    directory,
                    model,
                    console,
                    timeline,
                    prompts,
                    held_out,
                    rewards,
                    system,
                    generator,
                    algorithm,
                    begin,
                )
