"""This project against TRL on the built-in task: python -m benchmarks.trl [--seeds 3] [--steps 60].

For GRPO and RLOO and each seed both train from the same start model on the same prompts, with the same reward, number
of samples, optimizer and KL weight, in turns: what runs first changes from pair to pair. Both have two processes with a
thread each. TRL generates with transformers, as it does without vLLM. Then task=evaluate decodes the same 256 held-out
prompts with both models. RLOO differs in one thing: TRL's ratio is of whole sequences, ours of tokens.

Prints a table; the figures are saved as JSON. Needs TRL: pip install -e '.[trl]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.paired import ratio_interval
from benchmarks.trl_run import TIMES_FILE, TRAINERS
from rlhfspec_mega.errors import UserError

OURS, TRL = "ours", "TRL"
PROCESSES = 2
TOO_EARLY = 3  # steps in which both still warm up; their times do not count
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Trained:
    """What became of one run.

    Attributes:
        step_seconds, generation_seconds: medians over its steps.
        exact: of the held-out prompts, decoded greedily.
    """

    step_seconds: float
    generation_seconds: float
    exact: float
    prompts: int


def command(words: Sequence[str], log: Path) -> None:
    """Run it; raises UserError with the end of its output if it fails."""
    with log.open("w", encoding="utf-8") as file:
        if subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT).returncode:
            end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise UserError(f"{' '.join(words)} failed:\n{end}")


def train(*options: str) -> list[str]:
    """Command line of a run of this project."""
    return [sys.executable, "train.py", "logger.console=false", *options]


def exact_of(model: Path, seed: int, out: Path, name: str) -> tuple[float, int]:
    """Share of held-out prompts that a model answers exactly, and their number."""
    where = (f"output_dir={out}", f"name={name}", f"model.path={model}", f"seed={seed}")
    quick = ("trainer.samples_per_prompt=1", "speculation=off")
    command(train("task=evaluate", *where, *quick), out / f"{name}.log")
    found = json.loads((out / name / "evaluation.json").read_text(encoding="utf-8"))
    return found["greedy"]["exact_mean"], found["prompts"]


def between(ended: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(ended)][TOO_EARLY:]


def ours(algorithm: str, seed: int, steps: int, model: Path, out: Path) -> Trained:
    name = f"{algorithm}-{seed}"
    options = (f"algorithm={algorithm}", f"seed={seed}", f"trainer.steps={steps}", "trainer.eval_every=0")
    command(train(*options, f"output_dir={out}", f"name={name}"), out / f"{name}.log")
    started = json.loads((out / name / "summary.json").read_text(encoding="utf-8"))["start_model"]
    assert Path(started) == model, "a model of one's own has no draft"
    lines = (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "actor/loss" in row]
    generation = [row["timing_s/generate"] for row in rows][TOO_EARLY + 1 :]
    exact, prompts = exact_of(out / name / "model", seed, out, f"{name}-evaluated")
    seconds = between([row["time"] for row in rows])
    return Trained(statistics.median(seconds), statistics.median(generation), exact, prompts)


def of_trl(algorithm: str, seed: int, steps: int, model: Path, out: Path) -> Trained:
    name = f"trl-{algorithm}-{seed}"
    (out / name).mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    what = [f"--algorithm={algorithm}", f"--seed={seed}", f"--steps={steps}", f"--model={model}", f"--out={out / name}"]
    command([*launch, "-m", "benchmarks.trl_run", *what], out / f"{name}.log")
    times = json.loads((out / name / TIMES_FILE).read_text(encoding="utf-8"))
    exact, prompts = exact_of(out / name / "model", seed, out, f"{name}-evaluated")
    generation = times["generation"][TOO_EARLY + 1 :]
    return Trained(statistics.median(between(times["ended"])), statistics.median(generation), exact, prompts)


def start_model(seed: int, out: Path) -> Path:
    """The model that a run of this seed starts from; a run of one step makes it."""
    name = f"start-{seed}"
    options = (f"seed={seed}", "trainer.steps=1", "trainer.eval_every=0", "speculation=off", "trainer.export=false")
    command(train(*options, f"output_dir={out}", f"name={name}"), out / f"{name}.log")
    return Path(json.loads((out / name / "summary.json").read_text(encoding="utf-8"))["start_model"])


def compare(
    algorithm: str, seeds: Sequence[int], steps: int, starts: Mapping[int, Path], out: Path
) -> dict[str, list[Trained]]:
    """Both, for every seed."""
    found: dict[str, list[Trained]] = {OURS: [], TRL: []}
    for seed in seeds:
        turns = [(OURS, ours), (TRL, of_trl)]
        for who, run in turns if seed % 2 == 0 else reversed(turns):
            found[who].append(run(algorithm, seed, steps, starts[seed], out))
            print(f"  {algorithm} seed {seed} {who}: {found[who][-1]}", flush=True)
    return found


def pooled(runs: Sequence[Trained]) -> float:
    return sum(run.exact * run.prompts for run in runs) / sum(run.prompts for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--algorithms", nargs="+", choices=sorted(TRAINERS), default=sorted(TRAINERS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trl_cpu.json"))
    arguments = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed here: pip install -e '.[trl]'")
    if arguments.steps < TOO_EARLY + 3:
        sys.exit(f"--steps={arguments.steps} is too few: the first {TOO_EARLY + 1} do not count; use 8 or more.")
    seeds, results = range(arguments.seeds), {}
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark.") as directory:
            out = Path(directory)
            starts = {seed: start_model(seed, out) for seed in seeds}
            before = [exact_of(model, seed, out, f"before-{seed}") for seed, model in starts.items()]
            for algorithm in arguments.algorithms:
                results[algorithm] = compare(algorithm, seeds, arguments.steps, starts, out)
    except UserError as error:
        sys.exit(str(error))
    report(
        results, sum(exact * prompts for exact, prompts in before) / sum(prompts for _, prompts in before), arguments
    )


def report(results: Mapping[str, Mapping[str, Sequence[Trained]]], first: float, arguments: argparse.Namespace) -> None:
    """Print the table and write the figures."""
    print(f"Held-out exact before training: {first:.3f}.  Times: medians of runs; ratios of pairs, TRL's over ours.")
    print("algorithm  exact: ours    TRL  step s: ours    TRL  step ratio            generation ratio")
    rows = {}
    for algorithm, found in results.items():
        mine, theirs = found[OURS], found[TRL]
        steps, generation = (
            ratio_interval([getattr(one, name) for one in theirs], [getattr(one, name) for one in mine])
            for name in ("step_seconds", "generation_seconds")
        )
        middle = [statistics.median(one.step_seconds for one in runs) for runs in (mine, theirs)]
        print(
            f"{algorithm:9}  {pooled(mine):11.3f}  {pooled(theirs):5.3f}  {middle[0]:12.2f}  {middle[1]:5.2f}  "
            f"{steps!s:20}  {generation}"
        )
        rows[algorithm] = {
            "exact": {OURS: pooled(mine), TRL: pooled(theirs)},
            "step_ratio": vars(steps),
            "generation_ratio": vars(generation),
            "runs": {who: [asdict(run) for run in runs] for who, runs in found.items()},
        }
    figures = {"steps": arguments.steps, "seeds": arguments.seeds, "exact_before": first, "algorithms": rows}
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
