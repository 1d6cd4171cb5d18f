"""From prompts to finished samples: requests with their noise seeds, decoding, and text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.config.schema.generation import RolloutConfig
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.rollout.manager import Progress, RolloutManager
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Prompt, Sample

GENERATION_CONFIG = "generation_config.json"


def stop_tokens(tokenizer: Any, model_path: Path) -> tuple[int, ...]:
    """The tokenizer's end-of-text token and those of generation_config.json (Llama 3 ends turns with another one)."""
    found = {int(tokenizer.eos_token_id)}
    file = model_path / GENERATION_CONFIG
    if file.is_file():
        given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(given if isinstance(given, list) else [given] if given is not None else [])
    return tuple(sorted(found))


class SampleGenerator:
    """Generates groups of samples through the rollout manager.

    Args:
        stops: tokens that end a response; they count as response tokens but are not part of its text.

    Attributes:
        ledger: records every sample made here.
    """

    def __init__(
        self,
        rollout: RolloutManager,
        tokenizer: Any,
        stops: tuple[int, ...],
        config: RolloutConfig,
        seed: int,
    ) -> None:
        self.ledger = Ledger()
        self._rollout, self._tokenizer, self._stops = rollout, tokenizer, stops
        self._config, self._seed = config, seed

    def sample(
        self,
        prompts: Sequence[Prompt],
        members: int,
        step: int,
        progress: Progress | None = None,
        scoring: Scoring | None = None,
        ended: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        """`members` samples of each prompt at the run's temperature, ordered by prompt, then member.

        Args:
            scoring: receives each sample as it finishes, see RolloutManager.generate.
            ended: called with each sample as it ends.
        """
        samples = [
            Sample(f"{step}.{prompt.index}.{member}", step, prompt, member)
            for prompt in prompts
            for member in range(members)
        ]
        self.ledger.open(samples, Purpose.TRAIN)
        return self._generate(samples, self._config.temperature, "generate", progress, scoring, ended)

    def greedy(
        self,
        prompts: Sequence[Prompt],
        step: int,
        scoring: Scoring | None = None,
        ended: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        """The most probable response to each prompt, for evaluation. Arguments as for `sample`."""
        samples = [Sample(f"eval{step}.{prompt.index}", step, prompt, 0) for prompt in prompts]
        self.ledger.open(samples, Purpose.EVALUATE)
        return self._generate(samples, 0.0, "evaluate", None, scoring, ended)

    def _generate(
        self,
        samples: list[Sample],
        temperature: float,
        phase: str,
        progress: Progress | None,
        scoring: Scoring | None,
        ended: Callable[[Sample], None] | None,
    ) -> list[Sample]:
        by_id = {sample.sample_id: sample for sample in samples}

        def fill(result: GenerationResult) -> None:
            sample = by_id[result.sample_id]
            sample.response_tokens, sample.engine_logprobs = result.tokens, result.logprobs
            sample.policy_versions, sample.finish_reason = result.versions, result.finish_reason
            text_tokens = [token for token in result.tokens if token not in self._stops]
            sample.response = self._tokenizer.decode(text_tokens, skip_special_tokens=True)
            if ended:
                ended(sample)

        requests = [
            GenerationRequest(
                sample_id=sample.sample_id,
                group_id=sample.group_id,
                prompt_tokens=sample.prompt.tokens,
                seed=sample_seed(self._seed, sample.step, sample.prompt.index, sample.member),
                max_new_tokens=self._config.max_new_tokens,
                temperature=temperature,
                stop_tokens=self._stops,
            )
            for sample in samples
        ]
        self._rollout.generate(requests, self.ledger, phase, progress, scoring, fill)
        return samples
