"""Compares the samples of two runs: python -m tests.sglang.compare RUN RUN"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Comparison:
    """Attributes:
    samples: of both runs, by id.
    tokens: compared, up to the first that differs in each sample.
    parted: by id of samples whose tokens differ, where the first that does is.
    rewards_differ: ids of samples of equal tokens and other rewards.
    logprob_difference: the largest, of equal tokens.
    """

    samples: int
    tokens: int
    parted: dict[str, int]
    rewards_differ: list[str]
    logprob_difference: float


def compare(first: Path, second: Path) -> Comparison:
    """Of the rollouts.jsonl of two run directories. Raises AssertionError unless they have the same samples."""
    one, other = samples_of(first), samples_of(second)
    assert one.keys() == other.keys(), f"samples of one run only: {sorted(one.keys() ^ other.keys())[:5]}"
    found = Comparison(len(one), 0, {}, [], 0.0)
    for name, sample in one.items():
        a, b = sample["response_tokens"], other[name]["response_tokens"]
        same = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        found.tokens += same
        if a != b:
            found.parted[name] = same
        elif sample["reward"] != other[name]["reward"]:
            found.rewards_differ.append(name)
        logprobs = zip(sample["engine_logprobs"][:same], other[name]["engine_logprobs"][:same], strict=True)
        found.logprob_difference = max([found.logprob_difference, *(abs(x - y) for x, y in logprobs)])
    return found


def samples_of(run: Path) -> dict[str, dict[str, Any]]:
    """By id; a run writes each once."""
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    found = {row["sample_id"]: row for row in rows}
    assert len(found) == len(rows), "a sample was written twice"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs=2, type=Path)
    found = compare(*parser.parse_args().runs)
    print(f"{found.samples} samples, {found.tokens} equal tokens, {len(found.parted)} parted: {found.parted}")
    print(f"other rewards of equal tokens: {len(found.rewards_differ)}; log-probs: {found.logprob_difference:.2e}")


if __name__ == "__main__":
    main()
