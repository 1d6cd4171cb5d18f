"""Speculative generation: tokens per second of every drafting policy, against plain decoding and outside peers.

    python -m benchmarks.generation [--quick] [--model small] [--device cuda --dtype bfloat16]

One process, one thread, bfloat16 where the device computes in it (AMX or AVX512-BF16 on a CPU), else float32. All
policies decode the same samples with forced lengths, interleaved. Settings of each family are selected on the first
repeats and judged on later ones, with other prompts and noise: the best of many noisy settings looks better on the
repeats it was chosen on than it is. Ratios are times of a baseline over those of the adaptive policy: above 1, adaptive
is quicker. Prints tables; the last line is one JSON object of ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import (
    ADAPTIVE,
    BANDIT,
    EMA_TIERS,
    FAMILIES,
    FIXED,
    OFF,
    PUBLISHED,
    UNIFORM,
    Contender,
    contenders,
)
from benchmarks.drafts import own_draft
from benchmarks.generation_peers import against_peers, against_rejection, rules_on_text, rules_on_words
from benchmarks.generation_plot import plot
from benchmarks.hindsight import Hindsight, Predicted, share_of_oracle
from benchmarks.paired import Interval, interleaved, ratio_interval
from benchmarks.samples import load_target, word_prompts, words_target
from benchmarks.scenarios import BATCHES, LENGTHS, LONGEST, Bench, Scenario, batch_scenario, decay_scenario
from rlhfspec_mega.config.hardware import cpu_has_fast_bf16
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.strategy import Fixed

RESULTS = Path(__file__).parent / "results"
DRAFT_TOKENS = 320  # of the longest sample that the draft learns from
# Predictions are learnt from, and judged by, so many tokens at least: of one sample a step gains 4, give or take 2.
TAUGHT_TOKENS, PREDICTED_TOKENS = 512, 1536
CHECKED = (1, 2, 4, 8, 16, 32)  # draft tokens at which predicted tokens per step are compared with realised ones


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        batches: of the fixed batches at T = 1; `greedy`: at T = 0.
        tokens: of each sample of a fixed batch.
        samples: of a decay.
        selecting, judging: repeats.
        taught, predicted: runs, each of another prompt, that predictions are learnt from, and judged by, at least: what
            is drafted for one prompt's samples is accepted more often than for another's.
    """

    model: str
    batches: tuple[int, ...]
    greedy: tuple[int, ...]
    tokens: int
    samples: int
    selecting: int
    judging: int
    taught: int
    predicted: int
    draft_samples: int
    draft_steps: int
    device: str = "cpu"
    dtype: str = "float32"


QUICK = Sizes("tiny", (1, 8, 32), (1,), 32, 16, 2, 6, 2, 5, 192, 300)
FULL = Sizes("small", BATCHES, (1, 8, 32), 32, 32, 2, 7, 6, 16, 8192, 5000)


def usual_dtype(device: str) -> str:
    """What such a device is used with."""
    return "bfloat16" if device != "cpu" or cpu_has_fast_bf16() else "float32"


def scenarios(sizes: Sizes) -> list[Scenario]:
    found = [batch_scenario(batch, sizes.tokens, 1.0) for batch in sizes.batches]
    found += [batch_scenario(batch, sizes.tokens, 0.0) for batch in sizes.greedy]
    return found + [decay_scenario(name, sizes.samples) for name in ("chat", "reasoning")]


def measure(bench: Bench, scenario: Scenario, sizes: Sizes, all_of: Sequence[Contender]) -> dict[str, Any]:
    """Seconds of the settings while selecting, the setting selected per family, and their seconds while judged."""
    by_name = {contender.name: contender for contender in all_of}
    selecting = _interleave(bench, scenario, all_of, sizes.selecting, first=0)
    selected = {}
    for family in FAMILIES:
        names = [contender.name for contender in all_of if contender.family == family]
        selected[family] = min(names, key=lambda name: statistics.median(selecting[name]))
    judged_names = list(dict.fromkeys([*selected.values(), *PUBLISHED]))
    judging = _interleave(bench, scenario, [by_name[n] for n in judged_names], sizes.judging, first=sizes.selecting + 1)
    return {"scenario": asdict(scenario), "selecting": selecting, "selected": selected, "judging": judging}


