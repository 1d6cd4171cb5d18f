"""What a decode step of an SGLang engine takes, by batch and draft tokens: measured at start, on random weights."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfspec_mega.planning.chain import StepTable

STEPS = 24  # decode steps of a measurement, if no draft token is accepted


@dataclass(frozen=True)
class Profile:
    """Attributes:
    table: seconds of decode steps.
    prefill_seconds: of a prompt token.
    """

    table: StepTable
    prefill_seconds: float


def batches_up_to(slots: int) -> tuple[int, ...]:
    """Powers of two and `slots`."""
    return tuple(sorted({*(1 << power for power in range(slots.bit_length())), slots}))


def measure(
    engine: Any, counts: Sequence[int], force: Callable[[int], None], *, slots: int, length: int, vocabulary: int
) -> Profile:
    """Time an idle engine's steps; acceptance does not matter, steps are counted.

    Args:
        engine: a started `sglang.Engine`.
        counts: numbers of draft tokens that it can choose from, ascending.
        force: has it use one of them from now on.
        length: tokens of a typical sample in the middle of its decoding.
        vocabulary: tokens to make prompts of.
    """
    numbers, batches = itertools.count(), batches_up_to(slots)
    rows: list[list[float]] = [[] for _ in batches]
    prefills: list[float] = []
    for count in counts:
        force(count)
        _run(engine, numbers, 1, 8, vocabulary, STEPS)  # kernels that are compiled on first use
        for row, batch in zip(rows, batches, strict=True):
            started = time.perf_counter()
            outputs = _run(engine, numbers, batch, length, vocabulary, STEPS)
            row.append(_step_seconds(outputs))
            prefills.append((max(times[0] for times in outputs) - started) / (batch * length))
    table = StepTable(batches, tuple(counts), tuple(map(tuple, rows)))
    return Profile(table, sorted(prefills)[len(prefills) // 2])


def _run(
    engine: Any, numbers: itertools.count[int], batch: int, length: int, vocabulary: int, tokens: int
) -> list[list[float]]:
    """When each of so many requests put out tokens; no two requests of a profile share a prompt."""

    async def follow(number: int) -> list[float]:
        outputs = await engine.async_generate(
            input_ids=_prompt(number, length, vocabulary),
            sampling_params={"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": number},
            stream=True,
            rid=f"profile/{number}/",
        )
        return [time.perf_counter() async for _ in outputs]

    async def all_of_them() -> list[list[float]]:
        return await asyncio.gather(*(follow(next(numbers)) for _ in range(batch)))

    found: list[list[float]] = engine.loop.run_until_complete(all_of_them())
    return found


def _prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """Tokens that begin like those of no other number: nothing is found in a cache of prefixes."""
    digits = [number % vocabulary, number // vocabulary % vocabulary]
    return (digits + [place * 31 % vocabulary for place in range(length)])[:length]


def _step_seconds(outputs: Sequence[Sequence[float]]) -> float:
    """Of the steps between the last request's first output and the first one's last, while all are decoded."""
    first, last = max(times[0] for times in outputs), min(times[-1] for times in outputs)
    steps = max(sum(first < moment <= last for moment in times) for times in outputs)
    if steps == 0:  # all but the first output of each came at once: take what there is
        first, last = min(times[0] for times in outputs), max(times[-1] for times in outputs)
        steps = max(len(times) - 1 for times in outputs)
    return max(last - first, 1e-6) / max(steps, 1)
