"""The near-tie rule: two runs of one sample may part only where the two best perturbed scores all but tie.

Different batch shapes add up fp32 sums in different orders, so identity holds up to such ties. After the parting a
sample is not compared. At most one parting in 100,000 tokens is allowed (one at all in a smaller comparison).
"""

from collections.abc import Callable, Iterable, Mapping

import torch

from rlhfspec_mega.types import GenerationRequest, GenerationResult
from tests import reference_noise

MAX_GAP = 1e-4
MAX_LOGPROB_DIFFERENCE = 1e-4
TOKENS_PER_PARTING = 100_000

Logits = Callable[[list[int]], torch.Tensor]  # all tokens so far -> logits [vocab] of the next


def perturbed_scores(logits: torch.Tensor, request: GenerationRequest, position: int) -> torch.Tensor:
    """log p + g in float64, by the noise in plain Python; `position` is that of the last input token."""
    scores = (logits.double() / (request.temperature or 1.0)).log_softmax(dim=-1)
    if request.temperature > 0:
        noise = [reference_noise.gumbel(request.seed, position, token) for token in range(len(scores))]
        scores = scores + torch.tensor(noise, dtype=torch.float64)
    if request.ignore_stop:
        scores[list(request.stop_tokens)] = float("-inf")
    return scores


def assert_same(
    first: Mapping[str, GenerationResult],
    second: Mapping[str, GenerationResult],
    requests: Iterable[GenerationRequest],
    logits: Logits,
) -> None:
    """The results (by sample id) agree in tokens, finish reasons and log-probs under the near-tie rule."""
    partings = compared = 0
    for request in requests:
        a, b = first[request.sample_id], second[request.sample_id]
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
        if same is None:
            assert a.tokens == b.tokens and a.finish_reason == b.finish_reason, (
                f"{request.sample_id}: {len(a.tokens)} tokens ({a.finish_reason}) and "
                f"{len(b.tokens)} tokens ({b.finish_reason}) of at most {request.max_new_tokens}"
            )
            same = len(a.tokens)
        else:
            partings += 1
            sequence = [*request.prompt_tokens, *a.tokens[:same]]
            scores = perturbed_scores(logits(sequence), request, len(sequence) - 1)
            best = scores.topk(2)
            gap = float(best.values[0] - best.values[1])
            assert {a.tokens[same], b.tokens[same]} == set(best.indices.tolist()) and gap < MAX_GAP, (
                f"{request.sample_id}: tokens part at {same} where the two best scores differ by {gap:.2e}"
            )
        compared += same
        difference = torch.tensor(a.logprobs[:same]) - torch.tensor(b.logprobs[:same])
        assert not same or difference.abs().max() < MAX_LOGPROB_DIFFERENCE, f"{request.sample_id}: log-probs differ"
    assert partings <= max(1, compared // TOKENS_PER_PARTING), f"{partings} partings in {compared} tokens"
