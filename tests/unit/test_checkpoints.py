"""Saves and loads killed with -9 at every file operation: a good checkpoint is always left, and order returns."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfspec_mega import checkpoints
from rlhfspec_mega.checkpoints.directory import CheckpointDirectory
from rlhfspec_mega.errors import CheckpointError, RunError, UserError
from rlhfspec_mega.megatron.checkpoint_files import FileSum, first_damage, sync_and_sum

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}
IDENTITY = {"dtype": "float32", "architecture": "llama", "hidden_size": 8}
IDENTITY |= {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "ffn_size": 8, "vocab_size": 16}
IDENTITY |= {"max_positions": 8, "rope_theta": 1e4, "norm_eps": 1e-5, "tie_embeddings": True, "rope_scaling": None}


class OneFileActor:
    """In place of Megatron's ranks (tests/contract has those): its whole state is a number in two files."""

    def __init__(self, value: int) -> None:
        self.value = value

    def identity(self) -> dict[str, Any]:
        return dict(IDENTITY)

    def start_save(self, directory: Path, background: bool) -> None:
        self.files = self.save(directory)

    def save(self, directory: Path) -> dict[str, FileSum]:
        for name in ("shard", "common"):
            (directory / name).write_text(f"{name} {self.value}")
        return sync_and_sum(directory, ["shard", "common"])

    def saved(self) -> dict[str, FileSum]:
        return self.files

    def first_damage(self, directory: Path, files: dict[str, FileSum]) -> str | None:
        return first_damage(directory, files)

    def load(self, directory: Path) -> bool:
        values = {(directory / name).read_text().removeprefix(f"{name} ") for name in ("shard", "common")}
        assert len(values) == 1
        self.value = int(values.pop())
        return True


def save(run_dir: Path, step: int, value: int, keep: int = 1) -> None:
    checkpoints.save(run_dir, step, {"actor": OneFileActor(value)}, {"value": value}, keep)  # type: ignore[arg-type]


