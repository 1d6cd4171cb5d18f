"""How many draft tokens SGLang's batches get: by costs and acceptance, forced, fixed, watched; chains and trees."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.planning.draft_tokens import INITIAL_SHARPNESS, StepTable
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED, DraftChoice, _Step, write_config
from rlhfspec_mega.rollout.sglang_engine.shapes import ALWAYS_SPARE, DraftShapes, chains, shapes_of, trees
from rlhfspec_mega.rollout.sglang_engine.states import StateSwitch, allow_trees, start_with_largest, width_of_state
from rlhfspec_mega.rollout.sglang_engine.survival import NodeScores
from rlhfspec_mega.types import DraftingTally
from tests.sglang_fake import FakeEagleWorker, install
from tests.unit.test_chain_length import CANDIDATES, table_of

CHAINS = DraftShapes(CANDIDATES, CANDIDATES[-1])
TREES = DraftShapes((0, 2, 3, 6), 3, branches=2)
TREE_TABLE = StepTable((1, 8), TREES.counts, tuple(tuple(0.01 + 0.0005 * n for n in TREES.counts) for _ in range(2)))


def test_numbers_of_draft_tokens() -> None:
    assert chains(1).counts == (0, 1) and chains(4).counts == (0, 1, 2, 3, 4)
    assert chains(8) == DraftShapes((0, 1, 2, 3, 5, 8), 8)
    assert trees(32, 6, 4) == DraftShapes((0, 1, 2, 3, 5, 8, 12, 16, 24, 32), 6, 4)
    assert trees(32, 6, 1) == chains(6) and trees(2, 6, 4) == DraftShapes((0, 1, 2), 2, 4)
    assert trees(32, 2, 2).counts[-1] == 6, "two children, and two of each of these"


@pytest.mark.parametrize(
    ("policy", "as_trees", "wanted"),
    [
        ("adaptive", False, (chains(8), None)),
        ("adaptive", True, (trees(32, 8, 4), None)),
        ("fixed", False, (DraftShapes((0, 5), 5), 5)),
        ("fixed", True, (DraftShapes((0, 8), 5, 4), 8)),
    ],
)
def test_what_a_policy_chooses_from(policy: str, as_trees: bool, wanted: Any) -> None:
    drafting = SpeculationConfig(
        policy=policy, num_steps=5, num_draft_tokens=8, topk=4, max_num_steps=8, max_num_draft_tokens=32
    )
    assert shapes_of(drafting, as_trees) == wanted


@pytest.mark.parametrize("shapes", [chains(8), trees(16, 6, 4), trees(8, 6, 4), trees(16, 8, 8)])
def test_positions_that_sglang_needs(shapes: DraftShapes) -> None:
    """It reserves a step, and writes two ahead into a row that is longer than the context by the largest tree."""
    step, most = max(shapes.branches * shapes.depth, shapes.counts[-1] + 1), shapes.counts[-1] + 1
    longest = 500
    context = longest + shapes.spare_positions
    assert longest + step <= context
    assert longest + 2 * step <= context + most + 4
    assert DraftShapes().spare_positions == ALWAYS_SPARE


class Steps:
    """SGLang's worker as far as it speaks with the choice; of each step's draft tokens a share is accepted."""

    def __init__(self, path: Path, table: StepTable | None = None) -> None:
        self.choice = DraftChoice(str(path))
        self.choice.learn_costs(table or table_of(1e-4))
        self.kept = NodeScores("cpu", rows=1, nodes=self.choice.shapes.counts[-1])

    def step(self, batch: int, share: float) -> int:
        count = self.choice.begin(batch)
        accepted = round(share * self.choice.shapes.depth_of(count))
        if count and self.choice.shapes.branches > 1:
            self.kept.keep(scores_of([share, 0.1 * share], [0.5 * share, 0.0, 0.05 * share, 0.0]))
            self.choice.drafted(self.kept.nodes(1, 2))
        self.choice.verified([accepted] * batch)
        return count


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_config(tmp_path / "steps.json", CHAINS, collapse_ratio=0.5)
    return tmp_path / "steps.json"


def test_the_number_follows_acceptance(config: Path) -> None:
    good, bad = Steps(config), Steps(config)
    ends = [[steps.step(1, share) for _ in range(200)][-1] for steps, share in ((good, 1.0), (bad, 0.0))]
    assert ends[0] == 8 and ends[1] < 4


@pytest.mark.parametrize(("shapes", "table"), [(CHAINS, None), (TREES, TREE_TABLE)])
def test_two_ranks_decide_alike(shapes: DraftShapes, table: StepTable | None, tmp_path: Path) -> None:
    """What each learns is its own, and the same."""
    write_config(tmp_path / "steps.json", shapes, collapse_ratio=0.5)
    one, other = (Steps(tmp_path / "steps.json", table) for _ in range(2))
    shares = torch.rand(80, generator=torch.Generator().manual_seed(7)).tolist()
    assert [one.step(1, share) for share in shares] == [other.step(1, share) for share in shares]


def test_before_a_table_comes_the_number_is_that_of_the_start_or_the_one_that_is_forced(config: Path) -> None:
    choice = DraftChoice(str(config))
    assert choice.begin(1) == 8
    choice.force(0)
    assert choice.begin(1) == 0
    with pytest.raises(RunError, match="3 draft tokens were asked for"):
        choice.force(3)
    with pytest.raises(RunError, match="A table of"):
        choice.learn_costs(StepTable((1,), (0, 1), ((0.1, 0.2),)))


def test_a_fixed_number_is_left_only_for_a_collapse(tmp_path: Path) -> None:
    write_config(tmp_path / "steps.json", DraftShapes((0, 2), 2), collapse_ratio=0.5, fixed=2)
    steps = Steps(tmp_path / "steps.json", StepTable((1,), (0, 2), ((0.1, 0.2),)))
    steps.choice.force(2)
    for _ in range(300):  # measured on random weights, of which nothing is learnt
        steps.step(1, 0.0)
    steps.choice.force(NOT_FIXED)
    assert {steps.step(1, 1.0) for _ in range(300)} == {2}
    assert 0 in [steps.step(1, 0.0) for _ in range(500)]


def test_steps_are_counted_in_their_order_when_results_come_late(config: Path) -> None:
    """The number has changed by then; a step whose batch was dropped has no result."""
    choice = DraftChoice(str(config))
    for forced, batch in ((2, 2), (4, 2), (1, 3), (0, 1)):
        choice.force(forced)
        assert choice.begin(batch) == forced
    choice.verified([2, 0])
    choice.verified([4, 1])
    choice.verified([0])
    tally = choice.take_tally()
    assert (tally.sample_steps, tally.drafted_sample_steps, tally.verified, tally.accepted) == (5, 4, 12, 7)
    assert choice.take_tally() == DraftingTally()


def test_a_collapse_is_said_and_ends_drafting_until_weights_change(config: Path) -> None:
    steps = Steps(config)
    for _ in range(300):
        steps.step(1, 1.0)
    assert steps.choice.take_tally().collapsed_rate is None
    while steps.choice.take_tally().collapsed_rate is None:
        steps.step(1, 0.0)
    assert steps.step(1, 0.0) == 0
    steps.choice.weights_changed()
    assert steps.choice.take_tally().collapsed_rate is None
    assert max(steps.step(1, 1.0) for _ in range(2000)) > 0


def test_a_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stock.json").write_text('{"1": {"candidate_steps": [1, 3]}}')
    with pytest.raises(UserError, match="has no section 'rlhfspec_mega'"):
        DraftChoice(str(tmp_path / "stock.json"))
    with pytest.raises(UserError, match="needs --speculative-adaptive-config"):
        DraftChoice(None)


def scores_of(first: Sequence[float], later: Sequence[float]) -> list[torch.Tensor]:
    """Of two layers, as SGLang has them: [B, 1, branches] and [B, branches, branches]."""
    return [torch.tensor(first).view(1, 1, 2), torch.tensor(later).view(1, 2, 2)]


def test_the_likeliest_nodes_and_their_depths() -> None:
    kept = NodeScores("cpu", rows=3, nodes=8)
    kept.keep(scores_of([0.6, 0.3], [0.5, 0.05, 0.2, 0.1]))
    survival, depths = kept.nodes(1, 2).read()
    torch.testing.assert_close(torch.tensor(survival[0, :7]), torch.tensor([0.6, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0]))
    assert depths[0, :6].tolist() == [1, 2, 1, 2, 2, 2]


def test_trees_are_as_large_as_their_nodes_promise(tmp_path: Path) -> None:
    """The same acceptance, spread over siblings or along one path."""
    write_config(tmp_path / "steps.json", TREES, collapse_ratio=0.5)
    found = {}
    for name, first, later in (("path", [0.9, 0.0], [0.9, 0.0, 0.0, 0.0]), ("broad", [0.4, 0.4], [0.3, 0.3, 0.3, 0.3])):
        steps = Steps(tmp_path / "steps.json", TREE_TABLE)
        kept = NodeScores("cpu", rows=1, nodes=8)
        for _ in range(60):
            count = steps.choice.begin(1)
            if count:
                kept.keep(scores_of(first, later))
                steps.choice.drafted(kept.nodes(1, 2))
            steps.choice.verified([min(count, 2)])
        found[name] = count
        assert steps.choice.sharpness > INITIAL_SHARPNESS, "more was accepted than promised"
    assert found["path"] < found["broad"] == 6


def test_every_number_has_its_state_and_the_live_one_is_switched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between numbers that are drafted to the same depth."""
    install(monkeypatch)
    write_config(tmp_path / "steps.json", TREES, collapse_ratio=0.5)
    worker = FakeEagleWorker(
        {
            "speculative_adaptive_config": str(tmp_path / "steps.json"),
            "speculative_num_steps": TREES.depth,
            "speculative_num_draft_tokens": TREES.depth + 1,
            "speculative_eagle_topk": TREES.branches,
        }
    )
    choice = DraftChoice.current
    assert choice is not None
    for count in (6, 3, 0, 2, 6, 6):
        choice.force(count)
        assert worker.begin(4) == count
        assert worker.speculative_num_steps == min(count, TREES.depth)


