"""What the generation benchmark decodes: fixed batches and long-tail decays of forced lengths, on one engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import MOST_DEPTH, MOST_NODES, MOST_WIDTH, Contender
from benchmarks.samples import PREFILL_CHUNK, Target
from rlhfspec_mega.draft.directory import load_draft
from rlhfspec_mega.history.index import History
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.oversight import MonitoredPolicy
from rlhfspec_mega.planning.strategy import CalibratedPolicy
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.rollout.torch_engine.profile import ScriptedPolicy, profile, rehearse
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import DECODE_MODES, GenerationRequest, TensorInfo, WeightTarget

BATCHES = (1, 2, 4, 8, 16, 32)
SLOTS = 32
# Lognormal: median tokens and sigma of chat (LMSYS-like) and of reasoning RL, and the scale to what a small model
# decodes in seconds.
LENGTHS = {"chat": (119, 0.77, 0.17), "reasoning": (1300, 0.99, 0.02)}
LONGEST = 320
MATRIX_PRODUCTS = (
    *("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::linear"),
    *("aten::_scaled_dot_product_flash_attention_for_cpu", "mkldnn::_linear_pointwise_", "aten::mkldnn_linear"),
)
HISTORY_TOKENS = 65536  # of a fresh index
MEMBERS = 8  # samples of a prompt


@dataclass(frozen=True)
class Scenario:
    """Samples that start together; `lengths` are forced, so that every policy decodes the same number of tokens."""

    name: str
    lengths: tuple[int, ...]
    temperature: float = 1.0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def batch_scenario(batch: int, tokens: int, temperature: float) -> Scenario:
    """A batch that stays whole to its end."""
    return Scenario(f"batch {batch} T={temperature:g}", (tokens,) * batch, temperature)


def decay_scenario(name: str, samples: int) -> Scenario:
    """Lognormal lengths at evenly spaced quantiles: the batch decays as a rollout's does."""
    median, sigma, scale = LENGTHS[name]
    quantiles = (np.arange(samples) + 0.5) / samples
    normal = torch.special.ndtri(torch.from_numpy(quantiles)).numpy()
    lengths = np.clip(np.rint(median * scale * np.exp(sigma * normal)), 1, LONGEST)
    return Scenario(f"{name} decay", tuple(int(length) for length in lengths))


