"""SGLang on a GPU: the torch engine's tokens whatever is drafted, moved or updated. Not run yet.

Model and draft are made on the spot, or taken from the cache: acceptance is real.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.gpu_generation import pair
from benchmarks.samples import load_target, plain_engine, word_prompts
from benchmarks.sglang_engines import PORTABLE, finish, ours, send, settings, started
from rlhfspec_mega.config.schema import DraftingConfig, RolloutConfig, SGLangConfig
from rlhfspec_mega.models.draft_directory import draft_tensors, load_target_ids, read_draft_shape, write_draft
from rlhfspec_mega.models.hf_directory import read_shape
from rlhfspec_mega.rollout.migration.messages import MigrationOrder, Orders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.sglang_engine import pins
from rlhfspec_mega.rollout.sglang_engine.choice import FREE
from rlhfspec_mega.rollout.sglang_engine.control import DraftingControl
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.shapes import trees
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Landing, WeightTarget
from rlhfspec_mega.workers.sglang import SGLangEngineWorker
from tests.e2e.conftest import SHAPE, make_model, small_run, train
from tests.near_tie import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or pins.missing() is not None, reason="needs CUDA and SGLang"),
]
LONGEST = 96
FP32 = {"dtype": "float32", "max_positions": 300}


@pytest.fixture(scope="module")
def made() -> tuple[Path, Path]:
    """A model and its draft."""
    return pair("tiny")


@pytest.fixture(scope="module")
def engines(
    made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SGLangEngine, SGLangEngine, DraftingControl]:
    """One that decodes plainly, and one that drafts."""
    root = tmp_path_factory.mktemp("sglang")
    plain, _ = ours(settings(made[0], None, **FP32), root / "plain")
    drafting, control = ours(settings(*made, **FP32), root / "drafting")
    assert control is not None
    return plain, drafting, control


@pytest.fixture(scope="module")
def branching(
    made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SGLangEngine, DraftingControl]:
    """One that drafts trees."""
    chosen = settings(*made, **FP32, shapes=trees(16, 5, 4))
    engine, control = ours(chosen, tmp_path_factory.mktemp("trees") / "engine")
    assert control is not None
    return engine, control


@pytest.fixture(scope="module")
def requests(made: tuple[Path, Path]) -> list[GenerationRequest]:
    """Greedy and sampled ones, side by side in every batch."""
    tokenizer = load_target(made[0]).tokenizer
    return [
        GenerationRequest(
            f"{group}.{member}",
            f"{group}",
            prompt[-120:],
            sample_seed(5, 0, group, member),
            LONGEST,
            temperature=(0.0, 1.0, 1.0, 0.7)[member],
            stop_tokens=(tokenizer.eos_token_id,),
        )
        for group, prompt in enumerate(word_prompts(24, tokenizer, "eval"))
        for member in range(4)
    ]


@pytest.fixture(scope="module")
def judge(made: tuple[Path, Path]) -> Callable[[list[int]], torch.Tensor]:
    net = transformers.AutoModelForCausalLM.from_pretrained(made[0], dtype=torch.float64)

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return net(input_ids=torch.tensor([tokens])).logits[0, -1]

    return logits


@pytest.fixture(scope="module")
def wanted(made: tuple[Path, Path], requests: list[GenerationRequest]) -> dict[str, GenerationResult]:
    """The torch engine's, on the CPU."""
    return finish(plain_engine(load_target(made[0]), slots=32, positions=300), requests)


@pytest.mark.parametrize("drafted", ["off", "adaptive", 0, 1, 3, 8])
def test_identity(
    drafted: str | int,
    engines: tuple[SGLangEngine, SGLangEngine, DraftingControl],
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Callable[[list[int]], torch.Tensor],
) -> None:
    """Off, adaptive and every forced number of draft tokens give the torch engine's tokens and log-probs."""
    plain, drafting, control = engines
    if drafted != "off":
        control.force(FREE if drafted == "adaptive" else int(drafted))
    found = finish(plain if drafted == "off" else drafting, requests)
    assert_same(wanted, found, requests, judge)
    if drafted == 3:
        tally = control.take_tally()
        assert tally.accepted > 0.3 * tally.sample_steps, "the draft does not share the noise"


