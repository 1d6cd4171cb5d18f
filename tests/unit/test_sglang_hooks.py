"""The hooks in SGLang on made-up batches: the choices of the torch engine's rule, whatever calls them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.sglang_engine import pins, plugin, seams
from rlhfspec_mega.rollout.sglang_engine.choice import METHOD, DraftChoice, write_config
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes
from rlhfspec_mega.rollout.sglang_engine.shared_noise import DraftNoise, choose, keep_seeds, last_positions, verify
from rlhfspec_mega.sampling.noise import gumbel
from rlhfspec_mega.sampling.select import select_tokens
from tests.sglang_fake import FakeKind, FakeRegistry

VOCABULARY = 97
SEEDS = torch.tensor([5, 2**62 + 3, 11])
GREEDY = torch.tensor([False, True, False])


def info_of(temperatures: list[float]) -> SimpleNamespace:
    """SGLang turns temperature 0 into top_k 1 at temperature 1."""
    return SimpleNamespace(
        temperatures=torch.tensor([t or 1.0 for t in temperatures])[:, None],
        top_ks=torch.tensor([1 if t == 0 else 1 << 30 for t in temperatures], dtype=torch.int32),
        is_all_greedy=not any(temperatures),
        sampling_seed=SEEDS[: len(temperatures)].clone(),
    )


def wanted(logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, at: torch.Tensor) -> list[int]:
    return select_tokens(logits, temperatures, gumbel(seeds, at, VOCABULARY)).tokens.tolist()


@pytest.fixture
def logits() -> torch.Tensor:
    return 3.0 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))


def test_the_plain_sampler_chooses_as_the_torch_engine(logits: torch.Tensor) -> None:
    temperatures, at = torch.tensor([0.7, 0.0, 1.0]), torch.tensor([9, 4, 30])
    info = info_of(temperatures.tolist())
    probs = (logits / info.temperatures).softmax(dim=-1)
    tokens = choose(None, None, probs, info, at, False)  # type: ignore[arg-type]
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == wanted(logits, temperatures, SEEDS, at)


def verified(logits: torch.Tensor, info: Any, positions: torch.Tensor, nodes: int) -> tuple[list[int], Any]:
    """What SGLang's greedy verification would take for the target's choices."""
    output = SimpleNamespace(next_token_logits=logits)
    batch = SimpleNamespace(sampling_info=info, forward_mode=SimpleNamespace(is_idle=lambda: False))
    tree = SimpleNamespace(draft_token_num=nodes, positions=positions)

    def original(verify_input: Any, batch: Any, logits_output: Any, mask: Any) -> list[int]:
        assert batch.sampling_info.is_all_greedy and mask == "mask"
        return logits_output.next_token_logits.argmax(dim=-1).tolist()

    return verify(original, tree, batch, output, "mask"), output


def test_verification_takes_the_choices_of_plain_decoding() -> None:
    """Every node of a tree is decided as plain decoding would decide at its position."""
    nodes, temperatures = 4, torch.tensor([0.7, 0.0, 1.0])
    logits = 3.0 * torch.randn(3 * nodes, VOCABULARY, generator=torch.Generator().manual_seed(2))
    at = torch.tensor([20, 21, 21, 22] * 3) + torch.arange(3).repeat_interleave(nodes) * 7
    info = info_of(temperatures.tolist())
    found, output = verified(logits, info, at, nodes)
    rows = torch.arange(3).repeat_interleave(nodes)
    assert found == wanted(logits, temperatures[rows], SEEDS[rows], at)
    assert output.next_token_logits is logits and not info.is_all_greedy, "log-probs come from what the model said"


def test_a_greedy_batch_is_verified_as_it_was() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(3))
    found, _ = verified(logits, info_of([0.0, 0.0]), torch.arange(4), 2)
    assert found == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("target_ids", [None, torch.tensor([3, 90, 41, 7, 8])])
def test_the_draft_ranks_with_the_targets_noise(target_ids: torch.Tensor | None) -> None:
    """Two rows for each request; the noise is that of the target token behind the position that the draft is told."""
    size = VOCABULARY if target_ids is None else len(target_ids)
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(4))
    noise = DraftNoise("cpu", rows=8)
    noise.fill(info_of([0.7, 0.0, 1.0]))
    positions, rows = torch.tensor([8, 9, 3, 4, 29, 30]), torch.arange(3).repeat_interleave(2)
    scores = logits.clone()
    noise.perturb(scores, positions, 3, target_ids)
    scaled = logits / torch.tensor([0.7, 1.0, 1.0])[rows][:, None]
    shared = gumbel(SEEDS[rows], positions + 1, VOCABULARY if target_ids is None else target_ids)
    torch.testing.assert_close(scores, scaled + (shared * ~GREEDY[rows][:, None]).float())


def test_rows_beyond_the_batch_are_left_alone() -> None:
    noise = DraftNoise("cpu", rows=8)
    noise.fill(info_of([1.0, 1.0, 1.0]))
    noise.fill(info_of([1.0]))
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(5))
    scores = logits.clone()
    noise.perturb(scores, torch.arange(3), 3, None)
    assert torch.equal(scores[1:], logits[1:]) and not torch.equal(scores[0], logits[0])


def test_the_last_position_of_each_extended_request() -> None:
    positions = torch.tensor([0, 1, 2, 0, 5, 6])
    assert last_positions(positions, 3, torch.tensor([3, 1, 2])).tolist() == [2, 0, 6]
    assert last_positions(positions, 6, torch.tensor([3, 1, 2])) is positions
    assert last_positions(positions, 6, None) is positions


def test_seeds_are_kept_and_made_from_ids_where_there_are_none() -> None:
    def batch(*seeds: int | None) -> Any:
        requests = [SimpleNamespace(rid=f"r{i}", sampling_params=SimpleNamespace(sampling_seed=seed)) for i, seed in
                    enumerate(seeds)]  # fmt: skip
        return SimpleNamespace(reqs=requests, device="cpu")

    def original(cls: type, batch: Any, size: int) -> Any:
        return SimpleNamespace(sampling_seed=None)

    first, again = (keep_seeds(original, object, batch(7, None, 2**62), 10).sampling_seed for _ in range(2))
    assert first.tolist() == again.tolist() and first[[0, 2]].tolist() == [7, 2**62]
    assert first[1] != keep_seeds(original, object, batch(None), 10).sampling_seed[0]


def worker_of(model: type) -> Any:
    return SimpleNamespace(draft_runner=SimpleNamespace(model=model()))


class LlamaForCausalLMEagle3:
    """Named like SGLang's model."""


