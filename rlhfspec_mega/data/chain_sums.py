"""The built-in task: sums and differences worked step by step, with a long tail of chain lengths.

"7+5-8+3=" is answered "7+5=12-8=4+3=7;7": each term with the partial sum it leads to, then the result. Writing every
term again makes the sum a matter of the last few characters, which a small model learns far sooner.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from dataclasses import dataclass
from statistics import NormalDist

from rlhfspec_mega.config.schema.generation import DataConfig
from rlhfspec_mega.errors import UserError

TERM = re.compile(r"[+-]?\d+")
EVAL_SHARE = 10  # one prompt text in this many is held out
TASK_VERSION = 2  # to be raised when the same settings give other prompts
GOLDEN = (math.sqrt(5) - 1) / 2
TRIES = 200  # texts drawn with one number of terms, and numbers of terms, before a split is taken to have none
# Demonstrations are of mixed quality, like pretraining data: long chains are often answered without the
# working. So the warmed-up model can do it but seldom does, and RL finds that longer answers are right more often.
LAZY_FROM_TERMS = 4  # chains of so many terms or more ...
LAZY_SHARE = 0.7  # ... skip the working in this share of the demonstrations


@dataclass(frozen=True)
class ChainSums:
    """Prompts by number. Lengths are lognormal; signs are chosen so that partial sums stay in 0..max_sum.

    Prompts with neighbouring numbers have lengths from all parts of the distribution, so that each training step is
    about as hard as the others: prompt n has the quantile of n times the golden ratio, shifted at random, modulo 1 (an
    additive recurrence, e.g. Niederreiter 1992, section 3.1). Both splits have the same distribution of lengths.

    Attributes:
        median_terms, sigma_terms: of the lognormal number of terms, clipped to 2..max_terms.
        max_operand: terms are 1..max_operand.
    """

    seed: int
    max_terms: int
    median_terms: float
    sigma_terms: float
    max_operand: int
    max_sum: int

    @classmethod
    def from_config(cls, config: DataConfig, seed: int) -> ChainSums:
        """Raises UserError for settings that allow no chain."""
        if config.max_terms < 2 or config.median_terms <= 0 or config.sigma_terms < 0:
            raise UserError("Chain sums need data.max_terms >= 2, data.median_terms > 0 and data.sigma_terms >= 0.")
        least = 2 * config.max_operand - 1  # below it, some partial sum allows neither sign of some term
        if config.max_operand < 1 or config.max_sum < least:
            raise UserError(
                f"data.max_sum={config.max_sum} is too small for data.max_operand={config.max_operand} (at least 1); "
                f"set it to {least} or more."
            )
        return cls(seed, config.max_terms, config.median_terms, config.sigma_terms, config.max_operand, config.max_sum)

    def prompt_text(self, split: str, index: int) -> str:
        """Prompt number `index` of "train" or "eval"; no text is in both. The same text can have several numbers.

        Raises UserError if the settings allow so few chains that the split has none.
        """
        rng = random.Random(f"{self.seed}/{split}/{index}")
        shift = random.Random(f"{self.seed}/{split}").random()
        quantile = (shift + index * GOLDEN) % 1.0
        for _ in range(TRIES):
            terms = self._terms(quantile)
            for _ in range(TRIES):
                text = self._draw(rng, terms)
                if (zlib.crc32(text.encode()) % EVAL_SHARE == 0) == (split == "eval"):
                    return text
            quantile = rng.random()
        raise UserError("Of so few chains of sums none is held out: set data.max_operand or data.max_terms higher.")

    def longest_prompt(self) -> str:
        """A prompt of the greatest length the settings allow."""
        return "+".join([str(self.max_operand)] * self.max_terms) + "="

    def _terms(self, quantile: float) -> int:
        """The number of terms that this share of chains does not exceed."""
        normal = NormalDist().inv_cdf(max(quantile, 1e-12))
        drawn = round(math.exp(math.log(self.median_terms) + self.sigma_terms * normal))
        return max(2, min(self.max_terms, drawn))

    def _draw(self, rng: random.Random, terms: int) -> str:
        total = rng.randint(1, self.max_operand)
        text = str(total)
        for _ in range(terms - 1):
            term = rng.randint(1, self.max_operand)
            signs = [sign for sign in (1, -1) if 0 <= total + sign * term <= self.max_sum]
            sign = rng.choice(signs)
            total += sign * term
            text += f"{'+' if sign > 0 else '-'}{term}"
        return text + "="


def answer_text(prompt: str) -> str:
    """The full worked solution: the target of supervised warm-up and of the exact reward.

    Raises:
        ValueError: the prompt is no chain of sums.
    """
    terms = TERM.findall(prompt)
    if not terms or "".join(terms) + "=" != prompt:
        raise ValueError(f"{prompt!r} is no chain of sums")
    total = int(terms[0])
    working = terms[0]
    for term in terms[1:]:
        total += int(term)
        working += f"{term}={total}"
    return f"{working};{total}"


def demonstration(prompt: str, index: int) -> str:
    """The demonstration for prompt number `index`: fully worked, or, for long chains, often the bare result."""
    answer = answer_text(prompt)
    is_long = len(TERM.findall(prompt)) >= LAZY_FROM_TERMS
    if is_long and random.Random(f"demonstration/{index}").random() < LAZY_SHARE:
        return ";" + answer.rpartition(";")[2]
    return answer


def corrupted(prompt: str, index: int) -> str:
    """A response to prompt number `index` that is not exact: a wrong result, a slip that is carried on, or no working.

    A reward model that tells it from the worked solution has learnt what the exact reward is about.
    """
    rng = random.Random(f"corrupted/{index}")
    working, _, result = answer_text(prompt).rpartition(";")
    wrong = str(int(result) + rng.choice([-2, -1, 1, 2]))
    kind = rng.randrange(3)
    if kind == 0:
        return f"{working};{wrong}"
    if kind == 1:
        return ";" + rng.choice([result, wrong])
    terms = TERM.findall(prompt)
    slip, total, text = rng.randrange(1, len(terms)), int(terms[0]), terms[0]
    for number, term in enumerate(terms[1:], start=1):
        total += int(term) + (rng.choice([-1, 1]) if number == slip else 0)
        text += f"{term}={total}"
    return f"{text};{total}"