@pytest.mark.parametrize("drafted", ["adaptive", 0, 2, 5, 16])
def test_identity_of_trees(
    drafted: str | int,
    branching: tuple[SGLangEngine, DraftingControl],
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Callable[[list[int]], torch.Tensor],
) -> None:
    """Trees of every size give the torch engine's tokens; larger ones have more of their nodes accepted."""
    engine, control = branching
    control.take_tally()
    control.force(FREE if drafted == "adaptive" else int(drafted))
    assert_same(wanted, finish(engine, requests), requests, judge)
    if drafted == 16:
        of_trees = acceptance(control)
        control.force(5)
        finish(engine, requests)
        assert of_trees > acceptance(control) > 0.3, "the likeliest nodes are not the ones that are taken"


def test_chi_square(tmp_path: Path) -> None:
    """Sampled frequencies of first and second tokens equal the model's probabilities."""
    count, shape = 20_000, replace(SHAPE, hidden_size=128, head_dim=32, max_positions=512)
    model, prompt = make_model(tmp_path / "model", shape), (7, 30, 11)
    asked = [GenerationRequest(str(i), str(i), prompt, sample_seed(9, 0, i, 0), 2) for i in range(count)]
    engine, _ = ours(settings(model, None, **FP32), tmp_path / "engine")
    found = finish(engine, asked)
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    firsts = Counter(found[one.sample_id].tokens[0] for one in asked)
    top = firsts.most_common(1)[0][0]
    seconds = Counter(found[one.sample_id].tokens[1] for one in asked if found[one.sample_id].tokens[0] == top)
    for tokens, counts in ((prompt, firsts), ((*prompt, top), seconds)):
        with torch.no_grad():
            chances = net(input_ids=torch.tensor([tokens])).logits[0, -1].softmax(dim=-1)
        assert chi_square_tail(counts, chances) > 1e-4


def chi_square_tail(counts: Counter[int], chances: torch.Tensor) -> float:
    """Chance of frequencies at least as far off; rare tokens are one class."""
    total = sum(counts.values())
    expected = chances * total
    often = expected >= 5
    seen = torch.tensor([counts[token] for token in range(len(chances))], dtype=torch.float64)
    observed = torch.cat((seen[often], seen[~often].sum()[None]))
    wanted = torch.cat((expected[often], expected[~often].sum()[None])).clamp_min(1e-9)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2.0), statistic.float() / 2.0))


def worker(made: tuple[Path, Path], drafts: bool = True) -> SGLangEngineWorker:
    config = RolloutConfig(
        engine="sglang",
        slots=32,
        max_prompt_tokens=150,
        max_new_tokens=150,
        prefill_chunk=8192,
        sglang=SGLangConfig(options=PORTABLE),
    )
    shape, draft = read_shape(made[0]), made[1] if drafts else None
    return SGLangEngineWorker(shape, config, "float32", made[0], 0.1, True, draft, DraftingConfig())


@pytest.fixture(scope="module")
def workers(made: tuple[Path, Path]) -> list[SGLangEngineWorker]:
    """Two on one GPU."""
    both = [worker(made), worker(made)]
    for one in both:
        started(lambda one=one: one._engine)  # type: ignore[misc]
        send(one, made[0], 0)
    return both


