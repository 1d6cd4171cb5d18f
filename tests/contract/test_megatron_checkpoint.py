"""Checkpoints of two real Megatron ranks: nothing damaged or foreign is ever loaded, no failed write does harm."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfspec_mega import checkpoints
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.config.schema.training import ActorConfig, OptimizerConfig
from rlhfspec_mega.errors import CheckpointError, UserError
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.objectives import supervised_objective
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.workers.megatron import MegatronWorker
from rlhfspec_mega.workers.model_group import ModelGroup
from tests.clusters import local_cluster
from tests.megatron_probe import described, worker_specs

SHAPE = ModelShape("llama", 32, 2, 4, 2, 8, 64, 96, 64, 1e4, 1e-5, True)
SEED = 7
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0)
SAMPLES = Experience.of([[5, 7], [23]], [[11, 13, 17, 19], [29, 31, 37]])


class TestedWorker(MegatronWorker):
    """An actor rank whose files can be limited in size and whose generators can be drawn from."""

    __test__ = False

    def limit_files(self, size: int | None) -> None:
        """Writing beyond `size` bytes of a file fails (EFBIG) on this rank alone."""
        soft = resource.RLIM_INFINITY if size is None else size
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    def draw(self) -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))


@dataclass
class Ranks:
    """Two ranks, the driver's view of them, and the warnings of loads."""

    cluster: LocalCluster
    group: Group
    actor: ModelGroup
    warnings: list[str] = field(default_factory=list)

    def train(self) -> float:
        loss = self.actor.accumulate(SAMPLES, supervised_objective, [])["loss"]
        self.actor.step()
        return loss

    def draw(self) -> list[tuple[float, ...]]:
        return self.group.call("draw", phase="test")

    def load(self, run_dir: Path) -> dict[str, Any] | None:
        self.warnings = []
        return checkpoints.load_latest(run_dir, {"actor": self.actor}, self.warnings.append)


def start(directory: Path, config: ActorConfig) -> Ranks:
    cluster = local_cluster(directory)
    model = described(SHAPE, config, ranks=2, total_updates=9)
    kind = "tests.contract.test_megatron_checkpoint.TestedWorker"
    group = cluster.launch("actor", worker_specs(directory / "meet", [model], SEED, kind))
    cluster.wait_started()
    return Ranks(cluster, group, ModelGroup(group, model, Batching(64)))


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    directory = tmp_path_factory.mktemp("tp2")
    ranks = start(directory, ActorConfig(tensor_parallel=2, optimizer=OPTIMIZER))
    tensors = mapping_for("llama").hf_tensors(SHAPE)
    write_directory(directory / "model", SHAPE, initial_tensors(tensors, SHAPE.num_layers, seed=3))
    ranks.actor.load_weights(directory / "model")
    yield ranks
    ranks.cluster.close()


@dataclass
class History:
    """A run with the checkpoints step_2 and step_4; the losses of the update after each, and what was drawn then."""

    run_dir: Path
    losses: dict[int, float]
    drawn: dict[int, list[tuple[float, ...]]]


@pytest.fixture(scope="module")
def history(tp2: Ranks, tmp_path_factory: pytest.TempPathFactory) -> History:
    made = History(tmp_path_factory.mktemp("history"), {}, {})
    for step in (2, 4):
        checkpoints.save(made.run_dir, step, {"actor": tp2.actor}, {"cursor": 10 * step}, keep=2)
        made.drawn[step] = tp2.draw()
        made.losses[step] = tp2.train()
    return made


@pytest.fixture
def run_dir(history: History, tmp_path: Path) -> Path:
    return Path(shutil.copytree(history.run_dir, tmp_path / "run"))


def step_4(run_dir: Path, name: str = "") -> Path:
    return run_dir / "checkpoints" / "step_4" / name


def latest(run_dir: Path) -> str:
    return (run_dir / "checkpoints" / "latest").read_text().strip()


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def save_directly(actor: ModelGroup, directory: Path) -> None:
    actor.start_save(directory, background=False)
    actor.saved()


