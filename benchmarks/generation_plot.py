"""The generation benchmark as a picture: speed against plain decoding, and n against live samples."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from benchmarks.contenders import FAMILIES, OFF


def plot(found: dict[str, Any], path: Path) -> None:
    """Two panels: tokens per second over `off` by scenario and family; draft tokens per sample by live samples."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    names = [entry["scenario"]["name"] for entry in found["scenarios"]]
    families = [family for family in FAMILIES if family != OFF]
    for number, family in enumerate(families):
        heights = []
        for entry in found["scenarios"]:
            judging, selected = entry["judging"], entry["selected"]
            pairs = zip(judging[selected[OFF]], judging[selected[family]], strict=True)
            heights.append(statistics.median(a / b for a, b in pairs))
        places = [place + (number - 2) * 0.16 for place in range(len(names))]
        left.bar(places, heights, 0.16, label=family)
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set_xticks(range(len(names)), names, rotation=40, ha="right")
    left.set_ylabel("tokens per second over plain decoding")
    left.legend()
    for name, steps in found["live"].items():
        by_size = defaultdict(list)
        for size, nodes in steps:
            by_size[size].append(nodes)
        sizes = sorted(by_size)
        right.plot(sizes, [statistics.mean(by_size[size]) for size in sizes], marker="o", label=name)
    right.set_xlabel("live samples")
    right.set_ylabel("draft tokens verified per sample and step (adaptive)")
    right.set_xscale("log", base=2)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
