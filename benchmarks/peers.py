"""Outside peers on the same weights: transformers' `generate`, plain, with prompt lookup, and assisted.

    python -m benchmarks.peers --model small --assistant tiny

Lengths are forced (<eos> is masked by min_new_tokens = max_new_tokens), one thread, float32. Prompt lookup (Saxena
2023) and assisted generation (Leviathan et al. 2023) decode one sequence at a time: transformers refuses more.
Prints a table; the last line is one JSON object: tokens per second by method, temperature and batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from benchmarks.samples import Sampled, Target, load_target, sample, word_prompts, words_target
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.transformer import causal_attention

LOOKUP_TOKENS = 10  # as in transformers' own examples of prompt lookup
NEAR_TIE = 1e-4  # of the two best log-probs: below, batch shapes may decide
TOKENS_PER_PARTING = 100_000


class Method(StrEnum):
    """How transformers decodes."""

    PLAIN = "plain"
    LOOKUP = "prompt lookup"
    ASSISTED = "assisted"


@dataclass(frozen=True)
class Decoded:
    """What a peer decoded: responses in the order of the prompts, and the wall time it took."""

    tokens: list[tuple[int, ...]]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


class Peer:
    """transformers' `generate` on a target's directory.

    Args:
        assistant: a smaller model with the same tokenizer, for `Method.ASSISTED`.
        dtype: of the weights.
    """

    def __init__(self, target: Target, assistant: Target | None = None, dtype: torch.dtype = torch.float32):
        self._model = _load(target, dtype)
        self._assistant = _load(assistant, dtype) if assistant else None
        self._pad, self._eos = target.tokenizer.pad_token_id, target.tokenizer.eos_token_id
        if assistant and assistant.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise UserError(
                f"{assistant.directory} has another tokenizer than {target.directory}; choose one that shares it."
            )

    def decode(
        self,
        prompts: Sequence[tuple[int, ...]],
        length: int,
        *,
        method: Method = Method.PLAIN,
        temperature: float = 1.0,
        batch: int = 1,
    ) -> Decoded:
        """Responses of exactly `length` tokens to prompts, `batch` at a time (padded on the left).

        Raises UserError for a batch above 1 with prompt lookup or an assistant, and for a missing assistant.
        """
        self._check(method, batch)
        config = self._config(method, length, temperature)
        options = {"assistant_model": self._assistant} if method is Method.ASSISTED else {}
        responses: list[tuple[int, ...]] = []
        started = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(prompts), batch):
                tokens, mask = _padded(prompts[first : first + batch], self._pad)
                found = self._model.generate(tokens, attention_mask=mask, generation_config=config, **options)
                responses += [tuple(row) for row in found[:, tokens.shape[1] :].tolist()]
        seconds = time.perf_counter() - started
        if any(len(response) != length for response in responses):
            raise RunError(f"transformers ended a response before its forced {length} tokens.")
        return Decoded(responses, seconds)

    def _check(self, method: Method, batch: int) -> None:
        if method is not Method.PLAIN and batch > 1:
            raise UserError(f"transformers supports {method} for one sequence at a time only: set the batch to 1.")
        if method is Method.ASSISTED and self._assistant is None:
            raise UserError("Assisted generation needs an assistant: name a smaller model with the same tokenizer.")

    def _config(self, method: Method, length: int, temperature: float) -> GenerationConfig:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=self._pad,
            eos_token_id=self._eos,
            prompt_lookup_num_tokens=LOOKUP_TOKENS if method is Method.LOOKUP else None,
            **(sampling if temperature > 0 else {"do_sample": False}),
        )


def check_greedy(target: Target, ours: Sequence[Sampled], theirs: Sequence[tuple[int, ...]]) -> int:
    """Number of sequences whose greedy responses part at a near tie; the rest agree in every token.

    Raises RunError where they part though the two best log-probs differ by 1e-4 or more, or part too often.
    """
    partings = compared = 0
    for sampled, other in zip(ours, theirs, strict=True):
        own = sampled.response
        same = next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), len(own))
        compared += same
        if same < len(own):
            partings += 1
            gap = _best_gap(target, sampled.tokens[: sampled.prompt_length + same], {own[same], other[same]})
            if gap >= NEAR_TIE:
                raise RunError(f"Greedy responses part at token {same} where the best log-probs differ by {gap:.1e}.")
    if partings > max(1, compared // TOKENS_PER_PARTING):
        raise RunError(f"Greedy responses part {partings} times in {compared} tokens.")
    return partings


@torch.no_grad()
def _best_gap(target: Target, tokens: Sequence[int], parted: set[int]) -> float:
    """Difference of the two best log-probs after `tokens`, <eos> left out; infinite if these are not `parted`."""
    states = target.model.hidden(
        torch.tensor([tokens]), torch.arange(len(tokens))[None], causal_attention(target.shape)
    )
    logprobs = target.model.logits(states[:, -1])[0].double().log_softmax(-1)
    logprobs[target.tokenizer.eos_token_id] = float("-inf")
    best = logprobs.topk(2)
    return float(best.values[0] - best.values[1]) if set(best.indices.tolist()) == parted else float("inf")


def _load(target: Target, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(target.directory, dtype=dtype, local_files_only=True)
    return model.eval()


def _padded(prompts: Sequence[tuple[int, ...]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and attention mask [B, T], padded on the left."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([(pad,) * (longest - len(prompt)) + prompt for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return tokens, (torch.arange(longest) >= longest - lengths[:, None]).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="built-in model: tiny or small")
    parser.add_argument("--assistant", help="built-in model that drafts for assisted generation")
    parser.add_argument("--length", type=int, default=128, help="tokens of every response")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = load_target(words_target(arguments.model))
    assistant = load_target(words_target(arguments.assistant)) if arguments.assistant else None
    peer, prompts = Peer(target, assistant), word_prompts(32, target.tokenizer, "eval")
    runs = [(method, 1) for method in Method if assistant or method is not Method.ASSISTED] + [(Method.PLAIN, 32)]
    rates = {}
    for temperature in (0.0, 1.0):
        ours = sample(target, prompts, temperature=temperature, max_new_tokens=arguments.length, seed=0, forced=True)
        for method, batch in runs:
            count = 4 if batch == 1 else batch
            peer.decode(prompts[:1], 8, method=method, temperature=temperature)  # to warm up
            decoded = peer.decode(
                prompts[:count], arguments.length, method=method, temperature=temperature, batch=batch
            )
            partings = check_greedy(target, ours[:count], decoded.tokens) if temperature == 0 else 0
            rates[f"{method} T={temperature:g} batch={batch}"] = round(decoded.tokens_per_second, 1)
            note = f", same tokens as the engine ({partings} near ties)" if temperature == 0 else ""
            print(f"{method:<14} T={temperature:g} batch {batch:>2}: {decoded.tokens_per_second:8.1f} tokens/s{note}")
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
