"""The noise of a decode step, and the tokens that are best under it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from rlhfspec_mega.compiled import COMPILES
from rlhfspec_mega.planning.tree import Ints
from rlhfspec_mega.rollout.torch_engine.slots import SlotState
from rlhfspec_mega.sampling.host_select import Best, Chosen, best_tokens, choose_tokens
from rlhfspec_mega.sampling.noise import gumbel_from_states
from rlhfspec_mega.sampling.select import perturbed_scores, scaled_logits

_BLOCK_CELLS = 2**14  # samples x depths x vocabulary of noise computed at once; fewer would take as long


class StepNoise(Protocol):
    """The noise of one step for all samples at their next positions, shared by draft and target."""

    def choose(self, logits: torch.Tensor, rows: Ints, depths: Ints) -> Chosen:
        """The token after each node, with its log-prob; arguments as `best`."""

    def best(
        self, logits: torch.Tensor, rows: Ints, depths: Ints, count: int, token_ids: torch.Tensor | None = None
    ) -> Best:
        """The `count` best tokens after each of the nodes at these rows and depths.

        Args:
            logits: float32 [n, V].
            rows: [n] slots.
            depths: [n] of the nodes; 0 is the sample's last token.
            token_ids: int64 [V], the target's token ids of the logits, if they are not 0 .. V - 1.
        """


def step_noise(slots: SlotState, batch: int, depths: int) -> StepNoise:
    """For a step of the first `batch` slots, with nodes of up to `depths` - 1 layers."""
    if COMPILES and slots.noise.device.type == "cpu":
        return _HostNoise(slots)
    return DeviceNoise(slots, batch, depths)


class _HostNoise:
    """Noise of only those tokens that may be the best ones."""

    def __init__(self, slots: SlotState) -> None:
        self._next_tokens = slots.next_tokens

    def choose(self, logits: torch.Tensor, rows: Ints, depths: Ints) -> Chosen:
        return choose_tokens(logits.numpy(), self._next_tokens, rows, depths)

    def best(
        self, logits: torch.Tensor, rows: Ints, depths: Ints, count: int, token_ids: torch.Tensor | None = None
    ) -> Best:
        ids = None if token_ids is None else token_ids.numpy()
        return best_tokens(logits.numpy(), self._next_tokens, rows, depths, count, ids)


class DeviceNoise:
    """The noise of all tokens, in torch.

    It is computed on demand, some depths at a time, because a draft may stop early and noise over a large vocabulary is
    expensive.

    Args:
        batch: number of slots, from the first on.
        depths: most positions per sample; depth 0 is the token after the sample's last one.
    """

    def __init__(self, slots: SlotState, batch: int, depths: int):
        self._temperatures = slots.temperatures[:batch]
        temperatures = slots.host_temperatures[:batch]
        self._sampled, self._unit = bool(temperatures.any()), bool((temperatures == 1.0).all())
        self._states, self._first = slots.noise[:batch, None], slots.lengths[:batch, None] - 1
        self._vocab_size, self._depths = slots.stops.shape[1], depths
        self._values: torch.Tensor | None = None  # float64 [batch, depths, vocab], valid up to depth `_made`
        self._made, self._at_once = 0, max(1, _BLOCK_CELLS // (batch * self._vocab_size))
        self._banned = slots.stops[:batch] & slots.forced[:batch, None] if slots.any_forced else None

    def choose(self, logits: torch.Tensor, rows: Ints, depths: Ints) -> Chosen:
        """See StepNoise."""
        scaled, scores = self.scores(logits, rows, depths)
        tokens = scores.argmax(dim=-1)
        logprobs = scaled.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
        return Chosen(tokens.cpu().numpy(), logprobs.cpu().numpy())

    def best(
        self, logits: torch.Tensor, rows: Ints, depths: Ints, count: int, token_ids: torch.Tensor | None = None
    ) -> Best:
        """See StepNoise."""
        values, columns = self.scores(logits, rows, depths, token_ids)[1].topk(count, dim=-1)
        return Best(columns.cpu().numpy(), values.cpu().numpy())

    def scores(
        self, logits: torch.Tensor, rows: Ints, depths: Ints, token_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits / T, float32 [n, V], and the perturbed scores, float64 [n, V]; arguments as `best`."""
        deepest = int(depths.max(initial=0))
        at, below = (torch.from_numpy(values).to(logits.device) for values in (rows, depths))
        noise = self._noise(at, below, deepest) if self._sampled else None
        banned = None if self._banned is None else self._banned[at]
        if token_ids is not None:
            noise = None if noise is None else noise[:, token_ids]
            banned = None if banned is None else banned[:, token_ids]
        if self._unit and noise is not None:  # the same numbers in fewer operations
            scaled = logits.float()
            scores = scaled + noise
            return scaled, scores if banned is None else scores.masked_fill_(banned, float("-inf"))
        temperatures = self._temperatures[at]
        scaled = scaled_logits(logits, temperatures)
        return scaled, perturbed_scores(scaled, temperatures, noise, banned)

    def _noise(self, rows: torch.Tensor, depths: torch.Tensor, deepest: int) -> torch.Tensor:
        """float64 [n, vocab] at these rows and depths."""
        if self._values is None:
            size = (len(self._states), self._depths, self._vocab_size)
            self._values = torch.empty(size, dtype=torch.float64, device=self._states.device)
        if self._made < self._depths:
            while self._made < min(1 + deepest, self._depths):
                self._make(self._values)
        return self._values[rows, depths]

    def _make(self, values: torch.Tensor) -> None:
        """Compute the noise of the next depths."""
        places = np.arange(self._made, min(self._made + self._at_once, self._depths))
        positions = torch.from_numpy(self._first + places).to(values.device)
        made = slice(self._made, self._made + len(places))
        values[:, made] = gumbel_from_states(self._states, positions, self._vocab_size)
        self._made = made.stop
