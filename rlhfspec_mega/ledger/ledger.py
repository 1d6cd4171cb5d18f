"""The table of all samples of a run: from prompt to update, each exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.ledger.custody import Custody
from rlhfspec_mega.ledger.entry import LAST_STATE, STATE_BEFORE, Entry, Purpose, Reference, find, first_five, refuse
from rlhfspec_mega.types import Sample, SampleState


@dataclass(slots=True)
class _Tally:
    """Counts of samples of one purpose since the run began.

    Attributes:
        settled: samples that were settled.
        last_step, last_prompt: highest settled, -1: none.
        dropped: samples settled without all of their updates, by reason.
    """

    opened: int = 0
    settled: int = 0
    last_step: int = -1
    last_prompt: int = -1
    dropped: dict[str, int] = field(default_factory=dict)


class Ledger:
    """All samples of a run. Time O(1) per sample; per step, O(its samples).

    A sample is PENDING, then GENERATING at the engine that owns it, FINISHED, SCORED and, if it is for training,
    TRAINED after the last of its updates. A DROPPED sample goes no further. Then its step is settled, once. Between
    FINISHED and TRAINED a replica of the reference may read it. The ledger sets `state` of the Sample objects.

    Attributes:
        custody: the samples at engines: who holds and owns them, and transfers.
    """

    def __init__(self) -> None:
        self._tallies = {purpose: _Tally() for purpose in Purpose}
        self._entries: dict[str, Entry] = {}  # in the order of opening
        self.custody = Custody(self._entries)
        self._steps: dict[tuple[Purpose, int], dict[str, Entry]] = {}
        self._last_prompts: dict[int, int] = {}  # highest training prompt, by the step in which it was opened

    def open(self, samples: Sequence[Sample], purpose: Purpose, uses: int = 1) -> None:
        """Enter samples of one step as PENDING: all, or none if one is refused.

        Args:
            uses: number of updates that each will be part of.

        Raises:
            RunError: an id is already open or given twice; the step, or a later one, is settled; training prompts are
                not beyond those of all earlier steps.
        """
        if not samples:
            return
        step, tally = samples[0].step, self._tallies[purpose]
        if any(sample.step != step for sample in samples):
            raise ValueError("samples of several steps cannot be opened together")
        times = Counter(sample.sample_id for sample in samples)
        refuse([name for name, count in times.items() if count > 1 or name in self._entries], "would be open twice")
        if step <= tally.last_step:
            refuse(list(times), f"belong to step {step}, but step {tally.last_step} of '{purpose}' is settled already")
        if purpose is Purpose.TRAIN:
            last = self._last_train_prompt(step)
            old = [sample.sample_id for sample in samples if sample.prompt.index <= last]
            refuse(old, f"have prompts that training has had before: the next is prompt {last + 1}")
        for sample in samples:
            uses_left = uses if purpose is Purpose.TRAIN else 0
            self._enter(Entry(sample.sample_id, step, purpose, sample.prompt.index, step, uses_left, sample=sample))
            sample.state = SampleState.PENDING
        tally.opened += len(samples)

    def advance(self, sample_ids: Sequence[str], state: SampleState) -> None:
        """Samples were SCORED by the reward, or were part of an update (TRAINED): all, or none if one is refused.

        Raises:
            RunError: a sample is not open, given twice, not in the preceding state, or TRAINED while the reference is
                still to read it.
        """
        refuse([name for name, count in Counter(sample_ids).items() if count > 1], f"would become {state} twice")
        entries = [find(self._entries, sample_id) for sample_id in sample_ids]
        for entry in entries:
            if (
                state not in (SampleState.SCORED, SampleState.TRAINED)
                or entry.state is not STATE_BEFORE[state]
                or entry.done
            ):
                raise RunError(f"Sample {entry} of '{entry.purpose}' cannot become {state}.")
            if state is SampleState.TRAINED and _awaits_reference(entry):
                raise RunError(f"Sample {entry} cannot be trained on: the reference has not read it.")
        for entry in entries:
            if state is SampleState.TRAINED:
                entry.uses_left -= 1
            if state is SampleState.SCORED or not entry.uses_left:
                entry.move(state)

    def state(self, sample_id: str) -> SampleState:
        """State of an open sample. Raises RunError for any other."""
        return find(self._entries, sample_id).state

    # The reference beside generation

    def ask_reference(self, sample_id: str) -> None:
        """A finished sample waits for the reference. Raises RunError for one that is not finished, or already waits."""
        entry = find(self._entries, sample_id)
        if entry.reference is not Reference.NOT_ASKED:
            raise RunError(f"Sample {sample_id} was handed in for scoring twice.")
        if entry.state not in (SampleState.FINISHED, SampleState.SCORED):
            raise RunError(f"Sample {entry} was handed in for scoring before it had ended.")
        entry.reference = Reference.WAITING

    def reference_reads(self, sample_ids: Sequence[str], replica: int) -> None:
        """A replica was given samples that waited."""
        for entry in self._at_reference(sample_ids, Reference.WAITING, None):
            entry.reference, entry.replica = Reference.READING, replica

    def reference_scored(self, sample_ids: Sequence[str], replica: int) -> None:
        """A replica has scored samples that it was given."""
        for entry in self._at_reference(sample_ids, Reference.READING, replica):
            entry.reference, entry.replica = Reference.SCORED, None

    def reference_lost(self, sample_ids: Sequence[str], replica: int) -> None:
        """A replica died: its samples wait again."""
        for entry in self._at_reference(sample_ids, Reference.READING, replica):
            entry.reference, entry.replica = Reference.WAITING, None

    def _at_reference(self, sample_ids: Sequence[str], place: Reference, replica: int | None) -> list[Entry]:
        entries = [find(self._entries, sample_id) for sample_id in sample_ids]
        wrong = [entry.id for entry in entries if (entry.reference, entry.replica) != (place, replica)]
        refuse(wrong, f"are not {place}" if replica is None else f"are not {place} at replica {replica}")
        return entries

    # What no update, a later one, or another sample in its place will have

    def drop(self, sample_ids: Sequence[str], reason: str) -> None:
        """No update will use these samples: all, or none if one is refused.

        Raises:
            RunError: a sample is not open, was dropped or trained on, or is held by an engine or the reference.
        """
        if not reason:
            raise ValueError("a sample is dropped for a reason")
        entries = {sample_id: find(self._entries, sample_id) for sample_id in sample_ids}.values()
        refuse([entry.id for entry in entries if _at_work(entry)], "cannot be dropped while they are being read")
        refuse([entry.id for entry in entries if entry.done], "cannot be dropped: nothing more is to become of them")
        for entry in entries:
            entry.dropped = reason
            entry.move(SampleState.DROPPED)

    def replace(self, group: str, samples: Sequence[Sample], reason: str) -> None:
        """Drop a whole training group and open these samples of the same step instead, e.g. if all had one reward.

        Raises:
            RunError: the group has no open sample, or these are not as many or of another step; a sample cannot be
                dropped, or cannot be opened.
        """
        old = [entry for entry in self._entries.values() if (entry.purpose, entry.group) == (Purpose.TRAIN, group)]
        if not old or {entry.step for entry in old} != {sample.step for sample in samples} or len(old) != len(samples):
            raise RunError(f"Group {group} has {len(old)} samples and cannot be replaced by these {len(samples)}.")
        refuse([entry.id for entry in old if _at_work(entry) or entry.done], "cannot be replaced")
        self.open(samples, Purpose.TRAIN, max(entry.uses_left for entry in old))
        self.drop([entry.id for entry in old], reason)

    def carry(self, sample_ids: Sequence[str], step: int) -> None:
        """Settle these samples with a later step than their own: all, or none.

        Raises:
            RunError: a sample is not open or has reached its last state; the step is not later than its own.
        """
        entries = [find(self._entries, sample_id) for sample_id in dict.fromkeys(sample_ids)]
        refuse([entry.id for entry in entries if entry.done], "cannot be carried over: nothing is to become of them")
        refuse([entry.id for entry in entries if entry.step >= step], f"cannot be carried over to step {step}")
        for entry in entries:
            self._leave(entry)
            entry.step = step
            self._enter(entry)

    # The end of a step

    def settle(self, step: int, purpose: Purpose) -> None:
        """Close a step whose samples have all reached their last state. Steps are settled in order.

        Raises:
            RunError: the step has no open sample, a sample is not in its last state, an earlier step is open, or the
                counts do not balance.
        """
        if (purpose, step) not in self._steps:
            raise RunError(f"Step {step} of '{purpose}' has no open samples: it is settled or was never opened.")
        earlier = min(number for kind, number in self._steps if kind is purpose)
        if earlier < step:
            raise RunError(f"Step {step} of '{purpose}' cannot be settled while step {earlier} is open.")
        closing = self._steps[purpose, step]
        unfinished = [entry for entry in closing.values() if not entry.done]
        if unfinished:
            raise RunError(
                f"Step {step} of '{purpose}' cannot be settled: {len(unfinished)} of {len(closing)} samples "
                f"are not {LAST_STATE[purpose]}: {first_five(map(str, unfinished))}."
            )
        tally = self._tallies[purpose]
        for entry in closing.values():
            del self._entries[entry.id]
            if entry.dropped:
                tally.dropped[entry.dropped] = tally.dropped.get(entry.dropped, 0) + 1
            else:
                tally.settled += 1
        del self._steps[purpose, step]
        tally.last_step = step
        if purpose is Purpose.TRAIN:
            past = [born for born in self._last_prompts if born <= step]
            tally.last_prompt = max([tally.last_prompt, *(self._last_prompts.pop(born) for born in past)])
        self._check_balance()

    def counts(self) -> dict[Purpose, dict[str, int]]:
        """Samples opened, settled, dropped and open, by purpose; opened is the sum of the others."""
        still_open = Counter(entry.purpose for entry in self._entries.values())
        return {
            purpose: {
                "opened": tally.opened,
                "settled": tally.settled,
                "dropped": sum(tally.dropped.values()),
                "open": still_open[purpose],
            }
            for purpose, tally in self._tallies.items()
        }

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """State in JSON types, without Sample objects, owners and transfers.

        Nobody works on a sample when it is loaded.
        """
        return {
            "tallies": {purpose.value: asdict(tally) for purpose, tally in self._tallies.items()},
            "open": [
                {
                    "id": entry.id,
                    "step": entry.step,
                    "purpose": entry.purpose.value,
                    "prompt": entry.prompt,
                    "state": _at_rest(entry.state).value,
                    "born": entry.born,
                    "uses_left": entry.uses_left,
                    "dropped": entry.dropped,
                }
                for entry in self._entries.values()
            ],
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore the saved state; Sample objects given earlier are no longer updated.

        Raises:
            UserError: `state` is not the state of a ledger; the ledger is unchanged.
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
            values = dict(state["tallies"][purpose.value])
            dropped = {str(why): _integer(count) for why, count in values.pop("dropped", {}).items()}
            numbers = {part.name: _integer(values[part.name]) for part in fields(_Tally) if part.name != "dropped"}
            self._tallies[purpose] = _Tally(**numbers, dropped=dropped)
        for values in state["open"]:
            name, step, purpose = str(values["id"]), _integer(values["step"]), Purpose(values["purpose"])
            prompt, state_then = _integer(values["prompt"]), SampleState(values["state"])
            if name in self._entries:
                raise ValueError(f"sample {name} is open twice")
            if step <= self._tallies[purpose].last_step:
                raise ValueError(f"sample {name} is open, but its step {step} is settled")
            # Older files hold one step and one use per sample.
            born, uses_left = _integer(values.get("born", step)), _integer(values.get("uses_left", 1))
            reason = str(values.get("dropped", ""))
            self._enter(Entry(name, born, purpose, prompt, step, uses_left, _at_rest(state_then), dropped=reason))
        self._check_balance()

    def _check_balance(self) -> None:
        """Raise RunError unless every opened sample is counted exactly once: opened = settled + dropped + open."""
        in_steps = sum(map(len, self._steps.values()))
        for purpose, count in self.counts().items():
            if count["opened"] != count["settled"] + count["dropped"] + count["open"] or in_steps != len(self._entries):
                raise RunError(f"Samples of '{purpose}' are lost or counted twice: {count}.")

    def _enter(self, entry: Entry) -> None:
        """Add an entry to the table and to its step."""
        self._steps.setdefault((entry.purpose, entry.step), {})[entry.id] = entry
        self._entries[entry.id] = entry
        if entry.purpose is Purpose.TRAIN:
            self._last_prompts[entry.born] = max(self._last_prompts.get(entry.born, -1), entry.prompt)

    def _leave(self, entry: Entry) -> None:
        """Remove an entry from its step."""
        step = self._steps[entry.purpose, entry.step]
        del step[entry.id]
        if not step:
            del self._steps[entry.purpose, entry.step]

    def _last_train_prompt(self, step: int) -> int:
        """The highest training prompt outside this step, settled or open."""
        others = (prompt for born, prompt in self._last_prompts.items() if born != step)
        return max([self._tallies[Purpose.TRAIN].last_prompt, *others])


def _at_rest(state: SampleState) -> SampleState:
    """The state to save: a sample that is being generated starts anew, since no engine holds it after a load."""
    return SampleState.PENDING if state is SampleState.GENERATING else state


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _awaits_reference(entry: Entry) -> bool:
    return entry.reference in (Reference.WAITING, Reference.READING)


def _at_work(entry: Entry) -> bool:
    """Whether an engine or the reference holds it."""
    return entry.state is SampleState.GENERATING or _awaits_reference(entry)