def _interleave(
    bench: Bench, scenario: Scenario, these: Sequence[Contender], repeats: int, first: int
) -> dict[str, list[float]]:
    """Seconds by name; every repeat has prompts and noise of its own, from number `first` on."""
    runs = dict.fromkeys((contender.name for contender in these), first)

    def once(contender: Contender) -> float:
        repeat = runs[contender.name]
        runs[contender.name] += 1
        return bench.run(contender, scenario, repeat)

    return interleaved({contender.name: partial(once, contender) for contender in these}, repeats)


def ratios(found: dict[str, Any]) -> dict[str, Interval]:
    """Time of each family's selected setting over adaptive's, repeat by repeat."""
    judging, ours = found["judging"], found["judging"][found["selected"][ADAPTIVE]]
    families = {family: judging[name] for family, name in found["selected"].items() if family != ADAPTIVE}
    families |= {name: judging[name] for name in PUBLISHED}
    return {family: ratio_interval(times, ours) for family, times in families.items()}


def judge_choices(bench: Bench, scenario: Scenario, contender: Contender, repeat: int) -> dict[str, float | None]:
    """Share of the oracle (hindsight over n on the same ranked nodes and depth), and of the steps that drafted.

    Of a step without a draft the share is 1; None where none was drafted.
    """
    policy = bench.overseen(contender, scenario.temperature).policy
    hindsight = Hindsight(policy, policy.cost)  # type: ignore[attr-defined]
    bench.engine.policy = hindsight
    bench.decode(bench.engine, scenario, repeat)
    drafted = [step for step in hindsight.steps if len(step.tokens) > 1]
    return {
        "share": share_of_oracle(hindsight.steps),
        "share_where_drafted": share_of_oracle(drafted) if drafted else None,
        "steps_drafted": len(drafted) / len(hindsight.steps),
    }


def judge_predictions(bench: Bench, scenarios: Sequence[Scenario], sizes: Sizes) -> dict[str, Any]:
    """Predicted against realised tokens per step for every n, and predicted against measured seconds of a step.

    The first runs of a setting teach its models; errors are of the others together, with other noise and prompts.
    """
    errors: dict[str, dict[int, float]] = {}
    deviations: dict[str, dict[int, float]] = {}
    time_errors: dict[str, float] = {}
    for scenario in scenarios:
        # The second half of a forced length lies beyond the answers that the models were taught.
        name = f"{scenario.name}, {max(scenario.lengths)} tokens"
        errors[name], deviations[name], times = {}, {}, list[float]()
        taught = max(sizes.taught, math.ceil(TAUGHT_TOKENS / scenario.tokens))
        judged = max(sizes.predicted, math.ceil(PREDICTED_TOKENS / scenario.tokens))
        for nodes in CHECKED:
            cost = bench.cost_model()
            policy = Fixed(AcceptanceModel(), cost, 4, 8, nodes)
            policy.learns_cost = True  # what it does not read itself is judged here
            for repeats in (range(taught), range(taught, taught + judged)):
                bench.engine.policy = watched = Predicted(policy, cost)
                for repeat in repeats:
                    bench.decode(bench.engine, scenario, repeat)
                    watched.end_run()
            errors[name][nodes] = watched.found.tokens_error
            deviations[name][nodes] = watched.found.tokens_error_deviation
            times += watched.found.time_errors
        print(f"{name}: predicted over realised tokens per step, less 1, by n: {_by_n(errors[name])}", flush=True)
        time_errors[name] = statistics.median(times)
        print(f"  standard errors: {_by_n(deviations[name])}; median error of step time {time_errors[name]:.3f}")
    return {
        "tokens_error_by_n": errors,
        "tokens_error_deviation_by_n": deviations,
        "step_time_error": time_errors,
    }


