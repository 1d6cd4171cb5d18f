"""Watches whether the draft still fits its target after each weight update, and stops drafting when it does not."""

from __future__ import annotations

LEAST = 200  # first draft tokens that are judged at once
LEAST_OF_TRIAL = 40  # the same where drafting was stopped and is tried again
NEWEST = 0.2  # weight of a further full window in the usual rate


class CollapseWatch:
    """Follows how often the draft's best first token is the target's choice, for all samples that are drafted for.

    Verified or not: unlike accepted length, and unlike the rate among verified ones, no policy's choice of nodes moves
    it. A rate below `ratio` of the usual one is a collapse: a broken weight sync, or a policy that has moved away.
    Drafting then stops until the next weight update, which alone can mend it, and is tried again for a short window.

    Args:
        stops: whether a collapse stops drafting; else it is only said.

    Attributes:
        collapsed: the last window was a collapse.
        rate: of the last full window, None before it.
        usual: of the windows before, None before the first; set it to go on from an earlier run.
    """

    def __init__(self, ratio: float, stops: bool = True) -> None:
        self._ratio, self._stops = ratio, stops
        self.collapsed = False
        self.rate: float | None = None
        self.usual: float | None = None
        self._on_trial = False
        self._judged = self._accepted = 0

    def weights_changed(self) -> None:
        """Begin a new window: what was seen before an update says nothing of the time after it.

        What is too little to be judged goes on counting: else a draft that is hardly used would never be.
        """
        if self.without_hope or self._judged >= LEAST_OF_TRIAL:
            self._judged = self._accepted = 0
        self._on_trial = self.collapsed

    def settle(self) -> None:
        """A rollout is over: judge a window that did not become full, if it is long enough for a trial."""
        if self._judged >= LEAST_OF_TRIAL:
            self._judge()

    @property
    def without_hope(self) -> bool:
        """The last window was a collapse, and weights have not changed since."""
        return self.collapsed and not self._on_trial

    @property
    def may_draft(self) -> bool:
        return not (self.collapsed and self._stops) or self._on_trial

    def count(self, judged: int, accepted: int) -> None:
        """Best first tokens of a step; judge when there are enough."""
        self._judged += judged
        self._accepted += accepted
        if self._judged >= (LEAST_OF_TRIAL if self._on_trial else LEAST):
            self._judge()

    def _judge(self) -> None:
        self.rate = self._accepted / self._judged
        self.collapsed = self.usual is not None and self.rate < self._ratio * self.usual
        if not self.collapsed and not self._on_trial:  # a trial is too short to say what is usual
            news = NEWEST * min(1.0, self._judged / LEAST)
            self.usual = self.rate if self.usual is None else self.usual + news * (self.rate - self.usual)
        self._judged = self._accepted = 0
        self._on_trial = False
