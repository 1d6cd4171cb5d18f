"""Allowed values of single options: choices of the enumerated ones, bounds of the numbers."""

from __future__ import annotations

import math
from operator import attrgetter

from rlhfspec_mega.config.names import unknown_choice
from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ARCHITECTURES
from rlhfspec_mega.planning.placement import PLACEMENTS

DTYPES = ("float32", "bfloat16")
CHOICES: dict[str, tuple[str, ...]] = {
    "model.architecture": ARCHITECTURES,
    "actor.dtype": DTYPES,
    "actor.optimizer.schedule": ("constant", "linear", "cosine"),
    "algorithm.loss_average": ("token", "sample"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.overlong": ("keep", "mask", "penalize"),
    "rollout.engine": ("torch", "sglang"),
    "rollout.dtype": DTYPES,
    "drafting.policy": ("off", "adaptive", "uniform", "fixed"),
    "reallocation.policy": ("off", "queue", "adaptive"),
    "placement.mode": tuple(PLACEMENTS),
    "placement.reference": ("auto", "generation", "actor"),
    "data.kind": ("chain_sums", "files"),
    "cluster.launcher": ("local", "ray"),
    "cluster.device": ("auto", "cpu", "cuda"),
    "resharding.transport": ("auto", "shared_memory", "collective", "object_store"),
}
ABOVE_ZERO = (
    "model.rope_theta",
    "model.norm_eps",
    "actor.optimizer.lr",
    "actor.optimizer.eps",
    "actor.optimizer.clip_grad",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.importance_cap",
    "drafting.refresh_seconds",
    "drafting.learning_rate",
    "reward.time_limit",
    "data.median_terms",
    "cluster.deadline_seconds",
    "cluster.start_seconds",
    "resharding.bucket_mib",
    "warmup.lr",
)
FROM_ZERO = (
    "seed",
    "actor.optimizer.warmup_steps",
    "actor.optimizer.weight_decay",
    "trainer.eval_every",
    "trainer.checkpoint_every",
    "algorithm.kl_coef",
    "algorithm.overlong_penalty",
    "rollout.temperature",
    "drafting.tail_weight",
    "reallocation.least_gain",
    "reallocation.cool_down",
    "reallocation.tolerance",
    "drafting.refresh_every",
    "cluster.max_restarts",
    "data.sigma_terms",
    "logger.rollouts_per_step",
    "warmup.warmup_steps",
)
FROM_ONE = (
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.ffn_size",
    "model.vocab_size",
    "model.max_positions",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.virtual_pipeline",
    "actor.data_parallel",
    "actor.logprob_chunk",
    "trainer.prompts_per_step",
    "trainer.samples_per_prompt",
    "trainer.samples_per_update",
    "trainer.max_tokens_per_microbatch",
    "trainer.steps",
    "trainer.eval_prompts",
    "trainer.keep_checkpoints",
    "rollout.engines",
    "rollout.max_prompt_tokens",
    "rollout.max_new_tokens",
    "rollout.slots",
    "rollout.prefill_chunk",
    "rollout.sglang.tensor_parallel",
    "placement.reference_tensor_parallel",
    "drafting.max_depth",
    "drafting.max_tokens",
    "drafting.width",
    "drafting.depth",
    "drafting.tokens",
    "drafting.refresh_steps",
    "drafting.buffer_tokens",
    "data.max_operand",
    "data.max_sum",
    "cluster.nodes",
    "cluster.devices_per_node",
    "cluster.threads_per_worker",
    "warmup.max_steps",
    "warmup.examples_per_step",
    "warmup.eval_every",
    "warmup.eval_prompts",
)
FROM_FIVE = ("cluster.silence_seconds",)  # workers show a sign of life once a second
POLLS = ("rollout.poll_seconds",)  # an engine that answers later would be taken for stuck when the actor restarts
FROM_TWO = ("data.max_terms",)  # a sum has at least two terms
FRACTIONS = (
    "actor.optimizer.min_lr_ratio",
    "drafting.collapse_ratio",
    "warmup.target_exact",
    "warmup.least_exact",
)
SHARES = ("rollout.sglang.memory",)


def check_ranges(config: RunConfig) -> None:
    """Raise UserError for the first option whose value is not a choice it has, or lies outside its bounds.

    An option that is null passes: the schema says which may be.
    """
    for key, choices in CHOICES.items():
        value = attrgetter(key)(config)
        if value is not None and value not in choices:
            raise unknown_choice(key, value, choices)
    bounds = {
        "above 0": (ABOVE_ZERO, lambda value: value > 0),
        "0 or more": (FROM_ZERO, lambda value: value >= 0),
        "1 or more": (FROM_ONE, lambda value: value >= 1),
        "2 or more": (FROM_TWO, lambda value: value >= 2),
        "5 or more": (FROM_FIVE, lambda value: value >= 5),
        "above 0 and at most 5": (POLLS, lambda value: 0 < value <= 5),
        "from 0 to 1": (FRACTIONS, lambda value: 0 <= value <= 1),
        "above 0 and below 1": (SHARES, lambda value: 0 < value < 1),
    }
    for words, (keys, holds) in bounds.items():
        for key in keys:
            value = attrgetter(key)(config)
            if value is not None and not (math.isfinite(value) and holds(value)):
                raise UserError(f"{key}={value} is out of range: it must be {words}.")
    if not all(0 <= beta < 1 for beta in config.actor.optimizer.betas):
        betas = list(config.actor.optimizer.betas)
        raise UserError(f"actor.optimizer.betas={betas} is out of range: both must be 0 or more and below 1.")
