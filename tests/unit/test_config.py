"""Configuration: what composes, and that everything else ends in one sentence that names a way out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlhfspec_mega.config.advice import with_advice
from rlhfspec_mega.config.checks import check_config
from rlhfspec_mega.config.compose import NoPresetError, load_config, sweep_jobs
from rlhfspec_mega.config.hardware import cpu_has_fast_bf16
from rlhfspec_mega.config.machine import PROCESS_BYTES
from rlhfspec_mega.config.model_shape import BYTE_VOCABULARY
from rlhfspec_mega.config.names import group_options
from rlhfspec_mega.config.notes import notes
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError
from tests.e2e.conftest import SHAPE, make_model

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [(group, name) for group, names in group_options().items() for name in names]
# Options that need something this test does not have: GPUs, several nodes, weights, files, packages, a function.
NEED_MORE = {
    "model=8b",
    "model=32b",
    "model=70b",
    "cluster=4n8g",
    "cluster=8n8g",
    "cluster/gpu=h100",
    "cluster/gpu=h200",
    "rollout=sglang",
    "placement=separate",
    "reward=custom",
    "data=files",
    "data=gsm8k",
    "experiment=gsm8k",
    "experiment=ppo",
}


def load(*overrides: str) -> RunConfig:
    return load_config(["cluster.device=cpu", *overrides])


def refusal(*overrides: str) -> str:
    """The sentence that a configuration ends in; fails the test if it is accepted."""
    with pytest.raises(UserError) as caught:
        check_config(load(*overrides))
    error = caught.value
    sentence = str(with_advice(error) if isinstance(error, NoPresetError) else error)
    assert "\n" not in sentence and sentence.endswith("."), sentence
    return sentence


@pytest.fixture
def out(tmp_path: Path) -> str:
    return f"output_dir={tmp_path}/outputs"


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_runs_or_is_refused_in_one_sentence(group: str, name: str, out: str) -> None:
    option = f"{group}={name}"
    if option in NEED_MORE:
        refusal(option, out)
    elif option != "logger=wandb":  # depends on whether the package is installed
        assert check_config(load(option, out)).actor_ranks >= 1


def test_the_memory_of_a_reference_counts(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest machine, to a MiB, on which the run fits without one is too small with one beside each engine."""
    options = ("trainer.max_tokens_per_microbatch=200000", "actor.logprob_chunk=200000", out)  # large passes

    def least_memory(config: RunConfig) -> int:
        low, high = 0, 1 << 16
        while high - low > 1:
            middle = (low + high) // 2
            monkeypatch.setattr("rlhfspec_mega.config.machine.host_memory", lambda: middle * 2**20)  # noqa: B023
            try:
                check_config(config)
                high = middle
            except UserError as error:
                assert ("of the reference model" in str(error)) == (config.algorithm.kl_coef > 0)
                low = middle
        return high

    without, with_one = load("algorithm.kl_coef=0", *options), load(*options)
    sizes = check_config(with_one)
    more = least_memory(with_one) - least_memory(without)
    assert more == pytest.approx(sizes.engines * (sizes.frozen_memory["reference"] + PROCESS_BYTES) / 2**20, abs=1)


