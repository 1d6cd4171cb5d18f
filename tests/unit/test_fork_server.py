"""The process that local workers are forked from: its death, and the import that it does for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from tests.clusters import local_cluster
from tests.unit.test_local_cluster import pid, spec


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = local_cluster(tmp_path)
    yield cluster
    cluster.close()


def test_all_workers_of_a_dead_fork_server_die_and_are_started_by_a_new_one(cluster: LocalCluster) -> None:
    group = cluster.launch("echo", [spec("a"), spec("b")], replaceable=True)
    cluster.wait_started()
    server = psutil.Process(pid(0)).parent()
    assert server is not None
    server.kill()
    calls = [group.start(rank, "sleep", 30) for rank in (0, 1)]
    cluster.wait(calls, "generate", check=False)
    assert [call.dead for call in calls] == [True, True]
    cluster.wait_started()
    assert group.call("greet", "you", phase="test") == ["a greets you", "b greets you"]
    assert [group.launches(rank) for rank in (0, 1)] == [2, 2] and psutil.Process(pid(0)).ppid() != server.pid


def test_a_workers_code_is_imported_once_and_what_that_prints_is_in_its_log(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys\nprint('imported by', os.getpid(), file=sys.stderr)\n"
    (tmp_path / "printing.py").write_text(code + "from tests.unit.test_local_cluster import Echo\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cluster.launch("printing", [WorkerSpec("printing.Echo", {"name": "a"}), WorkerSpec("printing.Echo", {"name": "b"})])
    cluster.wait_started()
    server = psutil.Process(pid(0, "printing")).ppid()
    texts = [(tmp_path / "logs" / f"printing-{rank}.log").read_text() for rank in (0, 1)]
    assert texts == [f"imported by {server}\n", ""]
