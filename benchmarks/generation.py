"""Speculative generation: tokens per second of every drafting policy, against plain decoding and outside peers.

    python -m benchmarks.generation [--quick] [--model tiny|small|deep] [--history] [--device cuda --dtype bfloat16]

One process, one thread, bfloat16 where the device computes in it (AMX or AVX512-BF16 on a CPU), else float32. All
policies decode the same samples with forced lengths, interleaved. Ours has the shipped setting; those of each other
family are selected on the first repeats and judged on later ones, with other prompts and noise: the best of many noisy
settings looks better on the repeats it was chosen on than it is. Ratios are times of a baseline over those of the
adaptive policy: above 1, adaptive is quicker. Rows are saved as they end; an interrupted run, started again, goes on.
Prints tables; the last line is one JSON object of ratios.
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
from pathlib import Path
from typing import Any

import torch

from benchmarks import history as sources_bench
from benchmarks.ceilings import ceilings
from benchmarks.contenders import (
    ADAPTIVE,
    FAMILIES,
    FIXED,
    OFF,
    PUBLISHED,
    Contender,
    contenders,
)
from benchmarks.deep_target import deep_draft_shape
from benchmarks.drafts import own_draft
from benchmarks.generation_peers import against_peers, against_rejection, rules_on_text, rules_on_words
from benchmarks.generation_plot import plot
from benchmarks.generation_rows import Row, Rows, measure, print_row, ratios, regret
from benchmarks.hindsight import Hindsight, Predicted, share_of_oracle
from benchmarks.samples import Target, load_target, word_prompts, words_target
from benchmarks.scenarios import BATCHES, LENGTHS, LONGEST, Bench, Scenario, batch_scenario, decay_scenario
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.hardware import cpu_has_fast_bf16
from rlhfspec_mega.models.host_cpu import has_amx
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.strategy import Fixed

RESULTS = Path(__file__).parent / "results"
DRAFT_TOKENS = 320  # of the longest sample that the draft learns from
# Predictions are learnt from, and judged by, so many tokens at least: of one sample a step gains 4, give or take 2.
TAUGHT_TOKENS, PREDICTED_TOKENS = 512, 1536
FIXED_NAME = {FIXED: "best_fixed"}
CHECKED = (1, 2, 4, 8, 16, 32)  # draft tokens at which predicted tokens per step are compared with realised ones


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        batches: of the fixed batches at T = 1; `greedy`: at T = 0.
        tokens: of each sample of a fixed batch.
        samples: of a decay.
        selecting, judging: repeats.
        history: whether all policies draft from history, too.
        taught, predicted: runs, each of another prompt, that predictions are learnt from, and judged by, at least: what
            is drafted for one prompt's samples is accepted more often than for another's.
        draft_samples, draft_steps: what the draft learns from, and steps of its training.
        draft_ffn: width of its feed-forward network; None: the target's. A draft that is trained on keeps its own.
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
    draft_ffn: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    history: bool = False


QUICK = Sizes("tiny", (1, 8, 32), (1,), 32, 16, 2, 6, 2, 5, 192, 300)
FULL = Sizes("small", BATCHES, (), 32, 32, 2, 20, 6, 16, 8192, 5000, 384)
DEEP = replace(FULL, model="deep", draft_samples=768, draft_steps=800)
TINY = replace(FULL, model="tiny", draft_samples=192, draft_steps=300, draft_ffn=None)
BY_MODEL = {"tiny": TINY, "small": FULL, "deep": DEEP}


def usual_dtype(device: str) -> str:
    """What such a device is used with."""
    return "bfloat16" if device != "cpu" or cpu_has_fast_bf16() else "float32"


def scenarios(sizes: Sizes) -> list[Scenario]:
    found = [batch_scenario(batch, sizes.tokens, 1.0) for batch in sizes.batches]
    found += [batch_scenario(batch, sizes.tokens, 0.0) for batch in sizes.greedy]
    return found + [decay_scenario(name, sizes.samples) for name in ("chat", "reasoning")]


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


def words_draft(target: Target, sizes: Sizes) -> Path:
    """Directory of the draft of a target; that of "deep" is the small target's, trained on."""
    training = word_prompts(sizes.draft_samples, target.tokenizer, "train")
    start = None
    if sizes.model == "deep":
        small = words_draft(load_target(words_target(FULL.model)), FULL)
        start = deep_draft_shape(small, target.shape), small
    return own_draft(
        target,
        training,
        tokens=DRAFT_TOKENS,
        steps=sizes.draft_steps,
        forced=False,
        ffn_size=sizes.draft_ffn,
        start=start,
    )


