"""The scorer: batches never change a result, nothing is read before it is needed, and memory is what was planned."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.hf_directory import WEIGHTS, write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer, sequence_logprobs
from rlhfspec_mega.planning.memory import ReferencePlan, reference_memory
from rlhfspec_mega.rollout.scoring import Scorer

SHAPE = ModelShape("llama", 32, 2, 4, 2, 8, 64, 41, 64, 1e4, 1e-5, False)
LARGE_HEAD = ModelShape("llama", 64, 2, 4, 2, 16, 96, 2000, 256, 1e4, 1e-5, True)
LARGE_LAYERS = ModelShape("qwen3", 64, 3, 4, 2, 16, 512, 50, 256, 1e4, 1e-5, False)


def weights_of(shape: ModelShape) -> dict[str, torch.Tensor]:
    tensors = dict(initial_tensors(mapping_for(shape.architecture).hf_tensors(shape), shape.num_layers, seed=5))
    return {name: tensor * 8 if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}  # far from uniform


def write(path: Path, shape: ModelShape = SHAPE) -> Path:
    write_directory(path, shape, weights_of(shape).items())
    return path


def scorer_of(path: Path, max_tokens: int = 64, logit_chunk: int = 16, **changes: Any) -> Scorer:
    given: dict[str, Any] = {"max_positions": 50, "dtype": torch.float32, "device": "cpu"}
    return Scorer(path, max_tokens=max_tokens, logit_chunk=logit_chunk, **(given | changes))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("scoring") / "model")


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(SHAPE, max_positions=50, dtype=torch.float32, device="cpu")
    model.load(weights_of(SHAPE))
    return model


tokens = st.integers(0, SHAPE.vocab_size - 1)
sequences = st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=12), st.lists(tokens, max_size=38)), max_size=9)


@settings(max_examples=30, deadline=None)
@given(sequences, st.integers(1, 200), st.integers(1, 60), st.sampled_from([0.0, 0.6, 1.0]))
def test_any_batch_gives_what_each_sequence_gives_alone(
    directory: Path, model: Transformer, given_: list, max_tokens: int, chunk: int, temperature: float
) -> None:
    found = scorer_of(directory, max_tokens, chunk).logprobs(given_, temperature)
    assert len(found) == len(given_)
    for (prompt, response), logprobs in zip(given_, found, strict=True):
        assert len(logprobs) == len(response)
        if response:
            alone = sequence_logprobs(model, torch.tensor([[*prompt, *response]]), temperature=temperature)
            assert logprobs == pytest.approx(alone[0, len(prompt) - 1 :].tolist(), abs=1e-4)


def test_weights_are_read_once_and_at_first_use(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    (path / WEIGHTS).rename(tmp_path / "away")
    scorer, one = scorer_of(path), [([1, 2], [3, 4, 5])]
    assert scorer.logprobs([([1], [])], 1.0) == [[]], "nothing to score, nothing to read"
    with pytest.raises(UserError, match=WEIGHTS):
        scorer.logprobs(one, 1.0)
    (tmp_path / "away").rename(path / WEIGHTS)
    first = scorer.logprobs(one, 1.0)
    (path / WEIGHTS).unlink()
    assert scorer.logprobs(one, 1.0) == first


def test_bad_input_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"51 tokens exceeds the model's 50"):
        scorer_of(directory).logprobs([([1] * 11, [2] * 40)], 1.0)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        scorer_of(tmp_path)


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside have taken at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        owned = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is None or storage._cdata in self._sizes or storage._cdata in owned:
                continue
            self._sizes[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._drop, storage._cdata)
        self.peak = max(self.peak, self._now)
        return result

    def _drop(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [LARGE_HEAD, LARGE_LAYERS], ids=["head", "layers"])
def test_memory_is_as_planned(shape: ModelShape, dtype: str, tmp_path: Path) -> None:
    """However much a call is given: the largest batch counts."""
    plan = ReferencePlan(dtype, batch_tokens=512, logit_chunk=128)
    scorer = scorer_of(write(tmp_path / "model", shape), 512, 128, max_positions=128, dtype=getattr(torch, dtype))
    scorer.logprobs([([1], [2])], 1.0)
    assert scorer._model is not None
    weights = sum(tensor.nbytes for tensor in scorer._model.hf_tensors().values())
    call = [([1] * 8, [2] * (120 - number % 7)) for number in range(12)]
    with PeakBytes() as measured:
        scorer.logprobs(call, 1.0)
    beside_weights = reference_memory(shape, plan) - weights
    assert 0.95 * measured.peak < beside_weights < 1.2 * measured.peak
    assert not scorer._model._packed._packed, "packed weights would need as much again"