def test_a_save_in_the_background_is_of_the_moment_it_began(tp2: Ranks, history: History, run_dir: Path) -> None:
    assert tp2.load(run_dir) == {"step": 4, "cursor": 40}
    saver = checkpoints.Saver(run_dir, keep=2, background=True)
    state = {"cursor": 50}
    saver.start(5, {"actor": tp2.actor}, state)
    state["cursor"] = 0
    drawn, loss = tp2.draw(), tp2.train()
    assert (drawn, loss) == (history.drawn[4], history.losses[4])
    tp2.train()
    saver.wait({"actor": tp2.actor}, deadline=60)
    assert names(run_dir) == {"latest", "step_4", "step_5"} and saver.poll({"actor": tp2.actor})
    assert tp2.load(run_dir) == {"step": 5, "cursor": 50} and tp2.warnings == []
    assert tp2.draw() == drawn and tp2.train() == loss


def test_a_save_in_the_background_that_fails(tp2: Ranks, history: History, run_dir: Path) -> None:
    assert tp2.load(run_dir) == {"step": 4, "cursor": 40}
    tp2.group.call("limit_files", 20_000, phase="test", ranks=[1])
    saver = checkpoints.Saver(run_dir, keep=2, background=True)
    saver.start(6, {"actor": tp2.actor}, {})
    tp2.draw()
    assert tp2.train() == history.losses[4]
    with pytest.raises(CheckpointError, match=r"step_6 was not saved.*actor rank 1: OSError.*File too large"):
        saver.wait({"actor": tp2.actor}, deadline=60)
    assert names(run_dir) == {"latest", "step_2", "step_4"} and latest(run_dir) == "step_4"
    tp2.group.call("limit_files", None, phase="test", ranks=[1])
    saver.start(6, {"actor": tp2.actor}, {})
    saver.wait({"actor": tp2.actor}, deadline=60)
    assert names(run_dir) == {"latest", "step_4", "step_6"}


def test_what_was_saved_comes_back(tp2: Ranks, history: History, run_dir: Path) -> None:
    assert tp2.load(run_dir) == {"step": 4, "cursor": 40}
    assert tp2.warnings == []
    assert tp2.draw() == history.drawn[4] and tp2.train() == history.losses[4]
    manifest = json.loads(step_4(run_dir, "manifest.json").read_text())
    files = {f"{path.relative_to(step_4(run_dir))}" for path in step_4(run_dir).rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {"manifest.json"}
    assert {"actor/__0_0.distcp", "actor/__1_0.distcp", "actor/.metadata", "state.json"} < files


def rewrite_manifest(run_dir: Path, **changes: Any) -> None:
    """A manifest with a right checksum that says something else."""
    from rlhfspec_mega.checkpoints import manifest

    file = step_4(run_dir, "manifest.json")
    content = {name: value for name, value in json.loads(file.read_text()).items() if name != "crc32"} | changes
    file.write_text(json.dumps(content | {"crc32": manifest._checksum(content)}))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position % len(content)] ^= 0x10
    file.write_bytes(content)


def of_another_model(run_dir: Path) -> None:
    belongs_to = json.loads(step_4(run_dir, "manifest.json").read_text())["belongs_to"]
    rewrite_manifest(run_dir, belongs_to=belongs_to | {"hidden_size": 64})


def something_else(run_dir: Path) -> None:
    shutil.rmtree(step_4(run_dir))
    step_4(run_dir, "model").mkdir(parents=True)
    step_4(run_dir, "model/weights.bin").write_bytes(b"0" * 1000)