def test_migration(
    workers: list[SGLangEngineWorker],
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Callable[[list[int]], torch.Tensor],
) -> None:
    """Samples go to and fro while they decode, and end with the tokens of those that stay."""
    meetings = [one.meet(1.0) for one in workers]
    given: list[Sequence[SampleSnapshot]] = [[SampleSnapshot(one, [], [], []) for one in requests], []]
    found: dict[str, GenerationResult] = {}
    landings, turn = list[Landing](), 0
    while len(found) < len(requests):
        for rank, one in enumerate(workers):
            orders = Orders(expects=True)
            if turn % 2 == rank:
                orders.moves = [MigrationOrder(name, meetings[1 - rank].address) for name in list(one._held)[:8]]
            report = one.advance(given[rank], 0.05, orders)
            found |= {result.sample_id: result for result in report.finished}
            landings += report.migration.landings
        given, turn = [[], []], turn + 1
    assert_same(wanted, found, requests, judge)
    copied = [one for one in landings if one.settled_bytes > 0]
    assert len(copied) > 0.5 * len(landings) > 0
    resumed, spared = (sum(one.stats()[name] for one in workers) for name in ("resumed_tokens", "spared_tokens"))
    assert spared > 0.7 * resumed, "copied KV is not found"
    steps = workers[0]._profile.table.of(len(requests) // 2)[0]
    downtimes = sorted((one.arrived - one.departed) / steps for one in copied)
    print(json.dumps({"migrations": len(landings), "downtime_steps_median": downtimes[len(downtimes) // 2]}))
    for one in workers:
        one.leave()


def test_weights(
    made: tuple[Path, Path],
    engines: tuple[SGLangEngine, SGLangEngine, DraftingControl],
    requests: list[GenerationRequest],
    tmp_path: Path,
) -> None:
    """An update of the target changes its tokens and back; one of the draft changes acceptance alone, and back."""
    _, drafting, control = engines
    other, shape = tmp_path / "other", read_shape(made[0])
    make_model(other, shape)
    control.force(3)
    before = tokens_of(finish(drafting, requests))
    usual = acceptance(control)
    send(drafting, other, 1)
    assert tokens_of(finish(drafting, requests)) != before
    send(drafting, made[0], 2)
    assert tokens_of(finish(drafting, requests)) == before
    control.take_tally()
    of_draft = read_draft_shape(made[1], shape)
    random = {info.name: 0.02 * torch.randn(info.shape) for info in draft_tensors(of_draft)}
    write_draft(tmp_path / "draft", of_draft, random, load_target_ids(made[1], of_draft))
    send(drafting, tmp_path / "draft", 1, WeightTarget.DRAFT)
    assert tokens_of(finish(drafting, requests)) == before
    assert acceptance(control) < 0.5 * usual
    send(drafting, made[1], 2, WeightTarget.DRAFT)
    assert tokens_of(finish(drafting, requests)) == before
    assert acceptance(control) == pytest.approx(usual, rel=0.05)
    control.force(FREE)


def acceptance(control: DraftingControl) -> float:
    tally = control.take_tally()
    return tally.accepted / max(tally.sample_steps, 1)


def tokens_of(found: dict[str, GenerationResult]) -> dict[str, list[int]]:
    return {name: result.tokens for name, result in found.items()}


def test_sleep(made: tuple[Path, Path], workers: list[SGLangEngineWorker], requests: list[GenerationRequest]) -> None:
    """Memory comes back and goes again; tokens and acceptance outlive it, as the draft does."""
    one = workers[0]
    before = tokens_of(finish(one, requests))
    tally = one.take_tally()
    free = torch.cuda.mem_get_info()[0]
    one.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    assert asleep - free > 0.05 * torch.cuda.mem_get_info()[1]
    send(one, made[0], 1)
    assert tokens_of(finish(one, requests)) == before
    again = one.take_tally()
    assert tally is not None and again is not None
    assert again.accepted / again.sample_steps == pytest.approx(tally.accepted / tally.sample_steps, rel=0.2)


def test_train(made: tuple[Path, Path], tmp_path: Path) -> None:
    """train.py rollout=sglang: actor and engine on one GPU, every phase of two steps, the draft's refresh included."""
    options = [f"+rollout.sglang.options.{name}={value}" for name, value in PORTABLE.items()]
    run = small_run(
        made[0],
        tmp_path,
        "sglang",
        "rollout=sglang",
        "cluster=1n1g",
        "actor.tensor_parallel=1",
        "rollout.max_prompt_tokens=40",
        "rollout.max_new_tokens=24",
        "trainer.steps=2",
        f"drafting.path={made[1]}",
        "drafting.refresh_every=1",
        *options,
    )
    result = train(*run)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in (tmp_path / "sglang" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["logprob_difference_max"] < 1e-3 for row in rows if "logprob_difference_max" in row)
