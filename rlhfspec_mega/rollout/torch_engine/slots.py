"""Per-slot state for the decode step: tensors on the device and lengths on the host, in slot order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhfspec_mega.planning.tree import Ints
from rlhfspec_mega.rollout.protocol import LiveSample
from rlhfspec_mega.sampling.host_select import NextTokens
from rlhfspec_mega.sampling.noise import seed_states


class SlotState:
    """Arrays [slots]; as in the KV cache, the samples being decoded have the first rows.

    Attributes:
        tokens: int64 on the host, the last token of each sample: the next input, whose KV is not cached yet.
        noise: int32, hash state of the sample's seed.
        temperatures: float32.
        stops, host_stops: bool [slots, vocab], the stop tokens, on the device and on the host.
        forced, host_forced: bool, whether stop tokens are masked, so that the sample has a forced length.
        lengths, generated, remaining: int64 on the host; tokens of prompt and response, tokens of the response, and
            tokens that may still be generated.
        host_temperatures, host_noise: float64 and int64 on the host.
        brought, joined: on the host, tokens of the response that the sample came with, and `progress` then.
        numbers: int64 on the host, consecutive number of the sample in this engine.
        progress: tokens of a sample that were decoded so far, in the mean over those of each step.
        next_tokens: those arrays on the host that the choice of tokens depends on.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str):
        self.noise = torch.zeros(slots, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        self.stops = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self.forced = torch.zeros(slots, dtype=torch.bool, device=device)
        self.host_stops, self.host_forced = np.zeros((slots, vocab_size), np.bool_), np.zeros(slots, np.bool_)
        self.tokens, self.lengths, self.generated, self.remaining = (np.zeros(slots, np.int64) for _ in range(4))
        self.host_temperatures, self.host_noise = np.zeros(slots), np.zeros(slots, np.int64)
        self.brought, self.numbers = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.progress, self.joined = 0.0, np.zeros(slots)
        self._assigned = 0  # samples so far
        self.any_forced = False
        self._tensors = (self.noise, self.temperatures, self.stops, self.forced)
        self._arrays = (
            *(self.tokens, self.lengths, self.generated, self.remaining, self.brought, self.joined, self.numbers),
            *(self.host_temperatures, self.host_noise, self.host_stops, self.host_forced),
        )
        self.next_tokens = NextTokens(
            self.host_noise, self.lengths, self.host_temperatures, self.host_stops, self.host_forced
        )

    def assign(self, first: int, samples: Sequence[LiveSample]) -> None:
        """Set the rows from `first` on to these samples."""
        rows = slice(first, first + len(samples))
        device = self.noise.device
        requests = [sample.request for sample in samples]
        self.tokens[rows] = [sample.sequence[-1] for sample in samples]
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
        self.generated[rows] = self.brought[rows] = [len(sample.tokens) for sample in samples]
        self.joined[rows] = self.progress
        self.remaining[rows] = [sample.request.max_new_tokens - len(sample.tokens) for sample in samples]
        self.host_temperatures[rows] = [request.temperature for request in requests]
        self.numbers[rows] = np.arange(self._assigned, self._assigned + len(samples))
        self._assigned += len(samples)

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for values in (*self._tensors, *self._arrays):
            values[target] = values[source]

    def grow(self, last_tokens: Ints, counts: Ints) -> None:
        """Add counts[i] tokens, the last of which is last_tokens[i], to the i-th of the first rows."""
        rows = slice(len(counts))
        self.tokens[rows] = last_tokens
        self.lengths[rows] += counts
        self.generated[rows] += counts
        self.remaining[rows] -= counts