def _by_n(found: dict[int, float]) -> str:
    return "  ".join(f"{nodes}: {value:+.3f}" for nodes, value in found.items())


def live_samples(bench: Bench, scenario: Scenario, contender: Contender) -> list[tuple[int, float]]:
    """(live samples, draft tokens per sample) of every step of a decay under adaptive."""
    policy = bench.overseen(contender, scenario.temperature).policy
    watched = Predicted(policy, policy.cost)  # type: ignore[attr-defined]
    bench.engine.policy = watched
    bench.decode(bench.engine, scenario, 0)
    return watched.live


def run(sizes: Sizes) -> dict[str, Any]:
    """All figures; models and drafts are made on first use."""
    started = time.monotonic()
    target = load_target(words_target(sizes.model))
    training = word_prompts(sizes.draft_samples, target.tokenizer, "train")
    draft = own_draft(target, training, tokens=DRAFT_TOKENS, steps=sizes.draft_steps, forced=False)
    bench = Bench(target, draft, word_prompts(256, target.tokenizer, "eval"), sizes.device, sizes.dtype)
    all_of, found = contenders(quick=sizes.model == "tiny"), []
    for scenario in scenarios(sizes):
        found.append(measure(bench, scenario, sizes, all_of))
        print(f"{scenario.name}: {time.monotonic() - started:.0f} s", flush=True)
        print_scenario(found[-1])
    adaptive = next(c for c in all_of if c.family == ADAPTIVE)
    decays = [s for s in scenarios(sizes) if "decay" in s.name]
    sampled = [s for s in scenarios(sizes) if s.temperature == 1]
    shares = {s.name: judge_choices(bench, s, adaptive, 99) for s in sampled}
    judged = [batch_scenario(batch, length * sizes.tokens, 1.0) for batch in (1, 8) for length in (1, 4)]
    predictions = judge_predictions(bench, judged, sizes)
    words = rules_on_words(target, draft, word_prompts(112, target.tokenizer, "eval"), sizes.tokens)
    text = rules_on_text(quick=sizes.model == "tiny")
    peers = sizes.device == "cpu"  # where they run
    live = {s.name: live_samples(bench, s, adaptive) for s in decays}
    return {
        "scenarios": found,
        "share_of_oracle": shares,
        "predictions": predictions,
        "live": live,
        "peers": against_peers(bench, target, adaptive, sizes.tokens, sizes.judging) if peers else {},
        "rejection_chain": against_rejection(bench, found, words),
        "tokens_per_step_n8": {"words": words.over_top_k(), "text": text.over_top_k()},
        "conditions": {
            "sizes": asdict(sizes),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "lengths": {name: dict(zip(("median", "sigma", "scale"), v, strict=True)) for name, v in LENGTHS.items()},
            "longest": LONGEST,
            "seconds": time.monotonic() - started,
        },
    }