def test_another_kind_of_draft_is_refused() -> None:
    with pytest.raises(RunError, match="A draft of class SimpleNamespace does not get the shared noise"):
        plugin.DraftHooks().set_requests(worker_of(SimpleNamespace), None)


def test_the_drafts_hooks_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as SGLang calls them: the model with one argument by name."""
    monkeypatch.setattr(DraftChoice, "current", None)
    hooks, info = plugin.DraftHooks(), info_of([1.0, 1.0])
    hooks.set_requests(worker_of(LlamaForCausalLMEagle3), SimpleNamespace(sampling_info=info, reqs=[1, 2]), "result")
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(6))
    buffer = logits.clone()
    result = SimpleNamespace(next_token_logits=buffer)
    batch = SimpleNamespace(batch_size=2, extend_seq_lens=torch.tensor([2, 1]))
    model = SimpleNamespace(hot_token_id=None)
    hooks.perturb(result, model, None, torch.tensor([4, 5, 9]), batch, pp_proxy_tensors=None)
    assert result.next_token_logits is buffer, "graphs share it"
    shared = gumbel(SEEDS[:2], torch.tensor([6, 10]), VOCABULARY).float()
    torch.testing.assert_close(result.next_token_logits, logits + shared)
    idle = SimpleNamespace(next_token_logits=None)
    assert hooks.perturb(idle, model, None, torch.zeros(0), batch, pp_proxy_tensors=None) is idle


def test_scores_of_trees_reach_the_choice(tmp_path: Path) -> None:
    """As SGLang calls the hooks; all ranks get those of the first."""
    write_config(tmp_path / "drafting.json", DraftShapes((0, 3), 2, branches=2), collapse_ratio=0.5)
    choice, sent = DraftChoice(str(tmp_path / "drafting.json")), list[int]()

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        sent.append(src)
        if tensor.is_floating_point():
            tensor.fill_(0.25)

    ranks = SimpleNamespace(world_size=2, broadcast=broadcast)
    worker = SimpleNamespace(topk=2, draft_runner=SimpleNamespace(tp_group=ranks))
    hooks = plugin.DraftHooks()
    hooks.keep_scores("tree", [torch.tensor([[[0.6, 0.3]]]), torch.tensor([[[0.5, 0.05], [0.2, 0.1]]])], [], [], 4)
    assert choice.begin(1) == 3
    hooks.hand_scores("input", worker, SimpleNamespace(reqs=["one"]))
    nodes = choice._under_way[-1].nodes
    assert nodes is not None and sent == [0, 0]
    survival, depths = nodes.read()
    assert survival.tolist() == [[0.25] * 3] and depths.tolist() == [[1, 2, 1]]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    """Of a SGLang that is told to load the plug-in."""
    module, found = ModuleType("hook_registry"), FakeRegistry(unknown=seams.VERIFY.target)
    module.HookRegistry, module.HookType = found, FakeKind  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    monkeypatch.setenv("SGLANG_PLUGINS", "another,rlhfspec_mega")
    return found


FINE = SimpleNamespace(**plugin.BYPASSES, speculative_adaptive_config=None)


def start(registry: FakeRegistry, arguments: Any) -> list[Any]:
    """Start a scheduler as SGLang does, arguments by name among them."""
    started: list[Any] = []
    check = registry.hooks[seams.SCHEDULER.target]
    scheduler = SimpleNamespace()
    check(lambda *given, **named: started.append((*given[1:], named)), scheduler, arguments, "port", gpu_id=0)
    assert hasattr(scheduler, METHOD)
    return started


def test_a_scheduler_without_all_hooks_does_not_start(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "missing", lambda device: None)
    plugin.install()
    with pytest.raises(RunError, match=r"has not applied the hooks of .*eagle_sample"):
        start(registry, FINE)
    registry._patched.add(seams.VERIFY.target)
    assert start(registry, FINE) == [(FINE, "port", {"gpu_id": 0})]


@pytest.mark.parametrize("name", plugin.BYPASSES)
def test_a_setting_that_goes_around_the_hooks_is_refused(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(pins, "missing", lambda device: None)
    plugin.install()
    with pytest.raises(UserError, match=f"{name}=on samples past the plug-in"):
        start(registry, SimpleNamespace(**(plugin.BYPASSES | {name: "on"})))


@pytest.mark.parametrize(("adaptive", "tokens"), [(False, 9), (True, 6)])
def test_arguments_that_were_resolved_without_the_hooks_are_refused(
    adaptive: bool, tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nine are what the file asks for."""
    monkeypatch.setattr(pins, "missing", lambda device: None)
    write_config(tmp_path / "drafting.json", DraftShapes((0, 8), 5, branches=4), collapse_ratio=0.5)
    given = {
        "speculative_adaptive_config": str(tmp_path / "drafting.json"),
        "speculative_adaptive": adaptive,
        "speculative_num_draft_tokens": tokens,
    }
    with pytest.raises(RunError, match=f"starts with {tokens} draft tokens, adaptive={adaptive}"):
        plugin.check_server_args(SimpleNamespace(**plugin.BYPASSES, **given), [])
    plugin.check_server_args(
        SimpleNamespace(
            **plugin.BYPASSES, **(given | {"speculative_adaptive": True, "speculative_num_draft_tokens": 9})
        ),
        [],
    )