def load(run_dir: Path, warnings: list[str] | None = None) -> tuple[int, int] | None:
    """(step, the actor's number) of the checkpoint that a resumed run would use."""
    actor = OneFileActor(-1)
    state = checkpoints.load_latest(run_dir, {"actor": actor}, [].append if warnings is None else warnings.append)  # type: ignore
    if state is None:
        return None
    assert state["value"] == actor.value, "driver and actor are of one moment"
    return state["step"], actor.value


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def killed_at(operation: int, run_dir: Path, work: Callable[[], object]) -> bool:
    """Do the work in a process that kills itself before so many file operations were begun; whether it was killed."""
    child = os.fork()
    if child == 0:
        left = operation

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in CHANGES and str(arguments[0]).startswith(str(run_dir)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def each_kill(before: Path, work: Callable[[Path], object]) -> list[Path]:
    """Copies of a run directory, each left by a process that was killed one file operation later."""
    copies = []
    while True:
        copy = Path(shutil.copytree(before, before.with_name(f"{before.name}{len(copies)}")))
        copies.append(copy)
        if not killed_at(len(copies), copy, lambda copy=copy: work(copy)):  # type: ignore[misc]
            return copies


def check_order(run_dir: Path, allowed: set[tuple[int, int]]) -> tuple[int, int] | None:
    """A load finds one of the allowed states, the same again, and the next save leaves nothing of a killed one."""
    found = load(run_dir)
    assert found in allowed and load(run_dir) == found
    save(run_dir, 9, 9, keep=2)
    assert load(run_dir) == (9, 9)
    assert names(run_dir) - {"latest", "step_9"} <= {f"step_{step}" for step, _ in allowed} | {"step_5.bad"}
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 3."""
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 2, 20)
    save(tmp_path / "run", 3, 30, keep=2)
    return tmp_path / "run"


def test_a_save_killed_anywhere(run_dir: Path) -> None:
    copies = each_kill(run_dir, lambda run: save(run, 5, 50, keep=1))
    found = [check_order(run, {(3, 30), (5, 50)}) for run in copies]
    assert len(copies) > 20 and found[0] == (3, 30) and found[-1] == (5, 50)
    assert found == sorted(found), "from one operation on, the new one counts"  # type: ignore[type-var]


def test_the_first_save_killed_anywhere(tmp_path: Path) -> None:
    before = tmp_path / "new"
    before.mkdir()
    found = []
    for run in each_kill(before, lambda run: save(run, 5, 50, keep=1)):
        found.append(load(run))
        save(run, 6, 60, keep=2)
        assert load(run) == (6, 60) and names(run) <= {"latest", "step_5", "step_6"}
    assert set(found) == {None, (5, 50)}


def test_a_save_in_place_of_another_killed_anywhere(run_dir: Path) -> None:
    copies = each_kill(run_dir, lambda run: save(run, 3, 31, keep=1))
    found = [check_order(run, {(3, 30), (3, 31)}) for run in copies]
    assert found[0] == (3, 30) and found[-1] == (3, 31)


def test_a_load_that_sets_a_bad_one_aside_killed_anywhere(run_dir: Path) -> None:
    save(run_dir, 5, 50, keep=3)
    (run_dir / "checkpoints" / "step_5" / "actor" / "shard").write_text("shard 51")
    for run in each_kill(run_dir, load):
        assert check_order(run, {(3, 30)}) == (3, 30)


def test_a_save_that_never_returned_is_neither_used_nor_kept(run_dir: Path) -> None:
    """The run went on from step 3, so step 5 is of a history that was given up."""
    save(run_dir, 5, 50, keep=3)
    (run_dir / "checkpoints" / "latest").write_text("step_3\n")
    warnings: list[str] = []
    assert load(run_dir, warnings) == (3, 30) and warnings == []
    save(run_dir, 4, 40, keep=3)
    assert names(run_dir) == {"latest", "step_2", "step_3", "step_4"}


def test_no_checkpoint_yet_is_not_an_error(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert load(tmp_path, warnings) is None
    assert len(warnings) == 1 and "begins at step 0" in warnings[0]
    (tmp_path / "checkpoints" / "step_4.partial" / "actor").mkdir(parents=True)
    assert load(tmp_path) is None and names(tmp_path) == set()


def test_only_bad_checkpoints_is_an_error(run_dir: Path) -> None:
    for step in (2, 3):
        (run_dir / "checkpoints" / f"step_{step}").rename(run_dir / "checkpoints" / f"step_{step}.bad")
    with pytest.raises(UserError, match=r"step_2\.bad was found bad before; step_3\.bad was found bad before"):
        load(run_dir)


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "latest.partial"])
def test_the_drivers_own_files_may_fail(name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory in the way of each of them: a typed error, nothing left, the checkpoints before untouched."""
    root = run_dir / "checkpoints"

    def save_and_block(actor: OneFileActor, directory: Path) -> dict[str, FileSum]:
        ((root if name == "latest.partial" else directory.parent) / name).mkdir()
        return {}

    monkeypatch.setattr(OneFileActor, "save", save_and_block)
    with pytest.raises(CheckpointError, match=r"step_5 was not saved, those before it are untouched.*directory"):
        save(run_dir, 5, 50)
    monkeypatch.undo()
    shutil.rmtree(root / "latest.partial", ignore_errors=True)
    assert names(run_dir) == {"latest", "step_2", "step_3"} and load(run_dir) == (3, 30)


@pytest.mark.parametrize("missing", ["shard", "common"])
def test_files_that_the_driver_cannot_see(missing: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a rank's output_dir is another node's own disk: a save that no load could use does not succeed."""
    whole_save = OneFileActor.save

    def save_elsewhere(actor: OneFileActor, directory: Path) -> dict[str, FileSum]:
        files = whole_save(actor, directory)
        (directory / missing).unlink()
        return files

    monkeypatch.setattr(OneFileActor, "save", save_elsewhere)
    with pytest.raises(CheckpointError, match=rf"step_5 was not saved.*actor/{missing} .*output_dir must be on a file"):
        save(run_dir, 5, 50)
    assert names(run_dir) == {"latest", "step_2", "step_3"} and load(run_dir) == (3, 30)


def test_a_file_that_no_rank_reports(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a rank failed after the others had agreed that all is well."""
    whole_save = OneFileActor.save
    monkeypatch.setattr(
        OneFileActor, "save", lambda actor, directory: {"common": whole_save(actor, directory)["common"]}
    )
    with pytest.raises(CheckpointError, match=r"step_5 was not saved.*wrote actor/shard did not report it"):
        save(run_dir, 5, 50)
    assert names(run_dir) == {"latest", "step_2", "step_3"} and load(run_dir) == (3, 30)


class SlowActor(OneFileActor):
    """Writes a piece whenever it is asked, until all pieces are written."""

    def __init__(self, value: int, pieces: int) -> None:
        super().__init__(value)
        self.pieces = pieces

    def start_save(self, directory: Path, background: bool) -> None:
        self.directory = directory

    def saved(self) -> dict[str, FileSum] | None:  # type: ignore[override]
        self.pieces -= 1
        if self.pieces > 0:
            with (self.directory / "shard").open("a") as file:
                file.write("piece")
        return self.save(self.directory) if self.pieces == 0 else None


def test_a_slow_disk_is_waited_for_and_a_dead_one_is_not(run_dir: Path) -> None:
    saver = checkpoints.Saver(run_dir, keep=1, background=True)
    slow = SlowActor(50, pieces=40)
    saver.start(5, {"actor": slow}, {"value": 50})  # type: ignore[arg-type]
    saver.wait({"actor": slow}, deadline=0.1)  # type: ignore[arg-type]
    assert names(run_dir) == {"latest", "step_5"} and load(run_dir) == (5, 50)
    dead = SlowActor(60, pieces=0)
    saver.start(6, {"actor": dead}, {"value": 60})  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"wrote nothing for 0\.1 s: .* launcher\.call_timeout"):
        saver.wait({"actor": dead}, deadline=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [3, 5])
def test_a_good_save_whose_predecessors_cannot_be_removed(
    step: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(self: CheckpointDirectory, path: Path) -> None:
        raise PermissionError(f"{path} cannot be removed")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDirectory, "_remove", cannot)
        save(run_dir, step, 50)
    assert len(caplog.records) == 1 and f"step_{step} was saved" in caplog.text
    assert load(run_dir) == (step, 50)
    save(run_dir, 6, 60)
    assert names(run_dir) == {"latest", "step_6"}
