"""Tokens per step of three verification rules by number of draft tokens and draft depth.

    python -m benchmarks.acceptance --quick

The same target, EAGLE-3 draft and sequences for all: word problems (the built-in chain sums) and high-entropy text.
Tokens per step = accepted + 1; intervals are bootstrapped over sequences. Prints a table and writes JSON and a plot.
The last line printed is one JSON object, in which tokens_per_step_ratio_n8 is shared noise over top-k trees with
target-only verification at 8 draft tokens, depth 8 and temperature 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.drafts import draft_of
from benchmarks.paired import Interval, quotient_of_ratios, ratio_of_sums
from benchmarks.samples import load_target, word_prompts, words_target
from benchmarks.text_target import STEPS, text_prompts, text_target
from benchmarks.tokens_per_step import CHAIN, DEPTHS, KEPT, RULES, SHARED, TOP_K, Setting, Task, measure

TEMPERATURES = (0.0, 0.6, 1.0)
TEXT_PROMPT = 64  # tokens
HEADLINE = 8  # draft tokens
RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]
Steps = dict[Setting, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        model: of the word problems.
        learnt, judged: sequences per temperature.
        word_tokens, text_tokens: longest response; that of text is forced.
        text_steps: training of the text target.
        draft_sequences, draft_steps: own samples that a draft learns from, and steps of its training.
    """

    model: str
    learnt: int
    judged: int
    word_tokens: int
    text_tokens: int
    text_steps: int
    draft_sequences: int
    draft_steps: int


QUICK = Sizes("tiny", 12, 16, 120, 64, 80, 192, 250)
FULL = Sizes("small", 48, 64, 320, 128, STEPS, 768, 1500)


def tasks(sizes: Sizes) -> Iterator[Task]:
    """Word problems, then text; models and drafts are made on first use."""
    count = sizes.learnt + sizes.judged
    words = load_target(words_target(sizes.model))
    training = word_prompts(sizes.draft_sequences, words.tokenizer, "train")
    draft = draft_of(words, training, tokens=sizes.word_tokens, steps=sizes.draft_steps, forced=False)
    yield Task("words", words, draft, word_prompts(count, words.tokenizer, "eval"), sizes.word_tokens, forced=False)
    text = load_target(text_target(sizes.text_steps))
    bos = text.tokenizer.bos_token_id
    training = text_prompts("train", sizes.draft_sequences, TEXT_PROMPT, bos)
    draft = draft_of(text, training, tokens=sizes.text_tokens, steps=sizes.draft_steps, forced=True)
    yield Task("text", text, draft, text_prompts("eval", count, TEXT_PROMPT, bos), sizes.text_tokens, forced=True)


def rows_of(task: Task, temperature: float, tokens: Tensor, steps: Steps) -> list[Row]:
    """One line per setting: tokens per step with its interval."""
    rows = []
    for (rule, depth, kept), taken in steps.items():
        found = ratio_of_sums(tokens, taken)
        setting = {"task": task.name, "temperature": temperature, "rule": rule, "depth": depth, "draft_tokens": kept}
        rows.append(setting | {"tokens_per_step": found.value, "low": found.low, "high": found.high})
    return rows


def ratio(tokens: Tensor, steps: Steps, rival: str, depth: int) -> Interval:
    """Tokens per step of shared noise over the rival's, at the same number of draft tokens and depth."""
    return quotient_of_ratios((tokens, steps[SHARED, depth, HEADLINE]), (tokens, steps[rival, depth, HEADLINE]))


def print_table(rows: list[Row]) -> None:
    """Tokens per step by task, temperature, depth and rule, one column per number of draft tokens."""
    values = {(row["task"], row["temperature"], row["depth"], row["rule"], row["draft_tokens"]): row for row in rows}
    print(f"{'task':<6} {'T':>3} {'depth':>5}  {'rule':<18}" + "".join(f"{f'n={kept}':>16}" for kept in KEPT))
    for task, temperature, depth in dict.fromkeys(key[:3] for key in values):
        for rule in RULES:
            cells = [values[task, temperature, depth, rule, kept] for kept in KEPT]
            line = "".join(f"{c['tokens_per_step']:>6.2f} {c['low']:>4.2f}-{c['high']:<4.2f}" for c in cells)
            print(f"{task:<6} {temperature:>3} {depth:>5}  {rule:<18}{line}")


