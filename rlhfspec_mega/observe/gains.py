"""What each way to make a decode step gave, by batch size, and what the best of them would have saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhfspec_mega.observe.metrics import SPECULATION
from rlhfspec_mega.types import BATCH_BUCKETS, DECODE_MODES, DraftingTally

SIZES = [
    *("1", "2"),
    *(f"{2 ** (bucket - 1) + 1}-{2**bucket}" for bucket in range(2, BATCH_BUCKETS - 1)),
    f"over_{2 ** (BATCH_BUCKETS - 2)}",
]
LEAST = 16.0  # plain steps' time for which a mode was in use, for its gain to be compared


def gain_metrics(tallies: Sequence[DraftingTally]) -> dict[str, float]:
    """Metrics from the engines' tallies of one rollout: sums, of modes and batch sizes that occurred."""
    metrics = {}
    for place, (_, _, tokens, seconds) in enumerate(_names()):
        if total := sum(tally.mode_seconds[place] for tally in tallies):
            metrics[tokens] = float(sum(tally.mode_tokens[place] for tally in tallies))
            metrics[seconds] = float(total)
    return metrics


def gain_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of some steps from the sums in their metrics; {} without any.

    Returns:
        gains: by batch size, tokens per second over those of plain steps of each mode;
        regret_by_batch: share of the time that the best mode of each batch size, known afterwards, would have saved;
        regret: of all, where a step counts as long as a plain one of its size.
    """
    gains: dict[str, dict[str, float]] = {}
    used: dict[str, tuple[float, float]] = {}  # tokens and time of all modes
    compared: dict[str, float] = {}
    for size, mode, tokens_name, seconds_name in _names():
        tokens, seconds = (sum(row.get(name, 0.0) for row in rows) for name in (tokens_name, seconds_name))
        if not seconds:
            continue
        gains.setdefault(size, {})[mode] = tokens / seconds
        before = used.get(size, (0.0, 0.0))
        used[size] = before[0] + tokens, before[1] + seconds
        if seconds >= LEAST:
            compared[size] = max(compared.get(size, 0.0), tokens / seconds)
    if not used:
        return {}
    saved = {size: max(0.0, used[size][1] - used[size][0] / best) for size, best in compared.items()}
    regret = {size: one / used[size][1] for size, one in saved.items()}
    total = sum(saved.values()) / sum(seconds for _, seconds in used.values())
    return {"gains": gains, "regret_by_batch": regret, "regret": total}


def gains_in_words(figures: Mapping[str, Any]) -> str:
    """A sentence for the summary about the batch sizes at which most modes were compared."""
    parts = [
        f"{size.replace('_', ' ')}: " + ", ".join(f"{mode} {gain:.2f}" for mode, gain in gains.items())
        for size, gains in figures["gains"].items()
        if len(gains) > 1
    ]
    said = f"The best way to step at each batch size, known afterwards, would have saved {figures['regret']:.1%}"
    return f"{said} of decoding (pace over plain steps by samples in a batch: {'; '.join(parts)})." if parts else ""


def _names() -> Iterator[tuple[str, str, str, str]]:
    """Batch size, mode, and the metrics of its tokens and its time, in the order of `DraftingTally.mode_tokens`."""
    for size in SIZES:
        for mode in DECODE_MODES:
            where = f"{mode}_batch_{size}"
            yield size, mode, f"{SPECULATION}tokens_{where}", f"{SPECULATION}seconds_{where}"
