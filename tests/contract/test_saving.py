"""Saves in the background of two real ranks: whatever fails, the run goes on; the memory that they take is planned."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfspec_mega import checkpoints
from rlhfspec_mega.config.schema.training import ActorConfig, OptimizerConfig
from rlhfspec_mega.errors import CheckpointError
from rlhfspec_mega.megatron.adamw_fixes import inner_optimizers
from rlhfspec_mega.megatron.checkpoint_gather import OptimizerGather
from rlhfspec_mega.megatron.checkpoint_staging import _states
from rlhfspec_mega.megatron.description import ModelDescription
from rlhfspec_mega.megatron.model import MegatronModel, on_megatron
from rlhfspec_mega.megatron.process import seed_megatron
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.memory import saving_bytes
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.objectives import supervised_objective
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.workers.megatron import MegatronWorker
from rlhfspec_mega.workers.model_group import ModelGroup
from tests.clusters import local_cluster
from tests.megatron_probe import described, worker_specs

SHAPE = ModelShape("llama", 32, 2, 4, 2, 8, 64, 96, 64, 1e4, 1e-5, True)
LARGE = ModelShape("llama", 384, 6, 6, 6, 64, 1024, 4096, 64, 1e4, 1e-5, False)
SAMPLES = Experience.of([[5, 7], [23]], [[11, 13, 17, 19], [29, 31, 37]])
MEGATRON = "rlhfspec_mega.megatron"


class SavingWorker(MegatronWorker):
    """An actor rank whose functions can be made to fail, and whose memory can be measured."""

    def rebuild(self, model: ModelDescription, call_timeout: float) -> None:
        """A model that has never been saved, the same on all ranks."""
        seed_megatron(0, self.grid_position(model.name))
        torch.manual_seed(0)
        self._models[model.name] = MegatronModel(model, range(model.parallel.ranks), torch.device("cpu"), call_timeout)

    def before(self, function: str, seconds: float | None) -> None:
        """The next call of this function fails, or comes so many seconds late."""
        module, name = function.rsplit(".", 1)
        owner = importlib.import_module(module)
        original = getattr(owner, name)

        def once(*args: Any, **kwargs: Any) -> Any:
            setattr(owner, name, original)
            if seconds is None:
                raise RuntimeError("broken by the test")
            time.sleep(seconds)
            return original(*args, **kwargs)

        setattr(owner, name, once)

    def count(self, function: str) -> None:
        """Count the calls of this function from now on."""
        module, name = function.rsplit(".", 1)
        owner = importlib.import_module(module)
        original: Callable = getattr(owner, name)
        self.calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    def counted(self) -> int:
        return self.calls

    @on_megatron
    def gathers_as_megatron(self) -> bool:
        """Whether what is gathered of this rank's optimizers is what Megatron's own gather gives."""
        model, same = self._models["actor"], True
        for part in inner_optimizers(model.optimizer):
            states = {parameter: _states(part, parameter) for parameter in part.model_param_group_index_map}
            ours = OptimizerGather(part, states, model.saving_groups.data)
            ours.reserve()
            ours.gather()
            part.data_parallel_group_gloo = model.saving_groups.data
            whole, megatrons = ours.whole(), part.get_parameter_state_dp_zero()
            if model.position.dp > 0:
                return whole is None and megatrons is None
            for index, buffer in enumerate(part.buffers):
                (dtype,) = part.gbuf_ranges[index]
                for start, end, _ in buffer.param_index_map.values():
                    for state, found in whole[index][dtype].items():
                        wanted = megatrons[index][dtype][state][start:end]
                        same &= torch.equal(found[start:end], wanted) and bool(wanted.any())
        return same

    def peak_of_save(self, directory: Path) -> int:
        """Bytes that a save took at most, files aside."""
        model, before, peak, done = self._models["actor"], anonymous_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.is_set():
                peak = max(peak, anonymous_bytes())
                time.sleep(0.001)

        watching = threading.Thread(target=watch)
        watching.start()
        part = model.write(model.stage(copy=True), directory)
        done.set()
        watching.join()
        assert part.failure is None
        return peak - before


def anonymous_bytes() -> int:
    """This process's memory without its files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Ranks:
    """Data-parallel ranks and the driver's view of them."""

    def __init__(self, directory: Path, shape: ModelShape, dtype: str, ranks: int) -> None:
        config = ActorConfig(dtype=dtype, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0))
        self.model = described(shape, config, ranks=ranks, total_updates=9)
        self.cluster = local_cluster(directory)
        specs = worker_specs(directory / "meet", [self.model], kind="tests.contract.test_saving.SavingWorker")
        self.group = self.cluster.launch("actor", specs)
        self.cluster.wait_started()
        self.actor = ModelGroup(self.group, self.model, Batching(64))

    def call(self, method: str, *args: Any, ranks: list[int] | None = None) -> list[Any]:
        return self.group.call(method, *args, phase="test", ranks=ranks)

    def train(self) -> float:
        loss = self.actor.accumulate(SAMPLES, supervised_objective, [])["loss"]
        self.actor.step()
        return loss


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("dp2"), SHAPE, "float32", 2)
    yield ranks
    ranks.cluster.close()