def test_experiments_win_over_groups_and_yield_to_the_user() -> None:
    config = load("experiment=pp2", "model=small")
    assert (config.name, config.actor.tensor_parallel, config.actor.pipeline_parallel) == ("small_pp2", 1, 2)
    assert load("experiment=pp2", "actor.data_parallel=3", "name=mine").actor.data_parallel == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("modle=tiny", "no option 'modle': did you mean 'model'?"),
        ("model=tinny", "model=tinny does not exist: did you mean 'tiny'?"),
        ("data=gsm8", "did you mean 'gsm8k'?"),
        ("model=null", "model=None does not exist"),
        ("trainer=3", "there is default, smoke"),
        ("actor.tensor_paralel=2", "did you mean 'actor.tensor_parallel'?"),
        ("tensor_parallel=2", "did you mean 'actor.tensor_parallel'?"),
        ("lr=1e-3", "'actor.optimizer.lr'"),
        ("trainer.lr=1e-3", "'actor.optimizer.lr'"),
        ("actor.optimizer={lrr: 1}", "did you mean 'actor.optimizer.lr'?"),
        ("qqqq=1", "no name resembles it"),
        ("actor.tensor_parallel=two", "actor.tensor_parallel=two is not valid: it must be a whole number"),
        ("actor.tensor_parallel=1.5", "must be a whole number"),
        ("actor.tensor_parallel=null", "must be a whole number"),
        ("actor.data_parallel=x", "must be a whole number or null"),
        ("actor.optimizer.lr=fast", "must be a number"),
        ("trainer.resume=perhaps", "must be true or false"),
        ("name=[1]", "must be a text"),
        ("data.train=a.jsonl", "must be a list such as [a,b]"),
        ("actor.optimizer=adam", "must be a section"),
        ("actor.optimizer.betas=[0.9]", "two numbers"),
        ("reward.arguments.x=1", "write +reward.arguments.x=1"),
        ("+seed=1", "exists already"),
        ("~seed", "set it instead"),
        ("tiny", "write option=value"),
        ("a b=1", "write option=value"),
        ("seed=1,2", "add --multirun"),
        ("name=${nothing}", "nothing"),
        ("hydra/launcher=nothing", "hydra/launcher/nothing"),
    ],
)
def test_bad_names_and_types(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "actor.tensor_parallel=3",
            "actor.tensor_parallel=3: model tiny has 4 heads, 2 key-value heads and a feed-forward size of 384: "
            "use 1 or 2",
        ),
        ("model.num_kv_heads=3", "model.num_heads=4 is no multiple of num_kv_heads=3"),
        ("model.head_dim=33", "use an even number"),
        ("model=small actor.tensor_parallel=6", "2 key-value heads"),
        ("actor.pipeline_parallel=3 actor.tensor_parallel=1", "4 layers: their product must be 1, 2 or 4"),
        ("actor.pipeline_parallel=2", "needs 4 devices and the cluster has 2"),
        ("actor.data_parallel=2", "The actor needs 4 devices"),
        ("rollout.engines=3", "use at most 2"),
        ("placement=separate", "cluster.devices_per_node=3"),
        ("actor.tensor_parallel=1 actor.sequence_parallel=true", "needs actor.tensor_parallel above 1"),
        ("trainer.mini_batch_size=48", "does not divide the 128 samples of a step"),
        ("model.vocab_size=100", "259 byte tokens"),
        ("algorithm.kl_coef=0 algorithm.kl_in=reward", "no effect here"),
        ("rollout.max_new_tokens=1000", "more than the 1024 positions of model tiny"),
        ("trainer.max_tokens_per_microbatch=500", "does not fit trainer.max_tokens_per_microbatch=500"),
        ("trainer.samples_per_prompt=1", "use at least 2"),
        ("rollout.temperature=0", "nothing could be learnt"),
        ("algorithm.adv_estimator=rlo", "did you mean 'rloo'"),
        ("algorithm.adv_estimator=my.own", "no effect with algorithm.adv_estimator=my.own"),
        ("algorithm.loss=mine", "no import path: write package.module.function"),
        ("algorithm.loss=my.own algorithm.clip_ratio_low=0.3", "no effect here: add algorithm.loss=null"),
        ("actor.dtype=float16", "float32, bfloat16"),
        ("actor.optimizer.lr=0", "must be above 0"),
        ("actor.optimizer.lr=nan", "must be above 0"),
        ("actor.optimizer.lr=inf", "must be above 0"),
        ("actor.optimizer.betas=[0.9,1.0]", "below 1"),
        ("rollout.temperature=-1", "must be 0 or more"),
        ("experiment=pp2 actor.virtual_pipeline=2 actor.batch_p2p=true", "gives wrong gradients"),
        ("experiment=pp2 actor.virtual_pipeline=2 actor.overlap_p2p=true", "corrupts gradients on a CPU"),
        ("actor.batch_p2p=true", "actor.batch_p2p=true has no effect here: add actor.pipeline_parallel=2"),
        ("algorithm.adv_estimator=rloo", "use algorithm=rloo"),
        ("algorithm.overlong_penalty=0.1", "add algorithm.overlong=penalize"),
        ("data.train=[a.jsonl]", "add data=files"),
        ("data=files", "add data.train=[FILE.jsonl]"),
        ("data=files data.train=[/no/such.jsonl] trainer.eval_every=0", "names /no/such.jsonl, which does not exist"),
        ("data.max_sum=3", "data.max_sum=3 is too small"),
        ("reward=custom", "There is no reward: set reward.function"),
        ("reward.function=len", "no import path"),
        ("rollout=sglang", "run make sglang-cpu"),
        ("cluster=8n8g launcher=ray", "cluster.nodes=8 needs a running Ray cluster: `ray start --head`"),
        ("cluster=8n8g", "cluster.nodes=8 needs a running Ray cluster: `ray start --head`"),
        ("cluster=8n8g launcher=local", "launcher=local starts processes on one machine: add launcher=ray"),
        ("cluster.nodes=2 launcher=local", "cluster.nodes=2, but launcher=local starts processes on one machine"),
        ("launcher.kind=slurm", "launcher.kind=slurm does not exist"),
        ("launcher.address=auto", "launcher.address=auto has no effect here: add launcher=ray"),
        (
            "reallocation=queue trainer.deterministic=true",
            "reallocation=queue hands samples out as engines become free",
        ),
        ("resharding.transport=object_store", "resharding.transport=object_store is Ray's: add launcher=ray"),
        ("launcher.max_restarts=-1", "launcher.max_restarts=-1 is out of range"),
        ("launcher.heartbeat_timeout=0", "launcher.heartbeat_timeout=0.0 is out of range"),
        ("model=70b", "has no line for a model of 70.6 billion weights on 1 x 2 CPU processes"),
        ("model.path=/no/such/model", "model.path=/no/such/model does not exist"),
        ("name=a/b", "cannot name a directory"),
        ("name=..", "cannot name a directory"),
    ],
)
def test_combinations_that_cannot_run(overrides: str, words: str, out: str) -> None:
    assert words in refusal(*overrides.split(), out)