def test_only_trees_are_allowed_beyond_what_sglang_adapts() -> None:
    def original(server_args: Any) -> str | None:
        if server_args.speculative_eagle_topk != 1:
            return "only topk=1"
        return "dp attention" if server_args.enable_dp_attention else None

    arguments = SimpleNamespace(speculative_eagle_topk=4, enable_dp_attention=False)
    assert allow_trees(original, arguments) is None and arguments.speculative_eagle_topk == 4
    arguments.enable_dp_attention = True
    assert allow_trees(original, arguments) == "dp attention"


def test_the_first_state_is_the_largest_tree(tmp_path: Path) -> None:
    """SGLang's buffers are for it; of a chain it is what SGLang makes of it."""
    write_config(tmp_path / "steps.json", TREES, collapse_ratio=0.5)

    def original(server_args: Any) -> None:
        server_args.speculative_num_draft_tokens = server_args.speculative_num_steps + 1

    for branches, wanted in ((2, 7), (1, 4)):
        arguments = SimpleNamespace(
            speculative_eagle_topk=branches,
            speculative_num_steps=3,
            speculative_adaptive_config=str(tmp_path / "steps.json"),
        )
        start_with_largest(original, arguments)
        assert arguments.speculative_num_draft_tokens == wanted


def test_graphs_of_the_drafts_reading_are_as_wide_as_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("runtime_context")
    module.get_spec = lambda: SimpleNamespace(speculative_num_draft_tokens=6)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)

    def original(*, phase: str, server_args: Any) -> int:
        return {"draft_extend": 9, "target_verify": 5}[phase]

    assert width_of_state(original, phase="draft_extend", server_args=None) == 6
    assert width_of_state(original, phase="target_verify", server_args=None) == 5


