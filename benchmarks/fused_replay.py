"""The updates of a PPO step, fused and one model after the other: python -m benchmarks.fused_replay [--pairs 10].

A run of one step, actor and critic with two pipeline stages each, saves its samples. tools.replay then trains on them
in five updates, fused and not, in turns: the weights must agree, and the seconds of all updates are compared. The first
updates of a replay include what is done once, such as the first allocations, for both alike.

Prints the ratio; the figures are saved as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.paired import ratio_interval

PPO = ("algorithm=ppo", "actor.tensor_parallel=1", "actor.pipeline_parallel=2", "speculation=off")
UPDATES = 5
SAMPLES = ("trainer.prompts_per_step=20", "trainer.samples_per_prompt=8", f"trainer.mini_batch_size={160 // UPDATES}")
LENGTHS = ("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=128")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*words: str) -> None:
    done = subprocess.run([sys.executable, *words], env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fused_replay_cpu.json"))
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"off": [], "always": []}
    with tempfile.TemporaryDirectory(prefix="benchmark.") as directory:
        out = Path(directory)
        options = (*PPO, *SAMPLES, *LENGTHS, f"trainer.max_tokens_per_microbatch={arguments.tokens}")
        once = ("trainer.steps=1", "trainer.eval_every=0", "logger.rollouts_per_step=0", "trainer.export=false")
        command("train.py", *options, *once, f"output_dir={out}", "name=run")
        model = json.loads((out / "run" / "summary.json").read_text(encoding="utf-8"))["start_model"]
        for pair in range(arguments.pairs):
            for fuse in list(seconds)[:: 1 if pair % 2 else -1]:
                place = out / f"{fuse}-{pair}"
                what = ("--step", "0", "--out", str(place), *options, f"placement.fuse={fuse}", f"model.path={model}")
                more = () if fuse == "always" else ("critic.pipeline_parallel=2",)
                command("-m", "tools.replay", str(out / "run" / "rollouts.jsonl"), *what, *more)
                found = json.loads((place / "replay.json").read_text(encoding="utf-8"))["metrics"]
                seconds[fuse].append(found["timing_s/update"] / UPDATES)
        weights = [load_file(out / f"{fuse}-0" / "model" / "model.safetensors") for fuse in seconds]
    apart = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    ratio = ratio_interval(seconds["off"], seconds["always"])
    print(f"An update: {statistics.median(seconds['off']):.3f} s one after the other, ", end="")
    print(f"{statistics.median(seconds['always']):.3f} s fused; ratio {ratio}; weights apart by at most {apart:.1g}.")
    figures = {"updates": UPDATES, "tokens": arguments.tokens, "seconds": seconds, "largest_difference": apart}
    arguments.out.write_text(json.dumps(figures | {"ratio": vars(ratio)}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
