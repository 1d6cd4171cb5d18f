"""This project against TRL on the built-in task: python -m benchmarks.trl [--seeds 3] [--steps 60].

For GRPO and RLOO and each seed both train from the same start model on the same prompts, with the same reward, number
of samples, optimizer and KL weight, in turns: what runs first changes from seed to seed. Both have two processes with a
thread each. TRL generates with transformers, as it does without vLLM. Ours runs as the demo does (TP 2, a draft that
learns) and like TRL (DP 2, without a draft model: it drafts from history). Then task=evaluate decodes the same 256
held-out prompts with all models. RLOO differs in one thing: TRL's ratio is of whole sequences, ours of tokens.

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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.paired import ratio_interval
from benchmarks.trl_run import TIMES_FILE, TRAINERS
from rlhfspec_mega.errors import UserError

TRL = "TRL"
OURS = {"ours, as the demo": (), "ours, DP 2": ("actor.tensor_parallel=1", "speculation.sources=[history]")}
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


def ours(algorithm: str, seed: int, steps: int, model: Path, out: Path, more: Sequence[str]) -> Trained:
    name = f"{algorithm}-{seed}-{len(more)}"
    options = (f"algorithm={algorithm}", f"seed={seed}", f"trainer.steps={steps}", "trainer.eval_every=0", *more)
    options = ("actor.optimizer.schedule=constant", *options)  # as TRL's run has it
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
    """All, for every seed."""
    contenders = {TRL: of_trl} | {name: partial(ours, more=more) for name, more in OURS.items()}
    found: dict[str, list[Trained]] = {name: [] for name in contenders}
    for seed in seeds:
        turns = list(contenders.items())
        for who, run in turns[seed % len(turns) :] + turns[: seed % len(turns)]:
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
    print("algorithm  who                    exact  step s  TRL's step / it        TRL's generation / its")
    rows: dict[str, Any] = {}
    for algorithm, found in results.items():
        rows[algorithm] = {}
        for who, runs in found.items():
            ratios = {
                name: ratio_interval([getattr(one, name) for one in found[TRL]], [getattr(one, name) for one in runs])
                for name in ("step_seconds", "generation_seconds")
            }
            middle = statistics.median(one.step_seconds for one in runs)
            print(
                f"{algorithm:9}  {who:21}  {pooled(runs):.3f}  {middle:6.2f}",
                *(f" {one!s:20}" for one in ratios.values()),
            )
            rows[algorithm][who] = {"exact": pooled(runs), "runs": [asdict(run) for run in runs]}
            rows[algorithm][who] |= {f"trl_over_it_{name}": vars(one) for name, one in ratios.items()}
    figures = {"steps": arguments.steps, "seeds": arguments.seeds, "exact_before": first, "algorithms": rows}
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