def prepare(sizes: Sizes) -> tuple[Bench, Target, Path]:
    """The engines; models and drafts are made on first use."""
    target = load_target(words_target(sizes.model))
    draft = words_draft(target, sizes)
    prompts = word_prompts(256, target.tokenizer, "eval")
    return Bench(target, draft, prompts, sizes.device, sizes.dtype, sizes.history), target, draft


def measure_rows(bench: Bench, sizes: Sizes, rows: Rows) -> None:
    """The rows that are not there yet."""
    started, all_of = time.monotonic(), contenders(quick=sizes.model == "tiny")
    for scenario in scenarios(sizes):
        row = rows.row(scenario)
        if row is None:
            row = measure(bench, scenario, (sizes.selecting, sizes.judging), all_of)
            rows.add(row)
        print(f"{scenario.name}: {time.monotonic() - started:.0f} s", flush=True)
        print_row(row)


def studies(bench: Bench, target: Target, draft: Path, sizes: Sizes, rows: Rows) -> dict[str, Any]:
    """What is measured beside the rows."""
    adaptive = next(c for c in contenders(quick=sizes.model == "tiny") if c.family == ADAPTIVE)
    decays = [s for s in scenarios(sizes) if "decay" in s.name]
    sampled = [s for s in scenarios(sizes) if s.temperature == 1]
    shares = {s.name: judge_choices(bench, s, adaptive, 99) for s in sampled}
    judged = [batch_scenario(batch, length * sizes.tokens, 1.0) for batch in (1, 8) for length in (1, 4)]
    predictions = judge_predictions(bench, judged, sizes)
    words = rules_on_words(target, draft, word_prompts(112, target.tokenizer, "eval"), sizes.tokens)
    text = rules_on_text(quick=sizes.model == "tiny")
    peers = sizes.device == "cpu"  # where they run
    return {
        "share_of_oracle": shares,
        "predictions": predictions,
        "live": {s.name: live_samples(bench, s, adaptive) for s in decays},
        "peers": against_peers(bench, target, adaptive, sizes.tokens, sizes.judging) if peers else {},
        "rejection_chain": against_rejection(bench, rows.found, words),
        "ceilings": ceilings(bench.cost_model(), words, sampled, bench.prompt_length),
        "tokens_per_step_n8": {"words": words.over_top_k(), "text": text.over_top_k()},
    }


def sources(target: Target, draft: Path, sizes: Sizes) -> dict[str, Any]:
    """Rollouts of a run with each source of drafts: see benchmarks.history."""
    bench = sources_bench.Bench(load_config([]), target, draft, sizes.dtype)
    return {str(batch): sources_bench.measure(bench, batch, sessions=2, steps=10) for batch in (8, 32)}


