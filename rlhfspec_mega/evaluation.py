"""task=evaluate: a model's answers to held-out prompts, greedy and sampled, scored by the run's rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.observe.reporter import sample_metrics
from rlhfspec_mega.observe.rollouts import ROLLOUTS_FILE, write_rollouts
from rlhfspec_mega.run import Run
from rlhfspec_mega.startup import started
from rlhfspec_mega.trainer import evaluate, rollout, score
from rlhfspec_mega.types import Sample

EVALUATION_FILE = "evaluation.json"


def run(config: RunConfig) -> None:
    """Evaluate model.path, or the model made here; writes evaluation.json and rollouts.jsonl.

    Raises:
        UserError: bad data, reward or model.
        RunError: a worker went silent or died too often.
    """
    with started(config) as run:
        run.system.reshard(0)
        found = {
            "model": str(run.model),
            "prompts": len(run.held_out),
            "greedy": {name.partition("/")[2]: value for name, value in evaluate(run, 0).items()},
            "sampled": sampled(run),
        }
        (run.directory / EVALUATION_FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        run.console.note(in_words(found))
        run.console.note(f"Everything is in {run.directory}: {EVALUATION_FILE} and {ROLLOUTS_FILE}.")


def sampled(run: Run) -> dict[str, Any]:
    """Figures of trainer.samples_per_prompt responses to each held-out prompt at rollout.temperature."""
    members = run.config.trainer.samples_per_prompt
    made = rollout(run, 0, refreshes=False, prompts=run.held_out)
    if made.scoring is not None:
        run.system.rollout.finish_scoring(made.scoring, "evaluate")
    score(run, made)
    samples = made.samples
    run.ledger.drop([sample.sample_id for sample in samples], "evaluated")
    run.ledger.settle(0, Purpose.TRAIN)
    write_rollouts(run.directory / ROLLOUTS_FILE, samples, run.config.logger.rollouts_per_step)
    figures = {name.partition("/")[2]: value for name, value in sample_metrics(samples, "val/").items()}
    return figures | {"samples_per_prompt": members, "pass_at": pass_at(samples, members)}


def pass_at(samples: Sequence[Sample], members: int) -> dict[int, float]:
    """Probability that at least one of k responses is exact, for k = 1, 2, 4, ..., mean over the prompts.

    A response without a reward counts as not exact.

    The unbiased estimate of Chen et al. 2021 (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k), with c of n exact.

    Args:
        samples: ordered by prompt, `members` of each.
    """
    exact = [sum(one.exact for one in samples[first : first + members]) for first in range(0, len(samples), members)]
    counts = [2**power for power in range(members.bit_length()) if 2**power <= members]
    return {
        k: sum(1.0 - math.comb(members - c, k) / math.comb(members, k) for c in exact) / max(len(exact), 1)
        for k in counts
    }


def in_words(found: dict[str, Any]) -> str:
    """The result, for a person."""
    greedy, several = found["greedy"], found["sampled"]
    passes = ", ".join(f"pass@{k} {value:.3f}" for k, value in several["pass_at"].items())
    return (
        f"{found['prompts']} held-out prompts. Greedy: exact {greedy['exact_mean']:.3f}, reward "
        f"{greedy['reward_mean']:.3f}, {greedy['response_length_mean']:.0f} tokens. Sampled, "
        f"{several['samples_per_prompt']} each: exact {several['exact_mean']:.3f}, reward "
        f"{several['reward_mean']:.3f}, {passes}."
    )
