"""What the warm-up teaches and from what: its sizes on any number of devices, its prompts, its demonstrations."""

from __future__ import annotations

import io
from copy import deepcopy
from pathlib import Path

import pytest

from rlhfspec_mega.bootstrap.start import tokenizer_directory
from rlhfspec_mega.bootstrap.warmup import WARMUP_SEED, WarmUp
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.schema.generation import DataConfig
from rlhfspec_mega.data.chain_sums import LAZY_FROM_TERMS, LAZY_SHARE, ChainSums, answer_text, demonstration
from rlhfspec_mega.observe.console import Console


@pytest.mark.parametrize("devices", range(1, 9))
def test_any_number_of_devices_can_make_the_model(devices: int, tmp_path: Path) -> None:
    config = load_config(
        [f"cluster.devices_per_node={devices}", "actor.tensor_parallel=1", f"model.cache_dir={tmp_path}"]
    )
    console = Console(1, stream=io.StringIO())
    before = deepcopy(config)
    warm_up = WarmUp(config, model_shape(config.model), tokenizer_directory(config), tmp_path, console)
    assert warm_up._sizes.actor_ranks == devices
    assert config == before, "the run's own configuration must stay as it was"


def test_no_run_meets_the_warm_ups_prompts_by_its_seed() -> None:
    with pytest.raises(Exception, match="seed"):
        from rlhfspec_mega.config.checks import check_config

        check_config(load_config([f"seed={WARMUP_SEED}"]))
    warm_up, run = (ChainSums.from_config(DataConfig(), seed) for seed in (WARMUP_SEED, 0))
    long = [i for i in range(300) if len(warm_up.prompt_text("train", i)) > 16]
    assert not {warm_up.prompt_text("train", i) for i in long} & {run.prompt_text("train", i) for i in range(300)}


def test_demonstrations_are_right_and_long_ones_often_bare() -> None:
    task = ChainSums.from_config(DataConfig(), WARMUP_SEED)
    bare = long = 0
    for index in range(2000):
        prompt = task.prompt_text("train", index)
        answer, shown = answer_text(prompt), demonstration(prompt, index)
        if sum(prompt.count(sign) for sign in "+-") + 1 < LAZY_FROM_TERMS:
            assert shown == answer
            continue
        long += 1
        bare += shown != answer
        assert shown == answer or shown == ";" + answer.split(";")[1]
    assert bare / long == pytest.approx(LAZY_SHARE, abs=0.05)