def conditions(sizes: Sizes) -> dict[str, Any]:
    return {
        "sizes": asdict(sizes),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": has_amx(),
        "lengths": {name: dict(zip(("median", "sigma", "scale"), v, strict=True)) for name, v in LENGTHS.items()},
        "longest": LONGEST,
        "contenders": [contender.name for contender in contenders(quick=sizes.model == "tiny")],
        "order": "drawn for each repeat",
    }


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The headline ratios of the rows.

    `worst_vs_*` are the least upper ends of any row's interval, `worst_median_vs_*` the least medians; rivals are all
    but off. `regret` is the mean over rows.
    """
    over = {row["scenario"]["name"]: ratios(row) for row in rows}
    families = [family for family in FAMILIES if family != ADAPTIVE]
    rivals = [*families[1:], *PUBLISHED]
    found = {f"worst_vs_{FIXED_NAME.get(f, f)}": min(each[f].high for each in over.values()) for f in families}
    found |= {f"worst_median_vs_{FIXED_NAME.get(f, f)}": min(each[f].value for each in over.values()) for f in families}
    for rival in [*families, *PUBLISHED]:
        mean = statistics.geometric_mean(each[rival].value for each in over.values())
        found[f"vs_{FIXED_NAME.get(rival, rival.replace(' ', '_'))}"] = mean
    found["worst_vs_rivals"] = min(each[rival].high for each in over.values() for rival in rivals)
    found["regret"] = statistics.mean(regret(row) for row in rows)
    found |= {f"speedup_{name.replace(' T=1', '').replace(' ', '_')}": each[OFF].value for name, each in over.items()}
    return found


def summarize_studies(found: dict[str, Any], tokens: int) -> dict[str, float]:
    """The headline figures of what was measured beside the rows; forced lengths of `tokens` lie within answers."""
    errors = found["predictions"]["tokens_error_by_n"]
    answers = [by_n for name, by_n in errors.items() if name.endswith(f", {tokens} tokens")]
    beyond = [by_n for name, by_n in errors.items() if not name.endswith(f", {tokens} tokens")]

    def worst_error(found_errors: Sequence[dict[int, float]]) -> float:
        return max(abs(error) for by_n in found_errors for error in by_n.values())

    deviations = found["predictions"]["tokens_error_deviation_by_n"].values()
    where_drafted = [each["share_where_drafted"] for each in found["share_of_oracle"].values()]
    where_drafted = [share for share in where_drafted if share is not None]
    return {
        "share_of_oracle": statistics.mean(each["share"] for each in found["share_of_oracle"].values()),
        **({"share_of_oracle_where_drafted": statistics.mean(where_drafted)} if where_drafted else {}),
        "tokens_per_step_ratio_n8": found["tokens_per_step_n8"]["words"]["value"],
        "tokens_per_step_ratio_n8_text": found["tokens_per_step_n8"]["text"]["value"],
        "vs_rejection_chain": statistics.geometric_mean(found["rejection_chain"].values()),
        **{
            f"vs_transformers_{batch.replace(' ', '')}": min(each["value"] for each in methods.values())
            for batch, methods in found["peers"].items()
        },
        "tokens_per_step_error_worst": worst_error(answers),
        "tokens_per_step_error_worst_beyond_answers": worst_error(beyond),
        "tokens_per_step_error_deviation_worst": max(deviation for by_n in deviations for deviation in by_n.values()),
        "step_time_error_worst": max(found["predictions"]["step_time_error"].values()),
    }


def summarize_sources(found: dict[str, Any]) -> dict[str, float]:
    """History alone over plain steps, and both sources over the better one: geometric means over batch sizes."""
    alone = [row[sources_bench.HISTORY][0] for row in found.values()]
    both = [
        row[sources_bench.BOTH][0] / max(row[sources_bench.HISTORY][0], row[sources_bench.DRAFT][0])
        for row in found.values()
    ]
    return {"history_alone": statistics.geometric_mean(alone), "both_sources": statistics.geometric_mean(both)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model and few repeats, under five minutes")
    parser.add_argument("--model", choices=tuple(BY_MODEL), help="instead of tiny (quick) or small")
    parser.add_argument("--history", action="store_true", help="all policies draft from history, too")
    parser.add_argument("--rows-only", action="store_true", help="leave out what is measured beside the rows")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes")
    parser.add_argument("--repeats", type=int, nargs=2, metavar=("SELECTING", "JUDGING"))
    parser.add_argument("--device", default="cpu", help="of the engines; the draft is trained on the CPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the engines and peers")
    parser.add_argument("--out", type=Path, help="JSON with all figures; rows and plot lie beside it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if given.quick else BY_MODEL[given.model or "small"]
    changes: dict[str, Any] = {"device": given.device, "dtype": given.dtype or usual_dtype(given.device)}
    changes |= {"history": given.history, "model": given.model or sizes.model}
    if given.batches:
        changes["batches"] = tuple(given.batches)
    if given.repeats:
        changes["selecting"], changes["judging"] = given.repeats
        if min(given.repeats) < 1 or given.repeats[1] < 2:
            parser.error("--repeats needs at least 1 to select by and 2 to judge by")
    sizes = replace(sizes, **changes)
    kind = f"{sizes.model}_{'history_' if sizes.history else ''}{'quick_' if given.quick else ''}{given.device}"
    out = given.out or RESULTS / f"generation_{kind}.json"
    rows = Rows(out.with_suffix(".rows.jsonl"), conditions(sizes))
    bench, target, draft = prepare(sizes)
    profiled = [batch for batch in sizes.batches if batch > bench.compiled_rows] if sizes.device == "cpu" else []
    shares = {batch: bench.matrix_share(batch) for batch in profiled}
    print("matrix products' share of a plain step:", ", ".join(f"{b}: {share:.2f}" for b, share in shares.items()))
    measure_rows(bench, sizes, rows)
    summary = summarize(rows.found) | {f"matrix_share_{batch}": share for batch, share in shares.items()}
    found: dict[str, Any] = {"conditions": conditions(sizes), "scenarios": rows.found}
    if not given.rows_only:
        found |= studies(bench, target, draft, sizes, rows)
        summary |= summarize_studies(found, sizes.tokens)
        if not given.quick and sizes.device == "cpu":
            found["sources"] = sources(target, draft, sizes)
            summary |= summarize_sources(found["sources"])
        plot(found, out.with_suffix(".png"))
    summary = {name: round(float(value), 4) for name, value in summary.items()}
    out.write_text(json.dumps(found | {"summary": summary}) + "\n", encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
