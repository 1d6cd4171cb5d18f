"""Measures the time of SGLang's decode steps by batch size and draft tokens, at start with random weights."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfspec_mega.planning.draft_tokens import StepTable

STEPS, HASTY_STEPS = 24, 4  # decode steps of a measurement, if no draft token is accepted; when time has run out
SECONDS = 30.0  # in which batches between the smallest and the largest are measured; the others are interpolated


@dataclass(frozen=True)
class Profile:
    """Attributes:
    table: seconds of decode steps.
    prefill_seconds: of a prompt token.
    """

    table: StepTable
    prefill_seconds: float


def batches_up_to(slots: int) -> tuple[int, ...]:
    """Powers of two below `slots`, and `slots`."""
    return tuple(sorted({*(1 << power for power in range(slots.bit_length())), slots}))


def measure(
    engine: Any,
    counts: Sequence[int],
    force: Callable[[int], None],
    *,
    slots: int,
    length: int,
    vocabulary: int,
    seconds: float | None = None,
) -> Profile:
    """Time decode steps of an idle engine; acceptance does not matter, because steps are counted.

    The smallest and the largest batch are measured with each number of draft tokens, in few steps once time has run
    out;
    then batches between them, widely spaced ones first, as long as there is time: after `seconds` no further one
        begins.

    Args:
        engine: a started `sglang.Engine`.
        counts: numbers of draft tokens that it can choose from, ascending.
        force: makes it use one of them from now on.
        length: tokens of a typical sample halfway through decoding.
        vocabulary: number of tokens that prompts are made of.
        seconds: see above; None: SECONDS.
    """
    runs, batches = _Runs(engine, length, vocabulary), batches_up_to(slots)
    end = time.monotonic() + (SECONDS if seconds is None else seconds)
    found: dict[tuple[int, int], float] = {}
    for count in counts:
        force(count)
        runs.steps = STEPS if time.monotonic() < end else HASTY_STEPS
        runs.warm_up()
        for batch in {batches[-1]: None, batches[0]: None}:
            found[batch, count] = runs.step_seconds(batch)
    for batch in _widely_spaced(batches):
        if time.monotonic() > end:
            break
        for count in counts:
            force(count)
            found[batch, count] = runs.step_seconds(batch)
    return Profile(_table(batches, counts, found), runs.prefill_seconds)


def _widely_spaced(batches: Sequence[int]) -> Iterable[int]:
    """All but the first and the last: the middle one, then the middle ones of both halves, and so on."""
    spans = [(0, len(batches) - 1)]
    while spans:
        first, last = spans.pop(0)
        if last - first > 1:
            middle = (first + last) // 2
            yield batches[middle]
            spans += [(first, middle), (middle, last)]


def _table(batches: Sequence[int], counts: Sequence[int], found: dict[tuple[int, int], float]) -> StepTable:
    """The table, linear between the measured batches."""
    measured = sorted({batch for batch, _ in found})
    columns = [np.interp(batches, measured, [found[batch, count] for batch in measured]) for count in counts]
    return StepTable(tuple(batches), tuple(counts), tuple(tuple(map(float, row)) for row in np.array(columns).T))


class _Runs:
    """Requests of a profile: those of one batch size use the same prompts, so that each prompt is prefilled once."""

    def __init__(self, engine: Any, length: int, vocabulary: int) -> None:
        self._engine, self._length, self._vocabulary = engine, length, vocabulary
        self._numbers = itertools.count()
        self.steps = STEPS
        self.prefill_seconds = 0.0  # per prompt token, in the first batch

    def warm_up(self) -> None:
        """Run once, so that kernels are compiled."""
        self._outputs(1, 8)

    def step_seconds(self, batch: int) -> float:
        started = time.perf_counter()
        outputs = self._outputs(batch, self._length)
        if not self.prefill_seconds:
            self.prefill_seconds = (max(times[0] for times in outputs) - started) / (batch * self._length)
        return _step_seconds(outputs)

    def _outputs(self, batch: int, length: int) -> list[list[float]]:
        """Times at which each of this many requests returned tokens."""

        async def follow(prompt: int) -> list[float]:
            number = next(self._numbers)
            outputs = await self._engine.async_generate(
                input_ids=_prompt(prompt, length, self._vocabulary),
                sampling_params={
                    "temperature": 1.0,
                    "max_new_tokens": self.steps,
                    "ignore_eos": True,
                    "sampling_seed": number,
                },
                stream=True,
                rid=f"profile/{number}/",
            )
            return [time.perf_counter() async for _ in outputs]

        async def all_of_them() -> list[list[float]]:
            return await asyncio.gather(*(follow(prompt) for prompt in range(batch)))

        found: list[list[float]] = self._engine.loop.run_until_complete(all_of_them())
        return found


def _prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """A prompt that begins unlike any other number's, so that no other prompt's prefix is in a cache."""
    digits = [number % vocabulary, number // vocabulary % vocabulary]
    return (digits + [place * 31 % vocabulary for place in range(length)])[:length]


def _step_seconds(outputs: Sequence[Sequence[float]]) -> float:
    """Seconds per step while all requests are decoded.

    From the last one's first output to the first one's last output.
    """
    first, last = max(times[0] for times in outputs), min(times[-1] for times in outputs)
    steps = max(sum(first < moment <= last for moment in times) for times in outputs)
    if steps == 0:  # all but the first output of each came at once: take what there is
        first, last = min(times[0] for times in outputs), max(times[-1] for times in outputs)
        steps = max(len(times) - 1 for times in outputs)
    return max(last - first, 1e-6) / max(steps, 1)
