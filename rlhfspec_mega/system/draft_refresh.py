"""When the draft of a run is refreshed: during a rollout, on a device that has become free, or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfspec_mega.cluster.interface import Cluster
from rlhfspec_mega.config.logprob_pass import update_gives_logprobs
from rlhfspec_mega.draft.refresh import RefreshReport
from rlhfspec_mega.planning.placement import ACTOR, ENGINE
from rlhfspec_mega.planning.refresh_schedule import RefreshSchedule
from rlhfspec_mega.system.generation import reallocates
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.workers.draft import DraftGroup, FreedRefresh


class DraftRefresh:
    """Refreshes of the draft beside the actor.

    Args:
        draft: returns the current draft, None without drafting; it changes when the actor is restarted.
        changed: called when a refresh has changed the draft.

    Attributes:
        schedule: in which steps it is refreshed; never without a draft.
        freed: refreshes during rollouts; None if no device ever becomes free for them.
    """

    def __init__(
        self, setup: Setup, cluster: Cluster, draft: Callable[[], DraftGroup | None], changed: Callable[[], None]
    ) -> None:
        self._wait, self._draft, self._changed = cluster.wait, draft, changed
        self.freed: FreedRefresh | None = None
        speculation, now = setup.config.speculation, draft()
        config, sizes = setup.config, setup.sizes
        self.schedule = RefreshSchedule(
            speculation.refresh_every if now else 0,
            speculation.refresh_seconds,
            backs_off=not config.trainer.deterministic,
            needs_pass=update_gives_logprobs(config.algorithm, sizes.samples_per_step, sizes.samples_per_update),
        )
        if now and speculation.refresh_every and reallocates(setup.config, "adaptive"):
            (device,) = setup.placement.devices(ACTOR)[now.rank]
            self.freed = FreedRefresh(self._begin, device, setup.placement.devices(ENGINE), speculation.refresh_seconds)

    def _begin(self, seconds: float) -> list[Any]:
        draft = self._draft()
        assert draft is not None
        return draft.start_refresh(seconds)

    def allow_freed(self) -> None:
        """Allow a refresh during the coming rollout."""
        if self.freed:
            self.freed.allow()

    def disallow_freed(self) -> None:
        """Allow no refresh from now on."""
        if self.freed:
            self.freed.disallow()

    def take_freed(self) -> RefreshReport | None:
        """Wait for a refresh that began on freed devices in the last rollout, and report it; None if none began."""
        report = self.freed.take(self._wait) if self.freed else None
        if report and report.kept:
            self._changed()
        return report

    def now(self, *, steps: int | None = None, seconds: float | None = None) -> RefreshReport:
        """Train the draft on recent samples for a number of steps or of seconds.

        A draft that got better goes out with the next reshard.
        """
        draft = self._draft()
        assert draft is not None
        report = draft.refresh(steps=steps, seconds=seconds)
        if report.kept:
            self._changed()
        return report
