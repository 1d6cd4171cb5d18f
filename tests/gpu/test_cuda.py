"""On a GPU: Megatron with NCCL against transformers, one update against the CPU, engine tokens, and speed (printed)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.schema.training import ActorConfig, OptimizerConfig
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest, GenerationResult
from tests.contract.test_megatron_parity import TEMPERATURE, make_batches, make_models, make_sequences, reference
from tests.contract.test_megatron_parity import relative_error as relative
from tests.e2e.conftest import make_model, small_run, train
from tests.megatron_probe import start_probes
from tests.near_tie import assert_same
from tests.random_trees import RandomTrees
from tests.unit.test_speculation import draft_weights, send_draft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = ActorConfig(tensor_parallel=1, optimizer=OptimizerConfig(lr=1e-2, eps=1.0))  # eps: updates follow the gradient


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cluster, group = start_probes(tmp_path_factory.mktemp("gpu"), 1, "cuda")
    yield group
    cluster.close()


@pytest.mark.parametrize("architecture", ["llama_tied", "llama", "qwen2", "qwen3"])
def test_megatron_on_nccl_agrees_with_transformers(architecture: str, models: dict, probe: Any) -> None:
    sequences = make_sequences()
    want_logprobs, want_gradients = reference(models[architecture], sequences)
    probe.call("build", CONFIG, models[architecture], TEMPERATURE, phase="build")
    found = probe.call("call", "columns", make_batches(sequences), phase="logprobs")[0]
    assert torch.allclose(found[0], torch.cat(want_logprobs), atol=1e-3, rtol=1e-3)
    gradients = probe.call("gradients", make_batches(sequences), phase="gradients")[0]
    for name, want in want_gradients.items():
        assert relative(gradients[name].cpu(), want) < 1e-3, name


def test_one_update_is_that_of_the_cpu(models: dict, probe: Any, tmp_path: Path) -> None:
    cluster, on_cpu = start_probes(tmp_path, 1)
    try:
        results = []
        for group in (probe, on_cpu):
            group.call("build", CONFIG, models["llama"], phase="build")
            metrics = group.call("update", [make_batches(make_sequences())], phase="update")[0]
            results.append((metrics, group.call("weights", phase="weights")[0]))
    finally:
        cluster.close()
    (gpu_metrics, gpu_weights), (cpu_metrics, cpu_weights) = results
    assert gpu_metrics["grad_norm"] == pytest.approx(cpu_metrics["grad_norm"], rel=1e-3)
    for name, want in cpu_weights.items():
        assert torch.allclose(gpu_weights[name].cpu(), want, atol=1e-4), name


def test_a_whole_run_on_one_gpu(tmp_path: Path) -> None:
    """Actor and engine on the same GPU, every phase of a step, export included."""
    model = make_model(tmp_path / "model")
    result = train(*small_run(model, tmp_path, "gpu", "cluster=1n1g", "actor.tensor_parallel=1", "trainer.steps=2"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "gpu" / "summary.json").is_file()


def engine(
    shape: ModelShape, weights: dict[str, torch.Tensor], device: str, slots: int, dtype: str, drafts: bool = False
) -> TorchEngine:
    given: dict[str, Any] = {"draft": draft_shape(shape), "policy": RandomTrees(0)} if drafts else {}
    positions = min(600, shape.max_positions)
    made = TorchEngine(
        shape,
        slots=slots,
        max_positions=positions,
        prefill_chunk=256,
        dtype=getattr(torch, dtype),
        device=device,
        **given,
    )
    if drafts:
        send_draft(made, draft_weights(draft_shape(shape)))
    made.begin_update(0, mapping_for(shape.architecture).hf_tensors(shape))
    made.update_weights([(name, 0, tensor.flatten()) for name, tensor in weights.items()])
    made.end_update(0)
    return made


def requests(count: int, tokens: int, vocabulary: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{i}", f"{i // 4}", (1 + i // 4 % (vocabulary - 1), 2, 3), sample_seed(0, 0, i // 4, i % 4), tokens
        )
        for i in range(count)
    ]


def finish(made: TorchEngine, wanted: list[GenerationRequest]) -> dict[str, GenerationResult]:
    made.submit(wanted)
    results: dict[str, GenerationResult] = {}
    while len(results) < len(wanted):
        results |= {result.sample_id: result for result in made.poll(1.0)}
    return results


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "random trees"])
def test_engine_gives_the_tokens_of_the_cpu(models: dict, drafts: bool) -> None:
    shape, reader = read_shape(models["llama"]), HfWeights(models["llama"])
    weights = {name: reader.get(name) for name in reader.names()}
    wanted = requests(16, 40, shape.vocab_size)
    on_gpu = finish(engine(shape, weights, "cuda", 8, "float32", drafts), wanted)
    on_cpu = finish(engine(shape, weights, "cpu", 8, "float32"), wanted)
    net = transformers.AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float64)

    def judge(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return net(input_ids=torch.tensor([tokens])).logits[0, -1]

    assert_same(on_cpu, on_gpu, wanted, judge)


def test_speed_of_the_small_model() -> None:
    """No assertion on time: the figure is printed (pytest -s) for the record."""
    shape = model_shape(load_config(["model=small"]).model)
    weights = dict(initial_tensors(mapping_for("llama").hf_tensors(shape), shape.num_layers, seed=0))
    for batch in (1, 16, 64, 256):
        made = engine(shape, weights, "cuda", batch, "bfloat16")
        finish(made, requests(batch, 32, shape.vocab_size))
        begin = time.perf_counter()
        results = finish(made, requests(batch, 256, shape.vocab_size))
        torch.cuda.synchronize()
        tokens = sum(len(result.tokens) for result in results.values())
        assert tokens == batch * 256
        print(f"small, bf16, batch {batch}: {tokens / (time.perf_counter() - begin):,.0f} tokens/s")
