"""What the schema says of options holds: bounds, conditions, presets, pages; no wrong command line is a trace."""

from __future__ import annotations

import random
import re
import sys
from copy import deepcopy
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from rlhfspec_mega.config.advice import with_advice
from rlhfspec_mega.config.compose import NoPresetError, load_config
from rlhfspec_mega.config.conditions import FACTS, check_read, missing
from rlhfspec_mega.config.describe import document, explained, help_text
from rlhfspec_mega.config.machine import check_memory
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import CONF_DIR, Known, group_options, known, options
from rlhfspec_mega.config.presets import from_presets, presets
from rlhfspec_mega.config.ranges import check_ranges
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.shape_checks import check_parallel
from rlhfspec_mega.config.sizes import derive_sizes
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.placement import PLACEMENTS
from rlhfspec_mega.planning.strategy import POLICIES
from tools.configuration import PAGES

NUMBERS = [one for one in options() if any(word in str(one.kind) for word in ("int", "float"))]


def set_option(config: RunConfig, key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config) if section else config, name, value)


@cache
def composed(*overrides: str) -> RunConfig:
    return load_config(list(overrides))


def default_config() -> RunConfig:
    return composed()


def with_value(key: str, value: object) -> RunConfig:
    config = deepcopy(default_config())
    set_option(config, key, value)
    return config


def test_a_run_has_the_defaults_of_the_schema() -> None:
    config = load_config([])
    for one in options():
        assert one.key in from_presets() or attrgetter(one.key)(config) == one.default, one.key


def test_files_of_conf_hold_only_what_differs_from_the_defaults() -> None:
    """A set of values that is the default itself names what it chooses, and nothing else."""
    for group, names in group_options().items():
        if group == "experiment":
            continue
        for name in names:
            values = yaml.safe_load((CONF_DIR / group / f"{name}.yaml").read_text())
            section = group.replace("/", ".")
            values.pop("defaults", None)
            same = [key for key, value in values.items() if known()[f"{section}.{key}"].default == value]
            assert same == [] or len(values) == 1, (group, name, same)


@pytest.mark.parametrize("one", NUMBERS, ids=lambda one: one.key)
def test_every_number_has_bounds_that_refuse(one: Known) -> None:
    option = one.option
    assert option.bounds, "an option without bounds accepts numbers that break a run later"
    bad: list[Any] = [limit - 1 for limit in (option.least,) if limit is not None]
    bad += [limit + 1 for limit in (option.most,) if limit is not None]
    bad += [limit for limit in (option.above, option.below) if limit is not None] + [float("nan"), float("inf")]
    for value in bad:
        given = (value, value) if "tuple" in str(one.kind) else value
        with pytest.raises(UserError, match=rf"^{one.key}=.* is out of range"):
            check_ranges(with_value(one.key, given))


@pytest.mark.parametrize("one", [one for one in options() if one.option.choices], ids=lambda one: one.key)
def test_choices_refuse_and_include_the_default(one: Known) -> None:
    several = isinstance(one.default, list)
    assert set(one.default if several else [one.default]) <= {None, *one.option.choices}
    with pytest.raises(UserError, match="does not exist"):
        check_ranges(with_value(one.key, ["nothing"] if several else "nothing"))


