"""Per-slot state for the decode step: tensors on the device and lengths on the host, in slot order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhfspec_mega.rollout.protocol import LiveSample
from rlhfspec_mega.sampling.noise import gumbel_from_states, seed_states
from rlhfspec_mega.sampling.select import perturbed_scores, scaled_logits

_BLOCK_CELLS = 2**14  # samples x depths x vocabulary of noise computed at once; fewer would take as long


class SlotState:
    """Arrays [slots]; as in the KV cache, the samples being decoded have the first rows.

    Attributes:
        tokens: int64, the last token of each sample: the next input, whose KV is not cached yet.
        noise: int32, hash state of the sample's seed.
        temperatures: float32.
        stops, host_stops: bool [slots, vocab], the stop tokens, on the device and on the host.
        forced, host_forced: bool, whether stop tokens are masked, so that the sample has a forced length.
        lengths, generated, remaining: int64 on the host; tokens of prompt and response, tokens of the response, and
            tokens that may still be generated.
        host_temperatures, host_noise: float64 and int64 on the host.
        numbers: int64 on the host, consecutive number of the sample in this engine.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str):
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.noise = torch.zeros(slots, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        self.stops = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self.forced = torch.zeros(slots, dtype=torch.bool, device=device)
        self.host_stops, self.host_forced = np.zeros((slots, vocab_size), np.bool_), np.zeros(slots, np.bool_)
        self.lengths, self.generated, self.remaining = (np.zeros(slots, np.int64) for _ in range(3))
        self.host_temperatures, self.host_noise = np.zeros(slots), np.zeros(slots, np.int64)
        self.numbers = np.zeros(slots, np.int64)
        self._assigned = 0  # samples so far
        self.any_forced = False
        self._tensors = (self.tokens, self.noise, self.temperatures, self.stops, self.forced)
        self._arrays = (
            *(self.lengths, self.generated, self.remaining, self.numbers),
            *(self.host_temperatures, self.host_noise, self.host_stops, self.host_forced),
        )

    def assign(self, first: int, samples: Sequence[LiveSample]) -> None:
        """Set the rows from `first` on to these samples."""
        rows = slice(first, first + len(samples))
        device = self.tokens.device
        requests = [sample.request for sample in samples]
        self.tokens[rows] = torch.tensor([sample.sequence[-1] for sample in samples], device=device)
        noise = seed_states(torch.tensor([request.seed for request in requests]))
        self.noise[rows], self.host_noise[rows] = noise.to(device), noise.numpy()
        self.temperatures[rows] = torch.tensor([request.temperature for request in requests], device=device)
        self.forced[rows] = torch.tensor([request.ignore_stop for request in requests], device=device)
        self.host_stops[rows] = False
        for slot, request in enumerate(requests, start=first):
            self.host_stops[slot, list(request.stop_tokens)] = True
        self.host_forced[rows] = [request.ignore_stop for request in requests]
        self.stops[rows] = torch.from_numpy(self.host_stops[rows]).to(device)
        self.any_forced |= any(request.ignore_stop for request in requests)
        self.lengths[rows] = [sample.length for sample in samples]
        self.generated[rows] = [len(sample.tokens) for sample in samples]
        self.remaining[rows] = [sample.request.max_new_tokens - len(sample.tokens) for sample in samples]
        self.host_temperatures[rows] = [request.temperature for request in requests]
        self.numbers[rows] = np.arange(self._assigned, self._assigned + len(samples))
        self._assigned += len(samples)

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for values in (*self._tensors, *self._arrays):
            values[target] = values[source]

    def grow(self, last_tokens: torch.Tensor, counts: np.ndarray) -> None:
        """Add counts[i] tokens, the last of which is last_tokens[i], to the i-th of the first rows."""
        rows = slice(len(counts))
        self.tokens[rows] = last_tokens
        self.lengths[rows] += counts
        self.generated[rows] += counts
        self.remaining[rows] -= counts

    def ends(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Whether these tokens end the samples of these rows: bool [n], on the host."""
        return self.host_stops[rows, tokens] & ~self.host_forced[rows]


class StepNoise:
    """The noise of one step for all samples at their next positions, shared by draft and target.

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

    def scores(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        depths: torch.Tensor | int,
        token_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled and perturbed scores of logits after the nodes at these rows and depths.

        Args:
            logits: float [n, V].
            rows: int64 [n], slots.
            depths: int64 [n], or one depth for all.
            token_ids: int64 [V], the target's token ids of the logits, if they are not 0 .. V - 1.

        Returns:
            logits / T, float32 [n, V], and the perturbed scores, float64 [n, V].
        """
        noise = self._noise(rows, depths) if self._sampled else None
        banned = None if self._banned is None else self._banned[rows]
        if token_ids is not None:
            noise = None if noise is None else noise[:, token_ids]
            banned = None if banned is None else banned[:, token_ids]
        if self._unit and noise is not None:  # the same numbers in fewer operations
            scaled = logits.float()
            scores = scaled + noise
            return scaled, scores if banned is None else scores.masked_fill_(banned, float("-inf"))
        temperatures = self._temperatures[rows]
        scaled = scaled_logits(logits, temperatures)
        return scaled, perturbed_scores(scaled, temperatures, noise, banned)

    def _noise(self, rows: torch.Tensor, depths: torch.Tensor | int) -> torch.Tensor:
        """float64 [n, vocab] at these rows and depths."""
        if self._values is None:
            size = (len(self._states), self._depths, self._vocab_size)
            self._values = torch.empty(size, dtype=torch.float64, device=self._states.device)
        if self._made < self._depths:
            wanted = 1 + (depths if isinstance(depths, int) else int(depths.max()))
            while self._made < min(wanted, self._depths):
                self._make(self._values)
        return self._values[rows, depths]

    def _make(self, values: torch.Tensor) -> None:
        """Compute the noise of the next depths."""
        places = np.arange(self._made, min(self._made + self._at_once, self._depths))
        positions = torch.from_numpy(self._first + places).to(values.device)
        made = slice(self._made, self._made + len(places))
        values[:, made] = gumbel_from_states(self._states, positions, self._vocab_size)
        self._made = made.stop
