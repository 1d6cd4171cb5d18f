"""Keeps every running engine at current weights: the actor's at each step, the draft's when it has changed."""

from __future__ import annotations

import time

from rlhfspec_mega.cluster.liveness import WorkerState
from rlhfspec_mega.cluster.supervised import Group, SupervisedCluster
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.resharding.controller import Resharder
from rlhfspec_mega.types import WeightTarget

_PAUSE_SECONDS = 0.1


class WeightSync:
    """Sends weights to engines and records which engine holds which version.

    Args:
        max_restarts: restarts allowed per engine, for messages.

    Attributes:
        policy_version: policy version of the engines' weights; -1 before the first.
    """

    def __init__(self, cluster: SupervisedCluster, engines: Group, max_restarts: int) -> None:
        self._cluster, self._engines, self._max_restarts = cluster, engines, max_restarts
        self.policy_version = -1
        self._draft_version = 0  # 0: there is no draft
        self._draft_holders: set[tuple[int, int]] = set()  # engines, by rank and launch, that hold this version

    def reshard(self, resharder: Resharder, version: int) -> None:
        """Send the actor's weights to every running engine as policy `version`; restarted engines join with it.

        The draft follows to engines that do not hold its current version.

        Raises RunError if no engine is left.
        """
        self._cluster.publish(version)
        self.policy_version = version
        while not resharder.update(self._engines, self._ready(), version):
            pass
        serving = self._identities(self._engines.serving())
        if self._draft_version and not serving <= self._draft_holders:
            ranks = sorted(rank for rank, _ in serving)
            held = resharder.update(self._engines, ranks, self._draft_version, WeightTarget.DRAFT)
            self._draft_holders = self._identities(held)

    def draft_changed(self) -> None:
        """The next reshard sends the draft to all engines."""
        self._draft_version += 1
        self._draft_holders.clear()

    def _identities(self, ranks: list[int]) -> set[tuple[int, int]]:
        return {(rank, self._engines.launches(rank)) for rank in ranks}

    def _ready(self) -> list[int]:
        ready = (WorkerState.REJOINING, WorkerState.SERVING)
        while not (ranks := self._engines.ranks(*ready)):
            if not self._engines.ranks(WorkerState.STARTING, WorkerState.SUSPECT):
                raise RunError(
                    f"No engine is left: each died more than launcher.max_restarts={self._max_restarts} "
                    f"times in one step; see {self._cluster.log_dir}."
                )
            self._cluster.wait_started()
            time.sleep(_PAUSE_SECONDS)  # a suspected engine either answers again or is declared dead
        return ranks
