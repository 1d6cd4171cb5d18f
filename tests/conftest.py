"""Which examples property tests take: the same every time; HYPOTHESIS_PROFILE=explore looks for new ones."""

from __future__ import annotations

import gc
import os

from hypothesis import settings

from rlhfspec_mega.rollout.sglang_engine import pins

collect_ignore = ["sglang"] if pins.missing("cpu") and pins.missing("cuda") else []  # make test-sglang installs it

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_finish() -> None:
    """The collector need not look at the objects of imported modules over and over: a sixth less time."""
    gc.collect()
    gc.freeze()
