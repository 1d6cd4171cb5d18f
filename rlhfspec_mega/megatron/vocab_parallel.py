"""Log-probabilities and entropy from vocabulary-parallel logits, in fp32, a chunk of tokens at a time.

Same mathematics as Megatron's vocab_parallel_cross_entropy, with what RL needs beside it: a sampling temperature, the
entropy, columns of vocabulary padding left out, and fp32 copies bounded by the chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def _chunk_statistics(
    logits: torch.Tensor, targets: torch.Tensor, offset: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob of targets, logsumexp, entropy) of fp32 logits [n, v/tp]; two all-reduces."""
    maximum = logits.amax(-1)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    exponential = (logits - maximum[:, None]).exp()
    local = targets - offset
    mine = (local >= 0) & (local < logits.shape[-1])
    gathered = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    target_logit = torch.where(mine, gathered, 0.0)
    # exp(-inf) * -inf is nan for padding columns; their probability is 0.
    weighted = torch.where(exponential > 0, exponential * logits, 0.0).sum(-1)
    sums = torch.stack([exponential.sum(-1), target_logit, weighted])
    dist.all_reduce(sums, group=group)
    log_normaliser = sums[0].log() + maximum
    return sums[1] - log_normaliser, log_normaliser, log_normaliser - sums[2] / sums[0]


class _VocabParallelLogProbs(torch.autograd.Function):
    """Forward keeps the logits as they came (no fp32 copy); backward recomputes the softmax chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        first_padding: int,
        chunk: int,
        group: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits.shape[-1]
        flat, flat_targets = logits.reshape(-1, width), targets.reshape(-1)
        offset = dist.get_rank(group) * width
        valid = max(0, min(width, first_padding - offset))
        outputs = [
            _chunk_statistics(_fp32(part, temperature, valid), part_targets, offset, group)
            for part, part_targets in zip(flat.split(chunk), flat_targets.split(chunk), strict=True)
        ]
        logprobs, normalisers, entropy = (torch.cat(x) for x in zip(*outputs, strict=True))
        ctx.save_for_backward(flat, flat_targets, normalisers, entropy)
        ctx.settings = (temperature, valid, chunk, offset, logits.shape)
        ctx.set_materialize_grads(False)  # a loss without the entropy gives it no gradient, and nothing is computed
        return logprobs.view(targets.shape), entropy.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, entropy_grad: torch.Tensor | None) -> tuple[Any, ...]:
        flat, targets, normalisers, entropy = ctx.saved_tensors
        temperature, valid, chunk, offset, shape = ctx.settings
        grad_logits = torch.empty_like(flat)
        grad = torch.zeros_like(normalisers) if grad is None else grad.reshape(-1)
        pieces = (x.split(chunk) for x in (flat, targets, normalisers, grad, grad_logits))
        of_entropy: list[Any] = [None] * len(flat.split(chunk))
        if entropy_grad is not None:
            of_entropy = list(zip(entropy.split(chunk), entropy_grad.reshape(-1).split(chunk), strict=True))
        for part, part_targets, normaliser, part_grad, out, bonus in zip(*pieces, of_entropy, strict=True):
            log_probabilities = _fp32(part, temperature, valid) - normaliser[:, None]
            probabilities = log_probabilities.exp()
            if bonus is not None:
                # The derivative of the entropy H by a logit is -p (log p + H), and 0 where p is.
                weighted = torch.where(probabilities > 0, log_probabilities + bonus[0][:, None], 0.0) * probabilities
                added = weighted * (-bonus[1] / temperature)[:, None]
            del log_probabilities  # a chunk's copies are what bounds memory here
            local = part_targets - offset
            mine = (local >= 0) & (local < part.shape[-1])
            probabilities.neg_()
            index = local.clamp(0, part.shape[-1] - 1)[:, None]
            probabilities.scatter_add_(-1, index, mine[:, None].to(probabilities.dtype))
            scale = (part_grad / temperature)[:, None]
            out.copy_(probabilities * scale if bonus is None else probabilities * scale + added)
        return grad_logits.view(shape), None, None, None, None, None


def _fp32(part: torch.Tensor, temperature: float, valid: int) -> torch.Tensor:
    """fp32 logits / T with the padding columns (from `valid` on) at -inf; never a view of the input."""
    scaled = part.float() / temperature
    if valid < part.shape[-1]:
        scaled[:, valid:] = float("-inf")
    return scaled


def vocab_parallel_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float, vocab_size: int, chunk: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits / T) at the targets, over the true vocabulary, and the entropy in nats.

    Args:
        logits: [..., padded_vocabulary / tp], this rank's columns; differentiable.
        targets: [...] token ids below vocab_size.
        vocab_size: true vocabulary; columns from it on are padding.
        chunk: tokens whose fp32 logits exist at once.
        group: the tensor-parallel process group.

    Returns:
        (log-probs, entropy), both [...] fp32, differentiable, and equal on all ranks of the group.
    """
    return _VocabParallelLogProbs.apply(logits, targets, temperature, vocab_size, chunk, group)