def plot(rows: list[Row], path: Path) -> None:
    """Tokens per step over draft tokens, a panel for each task and temperature; dashed at the smaller depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row["task"], row["temperature"]) for row in rows))
    columns = len(TEMPERATURES)
    figure, axes = pyplot.subplots(
        len(panels) // columns, columns, figsize=(12, 7), sharex=True, sharey="row", constrained_layout=True
    )
    for axis, (task, temperature) in zip(axes.flat, panels, strict=True):
        for number, rule in enumerate(RULES):
            for depth, style in zip(DEPTHS, ("--", "-"), strict=True):
                line = [r for r in rows if (r["task"], r["temperature"]) == (task, temperature)]
                line = [r for r in line if (r["rule"], r["depth"]) == (rule, depth)]
                counts = [r["draft_tokens"] for r in line]
                label = f"{rule}, depth {depth}"
                axis.plot(counts, [r["tokens_per_step"] for r in line], style, color=f"C{number}", label=label)
                axis.fill_between(
                    counts, [r["low"] for r in line], [r["high"] for r in line], color=f"C{number}", alpha=0.15
                )
        axis.set_xscale("log", base=2)
        axis.set_title(f"{task}, T = {temperature:g}")
        axis.set_xlabel("draft tokens n")
    axes.flat[0].set_ylabel("tokens per step")
    axes.flat[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def run(sizes: Sizes) -> dict[str, Any]:
    """Rows of all tasks and temperatures, the headline ratios with intervals, and the conditions."""
    rows: list[Row] = []
    ratios: dict[str, Any] = {}
    targets = {}
    for task in tasks(sizes):
        for temperature in TEMPERATURES:
            started = time.monotonic()
            tokens, steps = measure(task, temperature, sizes.learnt)
            rows += rows_of(task, temperature, tokens, steps)
            print(
                f"{task.name} T={temperature}: {int(tokens.sum())} tokens, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            for depth in DEPTHS:
                for name, rival in (("top_k", TOP_K), ("rejection_chain", CHAIN)):
                    found = ratio(tokens, steps, rival, depth)
                    key = f"{task.name} T={temperature} depth={depth} vs {name}"
                    ratios[key] = {"value": found.value, "low": found.low, "high": found.high}
        targets[task.name] = {
            "parameters": task.target.shape.parameters,
            "draft_parameters": task.draft.shape.parameters,
        }
    conditions = {"sizes": asdict(sizes), "targets": targets, "cpu": platform.processor() or platform.machine()}
    return {"rows": rows, "ratios_n8": ratios, "conditions": conditions | {"cores": os.cpu_count()}}


def summarize(found: dict[str, Any]) -> dict[str, float]:
    """The headline: shared noise over the rivals at 8 draft tokens and temperature 1."""
    ratios, deepest = found["ratios_n8"], max(DEPTHS)
    summary = {}
    for task in found["conditions"]["targets"]:
        for depth in DEPTHS:
            suffix = task if depth == deepest else f"{task}_depth{depth}"
            key = f"{task} T=1.0 depth={depth} vs"
            summary[f"tokens_per_step_ratio_n8_{suffix}"] = round(ratios[f"{key} top_k"]["value"], 4)
            summary[f"vs_rejection_chain_n8_{suffix}"] = round(ratios[f"{key} rejection_chain"]["value"], 4)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sequences, under three minutes on an idle core")
    parser.add_argument("--model", help="built-in model of the word problems: tiny (default of --quick) or small")
    parser.add_argument("--out", type=Path, help="JSON with all figures; the plot lies beside it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if arguments.quick else FULL
    found = run(replace(sizes, model=arguments.model or sizes.model))
    out = arguments.out or RESULTS / f"acceptance_cpu{'_quick' if arguments.quick else ''}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(found["rows"], out.with_suffix(".png"))
    print_table(found["rows"])
    print(json.dumps(summarize(found)))


if __name__ == "__main__":
    main()