def step_2_under_its_name(run_dir: Path) -> None:
    shutil.rmtree(step_4(run_dir))
    shutil.copytree(run_dir / "checkpoints" / "step_2", step_4(run_dir))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda run: truncate(step_4(run, "actor/__1_0.distcp")), "actor/__1_0.distcp has"),
        (lambda run: flip(step_4(run, "actor/__0_0.distcp"), 20_000), "checksum of actor/__0_0.distcp is wrong"),
        (lambda run: flip(step_4(run, "actor/__1_0.distcp"), 20_000), "checksum of actor/__1_0.distcp is wrong"),
        (lambda run: flip(step_4(run, "state.json"), 12), "checksum of state.json is wrong"),
        (lambda run: step_4(run, "actor/.metadata").unlink(), "actor/.metadata cannot be read"),
        (lambda run: step_4(run, "manifest.json").unlink(), "has no manifest.json"),
        (lambda run: truncate(step_4(run, "manifest.json")), "manifest.json cannot be read"),
        (lambda run: rewrite_manifest(run, format=99), "has format 99"),
        (of_another_model, "its hidden_size is 64, and this run's is 32"),
        (something_else, "not one of ours"),
        (step_2_under_its_name, "one of step 2 under another name"),
    ],
)
def test_a_bad_checkpoint_is_passed_over_loudly(
    harm: Callable[[Path], None], reason: str, tp2: Ranks, history: History, run_dir: Path
) -> None:
    harm(run_dir)
    assert tp2.load(run_dir) == {"step": 2, "cursor": 20}
    assert len(tp2.warnings) == 1 and "step_4 cannot be used" in tp2.warnings[0] and reason in tp2.warnings[0]
    assert tp2.train() == history.losses[2]
    assert names(run_dir) == {"latest", "step_2", "step_4.bad"} and latest(run_dir) == "step_2"
    assert tp2.load(run_dir) == {"step": 2, "cursor": 20} and tp2.warnings == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_noticed(data: st.DataObject, tp2: Ranks, history: History, run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints" / "step_2", ignore_errors=True)
    files = sorted(path for path in step_4(run_dir).rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    content = file.read_bytes()
    flip(file, data.draw(st.integers(0, len(content) - 1)))
    with pytest.raises(UserError, match="holds no checkpoint that can be used"):
        tp2.load(run_dir)
    file.write_bytes(content)


def test_where_all_are_bad_the_run_ends_with_a_sentence(tp2: Ranks, run_dir: Path) -> None:
    truncate(step_4(run_dir, "state.json"))
    (run_dir / "checkpoints" / "step_2" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"step_4: state.json has .*; step_2: it has no manifest.json") as error:
        tp2.load(run_dir)
    assert "\n" not in str(error.value) and names(run_dir) == {"latest", "step_2", "step_4"}


def test_a_bad_checkpoint_does_not_push_out_a_good_one(tp2: Ranks, run_dir: Path) -> None:
    step_4(run_dir, "manifest.json").unlink()
    tp2.load(run_dir)
    checkpoints.save(run_dir, 5, {"actor": tp2.actor}, {}, keep=2)
    assert names(run_dir) == {"latest", "step_2", "step_4.bad", "step_5"}
    checkpoints.save(run_dir, 6, {"actor": tp2.actor}, {}, keep=2)
    assert names(run_dir) == {"latest", "step_5", "step_6", "step_4.bad"} and latest(run_dir) == "step_6"


@pytest.mark.parametrize("written", ["step_9", "step_", "nonsense", None])
def test_a_wrong_latest_file(written: str | None, tp2: Ranks, run_dir: Path) -> None:
    file = run_dir / "checkpoints" / "latest"
    file.unlink() if written is None else file.write_text(written)
    assert tp2.load(run_dir) == {"step": 4, "cursor": 40}
    assert len(tp2.warnings) == 1 and "latest" in tp2.warnings[0]
    assert latest(run_dir) == "step_4"


def first_numbers(seed: int) -> tuple[float, float, float]:
    """What the three generators give first when seeded so."""
    drawn = torch.rand((), generator=torch.Generator().manual_seed(seed))
    return random.Random(seed).random(), float(np.random.RandomState(seed).random_sample()), float(drawn)


def test_other_parallel_sizes_start_the_generators_afresh(
    tp2: Ranks, history: History, run_dir: Path, tmp_path: Path
) -> None:
    """PP2 takes over weights and moments of TP2; its generators stay as its seed made them, and it says so."""
    pp2 = start(tmp_path, ActorConfig(tensor_parallel=1, pipeline_parallel=2, optimizer=OPTIMIZER))
    try:
        assert pp2.load(run_dir) == {"step": 4, "cursor": 40}
        assert len(pp2.warnings) == 1 and "random generators start afresh" in pp2.warnings[0]
        assert pp2.draw() == [first_numbers(SEED), first_numbers(SEED + 100)]
        assert pp2.train() == pytest.approx(history.losses[4], abs=1e-5)
        checkpoints.save(run_dir, 5, {"actor": pp2.actor}, {}, keep=2)
    finally:
        pp2.cluster.close()
    assert tp2.load(run_dir) == {"step": 5} and "random generators" in tp2.warnings[0]


@pytest.mark.parametrize("blocked", ["common.pt", "__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"])
def test_a_rank_that_cannot_write_a_file_stops_no_other(blocked: str, tp2: Ranks, tmp_path: Path) -> None:
    """A directory in the way of each file in turn: every rank is told, and all of them go on."""
    before = tp2.draw()
    (tmp_path / blocked).mkdir()
    with pytest.raises(CheckpointError, match=rf"actor rank {1 if '__1' in blocked else 0}: "):
        save_directly(tp2.actor, tmp_path)
    assert tp2.draw() != before


def test_a_disk_that_fails_one_rank(tp2: Ranks, history: History, run_dir: Path) -> None:
    tp2.group.call("limit_files", 20_000, phase="test", ranks=[1])
    with pytest.raises(CheckpointError, match=r"step_6 was not saved.*actor rank 1: OSError.*File too large"):
        checkpoints.save(run_dir, 6, {"actor": tp2.actor}, {}, keep=2)
    assert names(run_dir) == {"latest", "step_2", "step_4"} and latest(run_dir) == "step_4"
    tp2.group.call("limit_files", None, phase="test", ranks=[1])
    assert tp2.load(run_dir) == {"step": 4, "cursor": 40} and tp2.train() == history.losses[4]
    checkpoints.save(run_dir, 6, {"actor": tp2.actor}, {}, keep=2)
    assert names(run_dir) == {"latest", "step_4", "step_6"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many bytes."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], capture_output=True)
        if done.returncode != 0:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
        return place

    yield mount
    subprocess.run(["umount", place], capture_output=True, check=False)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_a_disk_that_fills_up_during_the_first_save(tp2: Ranks, small_disk: Callable[[int], Path]) -> None:
    """The estimate from the model's shape fits, the files do not; one of the ranks runs into it."""
    disk = small_disk(SHAPE.parameters * 16 + 8192)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step_2 was not saved.*No space left on device"):
            checkpoints.save(disk, 2, {"actor": tp2.actor}, {}, keep=2)
        assert names(disk) == set()
    assert tp2.load(disk) is None and "begins at step 0" in tp2.warnings[0]


def test_a_full_disk_is_foreseen(
    tp2: Ranks, history: History, run_dir: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(int(1.8 * size_of(step_4(run_dir))))
    shutil.copytree(step_4(run_dir), disk / "checkpoints" / "step_4")
    (disk / "checkpoints" / "latest").write_text("step_4\n")
    with pytest.raises(CheckpointError, match=r"step_6 was not saved.*needs about .* MiB and .* MiB are free"):
        checkpoints.save(disk, 6, {"actor": tp2.actor}, {}, keep=2)
    assert names(disk) == {"latest", "step_4"}
    assert tp2.load(disk) == {"step": 4, "cursor": 40} and tp2.train() == history.losses[4]


def test_the_size_is_foreseen_from_the_shape(history: History) -> None:
    """Weights and optimizer are most of even a tiny checkpoint: 16 bytes a weight in fp32."""
    shards = sum(path.stat().st_size for path in step_4(history.run_dir, "actor").glob("*.distcp"))
    assert SHAPE.parameters * 16 * 0.9 < shards
