"""Drafting from history, from the draft model, and from both, against plain steps: python -m benchmarks.history.

The rollouts are a run's: groups of eight samples of new prompts in each step, at temperature 1, as long as the model
makes them. Variants decode the same samples in turns, on engines of their own. A session is a run of so many steps that
begins with empty histories and untaught policies; its first two steps do not count. No index ever holds a sample before
it is decoded, nor another one of its seed.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired import interleaved, ratio_interval
from benchmarks.samples import Target, load_target, words_target
from benchmarks.scenarios import send
from rlhfspec_mega.bootstrap.start import start_draft
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.data.chain_sums import ChainSums
from rlhfspec_mega.data.prompts import encode_prompts
from rlhfspec_mega.draft.directory import load_draft
from rlhfspec_mega.history.index import History
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, StepCost
from rlhfspec_mega.planning.strategy import Adaptive
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.rollout.torch_engine.profile import profile
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest, WeightTarget

OFF, DRAFT, HISTORY, BOTH = "off", "draft", "history", "both"
VARIANTS = (OFF, DRAFT, HISTORY, BOTH)
SLOTS, MEMBERS, UNCOUNTED, HISTORY_TOKENS = 64, 8, 2, 262144
PROMPT_SEED = 4  # of chain sums: another stream than a run's


class Bench:
    """An engine for each variant, with the costs that it measured.

    Args:
        draft: directory of the target's draft.
    """

    def __init__(self, config: RunConfig, target: Target, draft: Path, dtype: str) -> None:
        self._config, self._target, self._draft = config, target, draft
        self._engines = {variant: self._engine(variant, getattr(torch, dtype)) for variant in VARIANTS}
        self._costs: dict[str, list[StepCost]] = {}
        for variant in VARIANTS[1:]:
            self.begin_session(variant)
            self._costs[variant] = profile(self._engines[variant])
        task = ChainSums.from_config(config.data, PROMPT_SEED)
        texts = [task.prompt_text("train", number) for number in range(4096)]
        self._prompts = encode_prompts(target.tokenizer, texts, False)
        self.tokens, self.steps = dict.fromkeys(VARIANTS, 0), dict.fromkeys(VARIANTS, 0)

    def begin_session(self, variant: str) -> None:
        """Forget what the variant's engine has decoded, and all that its policy has learnt but the profiled costs."""
        engine, cost = self._engines[variant], CostModel()
        if variant == OFF:
            return
        if variant in self._costs:
            cost.fit(self._costs[variant])
        speculation = self._config.speculation
        policy = Adaptive(
            AcceptanceModel(), cost, speculation.topk, speculation.max_num_steps, speculation.max_num_draft_tokens
        )
        policy.recalls = variant in (HISTORY, BOTH)
        engine.policy, engine.history = policy, History(SLOTS, HISTORY_TOKENS) if policy.recalls else None

    def rollout(self, variant: str, batch: int, step: int) -> float:
        """Seconds in which a variant decodes the samples of a step."""
        engine = self._engines[variant]
        requests = [self._request(step, number) for number in range(batch)]
        engine.reset_stats()
        started = time.perf_counter()
        engine.submit(requests)
        while not engine.idle:
            self.tokens[variant] += sum(len(result.tokens) for result in engine.poll(60.0))
        seconds = time.perf_counter() - started
        self.steps[variant] += engine.stats()["decode_steps"]
        return seconds

    def _request(self, step: int, number: int) -> GenerationRequest:
        group = number // MEMBERS
        prompt = (step * SLOTS + group) % len(self._prompts)
        return GenerationRequest(
            sample_id=f"{step}.{number}",
            group_id=f"{step}.{group}",
            prompt_tokens=self._prompts[prompt],
            seed=sample_seed(31, step, prompt, number % MEMBERS),
            max_new_tokens=self._config.rollout.max_new_tokens,
            stop_tokens=(self._target.tokenizer.eos_token_id,),
        )

    def _engine(self, variant: str, dtype: torch.dtype) -> TorchEngine:
        given: dict[str, Any] = {}
        if variant != OFF:
            given["policy"] = Adaptive(AcceptanceModel(), CostModel())  # replaced when a session begins
        if variant in (DRAFT, BOTH):
            given["draft"], weights = load_draft(self._draft, self._target.shape)
        rollout = self._config.rollout
        engine = TorchEngine(
            self._target.shape,
            slots=SLOTS,
            max_positions=rollout.max_prompt_tokens + rollout.max_new_tokens,
            prefill_chunk=rollout.chunked_prefill_size,
            dtype=dtype,
            device="cpu",
            **given,
        )
        send(engine, self._target.model.hf_tensors(), WeightTarget.ACTOR)
        if variant in (DRAFT, BOTH):
            send(engine, weights, WeightTarget.DRAFT)
        return engine


def measure(bench: Bench, batch: int, sessions: int, steps: int) -> dict[str, Any]:
    """Seconds of the counted steps by variant, and what they gained over plain steps."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    bench.tokens, bench.steps = dict.fromkeys(VARIANTS, 0), dict.fromkeys(VARIANTS, 0)
    for session in range(sessions):
        first = dict.fromkeys(VARIANTS, session * 1000)

        def once(variant: str, first: dict[str, int] = first) -> float:
            first[variant] += 1
            return bench.rollout(variant, batch, first[variant])

        for variant in VARIANTS:
            bench.begin_session(variant)
        found = interleaved({variant: partial(once, variant) for variant in VARIANTS}, steps, warm_up=UNCOUNTED)
        for variant, values in found.items():
            seconds[variant] += values
    decoded = {variant: bench.tokens[variant] / bench.steps[variant] for variant in VARIANTS}
    row: dict[str, Any] = {"batch": batch, "seconds": seconds, "tokens_per_decode_step": decoded}
    for variant in VARIANTS[1:]:
        over = ratio_interval(seconds[OFF], seconds[variant])
        row[variant] = (over.value, over.low, over.high)
        print(f"{batch:>5}  {variant:<8} {over}  {decoded[variant] / decoded[OFF]:.2f}", flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a session that count")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/history_cpu.json"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = load_config([f"model={given.model}"])
    directory = words_target(given.model)
    with Console(0) as console:
        draft = start_draft(config, directory, console)
    assert draft is not None, "a model made here has a draft"
    bench = Bench(config, load_target(directory), draft, given.dtype)
    print(
        "Plain seconds over those of the variant, by step: median and 95% interval; tokens per decode step over plain."
    )
    print("batch  sources")
    rows = [measure(bench, batch, given.sessions, given.steps) for batch in given.batches]
    conditions = {"model": given.model, "dtype": given.dtype, "cpu": platform.processor() or platform.machine()}
    given.out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