@pytest.mark.parametrize("one", [one for one in options() if one.option.only_with], ids=lambda one: one.key)
def test_what_a_refusal_says_to_add_makes_the_option_count(one: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Following the sentence, again and again, ends in a run that reads the option."""
    monkeypatch.setattr("rlhfspec_mega.config.hardware.gpu_memory", lambda: (80 * 2**30,))
    config, added = with_value(one.key, other_value(one)), []
    for _ in range(6):
        try:
            return check_read(with_overrides(config, one, added))
        except UserError as error:
            added.append(str(error).split("add ")[1].split(", or set")[0])
    pytest.fail(f"{one.key} is refused whatever is added: {added}")


def other_value(one: Known) -> Any:
    if one.option.choices:
        return next(choice for choice in one.option.choices if choice != one.default)
    if isinstance(one.default, bool):
        return not one.default
    if isinstance(one.default, (int, float)):
        return one.default / 2 if isinstance(one.default, float) and one.default else one.default + 1
    if one.default is None:
        return 0.5 if "float" in str(one.kind) else "x"
    return ["x"] if isinstance(one.default, list) else {"x": 1} if isinstance(one.default, dict) else "x"


def with_overrides(config: RunConfig, one: Known, added: list[str]) -> RunConfig:
    other = deepcopy(composed(*(line for line in added if "draft_model_path=DIR" not in line)))
    set_option(other, one.key, attrgetter(one.key)(config))
    return other


def test_choices_are_those_that_their_readers_know() -> None:
    assert known()["speculation.policy"].option.choices == ("off", *POLICIES)
    assert known()["placement.mode"].option.choices == tuple(PLACEMENTS)


def test_conditions_speak_of_options_that_exist() -> None:
    for one in options():
        for condition in one.option.only_with:
            missing(condition, default_config())
            for comparison in condition.split(" or ") if condition not in FACTS else []:
                key, _, values = comparison.replace(">", "=").partition("=")
                choices = known()[key].option.choices
                assert not choices or set(values.split("|")) <= set(choices), condition


def test_names_of_earlier_versions_are_answered_with_todays() -> None:
    for old, new in {
        "drafting=off": "'speculation'",
        "drafting.width=3": "'speculation.topk'",
        "drafting.refresh_every=3": "'speculation.refresh_every'",
        "rollout.slots=3": "'rollout.max_running_requests'",
        "cluster.launcher=ray": "'launcher.kind'",
        "warmup.lr=1": "'sft_warmup.lr'",
    }.items():
        with pytest.raises(UserError, match=f"is called {new} now"):
            load_config([old])
    for one in known().values():
        assert not set(one.option.was) & set(known())


def test_the_table_of_presets_sets_what_it_is_for() -> None:
    config = deepcopy(load_config([]))
    found = presets(10**6, config.cluster)
    assert sorted(found) == sorted(from_presets())
    for key, (value, _) in found.items():
        set_option(config, key, value)
    check_ranges(config)


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["cluster=1n8g", "model=8b"], (4, 1, "bfloat16", 1e-6)),
        (["cluster=8n8g", "model=8b"], (4, 1, "bfloat16", 1e-6)),
        (["cluster=4n8g", "model=32b"], (8, 2, "bfloat16", 1e-6)),
        (["cluster=1n8g", "model=32b", "cluster/gpu=h200"], (8, 1, "bfloat16", 1e-6)),
        (["cluster=4n8g", "model=70b", "cluster/gpu=h200"], (8, 4, "bfloat16", 1e-6)),
        (["cluster=8n8g", "model=70b"], (8, 4, "bfloat16", 1e-6)),
        (["cluster=8n8g", "model=70b", "actor.data_parallel=2"], (8, 4, "bfloat16", 1e-6)),
        (["cluster=1n8g"], (2, 1, "float32", 1e-4)),
        (["cluster=1n1g", "model=small"], (1, 1, "float32", 1e-4)),
    ],
)
def test_sizes_follow_from_model_and_hardware(overrides: list[str], sizes: tuple[Any, ...]) -> None:
    config = load_config([*overrides, "rollout=sglang"])
    actor, shape = config.actor, model_shape(config.model)
    assert (actor.tensor_parallel, actor.pipeline_parallel, actor.dtype, actor.optimizer.lr) == sizes
    check_parallel(config, shape)
    check_memory(config, shape, derive_sizes(config, shape))
    shown = explained(load_config(overrides))
    assert yaml.safe_load(shown)["actor"]["dtype"] == actor.dtype
    line = next(line for line in shown.splitlines() if line.strip().startswith("dtype: " + actor.dtype))
    assert "# conf/presets.yaml: up to" in line


def test_the_shape_in_a_directory_decides(tmp_path: Path) -> None:
    """An 8B model's config.json alone: neither the name nor weights are needed to compose."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, '
        '"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}'
    )
    actor = load_config(["cluster=1n8g", f"model.path={tmp_path}"]).actor
    assert (actor.tensor_parallel, actor.dtype, actor.optimizer.lr) == (4, "bfloat16", 1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster=1n8g", "cluster.devices_per_node=2", "model=8b", "cluster/gpu=h200"],
        ["cluster=1n8g", "model=8b", "cluster.gpu.memory_gib=48"],
        ["cluster=4n8g", "cluster.nodes=3", "model=70b", "cluster/gpu=h200"],
        ["cluster=1n8g", "model=70b"],
    ],
)
def test_a_combination_without_a_line_is_refused_with_one_that_is_accepted(overrides: list[str]) -> None:
    with pytest.raises(NoPresetError) as caught:
        load_config(overrides)
    sentence = str(with_advice(caught.value))
    assert "has no line for a model of" in sentence and "\n" not in sentence
    advice = re.split(": (?:add|use) ", sentence)[1].removesuffix(".")
    assert load_config([*overrides, *advice.split()]).actor.dtype == "bfloat16"


