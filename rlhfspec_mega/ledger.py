"""The ledger: every sample from prompt to update, its state and its owner, exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.types import Sample, SampleState


class Purpose(StrEnum):
    """What samples are generated for."""

    TRAIN = "train"
    EVALUATE = "evaluate"


LAST_STATE = {Purpose.TRAIN: SampleState.TRAINED, Purpose.EVALUATE: SampleState.SCORED}
STATE_BEFORE = {
    SampleState.FINISHED: SampleState.GENERATING,
    SampleState.SCORED: SampleState.FINISHED,
    SampleState.TRAINED: SampleState.SCORED,
}


@dataclass(slots=True)
class _Entry:
    """One open sample; `owner` is "" unless it is GENERATING."""

    id: str
    step: int
    purpose: Purpose
    prompt: int
    state: SampleState = SampleState.PENDING
    owner: str = ""
    sample: Sample | None = None

    def __str__(self) -> str:
        return f"{self.id} ({self.state}, {self.owner})" if self.owner else f"{self.id} ({self.state})"


@dataclass(slots=True)
class _Step:
    """The open samples of one step and purpose."""

    entries: list[_Entry] = field(default_factory=list)
    last_prompt: int = -1


@dataclass(slots=True)
class _Tally:
    """Samples of one purpose since the run began; `last_step` and `last_prompt` are the highest settled, -1: none."""

    opened: int = 0
    settled: int = 0
    last_step: int = -1
    last_prompt: int = -1


class Ledger:
    """All samples of a run. Time O(1) per sample; for an owner or a step, O(samples it has).

    A sample is PENDING, GENERATING with an owner, FINISHED, SCORED and, if it is for training, TRAINED. Then its step
    is settled, once. The ledger sets `state` of the Sample objects it was given.
    """

    def __init__(self) -> None:
        self._tallies = {purpose: _Tally() for purpose in Purpose}
        self._entries: dict[str, _Entry] = {}  # in the order of opening
        self._steps: dict[tuple[Purpose, int], _Step] = {}
        self._owned: dict[str, dict[str, _Entry]] = {}

    def open(self, samples: Sequence[Sample], purpose: Purpose) -> None:
        """Enter samples of one step as PENDING: all, or none if one is refused.

        Raises:
            RunError: an id is open already or given twice; the step, or a later one, is settled; samples to train on
                have prompts not beyond those of all other steps of training.
        """
        if not samples:
            return
        step, tally = samples[0].step, self._tallies[purpose]
        if any(sample.step != step for sample in samples):
            raise ValueError("samples of several steps cannot be opened together")
        times = Counter(sample.sample_id for sample in samples)
        _refuse([name for name, count in times.items() if count > 1 or name in self._entries], "would be open twice")
        if step <= tally.last_step:
            _refuse(list(times), f"belong to step {step}, but step {tally.last_step} of '{purpose}' is settled already")
        if purpose is Purpose.TRAIN:
            last = self._last_train_prompt(step)
            old = [sample.sample_id for sample in samples if sample.prompt.index <= last]
            _refuse(old, f"have prompts that training has had before: the next is prompt {last + 1}")
        for sample in samples:
            self._enter(_Entry(sample.sample_id, step, purpose, sample.prompt.index, sample=sample))
            sample.state = SampleState.PENDING
        tally.opened += len(samples)

    def assign(self, sample_id: str, owner: str) -> None:
        """Give a PENDING or GENERATING sample to an owner, e.g. "engine 1". Raises RunError for any other sample."""
        if not owner:
            raise ValueError("an owner needs a name")
        entry = self._entry(sample_id)
        if entry.state not in (SampleState.PENDING, SampleState.GENERATING):
            raise RunError(f"Sample {entry} cannot be given to {owner}: it is generated already.")
        self._move(entry, SampleState.GENERATING, owner)

    def release(self, owner: str) -> None:
        """The owner died: its samples are PENDING again."""
        for entry in list(self._owned.get(owner, {}).values()):
            self._move(entry, SampleState.PENDING)

    def advance(self, sample_ids: Sequence[str], state: SampleState, owner: str = "") -> None:
        """Move samples one state forward, to FINISHED, SCORED or TRAINED: all, or none if one is refused.

        Args:
            owner: who returned the FINISHED samples; refused if others own them now, as it was given up for dead.

        Raises:
            RunError: a sample is not open, given twice, in another state than the one before, or of another owner.
        """
        _refuse([name for name, count in Counter(sample_ids).items() if count > 1], f"would become {state} twice")
        entries = [self._entry(sample_id) for sample_id in sample_ids]
        for entry in entries:
            if entry.state is not STATE_BEFORE.get(state) or entry.state is LAST_STATE[entry.purpose]:
                raise RunError(f"Sample {entry} of '{entry.purpose}' cannot become {state}.")
            if owner and owner != entry.owner:
                raise RunError(f"Sample {entry} was returned by {owner}, which does not own it.")
        for entry in entries:
            self._move(entry, state)

    def state(self, sample_id: str) -> SampleState:
        """State of an open sample. Raises RunError for any other."""
        return self._entry(sample_id).state

    def counts(self) -> dict[Purpose, dict[str, int]]:
        """Samples opened, settled and open, by purpose; the first is the sum of the others."""
        still_open: Counter[Purpose] = Counter()
        for (purpose, _), step in self._steps.items():
            still_open[purpose] += len(step.entries)
        return {
            purpose: {"opened": tally.opened, "settled": tally.settled, "open": still_open[purpose]}
            for purpose, tally in self._tallies.items()
        }

    def settle(self, step: int, purpose: Purpose) -> None:
        """Close a step whose samples have all reached their last state. Steps are settled in their order.

        Raises:
            RunError: nothing of the step is open, a sample is not in its last state, an earlier step is open, or the
                counts do not balance.
        """
        if (purpose, step) not in self._steps:
            raise RunError(f"Step {step} of '{purpose}' has no open samples: it is settled or was never opened.")
        earlier = min(number for kind, number in self._steps if kind is purpose)
        if earlier < step:
            raise RunError(f"Step {step} of '{purpose}' cannot be settled while step {earlier} is open.")
        closing, last_state = self._steps[purpose, step], LAST_STATE[purpose]
        unfinished = [entry for entry in closing.entries if entry.state is not last_state]
        if unfinished:
            raise RunError(
                f"Step {step} of '{purpose}' cannot be settled: {len(unfinished)} of {len(closing.entries)} samples "
                f"are not {last_state}: {_first_five(map(str, unfinished))}."
            )
        for entry in closing.entries:
            del self._entries[entry.id]
        del self._steps[purpose, step]
        tally = self._tallies[purpose]
        tally.settled += len(closing.entries)
        tally.last_step, tally.last_prompt = step, max(tally.last_prompt, closing.last_prompt)
        self._check_balance()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the Sample objects, in JSON types."""
        return {
            "tallies": {purpose.value: asdict(tally) for purpose, tally in self._tallies.items()},
            "open": [
                {
                    "id": entry.id,
                    "step": entry.step,
                    "purpose": entry.purpose.value,
                    "prompt": entry.prompt,
                    "state": entry.state.value,
                    "owner": entry.owner,
                }
                for entry in self._entries.values()
            ],
        }

    def load_state_dict(self, state: Any) -> None:
        """Be as the ledger was that `state` was taken from; Sample objects given before are no longer kept up to date.

        Raises:
            UserError: `state` is none of a ledger; the ledger is then as before.
        """
        restored = Ledger()
        try:
            restored._restore(state)
        except (KeyError, TypeError, ValueError, RunError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
            raise UserError(
                f"The checkpoint has no usable ledger of samples ({reason}); it is damaged or of another version: "
                "resume from another checkpoint, or start a new run."
            ) from error
        vars(self).update(vars(restored))

    def _restore(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError("there is none")
        for purpose in Purpose:
            values = state["tallies"][purpose.value]
            self._tallies[purpose] = _Tally(*(_integer(values[part.name]) for part in fields(_Tally)))
        for values in state["open"]:
            name, step, purpose = str(values["id"]), _integer(values["step"]), Purpose(values["purpose"])
            state_now, owner = SampleState(values["state"]), str(values["owner"])
            if name in self._entries:
                raise ValueError(f"sample {name} is open twice")
            if step <= self._tallies[purpose].last_step:
                raise ValueError(f"sample {name} is open, but its step {step} is settled")
            if bool(owner) != (state_now is SampleState.GENERATING):
                raise ValueError(f"sample {name} is {state_now}, and its owner is {owner!r}")
            entry = _Entry(name, step, purpose, _integer(values["prompt"]))
            self._enter(entry)
            self._move(entry, state_now, owner)
        self._check_balance()

    def _entry(self, sample_id: str) -> _Entry:
        if sample_id not in self._entries:
            raise RunError(f"Sample {sample_id} is not open: it is settled or was never opened.")
        return self._entries[sample_id]

    def _enter(self, entry: _Entry) -> None:
        step = self._steps.setdefault((entry.purpose, entry.step), _Step())
        step.entries.append(entry)
        step.last_prompt = max(step.last_prompt, entry.prompt)
        self._entries[entry.id] = entry

    def _move(self, entry: _Entry, state: SampleState, owner: str = "") -> None:
        if entry.owner:
            del self._owned[entry.owner][entry.id]
        if owner:
            self._owned.setdefault(owner, {})[entry.id] = entry
        entry.state, entry.owner = state, owner
        if entry.sample is not None:
            entry.sample.state = state

    def _last_train_prompt(self, step: int) -> int:
        """The highest prompt of training outside this step, settled or open."""
        parts = (part for (purpose, number), part in self._steps.items() if purpose is Purpose.TRAIN and number != step)
        return max([self._tallies[Purpose.TRAIN].last_prompt, *(part.last_prompt for part in parts)])

    def _check_balance(self) -> None:
        for purpose, count in self.counts().items():
            if count["opened"] != count["settled"] + count["open"]:
                raise RunError(f"Samples of '{purpose}' are lost or counted twice: {count}.")


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _first_five(names: Iterable[str]) -> str:
    first = list(itertools.islice(names, 6))
    return ", ".join(first[:5]) + (" and more" if len(first) > 5 else "")


def _refuse(names: Sequence[str], why: str) -> None:
    if names:
        raise RunError(f"Samples {_first_five(names)} {why}.")
