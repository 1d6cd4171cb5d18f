"""Supervised tasks: examples and their order, the gradient of a reward model's loss, pass@k."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.algorithms.preferences import Preferences
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.schema.generation import DataConfig
from rlhfspec_mega.config.sizes import trained_shape
from rlhfspec_mega.data.chain_sums import ChainSums, answer_text, corrupted
from rlhfspec_mega.data.examples import Example, ExampleMaker, ExampleStream
from rlhfspec_mega.data.tokenizer import load_tokenizer, make_byte_tokenizer
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.evaluation import pass_at
from rlhfspec_mega.observe.reporter import sample_metrics
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import Shard
from rlhfspec_mega.rl.packing import Batching, micro_batches
from rlhfspec_mega.types import Prompt, Sample

BOS, EOS = 257, 258
TASK = ChainSums.from_config(DataConfig(), seed=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer(directory)
    return load_tokenizer(directory)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@given(st.integers(0, 10**9))
def test_a_corrupted_response_is_wrong_and_looks_like_an_answer(index: int) -> None:
    prompt = TASK.prompt_text("train", index)
    wrong, right = corrupted(prompt, index), answer_text(prompt)
    assert wrong != right and wrong == corrupted(prompt, index)
    assert wrong.count(";") == 1 and int(wrong.rpartition(";")[2]) is not None


def test_pairs_of_files_have_both_responses_with_their_end(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"p": "a", "good": "bc", "bad": "d"}, {"p": "a", "good": "x" * 9, "bad": ""}])
    config = DataConfig(
        "files", [path], [path], prompt_column="p", chosen_column="good", rejected_column="bad", shuffle=False
    )
    train, held_out = ExampleMaker(config, tokenizer, True, 4, 5).streams(0, held_out=True)
    assert train.size == 1, "the second one is too long"
    expected = Example((BOS, ord("a")), ((ord("b"), ord("c"), EOS), (ord("d"), EOS)))
    assert train.batch(0, 2, 2) == [expected] * 2 and held_out is not None and held_out.first(9) == [expected]
    with pytest.raises(
        UserError, match=r"No example of .* is within rollout\.max_prompt_tokens=1 and max_new_tokens=5"
    ):
        ExampleMaker(config, tokenizer, True, 1, 5).streams(0, held_out=False)
    config.rejected_column = "worse"
    with pytest.raises(UserError, match=r"a.jsonl, line 1: no column 'worse' \(it has: p, good, bad\)"):
        ExampleMaker(config, tokenizer, True, 4, 5).streams(0, held_out=False)


def test_demonstrations_and_pairs_of_the_built_in_task(tokenizer: Any) -> None:
    for pairs, count in ((False, 1), (True, 2)):
        train, held_out = ExampleMaker(DataConfig(), tokenizer, pairs, 256, 320).streams(0, held_out=True)
        assert train.size is None and held_out is not None and held_out.first(3) != train.first(3)
        assert all(len(one.responses) == count and one.responses[0][-1] == EOS for one in train.batch(4, 5, 1))


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 9), st.booleans())
def test_every_epoch_holds_each_example_once_whatever_the_batches(
    size: int, batch: int, seed: int, shuffle: bool
) -> None:
    def stream() -> ExampleStream:
        return ExampleStream(lambda row: Example((row,), ()), size, "", seed, shuffle)

    batches = [
        stream().batch(number, batch, 3) for number in range(-(-3 * size // batch))
    ]  # each from a new one: resumed
    order = [one.prompt[0] for examples in batches for one in examples]
    epochs = [order[first : first + size] for first in range(0, 3 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs) and len(order) == 3 * size
    assert shuffle or epochs[0] == list(range(size))


class Scores:
    """Stands in for a ModelGroup of two data-parallel ranks: scores are weights, and have gradients."""

    def __init__(self, scores: torch.Tensor, batching: Batching) -> None:
        self.scores, self.batching = scores, batching

    def accumulate(self, experience: Experience, loss: Any, metrics: Any, *, together: int) -> dict[str, float]:
        plans = micro_batches(experience.lengths.tolist(), self.batching, ranks=2, together=together)
        sums, count = dict.fromkeys(["loss", *metrics], torch.zeros((), dtype=torch.float64)), 0
        for plan in plans:
            for batch in Shard.cut(experience, plan, packed=self.batching.packed).batches():
                values = torch.full(batch.mask.shape, 77.0, dtype=torch.float64)
                own = self.scores[torch.tensor(batch.indices, dtype=torch.int64)]
                losses, found = loss(values.masked_scatter(batch.mask, own), batch)
                for name, tensor in {"loss": losses, **found}.items():
                    sums[name] = sums[name] + (tensor * batch.weights).sum()
                count += batch.loss_tokens
        (sums["loss"] / count).backward()
        return {name: float(value) / count for name, value in sums.items()}

    def step(self) -> dict[str, float]:
        return {"grad_norm": 1.0}


@given(
    st.lists(st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32)), min_size=1, max_size=6),
    st.floats(0, 2),
    st.integers(1, 30),
    st.booleans(),
)
def test_the_gradient_is_that_of_the_bradley_terry_loss(
    pairs: list[tuple[float, float]], margin: float, most: int, packed: bool
) -> None:
    """However micro-batches and ranks share the pairs, which have responses of different lengths."""
    scores = torch.tensor(pairs, dtype=torch.float64).flatten().requires_grad_()
    examples = [Example((1,), ((2,) * (1 + number % 3), (3,) * (1 + number % 2))) for number in range(len(pairs))]
    model = Scores(scores, Batching(most, packed))
    metrics = Preferences(margin).update(examples, model)  # type: ignore[arg-type]
    alone = scores.detach().clone().requires_grad_()
    chosen, rejected = alone.view(-1, 2).unbind(1)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin).mean()
    loss.backward()
    assert torch.allclose(scores.grad, alone.grad, atol=1e-6)
    assert metrics["reward_model/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["reward_model/accuracy"] == pytest.approx(fmean(float(a > b) for a, b in pairs))
    assert metrics["actor/grad_norm"] == 1.0


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3))
def test_pass_at_k_is_the_share_of_subsets_with_an_exact_one(groups: list[list[bool]]) -> None:
    samples = [
        Sample(f"{number}.{member}", 0, Prompt(number, "", "", ()), member, exact=exact)
        for number, group in enumerate(groups)
        for member, exact in enumerate(group)
    ]
    found = pass_at(samples, 5)
    assert list(found) == [1, 2, 4]
    for k, value in found.items():
        assert value == pytest.approx(fmean(fmean(map(any, itertools.combinations(group, k))) for group in groups))


def test_a_language_model_is_trained_from_a_language_model(tmp_path: Path) -> None:
    assert trained_shape(load_config(["task=reward_model"])).value_head
    config = json.loads((Path(make_classifier(tmp_path)) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    for task in ("rl", "sft"):
        with pytest.raises(UserError, match="is a reward model, which writes no text"):
            trained_shape(load_config([f"task={task}", f"model.path={tmp_path}"]))


def make_classifier(directory: Path) -> Path:
    from rlhfspec_mega.models.initialize import write_initial
    from rlhfspec_mega.models.shape import ModelShape

    write_initial(directory, ModelShape("llama", 32, 4, 4, 2, 8, 64, 259, 128, 1e4, 1e-5, False).with_value_head())
    return directory


def test_samples_without_a_reward_are_in_no_mean_of_rewards() -> None:
    scored = Sample("a", 0, Prompt(0, "", "", ()), 0, reward=1.0, exact=True)
    lost = Sample("b", 0, Prompt(0, "", "", ()), 1, failure="raised")
    assert sample_metrics([scored, lost], "val/")["val/exact_mean"] == 1.0
    assert sample_metrics([scored, lost], "val/")["val/reward_mean"] == 1.0
    assert sample_metrics([lost], "val/")["val/reward_mean"] == 0.0
