"""How fast decoding could be with a draft's acceptance, if the draft took less of its time, or none.

A step takes the seconds that were profiled and gives the tokens that the rules of verification give the same draft on
samples of the same kind. At each batch size the best of trees of up to 4 or 8 layers with 1, 2, 4 .. 64 draft tokens
for every sample is taken. What favours drafting: deciding takes no time, nor does prefill or the draft's reading of
prompts, samples of one length end together, and drafting a tree takes the time of a chain. What a policy can gain
beside it: numbers of its own for each sample and step, and between these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.generation_peers import Rules
from benchmarks.scenarios import Scenario
from benchmarks.tokens_per_step import DEPTHS, KEPT, SHARED
from rlhfspec_mega.planning.cost import CostModel

SHARES = (1.0, 0.5, 0.0)  # of the draft's time


def ceilings(
    cost: CostModel, rules: Rules, scenarios: Sequence[Scenario], prompt_length: int
) -> dict[str, dict[str, float]]:
    """Speed over plain steps, by scenario at T = 1 and by share of the draft's time."""
    print("Speed over plain steps that the draft's acceptance allows, if it took all, half or none of its time:")
    found = {}
    for scenario in scenarios:
        found[scenario.name] = {str(share): ceiling(cost, rules, scenario, prompt_length, share) for share in SHARES}
        print(f"  {scenario.name:<20}", *(f"{value:6.2f}" for value in found[scenario.name].values()), flush=True)
    return found


def ceiling(cost: CostModel, rules: Rules, scenario: Scenario, prompt_length: int, share: float) -> float:
    """Speed over plain steps if drafting took this share of its seconds."""
    plain = best = 0.0
    for batch, length, tokens in _stretches(scenario.lengths):
        kv = batch * (prompt_length + length)
        seconds = cost.plain_seconds(batch, kv)
        plain += tokens * seconds
        best += tokens * min(seconds, _fastest(cost, rules, batch, kv, share))
    return plain / best


def _fastest(cost: CostModel, rules: Rules, batch: int, kv: int, share: float) -> float:
    """Least seconds per token of each sample, over numbers of draft tokens and depths."""
    found = []
    for depth in DEPTHS:
        for kept in KEPT:
            rate, layers = rules.tokens_per_step((SHARED, depth, kept)), min(depth, kept)
            drafting = float(cost.draft_seconds(batch, kv, round(batch * rate), layers, batch * (layers - 1)))
            verifying = float(cost.verify_seconds(batch, kv, batch * (1 + kept)))
            found.append((share * drafting + verifying) / rate)
    return min(found)


def _stretches(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Of plain decoding, by batch size: samples, response tokens of each in the mean, and steps."""
    before, ordered = 0, sorted(lengths)
    for ended, length in enumerate(ordered):
        if length > before:
            yield len(ordered) - ended, (before + length) // 2, length - before
            before = length
