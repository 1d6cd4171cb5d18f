"""Every check across options, made before anything starts; each refusal is one sentence that says what to do."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from rlhfspec_mega.config.advice import nearest_fit
from rlhfspec_mega.config.conditions import check_read
from rlhfspec_mega.config.critic import check_critic_weights, has_critic
from rlhfspec_mega.config.fusion import check_fusion
from rlhfspec_mega.config.machine import check_devices, check_job_end, check_launcher, check_memory
from rlhfspec_mega.config.model_shape import check_weights
from rlhfspec_mega.config.names import unknown_choice
from rlhfspec_mega.config.output_dir import check_output_dir
from rlhfspec_mega.config.ranges import check_ranges
from rlhfspec_mega.config.reward_model import check_reward_weights
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import check_sglang, check_sglang_installed
from rlhfspec_mega.config.shape_checks import (
    check_critic,
    check_lengths,
    check_parallel,
    check_reward_model,
    check_shape,
)
from rlhfspec_mega.config.sizes import Sizes, derive_sizes, trained_shape
from rlhfspec_mega.config.speculation import check_speculation
from rlhfspec_mega.data.chain_sums import ChainSums
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape

ADVANTAGES = ("grpo", "rloo", "gae")


def check_config(config: RunConfig) -> Sizes:
    """Refuse a configuration that cannot run; return the derived sizes otherwise.

    Raises:
        UserError: for the first fault found.
    """
    shape, sizes = check_composition(config)
    _check_available(config)
    check_job_end(config)
    _check_files(config)
    check_output_dir(config)
    check_devices(config)
    _check_fits(config, shape, sizes)
    check_weights(config.model)
    _check_padding(config)
    check_critic_weights(config)
    check_reward_weights(config)
    return sizes


def check_composition(config: RunConfig) -> tuple[ModelShape, Sizes]:
    """Refuse what cannot run on any machine; what this one has, and whether the run fits, is not looked at.

    Raises:
        UserError: for the first fault found.
    """
    check_ranges(config)
    _check_name(config)
    check_sglang(config)
    check_read(config)
    _check_deterministic(config)
    _check_algorithm(config)
    _check_reward(config)
    _check_data(config)
    shape = trained_shape(config)
    check_speculation(config, shape)
    check_shape(config, shape)
    check_parallel(config, shape)
    check_critic(config, shape)
    check_fusion(config)
    check_reward_model(config)
    check_lengths(config, shape)
    return shape, derive_sizes(config, shape)


def _check_fits(config: RunConfig, shape: ModelShape, sizes: Sizes) -> None:
    """Refuse a run that has too little memory here, with the nearest settings that fit."""
    try:
        check_memory(config, shape, sizes)
    except UserError as error:
        found = nearest_fit(config)
        if not found:
            raise
        raise UserError(f"{str(error).removesuffix('.')}; the nearest that fits is {' '.join(found)}.") from None


def _check_name(config: RunConfig) -> None:
    if not re.fullmatch(r"[\w][\w.+=-]*", config.name):
        raise UserError(f"name={config.name!r} cannot name a directory: use letters, digits, '_', '-', '.', '+', '='.")


def _check_available(config: RunConfig) -> None:
    """Check that the packages, the launcher and the engine that the options name are installed."""
    check_sglang_installed(config)
    check_launcher(config)
    if config.logger.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("logger.wandb=true needs the package wandb: pip install wandb, or use logger=default.")


def _check_deterministic(config: RunConfig) -> None:
    """Options that a deterministic run cannot follow."""
    if not config.trainer.deterministic:
        return
    if config.reallocation.policy == "queue":
        raise UserError(
            "reallocation=queue hands samples out as engines become free, which trainer.deterministic=true forbids: "
            "use reallocation=off, or trainer.deterministic=false."
        )
    if config.placement.reference == "generation":
        raise UserError(
            "placement.reference=generation scores samples in the batches in which they end, which "
            "trainer.deterministic=true forbids: use placement.reference=actor, or trainer.deterministic=false."
        )


def _check_padding(config: RunConfig) -> None:
    """Refuse to train a classifier whose score would be read at another token than it is trained at, the last."""
    path = config.model.path
    if config.task != "reward_model" or path is None or not (Path(path) / "config.json").is_file():
        return
    from rlhfspec_mega.models.hf_directory import scores_before_end  # it brings torch

    if scores_before_end(path):
        raise UserError(
            f"model.path={path} is a classifier whose pad_token_id is its eos_token_id, so its score would be read "
            "before the end-of-text token: give it another pad_token_id in config.json."
        )


def _check_algorithm(config: RunConfig) -> None:
    trainer, estimator = config.trainer, config.algorithm.adv_estimator
    if estimator not in ADVANTAGES and not _is_import_path(estimator):
        raise unknown_choice("algorithm.adv_estimator", estimator, ADVANTAGES)
    if estimator != "grpo" and config.algorithm.norm_adv_by_std:
        raise UserError(
            f"algorithm.norm_adv_by_std=true has no effect with algorithm.adv_estimator={estimator}: "
            "use algorithm=rloo, or set it to false."
        )
    if config.task == "rl" and trainer.samples_per_prompt < 2 and estimator != "gae":
        raise UserError(
            f"trainer.samples_per_prompt={trainer.samples_per_prompt}, but {estimator} compares the "
            "samples of a prompt with each other: use at least 2."
        )
    if config.task == "rl" and config.rollout.temperature == 0:
        raise UserError(
            "rollout.temperature=0 makes all samples of a prompt equal, so nothing could be learnt: use e.g. 1.0."
        )
    if has_critic(config) and config.critic.warmup_steps >= trainer.steps:
        raise UserError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves the actor none of trainer.steps={trainer.steps}: "
            "lower it."
        )
    if config.algorithm.loss is not None and not _is_import_path(config.algorithm.loss):
        raise UserError(f"algorithm.loss={config.algorithm.loss} is no import path: write package.module.function.")


def _check_reward(config: RunConfig) -> None:
    reward = config.reward
    if reward.function == "" or (reward.function, reward.remote.url, reward.model.path) == (None, None, None):
        raise UserError(
            "There is no reward: set reward.function=package.module.function, reward.remote.url=URL or "
            "reward.model.path=DIR."
        )
    if reward.function is not None and not _is_import_path(reward.function):
        raise UserError(f"reward.function={reward.function} is no import path: write package.module.function.")
    if reward.remote.url is not None and not re.match(r"https?://[^/\s]+", reward.remote.url):
        raise UserError(f"reward.remote.url={reward.remote.url} is no address: write e.g. http://localhost:8000/score.")
    if reward.length_penalty and reward.length_free >= config.rollout.max_new_tokens:
        raise UserError(
            f"reward.length_free={reward.length_free} leaves no response to penalize: lower it below "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}."
        )


def _is_import_path(value: str) -> bool:
    return re.fullmatch(r"\w+(\.\w+)+", value) is not None


def _check_data(config: RunConfig) -> None:
    data = config.data
    if data.kind == "chain_sums":
        ChainSums.from_config(data, config.seed)
        return
    if config.task == "evaluate":
        if not data.eval:
            raise UserError("task=evaluate needs files of held-out prompts: add data.eval=[FILE.jsonl].")
        return
    if not data.train:
        raise UserError("data=files needs files to train on: add data.train=[FILE.jsonl].")
    if config.task == "rl" and config.trainer.eval_every and not data.eval:
        raise UserError("data.eval is empty: add data.eval=[FILE.jsonl], or trainer.eval_every=0 for no evaluation.")


def _check_files(config: RunConfig) -> None:
    data = config.data
    if data.kind != "files":
        return
    for key, files in (("data.train", data.train), ("data.eval", data.eval)):
        for file in files:
            if not Path(file).is_file():
                raise UserError(f"{key} names {file}, which does not exist: put the file there or correct the path.")