class Bench:
    """A plain engine and one with the draft, and the policies' own models of cost and acceptance."""

    def __init__(
        self,
        target: Target,
        draft: Path,
        prompts: Sequence[tuple[int, ...]],
        device: str = "cpu",
        dtype: str = "float32",
        history: bool = False,
    ) -> None:
        self._target, self._prompts, self._device = target, prompts, device
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._history = history
        self.prompt_length = sum(map(len, prompts)) // len(prompts)
        positions = max(map(len, prompts)) + LONGEST
        self._plain = self._engine(positions, None)
        self.engine = self._engine(positions, draft)
        self.costs = profile(self.engine)
        self._overseen: dict[tuple[str, float], MonitoredPolicy] = {}

    def overseen(self, contender: Contender, temperature: float) -> MonitoredPolicy:
        """A contender's policy; it keeps what it learns at a temperature, which not all tell from another."""
        key = contender.name, temperature
        if key not in self._overseen:
            assert contender.make is not None
            policy, rehearsed = (contender.make(AcceptanceModel(), self.cost_model()) for _ in range(2))
            for one in (policy, rehearsed):
                if isinstance(one, CalibratedPolicy):
                    one.recalls = self._history
            self.engine.history = History(SLOTS, HISTORY_TOKENS) if self._history else None
            rehearse(self.engine, rehearsed)
            self._overseen[key] = MonitoredPolicy(policy, collapse_ratio=0.5, stops=False)
        return self._overseen[key]

    def cost_model(self) -> CostModel:
        """A fresh cost model that knows the profile."""
        cost = CostModel()
        cost.fit(self.costs)
        return cost

    def run(self, contender: Contender, scenario: Scenario, repeat: int) -> float:
        """Seconds to decode a scenario from prompts to last token; prompts and noise depend on the repeat alone.

        Policies are overseen as in a run: of 128 steps four decode plainly.
        """
        if contender.make is None:
            return self.decode(self._plain, scenario, repeat)
        self.engine.policy = self.overseen(contender, scenario.temperature)
        return self.decode(self.engine, scenario, repeat)

    def gains(self, contender: Contender, scenario: Scenario) -> dict[str, list[float]]:
        """By mode, tokens per second over those of plain steps and share of the time, since the last call."""
        tally = self.overseen(contender, scenario.temperature).take_tally()
        count = len(DECODE_MODES)
        found = {}
        for number, mode in enumerate(DECODE_MODES):
            tokens, seconds = sum(tally.mode_tokens[number::count]), sum(tally.mode_seconds[number::count])
            if seconds:
                found[mode] = [round(tokens / seconds, 3), round(seconds / sum(tally.mode_seconds), 3)]
        return found

    @property
    def compiled_rows(self) -> int:
        """See `Transformer.few_rows`."""
        return self._plain._model.few_rows

    def matrix_share(self, batch: int, steps: int = 24) -> float:
        """Share of a plain step's time that is spent in matrix products, attention's included.

        Their time is that of torch's profiler, which sees none in compiled layers (`Transformer.few_rows`); that of a
        step is measured without it.
        """
        engine, seconds, products = self._plain, 0.0, 0.0
        for profiled in (False, True, False):
            engine.submit(self.requests(batch_scenario(batch, 2 * steps, 1.0), 0))
            while engine.load().running < batch:
                engine.poll(0)
            watch = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            with watch if profiled else nullcontext() as found:
                started = time.perf_counter()
                for _ in range(steps):
                    engine.poll(0)
                seconds += 0.0 if profiled else time.perf_counter() - started
            if found is not None:
                averages = found.key_averages()
                products = sum(one.self_cpu_time_total for one in averages if one.key in MATRIX_PRODUCTS) * 1e-6
            engine.clear()
        return products / (seconds / 2)

    def prefill_seconds(self, scenario: Scenario, repeats: int = 9) -> float:
        """Median seconds of a scenario's prefill."""
        found = []
        for repeat in range(repeats):
            self._plain.reset_stats()
            self.decode(self._plain, scenario, repeat)
            found.append(self._plain.stats()["prefill_seconds"])
        return statistics.median(found)

    def decode(self, engine: TorchEngine, scenario: Scenario, repeat: int) -> float:
        """As `run`, on an engine as it is."""
        requests = self.requests(scenario, repeat)
        if self._history and engine is self.engine:  # a fresh one: samples of other repeats have the same prompts
            engine.history = History(SLOTS, HISTORY_TOKENS)
        started = time.perf_counter()
        engine.submit(requests)
        found = 0
        while not engine.idle:
            found += len(engine.poll(60.0))
        seconds = time.perf_counter() - started
        assert found == len(requests)
        return seconds

    def requests(self, scenario: Scenario, repeat: int) -> list[GenerationRequest]:
        """The samples of a scenario in groups that share a prompt, as in a rollout; prompts are drawn for the repeat.

        Long samples get long prompts, whose answers have much working: a forced length is then seldom beyond the
        answer, where the model says nothing that it was taught.
        """
        draws = np.random.default_rng(repeat).permutation(len(self._prompts))[
            : 2 * -(-len(scenario.lengths) // MEMBERS)
        ]
        prompts = sorted((self._prompts[draw] for draw in draws), key=len, reverse=True)
        lengths = sorted(scenario.lengths, reverse=True)
        return [
            GenerationRequest(
                sample_id=f"{repeat}.{number}",
                group_id=f"{repeat}.{number // MEMBERS}",
                prompt_tokens=prompts[number // MEMBERS],
                seed=sample_seed(23, repeat, number, 0),
                max_new_tokens=length,
                temperature=scenario.temperature,
                stop_tokens=(self._target.tokenizer.eos_token_id,),
                ignore_stop=True,
            )
            for number, length in enumerate(lengths)
        ]

    def _engine(self, positions: int, draft: Path | None) -> TorchEngine:
        given: dict[str, Any] = {}
        if draft is not None:
            shape, weights = load_draft(draft, self._target.shape)
            given = {"draft": shape, "policy": ScriptedPolicy(MOST_WIDTH, MOST_DEPTH, MOST_NODES, recalls=False)}
        engine = TorchEngine(
            self._target.shape,
            slots=SLOTS,
            max_positions=positions,
            prefill_chunk=PREFILL_CHUNK,
            dtype=self.dtype,
            device=self._device,
            **given,
        )
        send(engine, self._target.model.hf_tensors(), WeightTarget.ACTOR)
        if draft is not None:
            send(engine, weights, WeightTarget.DRAFT)
        return engine


def send(engine: TorchEngine, weights: dict[str, torch.Tensor], target: WeightTarget) -> None:
    """Give an engine its first weights."""
    engine.begin_update(0, [TensorInfo(name, tuple(t.shape), "float32") for name, t in weights.items()], target)
    engine.update_weights([(name, 0, tensor.flatten()) for name, tensor in weights.items()])
    engine.end_update(0)
