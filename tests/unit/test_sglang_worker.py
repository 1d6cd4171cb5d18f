"""The worker around SGLang's engine, over the stand-in: start, profile, drafting, weights, migration, sleep."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec_mega.config.schema import DraftingConfig, RolloutConfig, SGLangConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.draft_directory import draft_tensors, write_draft
from rlhfspec_mega.models.draft_shape import draft_shape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.throughput import seconds_per_token
from rlhfspec_mega.rollout.migration.messages import MigrationOrder, Orders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.sglang_engine.kv import KvAccess, gather, pools
from rlhfspec_mega.rollout.sglang_engine.profile import batches_up_to
from rlhfspec_mega.rollout.sglang_engine.seams import OPTIONS
from rlhfspec_mega.types import EngineReport, GenerationRequest, WeightTarget
from rlhfspec_mega.workers.sglang import SGLangEngineWorker
from tests.e2e.conftest import make_model
from tests.sglang_fake import LAYERS, SIZE, SLOTS, FakeEngine, FakeScheduler, install
from tests.unit.test_sglang_engine import load, request, wanted

SHAPE = ModelShape(
    architecture="llama",
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=8,
    vocab_size=23,
    max_positions=128,
    rope_theta=1e4,
    norm_eps=1e-5,
    tie_embeddings=True,
)
LIMITS = {"slots": 4, "max_prompt_tokens": 8, "max_new_tokens": 50}


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def make(tmp_path: Path, policy: str = "off", **options: Any) -> SGLangEngineWorker:
    make_model(tmp_path / "model", SHAPE)
    branching = SGLangConfig(options=options, trees=policy == "trees")
    config = RolloutConfig(engine="sglang", sglang=branching, **LIMITS)  # type: ignore[arg-type]
    draft = None if policy == "off" else tmp_path / "draft"
    if draft and not draft.exists():
        of_draft = draft_shape(SHAPE)
        write_draft(draft, of_draft, {info.name: torch.zeros(info.shape) for info in draft_tensors(of_draft)})
    policy = "adaptive" if policy == "trees" else policy
    drafting = DraftingConfig(policy=policy, max_depth=3, depth=2, max_tokens=8, width=2)
    return SGLangEngineWorker(
        SHAPE, config, "float32", tmp_path / "model", None, True, "cpu", draft=draft, drafting=drafting
    )


def fake(worker: SGLangEngineWorker) -> FakeEngine:
    engine = worker._engine
    assert isinstance(engine, FakeEngine)
    return engine


def finish(worker: SGLangEngineWorker, count: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while len(found) < count:
        found |= {result.sample_id: result.tokens for result in worker.advance([], 0.01).finished}
    return found


def snapshots(count: int) -> list[SampleSnapshot]:
    return [SampleSnapshot(request(number), [], [], []) for number in range(count)]


@pytest.mark.parametrize("policy", ["off", "fixed", "adaptive", "trees"])
def test_it_starts_measures_and_decodes(policy: str, tmp_path: Path) -> None:
    worker = make(tmp_path, policy, attention_backend="triton")
    started = fake(worker).arguments
    assert (
        started["attention_backend"] == "triton"
        and started["context_length"] > 58
        and started["load_format"] == "dummy"
    )
    table = worker._profile.table
    assert table.counts == {"off": (0,), "fixed": (0, 2), "adaptive": (0, 1, 2, 3), "trees": (0, 1, 2, 3, 5, 8)}[policy]
    assert table.batches == batches_up_to(4) == (1, 2, 4)
    assert all(0.0005 < seconds < 0.2 for row in table.seconds for seconds in row), "an output takes a millisecond"
    load(worker, 0)
    worker.advance(snapshots(6), 0.0)
    assert finish(worker, 6) == {f"s{number}": wanted(request(number)) for number in range(6)}
    tally = worker.take_tally()
    if policy == "off":
        assert tally is None and "speculative_algorithm" not in started
    else:
        assert tally is not None and 0 < tally.accepted <= tally.verified
        assert worker.take_tally() != tally, "every figure counts once"
    assert (seconds_per_token(worker.pace(1.0), torch.arange(1, 9).numpy()) > 0).all()


@pytest.mark.parametrize("policy", ["off", "fixed", "adaptive", "trees"])
def test_a_sample_as_long_as_is_allowed(policy: str, tmp_path: Path) -> None:
    """SGLang keeps positions for drafting to itself."""
    worker = make(tmp_path, policy)
    load(worker, 0)
    longest = GenerationRequest("long", "long", tuple(range(1, 9)), 3, LIMITS["max_new_tokens"])
    worker.advance([SampleSnapshot(longest, [], [], [])], 0.0)
    assert len(finish(worker, 1)["long"]) == LIMITS["max_new_tokens"]


def test_what_was_accepted_makes_it_quicker(tmp_path: Path) -> None:
    worker = make(tmp_path, "fixed")
    before = worker.pace(1.0)
    load(worker, 0)
    load(worker, 1, WeightTarget.DRAFT)
    worker.advance(snapshots(4), 0.0)
    finish(worker, 4)
    worker.take_tally()
    assert all(now < then for now, then in zip(worker.pace(1.0).seconds, before.seconds, strict=True))


def test_an_option_that_sglang_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.sglang\.options has nonsense, which sglang"):
        make(tmp_path, nonsense=1)


@pytest.mark.parametrize("policy", ["off", "adaptive"])
@pytest.mark.parametrize("copies", [True, False])
def test_samples_move_while_they_decode(copies: bool, policy: str, tmp_path: Path) -> None:
    """To and fro; every sample comes back once with its own tokens, and what was copied is not prefilled."""
    workers = [make(tmp_path, policy), make(tmp_path, policy)]
    for worker in workers:
        fake(worker)._pace = 1
        load(worker, 0)
        if not copies:
            worker._kv = None
    meetings = [worker.meet(1.0) for worker in workers]
    assert all(0 < meeting.copy_seconds < meeting.prefill_seconds for meeting in meetings)
    assert [meeting.prefill_seconds for meeting in meetings] == pytest.approx([1e-5] * 2), "what SGLang says itself"
    assert {meeting.kv_tokens for meeting in meetings} == {4 * 58}
    requests = [replace(request(n), stop_tokens=(), group_id=str(n % 3)) for n in range(12)]  # by prompt
    samples = [SampleSnapshot(one, [], [], []) for one in requests]
    reports: list[EngineReport] = [workers[0].advance(samples, 0.0, Orders())]
    before = sum(fake(worker).scheduler.prefilled for worker in workers)
    for turn in range(2000):
        source = turn // 3 % 2
        moving = [name for name in workers[source]._held if turn % 3 == 0][:3]
        for rank, worker in enumerate(workers):
            orders = Orders(expects=True)
            if rank == source:
                orders.moves = [MigrationOrder(name, meetings[1 - source].address) for name in moving]
            reports.append(worker.advance([], 0.004, orders))
        finished = [result for report in reports for result in report.finished]
        if len(finished) == 12:
            break
    assert sorted((result.sample_id, result.tokens) for result in finished) == sorted(
        (one.sample_id, wanted(one)) for one in requests
    )
    arrived = [sample for report in reports for sample in report.migration.arrived]
    landings = [landing for report in reports for landing in report.migration.landings]
    assert len(arrived) >= 4 and landings
    resumed, spared = (sum(worker.stats()[name] for worker in workers) for name in ("resumed_tokens", "spared_tokens"))
    prefilled = sum(fake(worker).scheduler.prefilled for worker in workers) - before
    assert prefilled == resumed - spared > 0
    if copies:
        assert any(landing.settled_bytes > 0 for landing in landings)
        assert spared > 0.5 * resumed
    else:
        assert all(landing.settled_bytes == 0 for landing in landings)
    for worker in workers:
        worker.clear()
        worker.leave()
        assert not fake(worker).scheduler.running_batch.reqs


@pytest.mark.parametrize("drafts", [False, True])
def test_kv_goes_from_engine_to_engine_whatever_their_ranks(drafts: bool, tmp_path: Path) -> None:
    """From two ranks with a head each to one with both, and back."""
    two, one = [FakeScheduler(rank, drafts) for rank in range(2)], [FakeScheduler(0, drafts, heads=2)]
    parts = {"target": (LAYERS, 2, SIZE)} | ({"draft": (1, 2, SIZE)} if drafts else {})
    tokens, access = list(range(40, 60)), []
    for number, schedulers in enumerate((two, one)):
        (tmp_path / str(number)).mkdir()
        engine = SimpleNamespace(collective_rpc=partial(_on_all, schedulers))
        access.append(KvAccess(engine, tmp_path / str(number), parts, "float32", len(schedulers)))
    requests = [scheduler.begin("s/1/", tokens) for scheduler in two]
    whole = {part: access[0].read("s/1/", part, 0, 18) for part in parts}
    assert all(
        tensor.shape[:4] == (shape[0], 2, 2, 18) for tensor, shape in zip(whole.values(), parts.values(), strict=True)
    )
    assert access[0].read("s/2/", "target", 0, 18).shape[3] == 0
    assert access[0].read("s/1/", "target", 18, 30).shape[3] == 2, "no more than is committed"
    access[1].write(tokens, whole)
    access[1].write(tokens, whole)
    slots = one[0].tree_cache.match(tokens)
    assert len(slots) == 18 and one[0].token_to_kv_pool_allocator.available_size() == SLOTS - 18
    for part, pool in pools(one[0]).items():
        kept = torch.stack(
            [torch.stack((k[slots], v[slots])) for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]
        )
        assert torch.equal(kept.transpose(2, 3), whole[part])
    for scheduler, decoding in zip(two, requests, strict=True):
        scheduler.end(decoding)
    access[0].write(tokens[:3], {part: tensor[:, :, :, :2] for part, tensor in whole.items()})
    for scheduler in two:
        assert len(scheduler.tree_cache.match(tokens)) == 2
        scheduler.begin("s/3/", tokens)
    assert not list((tmp_path / "0").iterdir()), "files in memory last no longer than their use"


def test_kv_takes_the_place_of_what_is_used_no_more(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    access = KvAccess(
        SimpleNamespace(collective_rpc=partial(_on_all, [scheduler])),
        tmp_path,
        {"target": (LAYERS, 1, SIZE)},
        "float32",
        1,
    )
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    ended = scheduler.begin("s/1/", list(range(20)))
    kv = {"target": access.read("s/1/", "target", 0, 20)}
    access.write(list(range(20)), kv)
    scheduler.end(ended)
    others = allocator.alloc(allocator.available_size())
    assert others is not None and len(others) == SLOTS - 20
    access.write(list(range(21)), {"target": kv["target"][:, :, :, :15]})
    assert len(tree.match(range(20))) == 15
    scheduler.begin("s/2/", list(range(16)))
    tree.known.clear()
    access.write(list(range(20)), kv)
    assert not tree.known, "all is in use: it is prefilled"


def _on_all(schedulers: list[FakeScheduler], method: str, **parameters: Any) -> None:
    for scheduler in schedulers:
        getattr(scheduler, method)(**parameters)


def test_it_sleeps_and_is_woken_by_weights(tmp_path: Path) -> None:
    """Also where the first sample afterwards comes with KV."""
    worker = make(tmp_path)
    load(worker, 0)
    worker.import_sample(snapshots(1)[0])
    worker.sleep()
    assert fake(worker).tokenizer_manager.asleep and worker.idle
    padding = fake(worker).scheduler.req_to_token_pool.req_to_token[0]
    padding.fill_(7)  # memory that was given back comes back with anything in it
    load(worker, 1)
    layers, _, heads, _, size = worker.kv_layout(1).parts["target"]
    known = [*request(0).prompt_tokens, *wanted(request(0))][:6]
    scheduler = FakeScheduler()
    scheduler.begin("x", known)
    kv = gather(scheduler, "target", "x", 0, 5)
    assert kv.shape == (layers, 2, heads, 5, size)
    tokens = wanted(request(0))[: 6 - len(request(0).prompt_tokens)]
    worker.import_sample(SampleSnapshot(request(0), tokens, [-0.01 * t for t in tokens], [0] * len(tokens), kv))
    assert not padding.any()
    worker.advance([snapshots(2)[1]], 0.0)
    assert len(finish(worker, 2)) == 2
    assert worker.stats()["spared_tokens"] == 5


def test_the_table_and_the_tally_are_files_of_its_own(tmp_path: Path) -> None:
    one, other = make(tmp_path, "adaptive"), make(tmp_path, "adaptive")
    first, second = Path(one._kv._directory), Path(other._files.name)
    assert first != second
    assert json.loads((first / "table.json").read_text())["counts"] == [0, 1, 2, 3]
    assert str(first) in fake(one).arguments["speculative_adaptive_config"]
