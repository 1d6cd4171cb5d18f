"""The registry of metrics: name, unit, meaning, how each is reduced, and how the console shows it.

metrics.jsonl, TensorBoard and Weights & Biases use these names; docs/metrics.md is generated from this table. A user's
loss reports `actor/NAME` for each of its metrics, and every phase of a step `timing_s/PHASE`.
"""

from __future__ import annotations

from typing import NamedTuple

from rlhfspec_mega.types import DECODE_MODES

ROLLOUT, VAL, ACTOR, SPECULATION, DRAFT = "rollout/", "val/", "actor/", "speculation/", "draft/"
REALLOCATION, PERF, TIMING = "reallocation/", "perf/", "timing_s/"


class Metric(NamedTuple):
    """A metric.

    Attributes:
        reduced: how values are reduced to one, e.g. mean or sum, and over what.
        label, form: on the console; empty: not shown there. `brief`: also shown in the line of a step.
    """

    name: str
    unit: str
    meaning: str
    reduced: str
    label: str = ""
    form: str = "{:.3f}"
    brief: bool = False


_SAMPLES = "mean over the step's samples"
_TOKENS = "mean over response tokens with weight in the loss, and over mini-batches"
_PAIRS = "mean over the step's pairs, before the update"
_SUM = "sum over engines"
_COUNT = "number in the step; absent if there are none"
METRICS = (
    Metric("rollout/reward_mean", "", "reward", _SAMPLES, "reward", brief=True),
    Metric("rollout/exact_mean", "", "share of responses that the reward calls exact", _SAMPLES, "exact", brief=True),
    Metric("reward/function_mean", "", "value of the reward function, where there are other sources", _SAMPLES),
    Metric("reward/remote_mean", "", "score of the reward service, where there are other sources", _SAMPLES),
    Metric("reward/model_mean", "", "score of the reward model, where there are other sources", _SAMPLES),
    Metric("reward/failures_exception", "", "samples for which the reward function raised", _COUNT),
    Metric("reward/failures_bad_value", "", "samples whose reward was no finite number", _COUNT),
    Metric("reward/failures_timeout", "", "samples that took longer than reward.time_limit", _COUNT),
    Metric("reward/failures_crash", "", "samples for which the reward function ended its process", _COUNT),
    Metric("reward/failures_refused", "", "samples that the reward service did not score", _COUNT),
    Metric("sft/loss", "nats", "negative log-likelihood", "mean over answer tokens of the step", "loss", brief=True),
    Metric("reward_model/loss", "nats", "-log sigmoid(chosen - rejected)", _PAIRS, "loss", brief=True),
    Metric("reward_model/accuracy", "", "pairs whose chosen response scores higher", _PAIRS, "accuracy", brief=True),
    Metric("val/loss", "nats", "of supervised tasks, on held-out examples", "mean over them", "held-out", brief=True),
    Metric("val/accuracy", "", "of a reward model, on held-out pairs", "mean", "held-out accuracy", brief=True),
    Metric("val/reward_mean", "", "reward of greedy responses to held-out prompts", "mean over them"),
    Metric("val/exact_mean", "", "exact ones of them", "mean over them", "held-out exact", brief=True),
    Metric("val/response_length_mean", "tokens", "length of these responses", "mean over them"),
    Metric("val/response_length_max", "tokens", "length of the longest of them", "maximum"),
    Metric("val/truncation_rate", "", "share of them cut off at rollout.max_new_tokens", "mean over them"),
    Metric(
        "rollout/response_length_mean", "tokens", "length of a response", _SAMPLES, "length mean", "{:.0f}", brief=True
    ),
    Metric(
        "rollout/response_length_max", "tokens", "length of the longest", "maximum", "length max", "{:.0f}", brief=True
    ),
    Metric("rollout/generated_tokens", "tokens", "tokens of all responses", "sum over the step's samples"),
    Metric(
        "perf/fused_updates",
        "",
        "share of mini-batches in which actor and critic trained in one pass; absent if their pipelines rule it out",
        "of the step",
    ),
    Metric(
        "perf/generation_tokens_per_second",
        "tokens/s",
        "generated tokens over the seconds of phase generate",
        "ratio",
        "tokens/s",
        "{:,.0f}",
        brief=True,
    ),
    Metric(
        "speculation/tokens_per_step",
        "tokens",
        "accepted draft tokens and one, per decode step of a sample",
        "ratio of sums over engines",
        "tokens/step",
        "{:.2f}",
        brief=True,
    ),
    Metric(
        "speculation/accepted_length",
        "tokens",
        "accepted draft tokens of a step in which some were verified",
        "ratio of sums over engines",
        "accepted",
        "{:.2f}",
    ),
    Metric(
        "speculation/verified_per_accepted",
        "",
        "verified draft tokens for each accepted one",
        "ratio of sums over engines",
        "verified/accepted",
        "{:.1f}",
    ),
    Metric(
        "speculation/share_recalled",
        "",
        "share of accepted draft tokens that history gave and the draft model did not",
        "ratio of sums over engines",
        "from history",
        "{:.0%}",
    ),
    Metric(
        "speculation/speedup_vs_plain",
        "",
        "pace of drafting steps over that of plain steps taken in between",
        "ratio of sums over engines",
        "vs plain",
        "{:.2f}x",
    ),
    Metric(
        "speculation/calibration_error",
        "",
        "distance of predicted from observed acceptance",
        "mean over engines",
        "calibration error",
    ),
    Metric("speculation/predicted_over_realised", "", "predicted over accepted draft tokens", "ratio of sums"),
    Metric("speculation/collapsed_drafts", "", "engines that stopped drafting: their draft no longer fits", _SUM),
    Metric("speculation/sample_steps", "", "decode steps, each counted once for every sample in it", _SUM),
    Metric("speculation/drafted_sample_steps", "", "those in which draft tokens of the sample were verified", _SUM),
    Metric("speculation/verified", "tokens", "verified draft tokens", _SUM),
    Metric("speculation/accepted", "tokens", "accepted draft tokens", _SUM),
    Metric("speculation/recalled", "tokens", "those that history gave and the draft model did not", _SUM),
    Metric("speculation/paired_seconds", "s", "time of the drafting steps that are compared with plain ones", _SUM),
    Metric("speculation/paired_plain_seconds", "s", "time that plain steps would have taken for their tokens", _SUM),
    Metric(
        "speculation/regret",
        "",
        "share of decoding that the best mode of each batch size, known afterwards, would have saved",
        "ratio of sums over engines",
        "regret",
        "{:.1%}",
    ),
    Metric("speculation/tokens_MODE_batch_SIZE", "", "tokens of steps in a mode, in those of plain steps", _SUM),
    Metric("speculation/seconds_MODE_batch_SIZE", "", "time of these steps, in that of plain steps", _SUM),
    Metric("speculation/steps_verified_NUMBER", "", "sample steps in which so many draft tokens were verified", _SUM),
    Metric("draft/expected_length_before", "tokens", "expected accepted length on held-out samples", "mean over them"),
    Metric("draft/expected_length_after", "tokens", "the same after the refresh", "mean over them"),
    Metric("draft/refresh_kept", "", "1 if the refreshed draft was kept, else 0", "of the step"),
    Metric("draft/fused_refresh_seconds", "s", "time of the refresh that passed beside the rollout", "of the step"),
    Metric("reallocation/migrations", "", "samples that moved from one engine to another", "sum"),
    Metric("reallocation/migration_downtime", "s", "time in which a moving sample was decoded nowhere", "median"),
    Metric("reallocation/freed_device_seconds", "s", "time of engines that had no more samples", "sum over devices"),
    Metric("reallocation/fused_tasks", "", "samples that frozen models scored on such devices", "sum"),
    Metric("reallocation/fused_seconds", "s", "time that this took", "sum over devices"),
    Metric("rollout/truncation_rate", "", "share of responses cut off", _SAMPLES, "truncated", "{:.1%}"),
    Metric("actor/entropy", "nats", "entropy of the actor's next token", _TOKENS, "entropy"),
    Metric("actor/old_entropy", "nats", "the same before the step's updates", "mean over response tokens"),
    Metric("actor/kl", "nats", "divergence from the reference (algorithm.kl_loss_type)", _TOKENS, "KL", "{:.4f}"),
    Metric("actor/ratio", "", "probability now over probability before the step's updates", _TOKENS),
    Metric("actor/clip_fraction", "", "share of tokens whose ratio was clipped", _TOKENS, "clipped", "{:.1%}"),
    Metric("actor/approx_kl", "nats", "divergence of the old from the new policy (k3)", _TOKENS),
    Metric("actor/tis_weight", "", "weight of truncated importance sampling", _TOKENS),
    Metric("actor/loss", "", "loss", _TOKENS),
    Metric("actor/loss_tokens", "tokens", "response tokens with weight in the loss", "mean over mini-batches"),
    Metric(
        "actor/grad_norm", "", "global norm of the gradient before clipping", "mean over mini-batches", "gradient norm"
    ),
    Metric("actor/padding_share", "", "share of the positions computed that are padding", "mean over mini-batches"),
    Metric("actor/lr", "", "learning rate", "mean over mini-batches"),
    Metric("actor/skipped_updates", "", "updates left out because the gradient was not finite", "sum"),
    Metric("actor/kl_coef", "", "weight of the KL penalty in the reward (PPO)", "of the step"),
    Metric("critic/loss", "", "half the squared error of the values", _TOKENS, "value loss"),
    Metric("critic/loss_tokens", "tokens", "response tokens with weight in the loss", "mean over mini-batches"),
    Metric(
        "critic/explained_variance",
        "",
        "1 - var(return - value) / var(return): undiscounted returns, values from before the update",
        "over the step's response tokens",
        "explained variance",
    ),
    Metric("critic/value", "", "value", _TOKENS),
    Metric("critic/clip_fraction", "", "share of values whose change was clipped", _TOKENS),
    Metric("critic/value_mean", "", "value before the update", "mean over the step's response tokens"),
    Metric("critic/return_mean", "", "return that the critic learns", "mean over the step's response tokens"),
    Metric("critic/padding_share", "", "share of the positions computed that are padding", "mean over mini-batches"),
    Metric("critic/grad_norm", "", "global norm of the critic's gradient before clipping", "mean over mini-batches"),
    Metric("critic/lr", "", "the critic's learning rate", "mean over mini-batches"),
    Metric("critic/skipped_updates", "", "updates of the critic left out for a gradient that was not finite", "sum"),
    Metric(
        "rollout/logprob_diff_mean",
        "nats",
        "distance of the engine's from the actor's log-probability of a token",
        "mean over response tokens",
        "log-prob difference",
        "{:.1e}",
    ),
    Metric("rollout/logprob_diff_max", "nats", "the same of the worst token", "maximum"),
    Metric("timing_s/PHASE", "s", "time of a phase of the step: generate, score, reference, update and others", "sum"),
)


def known(name: str) -> bool:
    """Whether the table has this metric; words in capitals in its entries stand for any phase, number, mode or size."""
    names = {metric.name for metric in METRICS}
    open_ended = (
        "steps_verified_",
        *(f"{sum_}_{mode}_batch_" for sum_ in ("tokens", "seconds") for mode in DECODE_MODES),
    )
    return name in names or name.startswith((TIMING, *(SPECULATION + start for start in open_ended)))


def document() -> str:
    """docs/metrics.md."""
    rows = [f"| `{one.name}` | {one.unit} | {one.meaning} | {one.reduced} |" for one in METRICS]
    return (
        "# Metrics\n\n"
        "Written by `python -m tools.configuration` from `rlhfspec_mega/observe/metrics.py`; edit it there.\n\n"
        "Each step writes those that apply to it to `metrics.jsonl`, TensorBoard and Weights & Biases: `val/*` only\n"
        "where held-out data was evaluated, `speculation/*` with a draft, `critic/*` with PPO. A loss of your own\n"
        "reports `actor/NAME` for each of its metrics.\n\n"
        "| Metric | Unit | Meaning | Reduced |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )
