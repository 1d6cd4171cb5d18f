"""The worked examples of docs/extending.md run as they stand there."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.config.conditions import missing
from rlhfspec_mega.config.option import KEY, Option
from rlhfspec_mega.config.schema import reward
from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.models import mapping
from rlhfspec_mega.models.shape import ARCHITECTURES, Architecture, ModelShape
from rlhfspec_mega.models.transformer import Transformer, causal_attention
from rlhfspec_mega.planning import placement, strategy
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.rl import shaping
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import Shard
from rlhfspec_mega.types import Prompt, Sample
from tests.near_tie import assert_same
from tests.unit.test_losslessness import REQUESTS, SHAPE, WEIGHTS, finish, make_engine, make_judge

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
BLOCKS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))


def example(name: str, within: ModuleType | None = None) -> ModuleType:
    """The block of this file, as a module; `within`: with the names of the module that it is added to."""
    module = ModuleType(name.removesuffix(".py").replace("/", "."))
    module.__dict__.update(vars(within) if within else {})
    exec(compile(BLOCKS[name], name, "exec"), module.__dict__)
    return module


def test_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "rewards.py").write_text(BLOCKS["my_package/rewards.py"])
    monkeypatch.syspath_prepend(tmp_path)
    responses = ("it is 42", "no" * 30)
    samples = [Sample(f"{n}", 0, Prompt(0, "q", "42", (1,)), n, response=text) for n, text in enumerate(responses)]
    with RewardRunner("my_package.rewards.brevity", arguments={"target": 30}) as runner:
        scores = runner.score(samples)
    assert scores == [(1.0, True), (pytest.approx(-0.3), False)]


def test_an_advantage_and_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("advantages", "losses"):
        monkeypatch.setitem(sys.modules, f"my_package.{name}", example(f"my_package/{name}.py"))
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    config = AlgorithmConfig(
        adv_estimator="my_package.advantages.ranks",
        norm_adv_by_std=False,
        loss="my_package.losses.reinforce",
        kl_coef=0.0,
    )
    algorithm = make_algorithm(config, members=2, samples_per_update=4)
    experience = Experience.of([[1]] * 4, [[2, 3]] * 4)
    experience.per_sample["rewards"] = torch.tensor([0.0, 5.0, 1.0, 0.5], dtype=torch.float64).numpy()
    experience.per_sample["truncated"] = torch.zeros(4, dtype=torch.bool).numpy()
    algorithm.add_advantages(experience, torch.Generator())
    assert experience.columns["advantages"].tolist() == [-1, -1, 1, 1, 1, 1, -1, -1]
    (batch,) = Shard.cut(experience, [[0, 1, 2, 3]]).batches()
    logprobs = -torch.rand(batch.mask.shape)
    loss, metrics = example("my_package/losses.py").reinforce(logprobs, logprobs, batch)
    assert torch.equal(loss, -batch.columns["advantages"] * logprobs) and set(metrics) == {"surprise"}


def test_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model computes what transformers' does with the same weights."""
    from transformers import MistralConfig, MistralForCausalLM

    monkeypatch.setitem(ARCHITECTURES, "mistral", Architecture("Mistral"))
    monkeypatch.setitem(mapping.MAPPINGS, "mistral", example("rlhfspec_mega/models/mapping/mistral.py").MAPPING)
    shape = ModelShape("mistral", 64, 2, 4, 2, 16, 96, 53, 64, 500.0, 1e-5, False)
    assert shape.hf_class == MistralForCausalLM.__name__
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=53, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, sliding_window=None,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
    )  # fmt: skip
    reference = MistralForCausalLM(config).eval()
    model = Transformer(shape, max_positions=64, dtype=torch.float32, device="cpu")
    model.load(dict(reference.state_dict()))
    tokens = torch.randint(0, 53, (1, 20))
    with torch.inference_mode():
        found = model.logits(model.hidden(tokens, torch.arange(20)[None], causal_attention(shape)))
        assert torch.allclose(found, reference(tokens).logits, atol=1e-4)


def test_a_drafting_policy() -> None:
    module = example("rlhfspec_mega/planning/strategy.py", strategy)
    policy = module.short_batches(SpeculationConfig(), AcceptanceModel(), CostModel.nominal(10**6, 10**4))
    policy.most = 4
    found = {}
    for slots in (4, 8):
        engine = make_engine(slots, policy)
        engine.submit(REQUESTS[:8])
        found[slots] = finish(engine)
    judge = make_judge(SHAPE, WEIGHTS)
    assert_same(found[8], found[4], REQUESTS[:8], judge)


def test_a_placement() -> None:
    made = example("rlhfspec_mega/planning/placement.py", placement).mostly_engines(
        placement.PlacementRequest(devices=8, replica_devices=2)
    )
    assert made.devices(placement.ACTOR) == [(0,), (1,)]
    assert made.devices(placement.ENGINE) == [(device,) for device in range(2, 8)]


def test_an_option() -> None:
    schema = example("rlhfspec_mega/config/schema/reward.py", reward)
    (field,) = dataclasses.fields(schema.RewardConfig)
    declared: Option = field.metadata[KEY]
    assert declared.allows(-1.0) and not declared.allows(1.0)
    run = RunConfig()
    (condition,) = declared.only_with
    assert missing(condition, run) == "reward.normalize=batch"
    run.reward.normalize = "group"
    assert missing(condition, run) is None
    floored = example("rlhfspec_mega/rl/shaping.py", shaping).floored
    rewards = np.array([-2.0, 0.5])
    assert floored(rewards, schema.RewardConfig(floor=-1.0)).tolist() == [-1.0, 0.5]
    assert floored(rewards, schema.RewardConfig()).tolist() == [-2.0, 0.5]
