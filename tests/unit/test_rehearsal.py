"""After a rehearsal nothing is left to compile: first uses would be taken for the cost of drafting."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlhfspec_mega.compiled import COMPILES

SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.oversight import MonitoredPolicy
from rlhfspec_mega.planning.strategy import Adaptive
from rlhfspec_mega.rollout.torch_engine.profile import profile, rehearse
from tests.unit.test_speculation import make_engine
from tests.unit.test_torch_engine import REQUESTS, generate


def signatures():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("rlhfspec_mega"):
            for one in vars(module).values():
                if hasattr(one, "py_func") and hasattr(one, "signatures"):
                    found[f"{one.py_func.__module__}.{one.py_func.__name__}"] = set(one.signatures)
    return found


def policy():
    made = Adaptive(AcceptanceModel(), cost)
    made.recalls = True
    return made


cost = CostModel()
engine = make_engine(policy(), slots=6, history_tokens=4096)
cost.fit(profile(engine, seconds=1.0))
rehearse(engine, policy())
known = signatures()
engine.policy = MonitoredPolicy(policy(), collapse_ratio=0.5)
for requests in (REQUESTS, REQUESTS[:1], REQUESTS):
    generate(engine, requests)
engine.policy.take_tally()
assert sum(map(len, known.values())) > 20, known
print(sorted(name for name, have in signatures().items() if have - known.get(name, set())))
"""


@pytest.mark.skipif(not COMPILES, reason="numba is not installed")
def test_after_a_rehearsal_nothing_is_left_to_compile() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "[]"
