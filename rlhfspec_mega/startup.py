"""Everything a run needs, built in the order in which bad input is found most cheaply: data, reward, model, workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.bootstrap.start import start_draft, start_model, start_tokenizer
from rlhfspec_mega.config.notes import notes
from rlhfspec_mega.config.output_dir import output_dir
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sizes import Sizes, shape_and_sizes, size_rows
from rlhfspec_mega.data.prompts import make_prompts
from rlhfspec_mega.data.reward_encoder import RewardEncoder
from rlhfspec_mega.generation import SampleGenerator, stop_tokens
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.observe.timeline import TIMELINE_FILE, Timeline
from rlhfspec_mega.reward.rewards import Rewards
from rlhfspec_mega.rl.shaping import RewardShaping
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
        only_evaluates = config.task == "evaluate"
        wanted = config.trainer.eval_prompts if config.trainer.eval_every or only_evaluates else 0
        data = replace(config.data, train=config.data.eval) if only_evaluates else config.data
        prompts, held_out = make_prompts(data, tokenizer, config.rollout.max_prompt_tokens, wanted, config.seed)
        members = config.trainer.samples_per_prompt
        algorithm = make_algorithm(
            config.algorithm,
            members,
            sizes.samples_per_update,
            config.critic,
            RewardShaping(config.reward, members, config.rollout.max_new_tokens),
        )
        with Rewards(config.reward, directory, in_order=config.trainer.deterministic) as rewards:
            model = start_model(config, shape, directory, console)
            draft = start_draft(config, model, console)
            reference = model if algorithm.needs_reference else None
            console.phase("starting workers")
            timeline = Timeline(directory / TIMELINE_FILE)
            setup = Setup(config, sizes, shape, directory, sizes.total_updates, model, draft, reference)
            with System(setup, timeline) as system:
                system.load_start_weights()
                stops = stop_tokens(tokenizer, model)
                encode = _reward_encoder(config, sizes, tokenizer, stops)
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
                    encode,
                    system,
                    generator,
                    algorithm,
                    begin,
                )


def _reward_encoder(config: RunConfig, sizes: Sizes, tokenizer: Any, stops: tuple[int, ...]) -> RewardEncoder | None:
    path, shape = config.reward.model.path, sizes.reward_shape
    return RewardEncoder(Path(path), tokenizer, stops, shape) if path is not None and shape is not None else None
