"""How tests are shared out among processes, and which examples property tests take.

They take the same every time; HYPOTHESIS_PROFILE=explore looks for new ones.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from rlhfspec_mega.rollout.sglang_engine import pins

collect_ignore = ["sglang"] if pins.missing("cpu") and pins.missing("cuda") else []  # make test-sglang installs it

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


class Scheduling(LoadFileScheduling):
    """All tests of a file in one process; those of Ray in one, too: instances beside each other starve on two cores."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "ray" if "/test_ray" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return Scheduling(config, log)
