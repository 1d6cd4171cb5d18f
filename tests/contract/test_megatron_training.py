"""Updates, checkpoints and the AdamW repairs on real ranks: every parallel layout ends with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfspec_mega.config.schema.training import ActorConfig, OptimizerConfig
from rlhfspec_mega.rl.microbatch import MicroBatch
from tests.contract.test_megatron_parity import collated, make_models, make_sequences
from tests.megatron_probe import start_probes

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, warmup_steps=2, schedule="cosine")
LAYOUTS = {
    "one": ActorConfig(tensor_parallel=1, optimizer=OPTIMIZER),
    "tp2": ActorConfig(tensor_parallel=2, optimizer=OPTIMIZER),
    "pp2": ActorConfig(tensor_parallel=1, pipeline_parallel=2, optimizer=OPTIMIZER),
    "pp2_interleaved": ActorConfig(tensor_parallel=1, pipeline_parallel=2, virtual_pipeline=2, optimizer=OPTIMIZER),
    "dp2": ActorConfig(tensor_parallel=1, optimizer=OPTIMIZER),
}


def shards(layout: str) -> list[list[MicroBatch]]:
    """The same five sequences for one or two data-parallel ranks, in micro-batches of unlike sizes.

    One process has them padded, all other layouts packed.
    """
    sequences = make_sequences()
    if layout == "dp2":
        return [collated(sequences, part, packed=True) for part in ([[0], [1, 4]], [[2, 3], []])]
    return [collated(sequences, [[0, 1], [2, 3], [4], []], packed=layout != "one")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))["llama_tied"]


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    started = {n: start_probes(tmp_path_factory.mktemp(f"probes{n}"), n) for n in (1, 2)}
    yield {name: started[1 if name == "one" else 2][1] for name in LAYOUTS}
    for cluster, _ in started.values():
        cluster.close()


def train(group: Any, layout: str, updates: int) -> dict[str, float]:
    return [group.call("update", shards(layout), phase="update")[0] for _ in range(updates)][-1]


def full_weights(group: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for part in group.call("weights", phase="weights") if part for name, tensor in part.items()}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.fixture(scope="module")
def undisturbed(probes: dict[str, Any], model: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and weights after six updates in one process."""
    probes["one"].call("build", LAYOUTS["one"], model, phase="build")
    metrics = train(probes["one"], "one", 6)
    return metrics, full_weights(probes["one"])


@pytest.mark.parametrize("layout", ["tp2", "pp2", "pp2_interleaved", "dp2"])
def test_layouts_train_alike(layout: str, probes: dict, model: Path, undisturbed: tuple) -> None:
    group = probes[layout]
    group.call("build", LAYOUTS[layout], model, phase="build")
    metrics = train(group, layout, 6)
    for name in ("loss", "grad_norm", "entropy", "lr", "loss_tokens"):
        assert metrics[name] == pytest.approx(undisturbed[0][name], rel=1e-4), name
    assert largest_difference(full_weights(group), undisturbed[1]) < 1e-4


def not_a_number(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss that breaks in one micro-batch, that of a single sequence."""
    broken = len(batch.indices) == 1
    return logprobs * (float("nan") if broken else -1.0), {"entropy": entropy}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_finite_is_skipped(layout: str, probes: dict, model: Path) -> None:
    """Weights and optimizer stay as they were: the next update ends where it would have without the broken one."""
    group, found = probes[layout], []
    for broken in (True, False):
        group.call("build", LAYOUTS[layout], model, phase="build")
        train(group, layout, 2)
        before = full_weights(group)
        loss = (not_a_number,) if broken else ()
        metrics = group.call("update", shards(layout), *loss, phase="update")
        if broken:
            assert all(one["skipped_updates"] == 1.0 for one in metrics)
            assert largest_difference(before, full_weights(group)) == 0.0
            assert train(group, layout, 1)["skipped_updates"] == 0.0
        found.append(full_weights(group))
    ratio = largest_difference(before, found[0]) / largest_difference(before, found[1])
    assert 0.3 < ratio < 3.0, "the learning rate is another, the direction the same"


def test_training_moves_weights_and_lowers_the_loss(probes: dict, model: Path) -> None:
    group = probes["one"]
    group.call("build", LAYOUTS["one"], model, phase="build")
    before = full_weights(group)
    first = train(group, "one", 1)["loss"]
    assert largest_difference(full_weights(group), before) > 1e-4
    assert train(group, "one", 5)["loss"] < first


def save(group: Any, directory: Path) -> None:
    assert not any(part.failure for part in group.call("save", directory, phase="save"))


@pytest.mark.parametrize("middle", ["pp2", "pp2_interleaved"])
def test_checkpoint_reshards(middle: str, probes: dict, model: Path, undisturbed: tuple, tmp_path: Path) -> None:
    """TP2 -> PP2 -> DP2, two updates each: the same weights as six updates in one process."""
    previous = None
    for layout in ("tp2", middle, "dp2"):
        group = probes[layout]
        group.call("build", LAYOUTS[layout], model, phase="build")
        if previous is not None:
            group.call("call", "load", previous, phase="load")
        metrics = train(group, layout, 2)
        previous = tmp_path / layout
        previous.mkdir()
        save(group, previous)
    assert metrics["lr"] == pytest.approx(undisturbed[0]["lr"])
    assert largest_difference(full_weights(probes["dp2"]), undisturbed[1]) < 1e-4


def test_resume_is_bitwise(probes: dict, model: Path, undisturbed: tuple, tmp_path: Path) -> None:
    """Saving after three updates and going on in a fresh actor gives the very same bits.

    Without the repairs the load fails or AdamW's bias correction runs ahead.
    """
    group = probes["one"]
    group.call("build", LAYOUTS["one"], model, phase="build")
    train(group, "one", 3)
    save(group, tmp_path)
    group.call("build", LAYOUTS["one"], model, 1.0, False, phase="build")
    group.call("call", "load", tmp_path, phase="load")
    train(group, "one", 3)
    assert largest_difference(full_weights(group), undisturbed[1]) == 0.0


def test_a_resumed_run_follows_its_own_configuration(probes: dict, model: Path, tmp_path: Path) -> None:
    """The checkpoint brings moments and the place in the schedule; learning rate and betas are those of now."""
    group = probes["one"]
    group.call("build", LAYOUTS["one"], model, phase="build")
    train(group, "one", 2)
    save(group, tmp_path)
    now = ActorConfig(tensor_parallel=1, optimizer=OptimizerConfig(lr=3e-4, betas=(0.5, 0.6), warmup_steps=0))
    group.call("build", now, model, phase="build")
    group.call("call", "load", tmp_path, phase="load")
    assert train(group, "one", 1)["lr"] == pytest.approx(3e-4)
    assert group.call("betas", phase="test")[0] == [(0.5, 0.6)]