@pytest.mark.parametrize("applied", [True, False])
def test_hooks_are_applied_in_a_process_that_has_loaded_its_plugins_before(
    applied: bool, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "missing", lambda device: None)
    sys.modules["sglang.srt.plugins"].load_plugins = lambda: None  # type: ignore[attr-defined]
    registry.unknown = seams.VERIFY.target if applied else seams.FIRST_STATE.target
    if not applied:
        with pytest.raises(RunError, match=r"has not applied the hooks of .*_init_adaptive_speculative_params"):
            plugin.apply_here()
        return
    plugin.apply_here()
    assert {seams.UNSUPPORTED.target, seams.FIRST_STATE.target, seams.WIDTHS.target} <= registry._patched


def test_a_scheduler_of_another_version_does_not_start(registry: FakeRegistry) -> None:
    """Not even though SGLang passes over what a plug-in raises; of the hooks only this check is there."""
    plugin.install()
    assert list(registry.hooks) == [seams.SCHEDULER.target]
    with pytest.raises(UserError, match="sglang is not installed"):
        start(registry, FINE)


def test_it_does_nothing_where_it_is_not_named(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    for others in ("", "another"):
        monkeypatch.setenv("SGLANG_PLUGINS", others)
        plugin.install()
    assert registry.hooks == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_goes_past_a_kernel_that_does_not_know_it(dtype: torch.dtype) -> None:
    norm = SimpleNamespace(forward_native=lambda x, residual, addition: ("native", residual, addition))
    found = plugin.normalize(lambda norm, x, *rest: ("kernel", *rest), norm, torch.ones(1, 2, dtype=dtype), 1, 2)
    assert found == ("native" if dtype == torch.float32 else "kernel", 1, 2)
