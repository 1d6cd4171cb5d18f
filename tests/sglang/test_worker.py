"""The worker around real SGLang: its profile, drafting, samples that move while they decode, sleep, files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.sglang_engines import DEVICE, SHARED_GPU, finish, send, started
from rlhfspec_mega.config.schema.generation import RolloutConfig, SGLangConfig, SpeculationConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.planning.draft_tokens import StepTable
from rlhfspec_mega.planning.throughput import seconds_per_token
from rlhfspec_mega.rollout.migration.messages import MigrationOrder, MigrationOrders
from rlhfspec_mega.rollout.protocol import DraftPast, SampleSnapshot
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.profile import _Runs
from rlhfspec_mega.types import EngineReport, GenerationRequest, GenerationResult
from rlhfspec_mega.workers.sglang_engine import MEMORY, SGLangEngineWorker
from tests.near_tie import assert_same
from tests.sglang.conftest import torch_results

SLOTS, PROMPT, NEW, CHUNK = 4, 120, 100, 32
ALWAYS = -1  # number of no order: an engine that expects it never stops waiting
ROOT = Path(__file__).resolve().parents[2]


def make(made: tuple[Path, Path], **options: Any) -> SGLangEngineWorker:
    """A worker without weights; `options`: of SGLang."""
    config = RolloutConfig(
        engine="sglang",
        max_running_requests=SLOTS,
        max_prompt_tokens=PROMPT,
        max_new_tokens=NEW,
        chunked_prefill_size=CHUNK,
        sglang=SGLangConfig(engine_kwargs=SHARED_GPU | options),
    )
    drafting, shape = SpeculationConfig(policy="adaptive", max_num_steps=3), read_shape(made[0])
    memory = 0.1 if DEVICE == "cuda" else None
    return SGLangEngineWorker(shape, config, "float32", made[0], memory, True, DEVICE, draft=made[1], drafting=drafting)


@pytest.fixture(scope="module")
def running(made: tuple[Path, Path]) -> list[SGLangEngineWorker]:
    """Two that draft. Their watchdogs are called off at the end of the process."""
    found = [make(made) for _ in range(2)]
    for worker in found:
        started(lambda worker=worker: worker.engine._engine)
    return found


@pytest.fixture
def workers(running: list[SGLangEngineWorker], made: tuple[Path, Path]) -> Iterator[list[SGLangEngineWorker]]:
    """With weights, and without samples."""
    for worker in running:
        if worker.engine.load().policy_version < 0:
            send(worker.engine, made[0], 0)
        worker.take_tally()
    yield running
    for worker in running:
        assert worker.controller.control is not None
        worker.controller.control.force(NOT_FIXED)
        worker.clear()
        worker.leave()


@pytest.fixture(scope="module")
def asked(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    """Six groups of four samples."""
    return [replace(one, prompt_tokens=one.prompt_tokens[-PROMPT:]) for one in requests[:24]]


@pytest.fixture(scope="module")
def right(made: tuple[Path, Path], asked: list[GenerationRequest]) -> dict[str, GenerationResult]:
    return torch_results(made[0], asked)


def test_its_steps_were_measured_at_start(workers: list[SGLangEngineWorker]) -> None:
    for worker in workers:
        assert worker.controller.profile is not None and worker.controller.profile.prefill_seconds > 0
        table = worker.controller.profile.table
        assert table.counts == (0, 1, 2, 3) and table.batches == (1, 2, SLOTS)
        assert all(seconds > 0 for row in table.seconds for seconds in row)
        assert (seconds_per_token(worker.pace(1.0), torch.arange(1, 9).numpy()) > 0).all()


def test_the_full_batch_is_measured_while_all_of_it_decode(workers: list[SGLangEngineWorker]) -> None:
    """Its prompts come in chunks; each request has put out a token before any has ended."""
    workers[0].engine._flush_cache()  # of what was measured at start, prompts too
    outputs = _Runs(workers[0].engine._engine, (PROMPT + NEW) // 2, 259)._outputs(SLOTS, (PROMPT + NEW) // 2)
    assert len(outputs) == SLOTS and max(times[0] for times in outputs) < min(times[-1] for times in outputs)


def test_it_drafts_by_the_table_of_costs(
    workers: list[SGLangEngineWorker],
    asked: list[GenerationRequest],
    right: dict[str, GenerationResult],
    judge: Any,
) -> None:
    """And counts what it drafts: nothing where draft tokens are dear, much where they cost nothing."""
    worker, found = workers[0], []
    assert worker.controller.profile is not None and worker.controller.control is not None
    table = worker.controller.profile.table
    for cost in (1.0, 0.0):
        seconds = tuple(tuple(0.01 + cost * count for count in table.counts) for _ in table.batches)
        worker.controller.control.learn_costs(StepTable(table.batches, table.counts, seconds))
        assert_same(right, finish(worker.engine, asked), asked, judge)
        tally = worker.take_tally()
        assert tally is not None and tally.accepted <= tally.verified
        found.append(tally)
    worker.controller.control.learn_costs(table)
    dear, free = found
    assert free.accepted > 0.3 * free.sample_steps and free.drafted_sample_steps > 0.9 * free.sample_steps
    assert dear.drafted_sample_steps < 0.3 * dear.sample_steps
    later = worker.take_tally()
    assert later is not None and later.sample_steps == 0, "every figure counts once"


def test_what_was_accepted_makes_it_quicker(workers: list[SGLangEngineWorker], asked: list[GenerationRequest]) -> None:
    worker = workers[0]
    worker.controller.accepted = 0.0
    before = worker.pace(1.0)
    finish(worker.engine, asked)
    worker.take_tally()
    assert any(now < then for now, then in zip(worker.pace(1.0).seconds, before.seconds, strict=True))


def test_a_sample_as_long_as_is_allowed(workers: list[SGLangEngineWorker]) -> None:
    """SGLang keeps positions for drafting to itself."""
    requests = [GenerationRequest(f"{i}", "long", tuple(range(PROMPT)), i, NEW) for i in range(SLOTS)]
    assert [len(result.tokens) for result in finish(workers[0].engine, requests).values()] == [NEW] * SLOTS


def test_an_option_that_sglang_does_not_know_is_refused(made: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=r"rollout\.sglang\.engine_kwargs has nonsense, which sglang"):
        make(made, nonsense=1)


@pytest.mark.parametrize("copies", [True, False])
def test_samples_move_while_they_decode(
    copies: bool,
    workers: list[SGLangEngineWorker],
    asked: list[GenerationRequest],
    right: dict[str, GenerationResult],
    judge: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To and fro; every sample comes back once with its own tokens, and what was copied is not prefilled."""
    for worker in workers:
        if not copies:
            monkeypatch.setattr(worker.engine, "_kv", None)
        assert worker.controller.control is not None
        worker.controller.control.force(0)  # so that they last
        worker.engine._flush_cache()
    peers = [worker.join_migration(1.0) for worker in workers]
    assert all(0 < peer.copy_seconds < peer.prefill_seconds for peer in peers)
    assert {peer.kv_tokens for peer in peers} == {SLOTS * (PROMPT + NEW)}
    before = [worker.engine.stats() for worker in workers]
    reports = to_and_fro(workers, [peer.address for peer in peers], asked)
    results = [result for report in reports for result in report.finished]
    assert sorted(result.sample_id for result in results) == sorted(one.sample_id for one in asked)
    assert_same(right, {result.sample_id: result for result in results}, asked, judge)
    arrived = [sample for report in reports for sample in report.migration.arrived]
    landings = [landing for report in reports for landing in report.migration.landings]
    assert len(arrived) >= 4 and landings
    assert any(landing.settled_bytes > 0 for landing in landings) == copies
    after = [worker.engine.stats() for worker in workers]
    resumed, spared = (
        sum(now[name] - then[name] for now, then in zip(after, before, strict=True))
        for name in ("resumed_tokens", "spared_tokens")
    )
    assert resumed > 0
    if copies:  # others find the prompts of their groups
        assert spared > 0.5 * resumed


