"""Real SGLang, on a CPU with stand-ins for its kernels, or on a GPU: make test-sglang and tools/gpu_check.sh run it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhfspec_mega.rollout.sglang_engine import cpu_kernels

# Before anything imports transformers or SGLang.
import torch  # isort: skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    cpu_kernels.prepare()

import pytest  # noqa: E402
import transformers  # noqa: E402

import rlhfspec_mega.workers.sglang_engine as sglang_worker  # noqa: E402
from benchmarks.gpu_generation import pair  # noqa: E402
from benchmarks.samples import load_target, plain_engine, word_prompts  # noqa: E402
from benchmarks.sglang_engines import end, finish  # noqa: E402
from rlhfspec_mega.rollout.sglang_engine import launch  # noqa: E402
from rlhfspec_mega.sampling.noise import sample_seed  # noqa: E402
from rlhfspec_mega.types import GenerationRequest, GenerationResult  # noqa: E402
from tests.sglang.forked import fork_processes  # noqa: E402

torch.set_num_threads(1)
SECONDS = 900  # of a test: several engines start in it, on a GPU each for minutes
TEMPERATURES = (0.0, 1.0, 1.0, 0.7)  # of a group's members: greedy and sampled ones side by side in every batch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session", autouse=True)
def alive(pytestconfig: pytest.Config) -> Iterator[list[Any]]:
    """Every engine that was started in this process and not ended: each takes 1.5 GB and, idle, a share of a core.

    A process of SGLang that crashes ends this one: what was captured is said before.
    """
    found: list[Any] = []
    start, end_process = launch.start, launch._end
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def noted(*given: Any) -> Any:
        found.append(start(*given))
        return found[-1]

    def told(*given: Any) -> None:
        capture.suspend_global_capture(in_=True)
        print(*capture.read_global_capture(), sep="\n", file=sys.stderr, flush=True)
        end_process(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_end", told)
        if DEVICE == "cpu":
            launch.load_few_models()
            fork_processes(patch)
        for module in (launch, sglang_worker):
            patch.setattr(module, "start", noted)
        yield found


def _end_all_but(alive: list[Any], count: int) -> None:
    while len(alive) > count:
        end(alive.pop())


@pytest.fixture(scope="module", autouse=True)
def end_engines_of_the_module(alive: list[Any]) -> Iterator[None]:
    before = len(alive)
    yield
    _end_all_but(alive, before)


@pytest.fixture(autouse=True)
def end_engines_of_the_test(alive: list[Any], end_engines_of_the_module: None) -> Iterator[None]:
    """Those that fixtures of the module have started were there before."""
    before = len(alive)
    yield
    _end_all_but(alive, before)


@pytest.fixture(scope="session")
def made() -> tuple[Path, Path]:
    """A trained model and its draft: acceptance is real."""
    return pair("tiny")


def requests_of(model: Path, groups: int, longest: int = 96) -> list[GenerationRequest]:
    """Four members a group."""
    tokenizer = load_target(model).tokenizer
    return [
        GenerationRequest(
            f"{group}.{member}",
            f"{group}",
            prompt[-120:],
            sample_seed(5, 0, group, member),
            longest,
            temperature=temperature,
            stop_tokens=(tokenizer.eos_token_id,),
        )
        for group, prompt in enumerate(word_prompts(groups, tokenizer, "eval"))
        for member, temperature in enumerate(TEMPERATURES)
    ]


@pytest.fixture(scope="session")
def requests(made: tuple[Path, Path]) -> list[GenerationRequest]:
    return requests_of(made[0], 24)


def torch_results(model: Path, requests: list[GenerationRequest]) -> dict[str, GenerationResult]:
    """The torch engine's, decoding plainly on the CPU."""
    return finish(plain_engine(load_target(model), slots=32, positions=300), requests)


@pytest.fixture(scope="session")
def wanted(made: tuple[Path, Path], requests: list[GenerationRequest]) -> dict[str, GenerationResult]:
    return torch_results(made[0], requests)


def judge_of(model: Path) -> Callable[[list[int]], torch.Tensor]:
    """Logits in float64, by transformers."""
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return net(input_ids=torch.tensor([tokens])).logits[0, -1]

    return logits


@pytest.fixture(scope="session")
def judge(made: tuple[Path, Path]) -> Callable[[list[int]], torch.Tensor]:
    return judge_of(made[0])
