"""Everything a run needs, made in the order in which bad input is cheapest to refuse: data, reward, model, workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.algorithms.policy_gradient import REFERENCE, PolicyGradient
from rlhfspec_mega.config.drafting import drafts
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.notes import notes
from rlhfspec_mega.config.output_dir import output_dir
from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.config.sizes import Sizes, derive_sizes, size_rows
from rlhfspec_mega.data.prompts import PromptStream, make_prompts
from rlhfspec_mega.data.tokenizer import load_tokenizer
from rlhfspec_mega.generation import SampleGenerator, stop_tokens
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.making.start import first_draft, tokenizer_directory, warm_model
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.observe.phases import PhaseTimer
from rlhfspec_mega.observe.timeline import TIMELINE_FILE, Timeline
from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.system.system import System
from rlhfspec_mega.types import Prompt


@dataclass
class Run:
    """The parts of a started run.

    Attributes:
        model: the Hugging Face directory the actor and the reference start from.
        beginning: state of prompts and ledger before the first step.
    """

    config: RunConfig
    sizes: Sizes
    directory: Path
    model: Path
    console: Console
    phases: PhaseTimer
    timeline: Timeline
    prompts: PromptStream
    held_out: list[Prompt]
    rewards: RewardRunner
    system: System
    ledger: Ledger
    generator: SampleGenerator
    algorithm: PolicyGradient
    started: float = field(default_factory=time.monotonic)
    beginning: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.beginning = {"prompts": self.prompts.state_dict(), "ledger": self.ledger.state_dict()}


@contextmanager
def started(config: RunConfig) -> Iterator[Run]:
    """Start a run in its already claimed output directory; every process it started ends with it.

    Raises:
        UserError: bad data, reward function or model.
        RunError: a worker did not start.
    """
    begin, directory = time.monotonic(), output_dir(config)
    shape = model_shape(config.model)
    sizes = derive_sizes(config, shape)
    with Console(config.trainer.steps, config.logger.console) as console:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        console.table("Sizes of this run", size_rows(config, sizes))
        for note in notes(config):
            console.note(note)
        tokenizer = load_tokenizer(config.model.path or tokenizer_directory(config))
        wanted = config.trainer.eval_prompts if config.trainer.eval_every else 0
        prompts, held_out = make_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens, wanted, config.seed)
        algorithm = make_algorithm(config.algorithm, config.trainer.samples_per_prompt, sizes.samples_per_update)
        reward = config.reward
        with RewardRunner(reward.function, reward.time_limit, reward.arguments) as rewards:
            model = Path(config.model.path or warm_model(config, shape, directory, console))
            draft = start_draft(config, model, console)
            reference = model if REFERENCE in algorithm.models else None
            console.phase("starting workers")
            timeline = Timeline(directory / TIMELINE_FILE)
            setup = Setup(config, sizes, shape, directory, sizes.total_updates, model, draft, reference)
            with System(setup, timeline) as system:
                system.actor.load_weights(model)
                ledger, stops = Ledger(), stop_tokens(tokenizer, model)
                generator = SampleGenerator(system.rollout, ledger, tokenizer, stops, config.rollout, config.seed)
                phases = PhaseTimer(entered=console.phase, charged=timeline.phase)
                yield Run(
                    config,
                    sizes,
                    directory,
                    model,
                    console,
                    phases,
                    timeline,
                    prompts,
                    held_out,
                    rewards,
                    system,
                    ledger,
                    generator,
                    algorithm,
                    begin,
                )


def start_draft(config: RunConfig, model: Path, console: Console) -> Path | None:
    """The directory of the draft to start from, made now if the model was made here; None without drafting."""
    if not drafts(config):
        return None
    return Path(config.drafting.path or first_draft(config, model, console))