def to_and_fro(
    workers: Sequence[SGLangEngineWorker], addresses: Sequence[Any], asked: Sequence[GenerationRequest]
) -> list[EngineReport]:
    """Reports until all samples have ended, while some of one worker are sent to the other all the time."""
    reports = [workers[0].advance([SampleSnapshot(one, [], [], []) for one in asked], 0.0, MigrationOrders())]
    end, finished = time.monotonic() + 120, 0
    turn = 0
    while finished < len(asked):
        assert time.monotonic() < end
        source = turn // 3 % 2
        moving = [name for name, held in workers[source].engine._held.items() if held.started and turn % 3 == 0][:3]
        for rank, worker in enumerate(workers):
            orders = MigrationOrders(expected=[ALWAYS])
            if rank == source:
                orders.moves = [MigrationOrder(turn, name, addresses[1 - source]) for name in moving]
            reports.append(worker.advance([], 0.01, orders))
        finished = sum(len(report.finished) for report in reports)
        turn += 1
    return reports


def test_it_sleeps_and_weights_wake_it(
    workers: list[SGLangEngineWorker], made: tuple[Path, Path], asked: list[GenerationRequest], right: Any, judge: Any
) -> None:
    """Also where the first sample afterwards comes with KV."""
    source, worker = workers[0].engine, workers[1]
    source.submit(asked[1:2])
    name = asked[1].sample_id
    while (settled := source.committed_positions(name)) is None or settled["target"] < len(asked[1].prompt_tokens) + 5:
        source.poll(0.001)
    kv = {part: source.committed_kv(name, part, 0, last) for part, last in settled.items()}
    snapshot = source.export_sample(name)
    rows = min(part.shape[3] for part in kv.values())
    snapshot.kv = kv["target"][:, :, :, :rows]
    snapshot.draft = DraftPast(kv["draft"][:, :, :, :rows], torch.empty(0, 0))
    worker.engine.import_sample(SampleSnapshot(asked[0], [], [], []))
    worker.sleep()
    assert worker.engine.idle and worker.engine.load().policy_version == -1
    send(worker.engine, made[0], 1)
    spared = worker.engine.stats()["spared_tokens"]
    worker.engine.import_sample(snapshot)
    assert_same(right, drained(worker.engine), asked[1:2], judge)
    assert worker.engine.stats()["spared_tokens"] - spared >= rows - 1


