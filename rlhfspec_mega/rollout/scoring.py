"""Forward-only log-probs of a frozen model on a generation device: the reference where the samples are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from rlhfspec_mega.algorithm.packing import micro_batches
from rlhfspec_mega.models.hf_directory import HfWeights, read_shape
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.transformer import Transformer, sequence_logprobs


class Scorer:
    """A frozen model from a Hugging Face directory, read at its first use.

    Its weights wait in host memory and are on the device only during a call; on a CPU the two are one. The larger a
    call, the less it costs to bring them.

    Args:
        path: of the directory. Raises UserError for a missing or unsupported config.json.
        max_positions: longest sequence in tokens.
        max_tokens: padded tokens of a batch, at most; a longer sequence is a batch of its own.
        logit_chunk: positions whose float32 logits exist at once.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_tokens: int,
        logit_chunk: int,
    ) -> None:
        self._path, self._shape = path, read_shape(path)
        self._max_positions, self._dtype, self._device = max_positions, dtype, torch.device(device)
        self._max_tokens, self._logit_chunk = max_tokens, logit_chunk
        self._model: Transformer | None = None  # on a CPU, once read
        self._host: dict[str, torch.Tensor] = {}  # elsewhere: the weights by name, once read

    def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
    ) -> list[list[float]]:
        """Log-probs of the response tokens of each (prompt tokens, response tokens); a prompt has one token at least.

        Args:
            temperature: log_softmax(logits / temperature) over the full vocabulary; 0 counts as 1.

        Raises UserError for a directory without the weights and for a sequence beyond `max_positions`.
        """
        tokens = [torch.tensor([*prompt, *response]) for prompt, response in sequences]
        found: list[list[float]] = [[] for _ in sequences]
        to_read = [index for index, (_, response) in enumerate(sequences) if response]
        if to_read:
            scored = self._score([tokens[index] for index in to_read], temperature)
            for index, row in zip(to_read, scored, strict=True):
                prompt, response = sequences[index]
                # Position t speaks of token t + 1.
                found[index] = row[len(prompt) - 1 : len(prompt) - 1 + len(response)]
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # other processes use this device too
        return found

    def _score(self, tokens: Sequence[torch.Tensor], temperature: float) -> list[list[float]]:
        """Log-probs of what follows each position, padding included, by sequence."""
        model = self._on_device()
        scored: list[list[float]] = [[] for _ in tokens]
        for batch in micro_batches([len(one) for one in tokens], self._max_tokens)[0]:
            padded = pad_sequence([tokens[index] for index in batch], batch_first=True).to(self._device)
            rows = sequence_logprobs(model, padded, temperature=temperature, chunk=self._logit_chunk)
            for index, row in zip(batch, rows.tolist(), strict=True):
                scored[index] = row
        return scored

    def _on_device(self) -> Transformer:
        """The model. Its weights are not packed: that serves products of fewer rows than come here."""
        if self._model is not None:
            return self._model
        model = Transformer(self._shape, max_positions=self._max_positions, dtype=self._dtype, device=self._device)
        own = model.hf_tensors()
        for name, tensor in self._weights():
            own[name].copy_(tensor, non_blocking=True)
        if self._device.type == "cpu":
            self._model = model
        return model

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All weights: from the directory, and from host memory (pinned) once they have been there."""
        if self._host:
            return self._host.items()
        infos, directory = mapping_for(self._shape.architecture).hf_tensors(self._shape), HfWeights(self._path)
        directory.check(infos)
        read = ((info.name, directory.get(info.name)) for info in infos)
        if self._device.type == "cpu":
            return read
        self._host = {name: tensor.to(self._dtype).pin_memory() for name, tensor in read}
        return self._host.items()