def test_a_large_model_without_weights_names_where_they_are(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfspec_mega.config.machine.host_memory", lambda: 10**16)
    advice = refusal("model=70b", out).split(": add ")[1].removesuffix(".")
    sentence = refusal("model=70b", *advice.split(), out)
    assert "names a shape only: download meta-llama/Llama-3.1-70B-Instruct" in sentence and "model.path=DIR" in sentence


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the checks believe in so many GPUs of 80 GiB."""

    def pretend(count: int) -> None:
        for module in ("machine", "hardware"):
            monkeypatch.setattr(f"rlhfspec_mega.config.{module}.gpu_memory", lambda: (80 * 2**30,) * count)

    return pretend


# Sizes by hand for a model for which conf/presets.yaml has no line.
BY_HAND = (
    "actor.tensor_parallel=8 actor.pipeline_parallel=1 actor.sequence_parallel=true actor.recompute=true "
    "actor.dtype=bfloat16 actor.optimizer.lr=1e-6 placement.reference_tensor_parallel=8"
)


@pytest.mark.parametrize(
    ("count", "overrides", "words"),
    [
        (0, "cluster=1n8g", "torch finds no NVIDIA GPU on this machine: use cluster=local"),
        (1, "cluster=local cluster.device=auto", "this machine has 1 GPU: set cluster.devices_per_node=1"),
        (4, "cluster=1n8g", "this machine has 4 GPUs"),
        (
            8,
            "cluster=1n8g model=8b rollout=torch rollout.max_running_requests=16",
            "names a shape only: download meta-llama/Llama-3.1-8B-Instruct",
        ),
        (8, f"cluster=1n8g model=32b rollout=torch {BY_HAND}", "GiB on each GPU and 72 GiB can be used"),
    ],
)
def test_machines_with_gpus(count: int, overrides: str, words: str, out: str, gpus: Callable[[int], None]) -> None:
    gpus(count)
    with pytest.raises(UserError) as caught:
        check_config(load_config([*overrides.split(), out]))
    assert words in str(caught.value)


def test_one_node_of_gpus_holds_four_copies_of_tiny(out: str, gpus: Callable[[int], None]) -> None:
    gpus(8)
    assert check_config(load_config(["cluster=1n8g", out])).data_parallel == 4


def test_interleaved_schedule_without_the_traps_is_accepted(out: str) -> None:
    assert check_config(load("experiment=pp2", "actor.virtual_pipeline=2", out)).actor_ranks == 2


def test_vocabulary_of_models_made_here_is_the_byte_tokenizers(tmp_path: Path) -> None:
    from rlhfspec_mega.data.tokenizer import make_byte_tokenizer

    make_byte_tokenizer(tmp_path)
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == BYTE_VOCABULARY


def test_slow_bf16_and_foreign_data_are_noted() -> None:
    assert notes(load()) == []
    config = load("actor.dtype=bfloat16", "data=gsm8k")
    assert len(notes(config)) == (1 if cpu_has_fast_bf16() else 2)


def test_a_long_run_without_checkpoints_is_noted(tmp_path: Path) -> None:
    make_model(tmp_path, SHAPE)
    for long in (["trainer.steps=101"], [f"model.path={tmp_path}"]):
        (note,) = notes(load(*long, "speculation=off"))
        assert "trainer.checkpoint_every=0" in note and "trainer.checkpoint_every=10" in note
        assert notes(load(*long, "speculation=off", "trainer.checkpoint_every=50")) == []


def test_sweeps_expand_in_order() -> None:
    jobs = sweep_jobs(["seed=0,1", "model=tiny,small", "trainer.steps=2"])
    assert jobs[1] == ["seed=0", "model=small", "trainer.steps=2"] and len(jobs) == 4


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments", [["modle=tiny"], ["model=70b", "cluster.device=cpu"], ["--multirun", "seed=0,1", "actor.dtype=x"]]
)
def test_the_command_ends_in_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    result = command(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1), result.stderr
    assert not list(tmp_path.iterdir())


def test_help_and_cfg_name_groups_and_values(tmp_path: Path) -> None:
    text = command("--help", cwd=tmp_path).stdout
    groups = dict(re.findall(r"^  ([a-z/_]+): (.+)$", text, re.MULTILINE))
    assert {group: set(names.split(", ")) for group, names in groups.items()} == {
        group: set(names) for group, names in group_options().items()
    }
    assert groups["cluster"].startswith("local, ") and groups["model"].startswith("tiny, ")  # the default first
    text = command("--cfg", "job", "model=small", cwd=tmp_path).stdout
    assert "hidden_size: 384" in text and text.startswith("name: small")
    assert not list(tmp_path.iterdir())


def test_the_readmes_gsm8k_command_is_accepted(out: str, tmp_path: Path) -> None:
    """Given a model and files, nothing else is missing."""
    make_model(tmp_path / "model", replace(SHAPE, max_positions=4096))
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    options = [f"model.path={tmp_path}/model", f"data.train=[{file}]", f"data.eval=[{file}]"]
    assert check_config(load("experiment=gsm8k", *options, out)).engines == 2
