"""The finished samples of earlier steps, which all engines draft from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfspec_mega.history.sizes import PROMPT_END, stored_tokens
from rlhfspec_mega.rollout.manager import Wait
from rlhfspec_mega.rollout.session import EnginePool
from rlhfspec_mega.types import FinishedText


class EarlierTexts:
    """The driver's copy of what engines draft from besides the samples that they decode: the newest finished samples.

    They fill half of an engine's history at most. An engine that has just joined gets all of them, and so does every
    engine of a resumed run: they are part of its checkpoint. With `deterministic`, all engines begin each share of
    samples with exactly these texts, in this order. Otherwise an engine has its own samples already.

    Args:
        history_tokens: tokens of earlier samples that each engine keeps; 0: nothing is drafted from them.
    """

    def __init__(self, engines: EnginePool, wait: Wait, history_tokens: int, deterministic: bool) -> None:
        self._engines, self._wait, self._deterministic = engines, wait, deterministic
        self._most = history_tokens // 2
        self._texts: list[FinishedText] = []
        self._stored = 0  # tokens of an engine's history that they take
        self._holders: set[tuple[int, int]] = set()  # engines, by rank and launch, that have all of them

    def add(self, texts: Sequence[FinishedText], phase: str) -> None:
        """Give the samples of a step to all engines; those of a large step that have no room are left out."""
        if not self._most:
            return
        forgotten = self._append(texts)
        if self._deterministic and forgotten:
            self._holders.clear()  # texts that were forgotten are not to be drafted from any more
        self._holders &= self._alive()
        if self._deterministic or self._engines.size > 1:
            kept = min(len(texts), len(self._texts))
            self._send(self._holders, self._texts[len(self._texts) - kept :], False, phase)
        self.complete(phase)

    def complete(self, phase: str) -> None:
        """Give all texts to the engines that lack them, also to a silent one: it may serve again in a moment."""
        if self._most:
            self._send(self._alive() - self._holders, self._texts, True, phase)

    def state_dict(self) -> list[FinishedText]:
        """Id, prompt and response of each text, which are not changed any more; JSON can write them."""
        return list(self._texts)

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        """Replace the texts, as far as there is room; `complete` gives them to the engines."""
        self._texts, self._stored = [], 0
        self._append([FinishedText(*text) for text in state])
        if self._deterministic:  # else engines keep what they have of abandoned steps: it will come again
            self._holders.clear()

    def _append(self, texts: Sequence[FinishedText]) -> int:
        """Add texts and forget the oldest as there is no room; returns how many earlier ones were forgotten."""
        before = len(self._texts)
        self._texts += [FinishedText(name, prompt[-PROMPT_END:], response) for name, prompt, response in texts]
        self._stored += sum(stored_tokens(len(text.response)) for text in texts)
        forgotten = 0
        while self._stored > self._most:
            self._stored -= stored_tokens(len(self._texts[forgotten].response))
            forgotten += 1
        del self._texts[:forgotten]
        return min(forgotten, before)

    def _alive(self) -> set[tuple[int, int]]:
        return {(rank, self._engines.launches(rank)) for rank in self._engines.alive()}

    def _send(self, engines: set[tuple[int, int]], texts: Sequence[FinishedText], anew: bool, phase: str) -> None:
        calls = {one: self._engines.start(one[0], "remember", texts, anew) for one in sorted(engines)}
        if not calls:
            return
        self._wait(list(calls.values()), phase, first=False, check=False)
        for one, call in calls.items():
            if call.dead:
                self._holders.discard(one)
            else:
                call.result()
                self._holders.add(one)
