"""What a mistake in the hooks would look like: each of these, made on purpose in SGLang's processes, is noticed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sglang_engines import DEVICE
from rlhfspec_mega.rollout.sglang_engine.cpu_kernels import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
# Run at the start of every Python process below, before SGLang's schedulers load the plug-in.
MUTATIONS = {
    "wrong draft offset": """
import rlhfspec_mega.rollout.sglang_engine.shared_noise as one
one.DRAFT_OFFSET = 2
""",
    "wrong noise seed": """
import rlhfspec_mega.rollout.sglang_engine.shared_noise as one
right = one.seed_states
one.seed_states = lambda seeds: right(seeds + 1)
""",
    "dropped hook": """
import rlhfspec_mega.rollout.sglang_engine.plugin as plugin
right = plugin.hooks
plugin.hooks = lambda: [hook for hook in right() if "eagle_sample" not in hook[0]]
""",
    "KV in a wrong slot": """
import rlhfspec_mega.rollout.sglang_engine.kv as kv
right = kv._rows
kv._rows = lambda file, pool, rows: right(file, pool, rows).roll(1, dims=2)
""",
}
# The test that fails, and what it says.
IDENTITY, MOVES = "tests/sglang/test_identity.py::test_identity", "tests/sglang/test_moves.py"
PARTED = r"tokens part at \d+ where|lengths differ"
NOTICED_BY = {
    "wrong draft offset": (f"{IDENTITY}[5]", "the draft's positions or its noise are not the target's"),
    "wrong noise seed": (f"{IDENTITY}[3]", PARTED),
    "dropped hook": (f"{IDENTITY}[3]", PARTED),
    "KV in a wrong slot": (
        f"{MOVES}::test_kv_that_moved_is_that_of_a_prefill[chains]",
        r"KV of the \w+ differs in rows",
    ),
}
IN_SCHEDULERS = "import re, sys\nif re.search('multiprocessing.(spawn|forkserver)', ' '.join(sys.orig_argv)):\n"


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_noticed(mutation: str, tmp_path: Path) -> None:
    """The named test fails in a process of its own whose schedulers have the mistake."""
    indented = "".join(f"    {line}\n" for line in MUTATIONS[mutation].strip().splitlines())
    (tmp_path / "sitecustomize.py").write_text(IN_SCHEDULERS + indented)
    stand_ins = [str(PACKAGES)] if DEVICE == "cpu" else []
    given = filter(None, [os.environ.get("PYTHONPATH")])  # SGLang itself, where it is not installed
    path = os.pathsep.join([str(tmp_path), str(ROOT), *stand_ins, *given])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", NOTICED_BY[mutation][0]]
    with (tmp_path / "log").open("wb") as log:  # on a GPU, a scheduler that does not start takes its parent along
        status = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log, timeout=250
        ).returncode
    output = (tmp_path / "log").read_text(errors="replace")
    test, sentence = NOTICED_BY[mutation]
    assert status != 0, f"{mutation}: nobody noticed"
    assert f"FAILED {test}" in output and re.search(sentence, output), output[-3000:]
