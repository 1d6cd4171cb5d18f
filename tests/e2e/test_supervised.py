"""Supervised tasks as whole runs: SFT, a reward model of it on PP 2, and evaluation."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from pathlib import Path
from uuid import uuid4

import pytest
import torch
import transformers

from tests.e2e.chaos import steps_done
from tests.e2e.conftest import marked, start, train
from tools import check_conversion, megatron_to_hf
from tools.command import exit_status

SMALL = (
    "trainer.max_tokens_per_microbatch=128",
    "rollout.max_new_tokens=24",
    "rollout.max_prompt_tokens=40",
    "supervised.batch_size=6",
    "supervised.eval_size=5",
    "logger.tensorboard=false",
)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_pairs(path: Path, count: int) -> Path:
    """The better response has even bytes only, the worse one odd bytes only."""
    rows = []
    for number in range(count):
        even, odd = "bdfhj"[: 2 + number % 4], "acegi"[: 2 + number % 4]
        rows.append({"question": f"say {number}", "answer": even, "chosen": even, "rejected": odd})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    directory = tmp_path_factory.mktemp("pairs")
    train_file, eval_file = (write_pairs(directory / f"{name}.jsonl", n) for name, n in (("train", 20), ("eval", 7)))
    return ("data=files", f"data.train=[{train_file}]", f"data.eval=[{eval_file}]")


@pytest.fixture(scope="module")
def sft(model: Path, data: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("sft")
    more = ("supervised.epochs=3", "supervised.eval_every=4", "actor.optimizer.lr=3e-3")
    result = train(*SMALL, *data, *more, "task=sft", f"model.path={model}", f"output_dir={output}", "name=sft")
    assert result.returncode == 0, result.stderr
    return output / "sft"


@pytest.fixture(scope="module")
def reward_model(sft: Path, data: tuple[str, ...]) -> Path:
    """Stopped once and resumed."""
    options = (*SMALL, *data, "task=reward_model", f"model.path={sft / 'model'}", f"output_dir={sft.parent}", "name=rm")
    options += (
        "supervised.max_steps=14",
        "supervised.epochs=9",
        "trainer.checkpoint_every=3",
        "actor.optimizer.lr=3e-3",
    )
    options += ("supervised.eval_every=5", "actor.tensor_parallel=1", "actor.pipeline_parallel=2")
    mark = uuid4().hex
    process = start(*options, mark=mark)
    while steps_done(sft.parent / "rm") < 4 and process.poll() is None:
        pass
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 75, errors
    assert marked(mark) == []
    result = train(*options, "trainer.resume=true")
    assert result.returncode == 0, result.stderr
    return sft.parent / "rm"


def test_sft_learns_the_answers_and_transformers_loads_the_result(sft: Path) -> None:
    """20 examples, three epochs of batches of 6: ten steps."""
    rows = lines(sft / "metrics.jsonl")
    assert len([row for row in rows if "sft/loss" in row]) == 10
    summary = json.loads((sft / "summary.json").read_text())
    assert (sft / "curves.png").stat().st_size > 1000
    assert summary["steps"] == 10 and summary["val_loss_last"] < summary["val_loss_first"] - 0.3
    model = transformers.AutoModelForCausalLM.from_pretrained(sft / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(sft / "model")
    losses = []
    for number in range(5):
        prompt = tokenizer(f"say {number}")["input_ids"]
        answer = [*tokenizer("bdfhj"[: 2 + number % 4], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        losses += [-float(logprobs[place, token]) for place, token in enumerate(answer)]
    assert summary["val_loss_last"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_a_reward_model_tells_the_better_response_whatever_stops_it(reward_model: Path) -> None:
    steps = [row for row in lines(reward_model / "metrics.jsonl") if "reward_model/loss" in row]
    assert [row["step"] for row in steps] == list(range(14))
    summary = json.loads((reward_model / "summary.json").read_text())
    assert summary["val_loss_last"] < summary["val_loss_first"] and summary["val_accuracy_last"] == 1.0
    config = json.loads((reward_model / "model" / "config.json").read_text())
    assert config["pad_token_id"] == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(reward_model / "model")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model / "model")
    texts = [f"say 3{response}{tokenizer.eos_token}" for response in ("bdfhj", "acegi")]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    chosen, rejected = model(**batch).logits[:, 0].tolist()
    assert chosen > rejected

    converted, saved = reward_model.parent / "converted", reward_model / "checkpoints/step_14"
    assert (
        exit_status(lambda: megatron_to_hf.convert(megatron_to_hf.parser().parse_args([str(saved), str(converted)])))
        == 0
    )
    assert (converted / "model.safetensors").read_bytes() == (reward_model / "model/model.safetensors").read_bytes()
    check_conversion.check(Namespace(hf=converted, megatron=saved, text="say 3bdfhj"))


def test_evaluation_of_a_model(sft: Path, data: tuple[str, ...]) -> None:
    options = [one for one in SMALL if not one.startswith("supervised")]
    more = ("trainer.samples_per_prompt=3", "reward.function=tests.e2e.rewards.evenness", "data=files", data[2])
    where = (f"model.path={sft / 'model'}", f"output_dir={sft.parent}", "name=evaluated")
    result = train("task=evaluate", *options, *more, *where)
    assert result.returncode == 0, result.stderr
    found = json.loads((sft.parent / "evaluated/evaluation.json").read_text())
    assert found["prompts"] == 7 and set(found["sampled"]["pass_at"]) == {"1", "2"}
    samples = lines(sft.parent / "evaluated/rollouts.jsonl")
    assert len(samples) == 21
    exact = sum(one["exact"] for one in samples) / 21
    assert found["sampled"]["pass_at"]["1"] == pytest.approx(exact)
    assert found["sampled"]["pass_at"]["2"] >= exact
    assert "7 held-out prompts. Greedy: exact" in result.stdout
