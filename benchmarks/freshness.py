"""What keeps a draft fresh: tokens per step over the demo with the draft's refresh on and off.

    python -m benchmarks.freshness [--steps 60] [--seeds 1]

The policy moves away from what the draft imitates, and a refresh follows it. Every variant is a whole run of train.py
(the demo's configuration, `trainer.eval_every=0`), one after the other, under speculation=fixed: the same number of
draft tokens in every step, so that only the draft changes what a step yields. The samples of both are the same, as no
draft changes a token. Prints tokens per step of each fifth of the run; the last line is one JSON object: last fifth
over first fifth, with the refresh and without, and in the last fifth the one over the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlhfspec_mega.observe.figures import drafting_figures

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
PARTS = 5
FIXED = "speculation=fixed"
VARIANTS: Mapping[str, tuple[str, ...]] = {"refreshed": (FIXED,), "left alone": (FIXED, "speculation.refresh_every=0")}


def run(output: Path, name: str, steps: int, seed: int, options: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of the training steps of one run."""
    command = [sys.executable, "train.py", f"name={name}", f"output_dir={output}", f"trainer.steps={steps}"]
    command += [f"seed={seed}", "trainer.eval_every=0", "trainer.export=false", "logger.tensorboard=false", *options]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    lines = (output / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "actor/loss" in row]


def by_fifth(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Tokens per step of each fifth of a run."""
    edges = [len(rows) * part // PARTS for part in range(PARTS + 1)]
    return [drafting_figures(rows[first:last])["tokens_per_step"] for first, last in pairwise(edges)]


def measure(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Both variants for every seed."""
    found = []
    with tempfile.TemporaryDirectory(prefix="freshness.") as directory:
        for seed in range(seeds):
            for variant, options in VARIANTS.items():
                started = time.monotonic()
                rows = run(Path(directory), f"{variant.split()[0]}-{seed}", steps, seed, options)
                fifths = by_fifth(rows)
                kept = [row["draft/refresh_kept"] for row in rows if "draft/refresh_kept" in row]
                seconds = time.monotonic() - started
                found.append({"variant": variant, "seed": seed, "tokens_per_step": fifths, "kept": kept})
                figures = "  ".join(f"{value:.3f}" for value in fifths)
                kept_of = f"{sum(kept):.0f} of {len(kept)} refreshes kept, " if kept else ""
                print(f"seed {seed}  {variant:<10}  {figures}  {kept_of}{seconds:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "freshness_cpu.json", help="JSON with all figures")
    arguments = parser.parse_args()
    found = measure(arguments.steps, arguments.seeds)
    summary = {}
    for variant in VARIANTS:
        shares = [e["tokens_per_step"][-1] / e["tokens_per_step"][0] for e in found if e["variant"] == variant]
        summary[f"last_over_first_{variant.replace(' ', '_')}"] = round(sum(shares) / len(shares), 4)
    last = {variant: [e["tokens_per_step"][-1] for e in found if e["variant"] == variant] for variant in VARIANTS}
    gains = [new / old for new, old in zip(last["refreshed"], last["left alone"], strict=True)]
    summary["last_fifth_refreshed_over_left_alone"] = round(sum(gains) / len(gains), 4)
    conditions = {"steps": arguments.steps, "cores": os.cpu_count(), "model": "the default of train.py"}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"runs": found, "conditions": conditions, "summary": summary}) + "\n", "utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