def test_a_collapse_is_told_from_a_smaller_tree(tmp_path: Path) -> None:
    """Of one child fewer are accepted than of two: that is no collapse."""
    write_config(tmp_path / "steps.json", TREES, collapse_ratio=0.5)
    choice = DraftChoice(str(tmp_path / "steps.json"))
    choice.learn_costs(TREE_TABLE)
    for count, share in ((6, 0.9), (2, 0.3)):
        for step in range(600):
            choice._under_way.append(_Step(count, 1))
            choice.verified([int(step % 10 < 10 * share)])
    assert choice.take_tally().collapsed_rate is None
    for _ in range(600):
        choice._under_way.append(_Step(2, 1))
        choice.verified([0])
    assert choice.take_tally().collapsed_rate is not None and choice.begin(1) == 0


def test_a_switch_takes_the_state_that_sglang_has_built(tmp_path: Path) -> None:
    write_config(tmp_path / "steps.json", CHAINS, collapse_ratio=0.5)
    built: list[int] = []

    def build(speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: Any) -> Any:
        assert cuda_graph_bs == [1, 2]
        built.append(speculative_num_steps)
        return SimpleNamespace(speculative_num_draft_tokens=speculative_num_draft_tokens)

    switch = StateSwitch(SimpleNamespace(build_adaptive_runtime_state=build), str(tmp_path / "steps.json"))
    switch.register(SimpleNamespace(speculative_num_steps=8, speculative_num_draft_tokens=9))
    switch.init_states([1, 2])
    assert built == [0, 1, 2, 4]
