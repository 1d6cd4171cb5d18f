"""Bad input through the command line: one sentence, exit status 2, nothing left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.output_dir import claimed_output_dir
from tests.e2e.conftest import small_run, train


def refused(*options: str) -> str:
    """The one line on stderr of a refused run."""
    result = train(*options, seconds=120)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["modle=tiny"], ["modle", "model"]),
        (["model=huge"], ["huge", "tiny"]),
        (["model=70b"], ["70.6 billion", "cluster=4n8g"]),
        (["rollout=sglang"], ["rollout=torch"]),
        (["data=files", "data.train=[nowhere.jsonl]", "trainer.eval_every=0"], ["nowhere.jsonl", "does not exist"]),
        (["cluster=8n8g"], ["nodes"]),
        (["trainer.resume=true", "name=never_started"], ["never_started"]),
    ],
)
def test_options(options: list[str], words: list[str], tmp_path: Path) -> None:
    sentence = refused(f"output_dir={tmp_path}", *options)
    for word in words:
        assert word in sentence
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["train.jsonl is empty"]),
        ('{"question": "1+1=", "answer": "2"}\n{"question": 7, "answer": "2"}\n', ["train.jsonl", "line 2"]),
    ],
)
def test_data_files(content: str, words: list[str], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(content)
    options = small_run(model, tmp_path / "runs", "bad", "data=files", f"data.train=[{file}]", "trainer.eval_every=0")
    idle = ("data.max_terms=8", "trainer.eval_every=2", "trainer.eval_prompts=5")  # refused where they do nothing
    sentence = refused(*[option for option in options if option not in idle])
    for word in words:
        assert word in sentence


def test_a_run_that_another_process_has(model: Path, tmp_path: Path) -> None:
    options = small_run(model, tmp_path, "twice")
    with claimed_output_dir(load_config(options)) as directory:
        before = sorted((path.name, path.read_bytes()) for path in directory.iterdir())
        sentence = refused(*options, "trainer.resume=true")
        assert str(directory) in sentence and "in use by process" in sentence and "name=twice2" in sentence
        assert sorted((path.name, path.read_bytes()) for path in directory.iterdir()) == before


def test_reward_that_does_not_exist(model: Path, tmp_path: Path) -> None:
    sentence = refused(*small_run(model, tmp_path, "bad", "reward.function=tests.e2e.rewards.nothing"))
    assert "tests.e2e.rewards.nothing" in sentence and "reward.function" in sentence


def test_a_model_directory_with_a_missing_tensor(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, broken / "model.safetensors")
    assert "model.norm.weight" in refused(*small_run(broken, tmp_path, "bad"))
