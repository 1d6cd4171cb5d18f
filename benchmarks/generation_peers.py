"""Who else decodes the same weights: transformers' `generate`, and other rules of verification at the same cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.acceptance import FULL as FULL_STUDY
from benchmarks.acceptance import QUICK, TEXT_PROMPT, ratio
from benchmarks.contenders import ADAPTIVE, Contender
from benchmarks.drafts import draft_of, load_own
from benchmarks.paired import interleaved, ratio_interval
from benchmarks.peers import Method, Peer
from benchmarks.samples import Target, load_target, words_target
from benchmarks.scenarios import MEMBERS, Bench, Scenario, batch_scenario
from benchmarks.text_target import text_prompts, text_target
from benchmarks.tokens_per_step import CHAIN, TOP_K, Setting, Task, measure

CHAINS = (1, 2, 4, 8)  # draft tokens of a rejection chain
DEEPEST = 8


@dataclass(frozen=True)
class Rules:
    """Tokens and steps of finished sequences under the rules of verification, at T = 1."""

    tokens: Tensor
    steps: dict[Setting, Tensor]

    def tokens_per_step(self, setting: Setting) -> float:
        return float(self.tokens.sum() / self.steps[setting].sum())

    def over_top_k(self) -> dict[str, float]:
        """Shared noise over top-k with target-only verification at 8 draft tokens and equal depth."""
        found = ratio(self.tokens, self.steps, TOP_K, DEEPEST)
        return {"value": found.value, "low": found.low, "high": found.high}


def rules_on_words(target: Target, draft: Path, prompts: Sequence[tuple[int, ...]], tokens: int) -> Rules:
    """The rules on what the benchmark itself decodes, with its draft."""
    return _rules(Task("words", target, load_own(draft, target), prompts, tokens, forced=True))


def rules_on_text(quick: bool) -> Rules:
    """The rules on high-entropy text."""
    sizes = QUICK if quick else FULL_STUDY
    target = load_target(text_target(sizes.text_steps))
    bos = target.tokenizer.bos_token_id
    training = text_prompts("train", sizes.draft_sequences, TEXT_PROMPT, bos)
    draft = draft_of(target, training, tokens=sizes.text_tokens, steps=sizes.draft_steps, forced=True)
    prompts = text_prompts("eval", 28, TEXT_PROMPT, bos)
    return _rules(Task("text", target, draft, prompts, sizes.text_tokens, forced=True))


def _rules(task: Task) -> Rules:
    return Rules(*measure(task, 1.0, learnt=len(task.prompts) // 3))


def against_peers(bench: Bench, target: Target, adaptive: Contender, tokens: int, repeats: int) -> dict[str, Any]:
    """Time of each of transformers' methods over ours, at T = 1: median and interval, by batch size."""
    assistant = load_target(words_target("tiny")) if target.shape != load_target(words_target("tiny")).shape else None
    peer, found = Peer(target, assistant, bench.dtype), dict[str, Any]()
    for batch in (1, 32):
        scenario = batch_scenario(batch, tokens, 1.0)
        methods = [Method.PLAIN]
        if batch == 1:
            methods += [Method.LOOKUP, *([Method.ASSISTED] if assistant else [])]
        runs: dict[str, int] = dict.fromkeys([ADAPTIVE, *methods], 500)

        def next_repeat(name: str, runs: dict[str, int] = runs) -> int:
            runs[name] += 1
            return runs[name]

        def decode(method: Method, batch: int = batch, scenario: Any = scenario) -> float:
            prompts = [r.prompt_tokens for r in bench.requests(scenario, next_repeat(method))]
            return peer.decode(prompts, tokens, method=method, temperature=1.0, batch=batch).seconds

        def ours(scenario: Any = scenario) -> float:
            return bench.run(adaptive, scenario, next_repeat(ADAPTIVE))

        variants: dict[str, Callable[[], float]] = {method: partial(decode, method) for method in methods}
        variants[ADAPTIVE] = ours
        times = interleaved(variants, repeats)
        found[f"batch {batch}"] = {method: vars(ratio_interval(times[method], times[ADAPTIVE])) for method in methods}
    return found


def against_rejection(bench: Bench, found: Sequence[dict[str, Any]], rules: Rules) -> dict[str, float]:
    """Time of the best rejection chain over adaptive's measured time, by batch size at T = 1.

    The chain takes its expected steps on samples of the same length, of profiled seconds each, after the prefill and
    the draft's reading of the prompts, which adaptive's time contains, too.
    """
    cost, result = bench.cost_model(), {}
    for entry in found:
        scenario = Scenario(**entry["scenario"] | {"lengths": tuple(entry["scenario"]["lengths"])})
        if scenario.temperature != 1.0 or len(set(scenario.lengths)) > 1:
            continue
        batch = len(scenario.lengths)
        kv = batch * (scenario.lengths[0] // 2 + bench.prompt_length)
        fastest = math.inf
        for nodes in CHAINS:
            rate = rules.tokens_per_step((CHAIN, DEEPEST, nodes))
            seconds = float(cost.draft_seconds(batch, kv, round(batch * rate), nodes, batch * (nodes - 1)))
            seconds += float(cost.verify_seconds(batch, kv, batch * (1 + nodes)))
            fastest = min(fastest, scenario.tokens / (batch * rate) * seconds)
        prompts = -(-batch // MEMBERS) * bench.prompt_length  # members of a group share theirs
        reading = cost.draft_seconds(batch, kv, batch + prompts, 1, 0) - cost.draft_seconds(batch, kv, batch, 1, 0)
        ours = statistics.median(entry["judging"][entry["selected"][ADAPTIVE]])
        result[scenario.name] = (fastest + float(reading) + bench.prefill_seconds(scenario)) / ours
    return result
