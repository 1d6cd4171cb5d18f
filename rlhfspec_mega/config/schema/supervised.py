"""Options of supervised tasks: fine-tuning on answers (SFT), and training of a reward model on pairs."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.config.option import option

TASKS = ("rl", "sft", "reward_model", "evaluate")
RL, SUPERVISED, ENGINES_RUN, LEARNS = "task=rl", "task=sft|reward_model", "task=rl|evaluate", "task=rl|sft|reward_model"


@dataclass
class SupervisedConfig:
    epochs: int = option(1, "passes over the training data", least=1, only_with="data.kind=files")
    max_steps: int | None = option(
        None,
        "longest training; null: all epochs of files, or 400 of the built-in task",
        unit="optimizer steps",
        least=1,
        common=True,
    )
    batch_size: int = option(64, "samples, or pairs of a reward model, of an optimizer step", least=1, common=True)
    eval_every: int = option(25, "between evaluations; 0: at the end only", unit="optimizer steps", least=0)
    eval_size: int = option(256, "held-out samples or pairs", least=1)
    margin: float = option(
        0.0,
        "by which the score of the chosen response should exceed that of the rejected one",
        least=0,
        only_with="task=reward_model",
    )
