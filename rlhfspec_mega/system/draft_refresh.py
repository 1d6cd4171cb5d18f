"""When a run's draft learns: during a rollout that frees its device, or after one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfspec_mega.cluster.interface import Cluster
from rlhfspec_mega.draft.refresh import RefreshReport
from rlhfspec_mega.planning.placement import ACTOR, ENGINE
from rlhfspec_mega.system.generation import reallocates
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.workers.draft import DraftGroup, FreedRefresh


class DraftRefresh:
    """Refreshes of the draft beside the actor.

    Args:
        draft: the one of now; None without drafting. The actor may be started anew.
        changed: is told when the draft is another one than before.

    Attributes:
        freed: refreshes in time that the long tail frees; None where nothing frees the device of the draft's rank.
    """

    def __init__(
        self, setup: Setup, cluster: Cluster, draft: Callable[[], DraftGroup | None], changed: Callable[[], None]
    ) -> None:
        self._wait, self._draft, self._changed = cluster.wait, draft, changed
        self.freed: FreedRefresh | None = None
        speculation, now = setup.config.speculation, draft()
        if now and speculation.refresh_every and reallocates(setup.config, "adaptive"):
            (device,) = setup.placement.devices(ACTOR)[now.rank]
            self.freed = FreedRefresh(self._begin, device, setup.placement.devices(ENGINE), speculation.refresh_seconds)

    def _begin(self, seconds: float) -> list[Any]:
        draft = self._draft()
        assert draft is not None
        return draft.start_refresh(seconds)

    def allow_freed(self) -> None:
        """There may be one during the rollout to come."""
        if self.freed:
            self.freed.allow()

    def disallow_freed(self) -> None:
        """None is begun any more."""
        if self.freed:
            self.freed.disallow()

    def take_freed(self) -> RefreshReport | None:
        """The one made during the last rollout, once it has ended; None without one."""
        report = self.freed.take(self._wait) if self.freed else None
        if report and report.kept:
            self._changed()
        return report

    def now(self, *, steps: int | None = None, seconds: float | None = None) -> RefreshReport:
        """Train the draft on the actor's recent samples, by count or by time; if kept, the next reshard brings it."""
        draft = self._draft()
        assert draft is not None
        report = draft.refresh(steps=steps, seconds=seconds)
        if report.kept:
            self._changed()
        return report
