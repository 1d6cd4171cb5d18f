"""Hooks that make SGLang sample by the shared noise, in plain and in speculative decoding alike.

The target: its plain sampler and its verifier choose argmax(log p + g) with the noise of (seed, index of the last input
token); verification then is the greedy one. The draft: its logits get the same noise where they leave the model, so
that every place that takes their best, CUDA graphs included, takes the children that the target may choose. Greedy
requests, which SGLang marks by top_k = 1 at temperature 1, get none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhfspec_mega.sampling.noise import gumbel_from_states, seed_states

CHUNK = 128  # rows whose noise exists at a time: at a vocabulary of 128k, 0.4 GB
MOST_ROWS = 4096  # most requests of a batch; buffers have fixed addresses for CUDA graphs
# An EAGLE draft reads the token at index i + 1 with the target's state of index i, and calls that position i: the last
# token behind its logits is one further than its position says.
DRAFT_OFFSET = 1


def keep_seeds(original: Callable[..., Any], cls: type, batch: Any, vocab_size: int) -> Any:
    """Hook around SamplingBatchInfo.from_schedule_batch: keeps seeds even without deterministic inference.

    A request without a seed (a warm-up, a health check) gets one from its id, the same on all ranks.
    """
    info = original(cls, batch, vocab_size)
    given = [(request.sampling_params.sampling_seed, request.rid) for request in batch.reqs]
    seeds = [zlib.crc32(str(rid).encode()) if seed is None else seed for seed, rid in given]
    pinned = torch.device(batch.device).type == "cuda"  # otherwise the copy waits for the forward pass in progress
    seeds_there = torch.tensor(seeds, dtype=torch.int64, pin_memory=pinned)
    info.sampling_seed = seeds_there.to(batch.device, non_blocking=True)
    return info


def choose(
    original: Callable[..., Any], sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool
) -> Tensor:
    """Hook around Sampler._sample_from_probs.

    Tokens int32 [B] for probabilities float32 [B, V] at the sampling temperature.

    `original` has other noise, and `simple` is about top-k and top-p; both are unused, because SGLangEngine never asks
    for these, and other clients' settings are ignored.
    """
    scores = probs.double().log_()
    add_noise(scores, info.sampling_seed, positions, ~greedy_rows(info))
    return scores.argmax(dim=-1).to(torch.int32)


def verify(original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *rest: Any) -> Any:
    """Around eagle_sample: the greedy verification, which takes the argmax of logits, of marks where the choices are.

    Perturbed scores themselves, in float64, would take much memory beside large trees. The logits are put back for the
    log-probs. A penalty, a bias or a grammar, which SGLangEngine never asks for, would end the scheduler.
    """
    info, logits = batch.sampling_info, logits_output.next_token_logits
    if batch.forward_mode.is_idle() or info.is_all_greedy:
        return original(verify_input, batch, logits_output, *rest)
    nodes = verify_input.draft_token_num
    temperatures = info.temperatures.view(-1).repeat_interleave(nodes)
    seeds, noisy = info.sampling_seed.repeat_interleave(nodes), (~greedy_rows(info)).repeat_interleave(nodes)
    marks = torch.zeros_like(logits, dtype=torch.uint8)
    for first in range(0, len(logits), CHUNK):
        rows = slice(first, first + CHUNK)
        scores = logits[rows].double().div_(temperatures[rows, None])
        add_noise(scores, seeds[rows], verify_input.positions[rows], noisy[rows])
        marks[rows].scatter_(1, scores.argmax(dim=-1, keepdim=True), 1)
    logits_output.next_token_logits, info.is_all_greedy = marks, True
    try:
        return original(verify_input, batch, logits_output, *rest)
    finally:
        logits_output.next_token_logits, info.is_all_greedy = logits, False


def greedy_rows(info: Any) -> Tensor:
    """bool [B]."""
    return info.top_ks.view(-1) == 1


def add_noise(scores: Tensor, seeds: Tensor, positions: Tensor, noisy: Tensor) -> None:
    """Add the noise to scores float64 [N, V] in the rows `noisy` [N]; seeds and positions int64 [N]."""
    states, weights = seed_states(seeds), noisy[:, None].to(scores.dtype)
    for first in range(0, len(scores), CHUNK):
        rows = slice(first, first + CHUNK)
        scores[rows].addcmul_(gumbel_from_states(states[rows], positions[rows], scores.shape[-1]), weights[rows])


class DraftNoise:
    """Adds noise to the draft's logits, by request: the seeds lie in buffers that CUDA graphs read.

    Args:
        rows: requests of a batch, at most.
    """

    def __init__(self, device: torch.device | str, rows: int = MOST_ROWS) -> None:
        self._states = torch.zeros(rows, dtype=torch.int32, device=device)
        self._scales = torch.ones(rows, device=device)
        self._noisy = torch.zeros(rows, device=device)

    def fill(self, info: Any, sharpness: float = 1.0) -> None:
        """Set the requests of the batch that is drafted for next; rows beyond them are not perturbed.

        Args:
            sharpness: factor of the scores; it does not change their order.
        """
        count = len(info.sampling_seed)
        self._states[:count] = seed_states(info.sampling_seed)
        self._scales[:count] = sharpness / info.temperatures.view(-1)
        self._noisy[:count] = sharpness * (~greedy_rows(info)).float()
        self._noisy[count:] = 0.0

    def perturb(self, logits: Tensor, positions: Tensor, requests: int, target_ids: Tensor | None) -> None:
        """Turn logits into sharpness x (log q + g) up to a constant of each row, in place: graphs share their buffer.

        Args:
            logits: float32 [N, V], N / requests rows for each request, in order.
            positions: int64 [N], as the draft counts them.
            target_ids: int64 [V] of a reduced vocabulary.
        """
        each = len(logits) // requests
        states, scales, noisy = (
            buffer[:requests].repeat_interleave(each) for buffer in (self._states, self._scales, self._noisy)
        )
        tokens = logits.shape[-1] if target_ids is None else target_ids
        logits.mul_(scales[:, None])
        for first in range(0, len(logits), CHUNK):
            rows = slice(first, first + CHUNK)
            noise = gumbel_from_states(states[rows], positions[rows] + DRAFT_OFFSET, tokens)
            logits[rows].addcmul_(noise.float(), noisy[rows, None])


def last_positions(positions: Tensor, rows: int, extended: Tensor | None) -> Tensor:
    """Positions [rows] of this many rows of logits: all of them, or the last one of each extended request."""
    if rows == len(positions) or extended is None:
        return positions
    return positions[extended.cumsum(0) - 1]
