"""The output directory: claimed by one run at a time, resumed only as what it was started as."""

from __future__ import annotations

import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rlhfspec_mega.config import output_dir as output_dir_module
from rlhfspec_mega.config.output_dir import claimed_output_dir, output_dir
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError
from tests.unit.test_config import ROOT, load, refusal


@pytest.fixture
def out(tmp_path: Path) -> str:
    return f"output_dir={tmp_path}/outputs"


def test_output_directory_is_claimed_by_exactly_one(out: str) -> None:
    config = load(out)
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: _claims(config), range(16))) == 1


def _claims(config: RunConfig) -> bool:
    try:
        with claimed_output_dir(config) as directory:
            (directory / "metrics.jsonl").touch()
    except UserError as error:
        assert "exists already" in str(error)
        return False
    return True


def test_a_name_is_refused_twice_and_resumed(out: str) -> None:
    with claimed_output_dir(load(out, "seed=3"), ["seed=3"]) as directory:
        assert (directory / "overrides.yaml").read_text() == "- seed=3\n"
        (directory / "metrics.jsonl").touch()
    sentence = refusal(out)
    assert "trainer.resume=true" in sentence and "name=tiny2" in sentence
    with claimed_output_dir(load(out, "seed=3", "trainer.resume=true", "experiment=one_process", "name=tiny")) as same:
        assert same == directory
    assert "was started with seed=3, not 0" in refusal(out, "trainer.resume=true")
    assert "model.num_heads=4, not 2" in refusal(out, "seed=3", "trainer.resume=true", "model.num_heads=2")
    assert "There is no run" in refusal(out, "trainer.resume=true", "name=other")
    (directory / "config.yaml").unlink()
    assert "config.yaml cannot be read" in refusal(out, "seed=3", "trainer.resume=true")
    assert "holds no run" in refusal(out, "seed=3")


def test_a_run_that_failed_at_once_frees_its_name(out: str) -> None:
    config = load(out)
    with pytest.raises(UserError, match="bad reward"), claimed_output_dir(config):
        raise UserError("bad reward")
    assert not output_dir(config).exists()
    with claimed_output_dir(config) as directory:
        (directory / "metrics.jsonl").touch()
    assert (directory / "config.yaml").exists()


HOLDER = """
import subprocess, sys, time
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.output_dir import claimed_output_dir
with claimed_output_dir(load_config(sys.argv[1:])):
    print(subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL).pid, flush=True)
    time.sleep(60)
"""


def test_a_run_is_resumed_by_one_process_at_a_time(out: str) -> None:
    """A killed one does not count, even while a process that it started lives on."""
    with claimed_output_dir(load(out)) as directory:
        (directory / "metrics.jsonl").touch()
    resume = [out, "cluster.device=cpu", "trainer.resume=true"]
    command = [sys.executable, "-c", HOLDER, *resume]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        child = psutil.Process(int(first.stdout.readline()))
        try:
            with pytest.raises(UserError) as caught, claimed_output_dir(load(*resume)):
                pass
            first.kill()
            first.wait()
            assert child.is_running()
            with claimed_output_dir(load(*resume)):
                pass
        finally:
            first.kill()
            child.kill()
    assert f"{directory} is in use by process {first.pid} on " in str(caught.value)


def test_a_lock_whose_run_has_just_freed_its_name_is_refused(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(out)
    lock = output_dir(config) / "run.lock"
    monkeypatch.setattr(output_dir_module.fcntl, "flock", lambda *_: lock.unlink())
    with pytest.raises(UserError, match="in use by another process"), claimed_output_dir(config):
        pass


def test_a_file_system_without_locks_is_told_of(
    out: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output_dir_module.fcntl, "flock", no_locks)
    with claimed_output_dir(load(out)):
        pass
    assert len(caplog.records) == 1 and "only one process at a time" in caplog.text
