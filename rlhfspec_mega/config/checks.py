"""Every check across options, made before anything starts; each refusal is one sentence that says what to do."""

from __future__ import annotations

import importlib.util
import re
from operator import attrgetter
from pathlib import Path

from rlhfspec_mega.config.drafting import check_drafting, idle_drafting
from rlhfspec_mega.config.machine import check_devices, check_launcher, check_memory
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import unknown_choice
from rlhfspec_mega.config.output_dir import check_output_dir
from rlhfspec_mega.config.ranges import check_ranges
from rlhfspec_mega.config.reallocation import check_reallocation, idle_reallocation
from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.config.sglang import check_sglang, check_sleep, idle_sglang
from rlhfspec_mega.config.shape_checks import check_lengths, check_parallel, check_shape
from rlhfspec_mega.config.sizes import Sizes, derive_sizes
from rlhfspec_mega.data.chain_sums import ChainSums
from rlhfspec_mega.errors import UserError

ADVANTAGES = ("grpo", "rloo")


def check_config(config: RunConfig) -> Sizes:
    """Refuse what cannot run; return the derived sizes of what can.

    Raises:
        UserError: the first thing found wrong.
    """
    check_ranges(config)
    _check_name(config)
    _check_available(config)
    _check_useless(config)
    check_reallocation(config)
    _check_algorithm(config)
    _check_data(config)
    check_output_dir(config)
    shape = model_shape(config.model)
    check_drafting(config, shape)
    check_shape(config, shape)
    check_parallel(config, shape)
    check_lengths(config, shape)
    sizes = derive_sizes(config, shape)
    check_sleep(config, sizes.placement)
    check_devices(config)
    check_memory(config, shape, sizes)
    _check_weights_exist(config)
    return sizes


def _check_name(config: RunConfig) -> None:
    if not re.fullmatch(r"[\w][\w.+=-]*", config.name):
        raise UserError(f"name={config.name!r} cannot name a directory: use letters, digits, '_', '-', '.', '+', '='.")


def _check_available(config: RunConfig) -> None:
    """Options that exist but whose other half is not there."""
    check_sglang(config)
    check_launcher(config)
    if config.logger.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("logger.wandb=true needs the package wandb: pip install wandb, or use logger=default.")


def _check_useless(config: RunConfig) -> None:
    """Options that were set and would change nothing: refused, so that no run is believed to be what it is not."""
    another = config.algorithm.advantage == "rloo" or _is_import_path(config.algorithm.advantage)
    if another and config.algorithm.normalize_by_std:
        raise UserError(
            f"algorithm.normalize_by_std=true has no effect with algorithm.advantage={config.algorithm.advantage}: use "
            "algorithm=rloo, or set it to false."
        )
    own_loss = config.algorithm.loss is not None
    plain_pipeline = config.actor.pipeline_parallel == 1
    built_in_data = config.data.kind == "chain_sums"
    idle = {
        "algorithm.clip_low": (own_loss, "algorithm.loss=null"),
        "algorithm.clip_high": (own_loss, "algorithm.loss=null"),
        "algorithm.importance_cap": (own_loss, "algorithm.loss=null"),
        "algorithm.overlong_penalty": (config.algorithm.overlong != "penalize", "algorithm.overlong=penalize"),
        "actor.optimizer.min_lr_ratio": (
            config.actor.optimizer.schedule == "constant",
            "actor.optimizer.schedule=cosine",
        ),
        "actor.virtual_pipeline": (plain_pipeline, "actor.pipeline_parallel=2"),
        "actor.overlap_p2p": (plain_pipeline, "actor.pipeline_parallel=2"),
        "actor.batch_p2p": (plain_pipeline, "actor.pipeline_parallel=2"),
        "data.train": (built_in_data, "data=files"),
        "data.eval": (built_in_data, "data=files"),
        "data.chat_template": (built_in_data, "data=files"),
        "algorithm.kl_in": (config.algorithm.kl_coef == 0, "algorithm.kl_coef=0.01"),
        "algorithm.kl_estimator": (config.algorithm.kl_coef == 0, "algorithm.kl_coef=0.01"),
        "data.max_terms": (not built_in_data, "data=chain_sums"),
        "data.median_terms": (not built_in_data, "data=chain_sums"),
        "data.sigma_terms": (not built_in_data, "data=chain_sums"),
        "data.max_operand": (not built_in_data, "data=chain_sums"),
        "data.max_sum": (not built_in_data, "data=chain_sums"),
        "trainer.eval_prompts": (not config.trainer.eval_every, "trainer.eval_every=20"),
        "cluster.address": (config.cluster.launcher == "local", "cluster.launcher=ray"),
        "logger.wandb_project": (not config.logger.wandb, "logger=wandb"),
        **idle_drafting(config),
        **idle_reallocation(config),
        **idle_sglang(config),
    }
    for key, (unused, remedy) in idle.items():
        value, default = attrgetter(key)(config), attrgetter(key)(RunConfig())
        if unused and value != default:
            raise UserError(
                f"{_setting(key, value)} has no effect here: add {remedy}, or set {_setting(key, default)}."
            )


def _setting(key: str, value: object) -> str:
    """An option as one writes it on the command line."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _check_algorithm(config: RunConfig) -> None:
    trainer = config.trainer
    if trainer.samples_per_prompt < 2:
        raise UserError(
            f"trainer.samples_per_prompt={trainer.samples_per_prompt}, but {config.algorithm.advantage} compares the "
            "samples of a prompt with each other: use at least 2."
        )
    if config.rollout.temperature == 0:
        raise UserError(
            "rollout.temperature=0 makes all samples of a prompt equal, so nothing could be learnt: use e.g. 1.0."
        )
    if not config.reward.function:
        raise UserError("reward.function is empty: set reward.function=package.module.function.")
    if not _is_import_path(config.reward.function):
        raise UserError(f"reward.function={config.reward.function} is no import path: write package.module.function.")
    if config.algorithm.advantage not in ADVANTAGES and not _is_import_path(config.algorithm.advantage):
        raise unknown_choice("algorithm.advantage", config.algorithm.advantage, ADVANTAGES)
    if config.algorithm.loss is not None and not _is_import_path(config.algorithm.loss):
        raise UserError(f"algorithm.loss={config.algorithm.loss} is no import path: write package.module.function.")


def _is_import_path(value: str) -> bool:
    return re.fullmatch(r"\w+(\.\w+)+", value) is not None


def _check_data(config: RunConfig) -> None:
    data = config.data
    if data.kind == "chain_sums":
        ChainSums.from_config(data, config.seed)
        return
    if not data.train:
        raise UserError("data=files needs files to train on: add data.train=[FILE.jsonl].")
    if config.trainer.eval_every and not data.eval:
        raise UserError("data.eval is empty: add data.eval=[FILE.jsonl], or trainer.eval_every=0 for no evaluation.")
    for key, files in (("data.train", data.train), ("data.eval", data.eval)):
        for file in files:
            if not Path(file).is_file():
                raise UserError(f"{key} names {file}, which does not exist: put the file there or correct the path.")


def _check_weights_exist(config: RunConfig) -> None:
    """Models made here are tiny and small; a shape with published weights needs them on disk."""
    model = config.model
    if model.path is None and model.hub_name is not None:
        raise UserError(
            f"model={model.name} names a shape only: download {model.hub_name} (hf download {model.hub_name} "
            "--local-dir DIR) and add model.path=DIR."
        )
