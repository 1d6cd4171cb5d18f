"""What the driver does between finished samples and an update, and how long it takes, by how samples are kept.

    python -m benchmarks.driver --out benchmarks/results/driver_cpu.json

Samples of equal length are made up; then they go through the ledger, get advantages (GRPO), are packed, and are handed
to real processes, each standing for eight ranks of TP 4 x PP 2 x DP 8, that check what came by checksums.
`arrays` is the product's way. `lists` keeps Python lists, pads micro-batches on the driver and pickles them once for
every rank, as was done before; it gets a tenth of the samples. Each repeat is a fresh process: its peak memory counts.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.algorithms.group_relative import GroupRelative
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.megatron.description import ParallelRanks
from rlhfspec_mega.rl.experience import Experience, starts
from rlhfspec_mega.rl.microbatch import Shard
from rlhfspec_mega.rl.packing import Batching, micro_batches
from rlhfspec_mega.types import Prompt, Sample, SampleState

SAMPLES, LENGTH, PROMPT, MEMBERS, BUDGET = 16384, 4096, 256, 16, 16384
TENSOR, PIPELINE, DATA, NODES = 4, 2, 8, 8
RANKS = [  # as Megatron numbers them
    ParallelRanks(tp, pp, dp) for pp in range(PIPELINE) for dp in range(DATA) for tp in range(TENSOR)
]
EACH = len(RANKS) // NODES
OF_NODE = [sorted({rank.dp for rank in RANKS[first : first + EACH]}) for first in range(0, len(RANKS), EACH)]
COLUMNS = ("engine_logprobs", "old_logprobs", "reference_logprobs")
VARIANTS = {"arrays": 1, "lists": 10}  # and the part of the samples that each gets


class Node:
    """A process that stands for the ranks of a node."""

    def checksum(self, shards: Sequence[Shard]) -> list[int]:
        """Of what each shard holds."""
        return [_of_arrays(shard.samples) for shard in shards]

    def checksum_of_batches(self, ranks: Sequence[bytes]) -> list[int]:
        """Of what each rank was sent, pickled."""
        return [_of_tensors(pickle.loads(rank)) for rank in ranks]


def _of_arrays(samples: Experience) -> int:
    total = zlib.adler32(samples.tokens.data)
    for name in sorted(samples.columns):
        total = zlib.adler32(samples.columns[name].data, total)
    return total


def _of_tensors(batches: Iterable[dict[str, torch.Tensor]]) -> int:
    total = 1
    for batch in batches:
        for name in sorted(batch):
            total = zlib.adler32(batch[name].numpy().data, total)
    return total


def through_the_ledger(count: int) -> None:
    """Every sample from its prompt to its update."""
    prompts = [Prompt(index, "", "", ()) for index in range(count // MEMBERS)]
    samples = [Sample(f"0.{one.index}.{member}", 0, one, member) for one in prompts for member in range(MEMBERS)]
    ledger, ids = Ledger(), [sample.sample_id for sample in samples]
    ledger.open(samples, Purpose.TRAIN)
    for number, name in enumerate(ids):
        ledger.custody.give(number % 16, [name])
    for number, name in enumerate(ids):
        ledger.custody.finished(number % 16, name)
    for state in (SampleState.SCORED, SampleState.TRAINED):
        ledger.advance(ids, state)
    ledger.settle(0, Purpose.TRAIN)


def made_up(count: int) -> Experience:
    """Scored samples as arrays."""
    generator, responses = np.random.default_rng(0), count * (LENGTH - PROMPT)
    made = Experience(
        generator.integers(0, 32000, count * LENGTH, np.int32),
        starts(np.full(count, LENGTH)),
        np.full(count, PROMPT, np.int64),
    )
    made.per_sample = {"rewards": generator.random(count), "truncated": np.zeros(count, np.bool_)}
    made.columns = {name: -generator.random(responses, np.float32) for name in COLUMNS}
    return made


def plan_of(lengths: Sequence[int]) -> list[list[list[int]]]:
    return micro_batches(lengths, Batching(BUDGET), ranks=DATA)


def arrays(count: int, nodes: Any) -> float:
    """Seconds of the product's way."""
    experience = made_up(count)
    algorithm = make_algorithm(AlgorithmConfig(), MEMBERS, count)
    started = time.perf_counter()
    through_the_ledger(count)
    algorithm.add_advantages(experience, torch.Generator())
    experience.columns["weights"] = experience.spread(np.ones(count))
    shards = [Shard.cut(experience, plan, packed=True) for plan in plan_of(experience.lengths.tolist())]
    parts = [[shards[dp] for dp in of_node] for of_node in OF_NODE]
    found = nodes.scatter("checksum", [(part,) for part in parts], "hand over")
    seconds = time.perf_counter() - started
    assert found == [[_of_arrays(shard.samples) for shard in part] for part in parts]
    return seconds


