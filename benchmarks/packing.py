"""Update time per token, packed against padded micro-batches: python -m benchmarks.packing [--repeats 20].

The tiny model on two CPU ranks, whose optimizer steps are the same but for rounding. Lengths are the demo's (answers of
its built-in task, at the run's own prompts) and like those of reasoning (lognormal, scaled to what the model can hold).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.paired import interleaved, ratio_interval
from benchmarks.scenarios import LENGTHS
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.data.chain_sums import ChainSums, answer_text
from rlhfspec_mega.megatron.description import Learning, ParallelSizes, describe
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.objectives import supervised_objective
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.workers.model_group import ModelGroup

LAYOUTS = {"TP 2": 2, "DP 2": 1}  # tensor-parallel size of two ranks
LIMITS = {"call_timeout": 300.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 0}
SAMPLES = 128  # of a step of the demo
DEMO = load_config([])


def demo_lengths() -> list[tuple[int, int]]:
    """Tokens of prompt and response; the tokenizer's tokens are bytes."""
    chains = ChainSums.from_config(DEMO.data, DEMO.seed)
    texts = [chains.prompt_text("train", number) for number in range(DEMO.trainer.prompts_per_step)]
    members = SAMPLES // len(texts)
    return [(len(text), len(answer_text(text)) + 1) for text in texts for _ in range(members)]


def reasoning_lengths() -> list[tuple[int, int]]:
    """As in benchmarks.scenarios: a median of 26 tokens and a long tail."""
    median, sigma, scale = LENGTHS["reasoning"]
    drawn = np.random.default_rng(0).lognormal(np.log(median * scale), sigma, SAMPLES)
    return [(24, int(np.clip(length, 1, 400))) for length in drawn]


def experience(lengths: list[tuple[int, int]]) -> Experience:
    generator = np.random.default_rng(1)
    return Experience.of(*([generator.integers(0, 256, part[k]).tolist() for part in lengths] for k in (0, 1)))


@contextmanager
def trained(tensor: int, directory: Path) -> Iterator[Callable[[Batching], ModelGroup]]:
    """The model on two ranks, as groups of different batching."""
    sizes = ParallelSizes(tensor=tensor, data=2 // tensor)
    shape = model_shape(DEMO.model)
    model = describe("actor", shape, DEMO.actor, sizes, temperature=1.0, learning=Learning(DEMO.actor.optimizer, 1000))
    meet = f"file://{directory / 'meet'}"
    cluster = LocalCluster(directory / "logs", threads=1, use_gpus=False, **LIMITS)
    try:
        arguments = {"models": [model], "device": "cpu", "seed": 0}
        specs = [
            WorkerSpec(
                "rlhfspec_mega.workers.megatron.MegatronWorker",
                arguments | {"rendezvous": Rendezvous(meet, rank, 2, LIMITS["call_timeout"])},
                devices=(rank,),
            )
            for rank in range(2)
        ]
        workers = cluster.launch("actor", specs)
        cluster.wait_started()
        yield partial(ModelGroup, workers, model)
    finally:
        cluster.close()


def update(group: ModelGroup, samples: Experience, padding: list[float]) -> float:
    """Seconds of an optimizer step."""
    begin = time.perf_counter()
    metrics = group.accumulate(samples, supervised_objective, [])
    group.step()
    padding.append(metrics["padding_share"])
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/packing_cpu.json"))
    arguments = parser.parse_args()
    rows = []
    print("lengths    layout  padding: padded  packed  seconds: padded  packed  packed / padded")
    for (name, lengths), (layout, tensor) in (
        (one, other)
        for one in {"demo": demo_lengths(), "reasoning": reasoning_lengths()}.items()
        for other in LAYOUTS.items()
    ):
        samples, padding = experience(lengths), {"padded": list[float](), "packed": list[float]()}
        with tempfile.TemporaryDirectory(prefix="benchmark.") as directory, trained(tensor, Path(directory)) as group:
            most = DEMO.trainer.max_tokens_per_microbatch
            variants = {
                kind: partial(update, group(Batching(most, kind == "packed")), samples, shares)
                for kind, shares in padding.items()
            }
            times = interleaved(variants, arguments.repeats)
        ratio = ratio_interval(times["packed"], times["padded"])
        middle = {kind: float(np.median(of_kind)) for kind, of_kind in times.items()}
        print(
            f"{name:9}  {layout:6}  {padding['padded'][0]:15.3f}  {padding['packed'][0]:6.3f}  "
            f"{middle['padded']:15.3f}  {middle['packed']:6.3f}  {ratio}",
            flush=True,
        )
        rows.append({"lengths": name, "layout": layout, "tokens": int(samples.lengths.sum()), "seconds": times})
        rows[-1] |= {"padding": {kind: shares[0] for kind, shares in padding.items()}, "ratio": vars(ratio)}
    arguments.out.write_text(json.dumps({"max_tokens_per_microbatch": most, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
