"""Under Ray a worker of several GPUs sees those of the workers that it shares them with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

GPUS = """
import json
import sys
from pathlib import Path
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.ray_launcher import RayCluster
from rlhfspec_mega.planning.placement import PlacementRequest, colocated
limits = {"call_timeout": 60.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 0}
placement = colocated(PlacementRequest(devices=4, replica_devices=4, data_parallel=1, engines=2, engine_devices=2))
places = {role: placement.devices(role) for role in ("actor", "engine")}
cluster = RayCluster(Path(sys.argv[1]), threads=1, use_gpus=True, places=places, address=None, **limits)
groups = [
    cluster.launch(role, [WorkerSpec("tests.echo.Echo", {}, devices) for devices in ranks])
    for role, ranks in places.items()
]
cluster.wait_started()
print(json.dumps([group.call("environment", "CUDA_VISIBLE_DEVICES", phase="test") for group in groups]))
cluster.close()
"""


def test_an_engine_of_several_gpus_sees_those_of_its_actor_ranks(tmp_path: Path) -> None:
    """GPUs that are not there: Ray believes what it is told."""
    temporary = tempfile.mkdtemp(dir="/tmp")  # short: Ray makes sockets in it
    found = subprocess.run(
        [sys.executable, "-c", GPUS, str(tmp_path / "logs")],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": temporary, "HOME": temporary},
        capture_output=True,
        text=True,
        timeout=180,
    )
    shutil.rmtree(temporary, ignore_errors=True)
    assert found.returncode == 0, found.stderr
    actor, engines = json.loads(found.stdout)
    assert len({*actor}) == 4
    assert [engine.split(",") for engine in engines] == [actor[:2], actor[2:]]
