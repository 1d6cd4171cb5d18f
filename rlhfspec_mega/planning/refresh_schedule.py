"""When the draft model learns from the actor's samples: often while that gains time, seldom while it costs more."""

from __future__ import annotations

from collections.abc import Mapping

BLOCK = 4  # steps, at least, over which gain and cost are compared
SELDOM = 8  # times more seldom: what the draft has learnt must not be too old if it is needed again


class RefreshSchedule:
    """Decides in which steps the draft is refreshed, and in which it needs the actor's hidden states.

    A draft that never learns ends up accepted nowhere, so all that it gains, the time of the tokens that it has given,
    is what learning is worth at most. Where the target is small, batches are large, or history gives most tokens, that
    is less than refreshes and the log-prob passes for them take.

    Args:
        every: steps between refreshes; 0: never.
        backs_off: whether they become rarer where they cost more than the draft gains. Not under
            trainer.deterministic, where nothing may depend on the clock.
        needs_pass: whether the actor has a log-prob pass only because the draft learns from it.

    Attributes:
        rare: whether they have become rarer.
    """

    def __init__(self, every: int, *, backs_off: bool, needs_pass: bool) -> None:
        self._every, self._backs_off = every, backs_off
        self._phases = ("draft", "logprobs") if needs_pass else ("draft",)
        self._steps, self._gained, self._paid = 0, 0.0, 0.0  # in this block
        self._usual_cost = 0.0  # seconds per step, while refreshes are not rare
        self.rare = False

    def due(self, step: int) -> bool:
        """Whether the draft is refreshed in this step (from 0)."""
        every = self._every * (SELDOM if self.rare else 1)
        return every > 0 and (step + 1) % every == 0

    def needs_states(self, step: int) -> bool:
        """Whether hidden states of this step's samples are kept for a refresh."""
        return self._every > 0 and (not self.rare or self.due(step))

    def observe(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> list[str]:
        """Learn from a step; returns a note for the user if refreshes become rarer or usual again.

        Args:
            seconds: of the step's phases.
            metrics: of its rollout, `speculation/...`.
        """
        accepted, recalled = (metrics.get(f"speculation/{name}", 0.0) for name in ("accepted", "recalled"))
        tokens = metrics.get("speculation/sample_steps", 0.0) + accepted
        self._gained += seconds.get("generate", 0.0) * (accepted - recalled) / max(tokens, 1.0)
        self._paid += sum(seconds.get(phase, 0.0) for phase in self._phases)
        self._steps += 1
        if not self._every or not self._backs_off or self._steps < max(self._every, BLOCK):
            return []
        gained, paid = self._gained / self._steps, self._paid / self._steps
        self._steps, self._gained, self._paid = 0, 0.0, 0.0
        if not self.rare:
            self._usual_cost = paid
        before, self.rare = self.rare, gained < self._usual_cost
        if self.rare == before:
            return []
        often, seldom = self._every, self._every * SELDOM
        return [
            f"The draft model saves at most {gained:.2g} s a step and learning costs {self._usual_cost:.2g} s: it "
            f"learns every {seldom if self.rare else often} steps from now on, not every "
            f"{often if self.rare else seldom}."
        ]
