"""When the draft model learns from the actor's samples: often while that gains time, seldom while it costs more."""

from __future__ import annotations

import math
from collections.abc import Mapping

BLOCK = 4  # steps, at least, over which gain and cost are compared once a refresh was measured
RARE_SHARE = 0.01  # of the time: what rare refreshes take, so that the draft does not get too old to be of use again


class RefreshSchedule:
    """Decides in which steps the draft is refreshed, and in which it needs the actor's hidden states.

    A draft that never learns ends up accepted nowhere, so all that it gains, the time of the tokens that it has given,
    is what learning is worth at most. Where the target is small, batches are large, or history gives most tokens, that
    is less than refreshes and the log-prob passes for them take. Where they also take more than RARE_SHARE of the time,
    the draft learns as seldom as they take that. The first comparison comes before the first refresh.

    Args:
        every: steps between refreshes; 0: never.
        seconds: of a refresh, until one was measured.
        backs_off: whether they become rarer where they cost more than the draft gains. Not under
            trainer.deterministic, where nothing may depend on the clock.
        needs_pass: whether the actor has a log-prob pass only because the draft learns from it.

    Attributes:
        rare: whether they have become rarer.
    """

    def __init__(self, every: int, seconds: float, *, backs_off: bool, needs_pass: bool) -> None:
        self._every, self._backs_off = every, backs_off
        self._phases = ("draft", "logprobs") if needs_pass else ("draft",)
        self._steps, self._gained, self._paid, self._seconds = 0, 0.0, 0.0, 0.0  # in this block
        self._seldom = 1  # times more seldom, while they are rare
        self._assumed = seconds / max(every, 1)  # seconds of refreshes, per step
        self._usual_cost = 0.0  # seconds per step, while refreshes are not rare
        self._refreshed = False  # in this block
        self._compared = every == 1  # whether gain and cost were compared; every step has a refresh if `every` is 1
        self.rare = False

    def due(self, step: int) -> bool:
        """Whether the draft is refreshed in this step (from 0)."""
        every = self._every * (self._seldom if self.rare else 1)
        return every > 0 and (step + 1) % every == 0

    def needs_states(self, step: int) -> bool:
        """Whether hidden states of this step's samples are kept for a refresh."""
        return self._every > 0 and (not self.rare or self.due(step))

    def observe(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> list[str]:
        """Learn from a step; returns a note for the user if refreshes become rarer or usual again.

        Args:
            seconds: of the step's phases.
            metrics: of the step: `speculation/...` of its rollout, and `draft/refresh_kept` if the draft was refreshed.
        """
        accepted, recalled = (metrics.get(f"speculation/{name}", 0.0) for name in ("accepted", "recalled"))
        tokens = metrics.get("speculation/sample_steps", 0.0) + accepted
        self._gained += seconds.get("generate", 0.0) * (accepted - recalled) / max(tokens, 1.0)
        self._paid += sum(seconds.get(phase, 0.0) for phase in self._phases)
        self._refreshed |= "draft/refresh_kept" in metrics
        self._seconds += sum(seconds.values())
        self._steps += 1
        block = max(self._every, BLOCK) if self._compared else self._every - 1
        if not self._every or not self._backs_off or self._steps < block:
            return []
        sums = self._gained, self._paid, self._seconds
        gained, paid, whole = (total / self._steps for total in sums)
        self._steps, self._gained, self._paid, self._seconds = 0, 0.0, 0.0, 0.0
        if not self.rare:
            self._usual_cost = paid if self._refreshed else paid + self._assumed
        self._compared, self._refreshed = True, False
        least = RARE_SHARE * whole
        before, self.rare = self.rare, gained < self._usual_cost and self._usual_cost > least
        if self.rare == before:
            return []
        if self.rare:
            self._seldom = math.ceil(self._usual_cost / max(least, 1e-9))
        often, seldom = self._every, self._every * self._seldom
        return [
            f"The draft model saves at most {gained:.2g} s a step and learning costs {self._usual_cost:.2g} s: it "
            f"learns every {seldom if self.rare else often} steps from now on, not every "
            f"{often if self.rare else seldom}."
        ]
