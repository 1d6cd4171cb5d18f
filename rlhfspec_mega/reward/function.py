"""A reward function as a source of rewards, which scores samples one after the other beside generation."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.reward.score import RewardFailure, RewardScore
from rlhfspec_mega.types import Sample


class FunctionReward:
    """Implements rewards.Source."""

    def __init__(self, runner: RewardRunner) -> None:
        self._runner, self._thread = runner, ThreadPoolExecutor(1, "reward")
        self.name = f"The reward function {runner.path}"

    def submit(self, samples: Sequence[Sample]) -> list[Future[RewardScore | RewardFailure]]:
        return [self._thread.submit(self._score, sample) for sample in samples]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._runner.kill()  # ends a score that is being computed
        self._thread.shutdown()
        self._runner.close()

    def _score(self, sample: Sample) -> RewardScore | RewardFailure:
        return self._runner.score([sample])[0]
