"""Two versions of this project against each other: python -m benchmarks.worktrees BEFORE AFTER [--pairs 20].

BEFORE and AFTER are checkouts (`git worktree add ../before COMMIT`). Each pair runs both, in turns first, with the
interpreter and the models of this environment: a short demo run, and the torch engine at several batches. Ratios
are of speeds, after over before: above 1 the newer version is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.paired import median_interval
from rlhfspec_mega.errors import UserError

STEPS, BATCHES, TURNS = 7, (1, 8, 32), 3
# What both versions understand; the first step, which warms up, does not count.
DEMO = ["trainer.eval_every=0", f"trainer.steps={STEPS}", "trainer.export=false", "logger.tensorboard=false"]
ENGINE = """
import json, sys, time
import torch
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import GenerationRequest

torch.set_num_threads(1)
shape = model_shape(load_config([]).model)
tensors = mapping_for(shape.architecture).hf_tensors(shape)
found = {}
for batch in json.loads(sys.argv[1]):
    engine = TorchEngine(
        shape, slots=batch, max_positions=200, prefill_chunk=64, dtype=torch.float32, device="cpu"
    )
    engine.begin_update(0, tensors)
    engine.update_weights([(n, 0, t.flatten()) for n, t in initial_tensors(tensors, shape.num_layers, seed=0)])
    engine.end_update(0)
    best = 0.0
    for repeat in range(4):
        engine.submit([GenerationRequest(f"{repeat}.{i}", "g", (1, 2), i, 120) for i in range(batch)])
        begun, done = time.perf_counter(), []
        with torch.inference_mode():
            while len(done) < batch:
                done += engine.poll(1.0)
        best = max(best, sum(len(one.tokens) for one in done) / (time.perf_counter() - begun))
    found[f"engine tokens/s, batch {batch}"] = best
print(json.dumps(found))
"""


def demo_speeds(worktree: Path) -> dict[str, float]:
    """Of one version, once: steps and rollouts per second."""
    with tempfile.TemporaryDirectory(prefix="benchmark.") as output:
        _run([sys.executable, "train.py", f"output_dir={output}", "name=demo", *DEMO], worktree)
        lines = (Path(output) / "demo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    times = [row["time"] for row in rows if "time" in row][:STEPS]
    generate = ("timing_s/generate", "seconds/generate")  # today's name, and that of earlier versions
    rollouts = [row[name] for row in rows[1:] for name in generate if name in row]
    return {
        "demo steps/s": (len(times) - 1) / (times[-1] - times[0]),
        "rollouts/s": 1.0 / statistics.mean(rollouts),
    }


def engine_speeds(worktree: Path) -> dict[str, float]:
    """Of one version, once: tokens per second at every batch."""
    found: dict[str, float] = json.loads(
        _run([sys.executable, "-c", ENGINE, json.dumps(BATCHES)], worktree).splitlines()[-1]
    )
    return found


def pair_of_speeds(versions: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Of both versions. Engines decode for seconds, so each takes several turns, of which the best counts."""
    found = {name: demo_speeds(worktree) for name, worktree in versions.items()}
    for _ in range(TURNS):
        for name, worktree in versions.items():
            turn = engine_speeds(worktree)
            found[name] |= {what: max(speed, found[name].get(what, 0.0)) for what, speed in turn.items()}
    return found


def _run(command: list[str], worktree: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(worktree)}
    ended = subprocess.run(command, cwd=worktree, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"{worktree} did not run {' '.join(command[1:3])}: {ended.stderr.strip().splitlines()[-1]}")
    return ended.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/worktrees_cpu.json"))
    arguments = parser.parse_args()
    versions = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    pairs: list[dict[str, dict[str, float]]] = []
    for number in range(arguments.pairs):
        order = list(versions) if number % 2 == 0 else list(reversed(versions))
        found = pair_of_speeds({name: versions[name] for name in order})
        pairs.append(found)
        ratios = {what: found["after"][what] / found["before"][what] for what in found["after"]}
        print(f"pair {number + 1}: " + ", ".join(f"{what} {ratio:.3f}" for what, ratio in ratios.items()), flush=True)
        arguments.out.write_text(json.dumps({"pairs": pairs}, indent=1) + "\n", encoding="utf-8")
    print(f"{'after / before':24} median [interval, coverage]")
    for what in pairs[0]["after"]:
        interval = median_interval([pair["after"][what] / pair["before"][what] for pair in pairs])
        print(f"{what:24} {interval}, {interval.coverage:.3f}")


if __name__ == "__main__":
    main()
