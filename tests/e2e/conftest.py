"""A small random model on disk and a small run's options, shared by the end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import torch
import transformers
from filelock import FileLock

from rlhfspec_mega.data.tokenizer import make_byte_tokenizer
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape

MARK = "RLHFSPEC_MEGA_TEST_RUN"
REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = ModelShape("llama", 32, 4, 4, 2, 8, 64, 259, 128, 1e4, 1e-5, True)


def make_model(directory: Path, shape: ModelShape = SHAPE) -> Path:
    """Random weights with a byte-level tokenizer, as an ordinary Hugging Face directory."""
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    write_directory(directory, shape, initial_tensors(tensors, shape.num_layers, seed=3))
    make_byte_tokenizer(directory)
    return directory


def make_reward_model(directory: Path) -> Path:
    """A classifier as transformers saves it, of another shape than the model."""
    torch.manual_seed(2)
    config = transformers.Qwen2Config(
        vocab_size=SHAPE.vocab_size,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
        num_labels=1,
        pad_token_id=256,
    )
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(directory)
    make_byte_tokenizer(directory)
    return directory


def scores_of(directory: Path, samples: list[dict]) -> list[float]:
    """transformers' scores of lines of rollouts.jsonl, each alone."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        sequences = [torch.tensor([sample["prompt_tokens"] + sample["response_tokens"]]) for sample in samples]
        return [float(model(tokens).logits) for tokens in sequences]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory that the first of the test processes to ask for it makes, and all of them read."""
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            make(directory)
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "random_model", make_model)


def small_run(model: Path, output: Path, name: str, *more: str) -> list[str]:
    """Options of a run of a few seconds after start-up; without processes for the reference, unless it is placed."""
    placed = any(option.startswith("placement") for option in more)
    return [
        f"model.path={model}",
        f"output_dir={output}",
        f"name={name}",
        "trainer.prompts_per_step=3",
        "trainer.samples_per_prompt=2",
        "trainer.eval_every=2",
        "trainer.eval_prompts=5",
        "trainer.steps=4",
        "rollout.max_new_tokens=24",
        "rollout.max_prompt_tokens=40",
        "rollout.max_running_requests=4",
        "data.max_terms=8",
        "trainer.max_tokens_per_microbatch=128",
        "reward.function=tests.e2e.rewards.evenness",
        "logger.tensorboard=false",
        "logger.plots=false",
        "launcher.call_timeout=150",  # a run that hangs says where before the test ends
        *([] if placed else ["placement.reference=actor"]),
        *more,
    ]


def start(*options: str, mark: str) -> subprocess.Popen[str]:
    """A run through the command line; every process it starts inherits the mark in its environment."""
    return subprocess.Popen(
        [sys.executable, "train.py", *options],
        cwd=REPOSITORY,
        env=os.environ | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests started in the background inherit an ignored SIGINT; a run in a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def marked(mark: str) -> list[int]:
    """Processes, other than zombies, that carry the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def left_behind(mark: str) -> list[int]:
    """Marked processes that stay: on a loaded machine, the kernel takes a moment to end what ends with its parent."""
    end = time.monotonic() + 3.0
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def train(*options: str, seconds: float = 200) -> subprocess.CompletedProcess[str]:
    """A whole run; nothing of it may be left when it ends. If it does not end, what it said is shown."""
    mark = uuid4().hex
    process = start(*options, mark=mark)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        names = [" ".join(psutil.Process(pid).cmdline()[:3]) for pid in marked(mark)]
        process.kill()
        output, errors = process.communicate()
        pytest.fail(f"No end after {seconds:g} s, with processes {names}. It said:\n{output}\n{errors}")
    assert left_behind(mark) == []
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope="session")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with a checkpoint and an export after two; its reference lies over both engines' devices."""
    more = ("trainer.checkpoint_every=2", "trainer.export_every=2", "logger.plots=true")
    spread = "placement.reference_tensor_parallel=2"

    def run(directory: Path) -> None:
        result = train(*small_run(model, directory.parent, directory.name, *more, spread))
        assert result.returncode == 0, result.stderr
        assert "4 steps" in result.stdout

    return made_once(tmp_path_factory, "finished", run)