def print_scenario(found: dict[str, Any]) -> None:
    """One line per family: selected setting, tokens per second, time over adaptive's."""
    tokens, judging = sum(found["scenario"]["lengths"]), found["judging"]
    over = ratios(found)
    for family, name in [*found["selected"].items(), *((name, name) for name in PUBLISHED)]:
        rate = tokens / statistics.median(judging[name])
        print(f"  {family:<20} {name:<22} {rate:>8.0f} tokens/s  {over.get(family, '')}", flush=True)


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """The headline ratios.

    `worst_vs_*` are the least upper ends of any scenario's interval, `worst_median_vs_*` the least medians.
    """
    over = {entry["scenario"]["name"]: ratios(entry) for entry in found["scenarios"]}
    peers = found["peers"]

    def worst(family: str) -> float:
        return min(each[family].high for each in over.values())

    def worst_median(family: str) -> float:
        return min(each[family].value for each in over.values())

    def mean(family: str) -> float:
        return statistics.geometric_mean(each[family].value for each in over.values())

    errors = found["predictions"]["tokens_error_by_n"]
    shortest = f", {found['conditions']['sizes']['tokens']} tokens"
    answers = [by_n for name, by_n in errors.items() if name.endswith(shortest)]
    beyond = [by_n for name, by_n in errors.items() if not name.endswith(shortest)]

    def worst_error(found_errors: Sequence[dict[int, float]]) -> float:
        return max(abs(error) for by_n in found_errors for error in by_n.values())

    deviations = found["predictions"]["tokens_error_deviation_by_n"].values()
    where_drafted = [each["share_where_drafted"] for each in found["share_of_oracle"].values()]
    where_drafted = [share for share in where_drafted if share is not None]
    batch1 = over.get("batch 1 T=1")
    summary = {
        **({"speedup_batch1": batch1[OFF].value} if batch1 else {}),
        "speedup_chat_decay": over["chat decay"][OFF].value,
        "speedup_reasoning_decay": over["reasoning decay"][OFF].value,
        "worst_vs_best_fixed": worst(FIXED),
        "worst_vs_off": worst(OFF),
        "worst_median_vs_best_fixed": worst_median(FIXED),
        "worst_median_vs_off": worst_median(OFF),
        "share_of_oracle": statistics.mean(each["share"] for each in found["share_of_oracle"].values()),
        **({"share_of_oracle_where_drafted": statistics.mean(where_drafted)} if where_drafted else {}),
        "tokens_per_step_ratio_n8": found["tokens_per_step_n8"]["words"]["value"],
        "tokens_per_step_ratio_n8_text": found["tokens_per_step_n8"]["text"]["value"],
        "vs_rejection_chain": statistics.geometric_mean(found["rejection_chain"].values()),
        "vs_ema_tiers": mean(EMA_TIERS),
        "vs_bandit": mean(BANDIT),
        "vs_uniform": mean(UNIFORM),
        **{f"vs_{name.replace(' ', '_')}": mean(name) for name in PUBLISHED},
        **{
            f"vs_transformers_{batch.replace(' ', '')}": min(each["value"] for each in methods.values())
            for batch, methods in peers.items()
        },
        "tokens_per_step_error_worst": worst_error(answers),
        "tokens_per_step_error_worst_beyond_answers": worst_error(beyond),
        "tokens_per_step_error_deviation_worst": max(deviation for by_n in deviations for deviation in by_n.values()),
        "step_time_error_worst": max(found["predictions"]["step_time_error"].values()),
    }
    return {name: round(float(value), 4) for name, value in summary.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model and few repeats, under five minutes")
    parser.add_argument("--model", choices=("tiny", "small"), help="instead of tiny (quick) or small")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes; greedy decoding is measured at the first")
    parser.add_argument("--repeats", type=int, nargs=2, metavar=("SELECTING", "JUDGING"))
    parser.add_argument("--device", default="cpu", help="of the engines; the draft is trained on the CPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the engines and peers")
    parser.add_argument("--out", type=Path, help="JSON with all figures; the plot lies beside it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if arguments.quick else FULL
    changes: dict[str, Any] = {"device": arguments.device, "dtype": arguments.dtype or usual_dtype(arguments.device)}
    changes["model"] = arguments.model or sizes.model
    if arguments.batches:
        changes |= {"batches": tuple(arguments.batches), "greedy": tuple(arguments.batches[:1])}
    if arguments.repeats:
        changes["selecting"], changes["judging"] = arguments.repeats
    found = run(replace(sizes, **changes))
    summary = summarize(found)
    name = f"generation_{arguments.device}{'_quick' if arguments.quick else ''}.json"
    out = arguments.out or RESULTS / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found | {"summary": summary}) + "\n", encoding="utf-8")
    plot(found, out.with_suffix(".png"))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