def drained(engine: SGLangEngine) -> dict[str, GenerationResult]:
    found: dict[str, GenerationResult] = {}
    while not engine.idle:
        found |= {result.sample_id: result for result in engine.poll(0.1)}
    return found


def test_kv_takes_the_place_of_what_was_used_longest_ago(workers: list[SGLangEngineWorker]) -> None:
    """More samples come with KV than there is room for: of the first nothing is left, the last finds all."""
    engine = workers[0].engine
    engine._flush_cache()
    # Two tokens of 250 tell the sequences apart: a GPU has room for more of them than the vocabulary has tokens.
    sequences = [(number % 250, *[number // 250] * 199) for number in range(engine.kv_room // 200 + 2)]
    for sequence in sequences:
        engine.import_sample(with_kv(engine, sequence))
        assert engine.abort(["s"])
    found = []
    for sequence in (sequences[-1], sequences[0]):
        before = engine.stats()["spared_tokens"]
        engine.import_sample(replace(with_kv(engine, sequence), kv=None, draft=None))
        while engine.is_waiting("s"):
            engine.poll(0.001)
        engine.abort(["s"])
        found.append(engine.stats()["spared_tokens"] - before)
    assert found[0] >= 190 and found[1] == 0
    engine._flush_cache()


def with_kv(engine: SGLangEngine, tokens: tuple[int, ...]) -> SampleSnapshot:
    """A sample of these tokens, the last 90 of them its response, and KV that means nothing."""
    request = GenerationRequest("s", "g", tokens[:-90], 1, NEW)
    shapes = engine.kv_layout(len(tokens) - 1).parts
    known = list(tokens[-90:]), [0.0] * 90, [0] * 90
    draft = DraftPast(torch.zeros(shapes["draft"]), torch.empty(0, 0))
    return SampleSnapshot(request, *known, torch.zeros(shapes["target"]), draft)


KILLED = """
import sys
from pathlib import Path
from rlhfspec_mega.rollout.sglang_engine import cpu_kernels
if sys.argv[3] == "cpu":
    cpu_kernels.prepare()
from tests.sglang.test_worker import make
if __name__ == "__main__":
    worker = make((Path(sys.argv[1]), Path(sys.argv[2])))
    print("ready", worker.engine._kv._directory, flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_of_a_worker_that_was_killed(made: tuple[Path, Path], tmp_path: Path) -> None:
    """As LocalCluster kills: its process group, with -9. SGLang's processes are in it, its files in memory."""
    script, temporary = tmp_path / "killed.py", tmp_path / "temporary"
    script.write_text(KILLED)
    temporary.mkdir()
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, str(script), str(made[0]), str(made[1]), DEVICE],
        env=os.environ | {"PYTHONPATH": python_path, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    directory = next(Path(line.split()[1]) for line in process.stdout if line.startswith("ready "))
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    files = {inode for one in family for inode in files_of(one.pid)} | {directory.stat().st_ino}
    assert directory.is_dir() and len(family) > 2
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end and left(family, files, (directory, temporary)):
        time.sleep(0.2)
    assert left(family, files, (directory, temporary)) == []


def files_of(pid: int) -> set[int]:
    """Inodes of what a process has mapped of files in memory: names change while they are made."""
    lines = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {int(parts[4]) for parts in lines if parts[-1].startswith(f"{MEMORY}/")}


def left(family: Sequence[psutil.Process], files: set[int], directories: Sequence[Path]) -> list[str]:
    """Processes and files that are still there."""
    found = [str(one) for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    for path in (*MEMORY.iterdir(), *(path for directory in directories for path in directory.rglob("*"))):
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if path.stat().st_ino in files or path.parent != MEMORY:
                found.append(str(path))
    return [name for name in found if "torchinductor" not in name]  # which is a cache
