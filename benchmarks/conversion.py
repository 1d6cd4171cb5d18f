"""Conversions of a random model of two billion float32 weights beside `dd`.

    python -m benchmarks.conversion --directory DIR [--repeats 3]

Every repeat copies the weights with dd and converts them there and back, one after the other, on one disk; each file is
forced to disk. A rate is bytes of weights per second; peak memory is the process's anonymous memory (RssAnon), sampled
every 10 ms: pages of mapped files do not count, because the kernel may drop them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhfspec_mega.models.hf_directory import HfWeights, new_directory
from rlhfspec_mega.models.shape import ModelShape

SHAPE = ModelShape("qwen3", 2048, 34, 16, 8, 128, 6144, 151936, 4096, 1e6, 1e-6, True)
_STATUS_LINE = "RssAnon:"


def make_model(path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    with new_directory(path, SHAPE, "float32") as tensors:
        for tensor in tensors.values():
            tensor.uniform_(generator=generator)


def timed(command: Sequence[object]) -> tuple[float, int]:
    """Seconds of a command, and its peak of anonymous memory in bytes."""
    peak, begin = 0, time.monotonic()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(0.01)
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith(_STATUS_LINE))])
    if process.wait():
        raise SystemExit(f"{command} failed with status {process.returncode}.")
    return time.monotonic() - begin, peak


def same(one: Path, other: Path) -> bool:
    a, b = HfWeights(one), HfWeights(other)
    return a.names() == b.names() and all(torch.equal(a.get(name), b.get(name)) for name in a.names())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="a directory with 30 GiB free, to be made")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/conversion_cpu.json"))
    arguments = parser.parse_args()
    root: Path = arguments.directory
    hf, megatron, back = root / "hf", root / "megatron", root / "back"
    make_model(hf)
    files = " ".join(str(path) for path in sorted(hf.glob("*.safetensors")))
    tool = [sys.executable, "-m"]
    commands: dict[str, list[object]] = {
        "dd": ["sh", "-c", f"cat {files} | dd of={root / 'copy'} bs=4M iflag=fullblock conv=fsync"],
        "hf_to_megatron": [
            *tool,
            "tools.hf_to_megatron",
            hf,
            megatron,
            *["--tensor-parallel", "2", "--pipeline-parallel", "2"],
        ],
        "megatron_to_hf": [*tool, "tools.megatron_to_hf", megatron, back],
    }
    rows: list[dict[str, float]] = []
    nbytes = 4 * SHAPE.parameters
    for repeat in range(arguments.repeats):
        row: dict[str, float] = {}
        for name, command in commands.items():
            seconds, peak = timed(command)
            row |= {f"{name}_seconds": seconds, f"{name}_bytes": float(peak)}
            print(f"{repeat + 1}: {name:<15} {nbytes / seconds / 2**20:6.0f} MiB/s, {peak / 2**30:.2f} GiB", flush=True)
        assert same(hf, back), "the model that came back is another one"
        rows.append(row)
        (root / "copy").unlink()
        shutil.rmtree(megatron)
        shutil.rmtree(back)
    shutil.rmtree(root)
    summary = {}
    for name in ("hf_to_megatron", "megatron_to_hf"):
        ratios = sorted(row["dd_seconds"] / row[f"{name}_seconds"] for row in rows)
        middle, most = statistics.median(ratios), max(row[f"{name}_bytes"] for row in rows)
        summary[name] = {"ratio_to_dd": middle, "lowest": ratios[0], "highest": ratios[-1], "peak_bytes": most}
        spread = f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        print(f"{name:<15} {middle:.2f} of dd's rate {spread}, peak {most / 2**30:.2f} GiB")
    result = {"parameters": SHAPE.parameters, "rows": rows, "summary": summary}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
