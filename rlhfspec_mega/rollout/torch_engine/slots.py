"""What the decode step needs of each slot's sample, as preallocated device tensors in slot order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhfspec_mega.rollout.torch_engine.scheduler import LiveSample
from rlhfspec_mega.sampling.noise import seed_states


class SlotTensors:
    """Tensors over slots; like the KV cache, the first `active` rows are live.

    Attributes:
        tokens: int64, the last token of each sample: the next input, whose KV is not cached yet.
        positions: int64, its position.
        noise: int32, hash state of the sample's seed.
        temperatures: float32.
        banned: bool [slots, vocab], stop tokens of samples that ignore them.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str):
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.noise = torch.zeros(slots, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        self.banned = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self._all = (self.tokens, self.positions, self.noise, self.temperatures, self.banned)

    def assign(self, first: int, samples: Sequence[LiveSample]) -> None:
        """Set the rows from `first` on to these samples."""
        rows = slice(first, first + len(samples))
        device = self.tokens.device
        self.tokens[rows] = torch.tensor([sample.last_token for sample in samples], device=device)
        self.positions[rows] = torch.tensor([sample.length - 1 for sample in samples], device=device)
        self.noise[rows] = seed_states(torch.tensor([sample.request.seed for sample in samples], device=device))
        self.temperatures[rows] = torch.tensor([sample.request.temperature for sample in samples], device=device)
        self.banned[rows] = False
        for slot, sample in enumerate(samples, start=first):
            if sample.request.ignore_stop:
                self.banned[slot, list(sample.request.stop_tokens)] = True

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for tensor in self._all:
            tensor[target] = tensor[source]