def lists(count: int, nodes: Any) -> float:
    """Seconds with lists of Python numbers."""
    experience = made_up(count)
    tokens = experience.tokens.reshape(count, LENGTH).tolist()
    columns = {name: column.reshape(count, -1).tolist() for name, column in experience.columns.items()}
    rewards = torch.from_numpy(experience.per_sample["rewards"]).view(-1, MEMBERS)
    algorithm = make_algorithm(AlgorithmConfig(), MEMBERS, count)
    started = time.perf_counter()
    through_the_ledger(count)
    assert isinstance(algorithm, GroupRelative)
    advantages = algorithm.advantages(rewards).flatten().tolist()
    shards = [
        [_padded(tokens, columns, advantages, rows) for rows in plan] for plan in plan_of([len(one) for one in tokens])
    ]
    sent = [[pickle.dumps(shards[rank.dp]) for rank in RANKS[node * EACH : (node + 1) * EACH]] for node in range(NODES)]
    found = nodes.scatter("checksum_of_batches", [(part,) for part in sent], "hand over")
    seconds = time.perf_counter() - started
    each_shard = [_of_tensors(shard) for shard in shards]
    assert found == [[each_shard[rank.dp] for rank in RANKS[node * EACH : (node + 1) * EACH]] for node in range(NODES)]
    return seconds


def _padded(
    tokens: list[list[int]], columns: dict[str, list[list[float]]], advantages: list[float], rows: Sequence[int]
) -> dict[str, torch.Tensor]:
    made = {name: torch.zeros(len(rows), LENGTH - 1) for name in (*columns, "advantages", "weights")}
    inputs = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
    for row, index in enumerate(rows):
        inputs[row] = torch.tensor(tokens[index])
        span = slice(PROMPT - 1, LENGTH - 1)
        for name, column in columns.items():
            made[name][row, span] = torch.tensor(column[index])
        made["advantages"][row, span], made["weights"][row, span] = advantages[index], 1.0
    return made | {"inputs": inputs}


def one_run(variant: str, count: int) -> dict[str, float]:
    """Seconds and the driver's peak memory in GiB, of one variant in this process."""
    with tempfile.TemporaryDirectory(prefix="benchmark.") as directory:
        limits = {"call_timeout": 600.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 0}
        cluster = LocalCluster(Path(directory), threads=1, use_gpus=False, **limits)
        try:
            nodes = cluster.launch("node", [WorkerSpec("benchmarks.driver.Node")] * NODES)
            cluster.wait_started()
            seconds = (arrays if variant == "arrays" else lists)(count, nodes)
        finally:
            cluster.close()
    return {"seconds": seconds, "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="a multiple of 160")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(one_run(options.variant, options.samples)))
        return
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for repeat in range(options.repeats):
        for variant, part in VARIANTS.items():
            count = options.samples // part // MEMBERS * MEMBERS
            command = [sys.executable, "-m", "benchmarks.driver", "--variant", variant, "--samples", str(count)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[variant].append(json.loads(output.splitlines()[-1]) | {"samples": count})
            print(f"repeat {repeat + 1}, {variant}: {found[variant][-1]}", flush=True)
    summary: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "length": LENGTH, "runs": found}
    print(f"{'':<8}{'samples':>9}{'seconds':>9}{'spread':>16}{'per 1000':>10}{'GiB':>7}")
    for variant, runs in found.items():
        seconds, count = [run["seconds"] for run in runs], runs[0]["samples"]
        middle, gib = statistics.median(seconds), max(run["gib"] for run in runs)
        summary[variant] = {"samples": count, "seconds": middle, "per_1000": 1000 * middle / count, "gib": gib}
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        print(f"{variant:<8}{count:>9.0f}{middle:>9.2f}{spread:>16}{1000 * middle / count:>10.3f}{gib:>7.2f}")
    summary["lists_over_arrays"] = summary["lists"]["per_1000"] / summary["arrays"]["per_1000"]
    print(f"a sample costs {summary['lists_over_arrays']:.1f} times as much as lists")
    if options.out:
        options.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