def test_texts_name_every_option() -> None:
    shown = document()
    assert all(f"`{one.key}`" in shown for one in options())
    assert all(one.key in help_text() for one in options() if one.option.common)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_a_table_is_not_stale(name: str) -> None:
    page = CONF_DIR.parent / "docs" / name
    assert page.read_text(encoding="utf-8") == PAGES[name](), "run python -m tools.configuration"


VALUES = (
    *("1", "-1", "0", "1.5", "1e400", "nan", "inf", "two", "", "''", "null", "true", "[", "[1,2]", "[1,[2]]", "{a:1}"),
    *("${seed}", "${nothing}", "${actor}", "${oc.env:NOT_THERE}", "${now:%Y}", "${", "${trainer.${name}}", "{a", "é"),
    *("1,2", "choice(1,2)", "range(1,3)", "interval(0,1)", "glob(*)", "sort(2,1)", "int(x)", "off", "???", "a b"),
    *("99999999999999999999", "a=b", "'a"),
)
PREFIXES = ("", "", "", "", "+", "++", "~", "--", "-", "@", ".")


def wrong_line(chance: random.Random) -> list[str]:
    names = [*known(), *group_options(), "hydra.run.dir", "hydra/launcher", "hydra.verbose"]
    names += ["--cfg", "--multirun", "--info"]
    if chance.random() < 0.4:  # right names, so that the value is what counts
        value = chance.choice([*VALUES, *(f"${{{key}}}" for key in known())])
        return [f"{chance.choice(list(known()))}={value}"]
    words = []
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(names)
        if chance.random() < 0.3:
            at = chance.randrange(len(name))
            name = name[:at] + chance.choice("xyz._/@ ") + name[at + chance.randint(0, 2) :]
        equals = "" if chance.random() < 0.05 else "=" * chance.choice([1, 1, 1, 1, 2])
        words.append(chance.choice(PREFIXES) + name + equals + (chance.choice(VALUES) if equals else ""))
    return [*words, "--multirun"] if chance.random() < 0.2 else words


@pytest.mark.parametrize("seed", range(6))
def test_no_command_line_ends_in_a_trace(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names, types, ranges, interpolations and sweeps at random: accepted, or refused in one sentence."""
    chance = random.Random(seed)
    monkeypatch.chdir(tmp_path)
    refused = 0
    for _ in range(25):
        line = wrong_line(chance)
        monkeypatch.setattr(sys, "argv", ["train.py", *line])
        try:
            train.answer_or_check()
        except UserError as error:
            sentence = str(with_advice(error)) if isinstance(error, NoPresetError) else str(error)
            assert "\n" not in sentence and sentence.endswith((".", "...")), (line, sentence)
            refused += 1
        except Exception as error:
            pytest.fail(f"{line} ends in {type(error).__name__}: {error}")
    assert refused > 10