@pytest.fixture
def dp2(started: Ranks) -> Ranks:
    """Two data-parallel ranks with a model that has not been saved yet."""
    started.call("rebuild", started.model, 60.0)
    return started


def check_next_save(dp2: Ranks, saver: checkpoints.Saver, run_dir: Path) -> None:
    """It is written, and what comes back is the state of that moment."""
    saver.start(2, {"actor": dp2.actor}, {})
    loss = dp2.train()
    saver.wait({"actor": dp2.actor}, deadline=60)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"latest", "step_2"}
    assert checkpoints.load_latest(run_dir, {"actor": dp2.actor}, pytest.fail) == {"step": 2}
    assert dp2.train() == loss


@pytest.mark.parametrize(
    ("function", "rank", "reason"),
    [
        (f"{MEGATRON}.checkpoint_staging._states", 1, "actor rank 1: RuntimeError: broken by the test"),
        ("torch.zeros", 0, "actor rank 0: RuntimeError: broken by the test"),
        ("torch.distributed.recv", 0, "actor rank 0: RuntimeError: broken by the test"),
        ("torch.distributed.send", 1, "actor rank 0: RuntimeError"),
        ("torch.distributed.all_gather_object", 0, "actor rank 0: RuntimeError: broken by the test"),
        ("torch.distributed.all_gather_object", 1, "actor rank 0: RuntimeError"),
        (f"{MEGATRON}.checkpoint_writer.mcore_to_pyt_state_dict", 1, "actor rank 1: RuntimeError: broken by the test"),
    ],
)
def test_a_save_is_dropped_whatever_fails_on_one_rank(
    function: str, rank: int, reason: str, dp2: Ranks, tmp_path: Path
) -> None:
    """Between collectives all ranks hear of it; in one, the others do not wait for this rank until a timeout."""
    dp2.call("before", function, None, ranks=[rank])
    saver = checkpoints.Saver(tmp_path, keep=2, background=True)
    with pytest.raises(CheckpointError, match=rf"step_1 was not saved.*{reason}"):
        saver.start(1, {"actor": dp2.actor}, {})
        saver.wait({"actor": dp2.actor}, deadline=60)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    check_next_save(dp2, saver, tmp_path)


def test_a_save_may_take_longer_than_a_call(dp2: Ranks, tmp_path: Path) -> None:
    """A rank that writes nothing waits for the one that writes, however long launcher.call_timeout is."""
    dp2.call("rebuild", dp2.model, 3.0)
    dp2.call("before", f"{MEGATRON}.checkpoint_writer.sync_and_sum", 4.0, ranks=[0])
    check_next_save(dp2, checkpoints.Saver(tmp_path, keep=2, background=True), tmp_path)


def test_shards_are_checked_until_a_save_has_succeeded(dp2: Ranks, tmp_path: Path) -> None:
    dp2.call("count", f"{MEGATRON}.checkpoint_writer.validate_sharding_integrity")
    dp2.call("before", f"{MEGATRON}.checkpoint_staging._states", None, ranks=[1])
    with pytest.raises(CheckpointError):
        checkpoints.save(tmp_path, 1, {"actor": dp2.actor}, {}, keep=1)
    assert dp2.call("counted") == [0, 0]
    for step in (2, 3):
        checkpoints.save(tmp_path, step, {"actor": dp2.actor}, {}, keep=1)
        assert dp2.call("counted") == [1, 1]


def test_the_optimizer_is_gathered_as_by_megatron(dp2: Ranks) -> None:
    dp2.train()
    assert dp2.call("gathers_as_megatron") == [True, True]


@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 1), ("float32", 1), ("bfloat16", 2)])
def test_memory_is_as_planned(dtype: str, ranks: int, tmp_path: Path) -> None:
    """Of all ranks together, the copies and what is gathered."""
    workers = Ranks(tmp_path, LARGE, dtype, ranks)
    (tmp_path / "saved").mkdir()
    try:
        peak = sum(workers.call("peak_of_save", tmp_path / "saved"))
    finally:
        workers.cluster.close()
    assert peak == pytest.approx(saving_bytes(LARGE, dtype), rel=0.15)
