"""The schema as text: the command's help, docs/configuration.md, and a run's configuration with origins of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import CONF_DIR, CONFIG_NAME, Known, as_written, group_options, known
from rlhfspec_mega.config.presets import from_presets, origins
from rlhfspec_mega.config.schema.run import RunConfig

_EXAMPLES = """\
  python train.py                                       the demo: a tiny model learns chain sums on two CPU cores
  python train.py name=try2 seed=1                      the same with another seed, in outputs/try2
  python train.py name=tiny trainer.resume=true         go on from the newest checkpoint of outputs/tiny
  python train.py experiment=gsm8k model.path=DIR       a Hugging Face model on GSM8K
  python train.py --multirun seed=0,1,2                 one run after the other: outputs/tiny_0, tiny_1, tiny_2
"""
_FLAGS = """\
  --cfg job        print the configuration, with the reason of each value from conf/presets.yaml, and stop
  --info defaults  print which files of conf/ are read
  --multirun       one run per combination of comma-separated values
  --hydra-help     more flags
"""
_INTRODUCTION = """\
# Configuration

Written by `python -m tools.configuration` from `rlhfspec_mega/config/schema/`; edit it there.

Set an option on the command line (`python train.py trainer.steps=100`), or choose a named set of values of a group
(`python train.py algorithm=rloo`). An option that nothing would read is refused with what it needs. *From
conf/presets.yaml* stands for values that follow from the size of the model and the hardware by the table in that file;
`python train.py --cfg job` prints them with the line that they come from.
"""


def help_text() -> str:
    """The output of `python train.py --help`."""
    groups = "\n".join(f"  {group}: {', '.join(names)}" for group, names in _groups())
    shown = [one for one in known().values() if one.option.common]
    width = max(len(_example(one)) for one in shown) + 2
    options = "\n".join(f"  {_example(one):{width}}{one.option.help}" for one in shown)
    return (
        "RLHF training: Megatron-core actors learn, generation engines decode, weights are resharded between them.\n\n"
        f"Usage: python train.py [group=option ...] [option=value ...]\n\n{_EXAMPLES}\n"
        f"Groups, one option each (group=option), the default first:\n\n{groups}\n\n"
        f"Most used options, with their defaults (all of them: docs/configuration.md):\n\n{options}\n\n"
        f"Flags:\n\n{_FLAGS}"
    )


def _example(one: Known) -> str:
    return f"{one.key}=..." if one.key in from_presets() else f"{one.key}={_value(one.default)}"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return as_written("", value)[1:]


def document() -> str:
    """docs/configuration.md."""
    return "\n".join([_INTRODUCTION, *_group_table(), *_sections()])


def _group_table() -> Iterator[str]:
    yield "## Groups\n\n| Group | Named sets of values, the default first |\n| --- | --- |"
    for group, names in _groups():
        yield f"| `{group}` | {', '.join(f'`{group}={name}`' for name in names)} |"
    yield "\nBy default no `experiment` and no `cluster/gpu` applies.\n"


def _groups() -> Iterator[tuple[str, list[str]]]:
    """Every config group with its options, first the one that conf/config.yaml chooses."""
    entries = yaml.safe_load((CONF_DIR / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {group: name for entry in entries if isinstance(entry, dict) for group, name in entry.items()}
    for group, names in group_options().items():
        yield group, sorted(names, key=lambda name: name != chosen.get(group))


def _sections() -> Iterator[str]:
    yield "## The run\n\n" + _HEAD
    sections = [one for one in known().values() if one.is_section]
    yield from (_row(one) for one in known().values() if "." not in one.key and not one.is_section)
    for section in sections:
        yield f"\n## {section.key}\n\n{_sentence(section.option.help)}\n\n{_HEAD}"
        for one in known().values():
            if one.key.rpartition(".")[0] == section.key and not one.is_section:
                yield _row(one)
    yield ""


_HEAD = "| Option | Default | Value | What it does |\n| --- | --- | --- | --- |"


def _row(one: Known) -> str:
    option = one.option
    default = "*from conf/presets.yaml*" if one.key in from_presets() else f"`{_value(one.default)}`"
    value = " \\| ".join(f"`{choice}`" for choice in option.choices) or one.expected
    value = f"a list of {value}" if option.choices and isinstance(one.default, list) else value
    value += f", {option.bounds}" if option.bounds else ""
    value += f", {option.unit}" if option.unit else ""
    needs = " and ".join(map(_condition, _narrowest(option.only_with)))
    return f"| `{one.key}` | {default} | {value} | {_sentence(option.help)}{f' Only with {needs}.' if needs else ''} |"


def _narrowest(conditions: Sequence[str]) -> list[str]:
    """The conditions, without one that another implies: task=reward_model says more than task=sft|reward_model."""
    choices = [(one, key, set(values.split("|"))) for one in conditions for key, _, values in [one.partition("=")]]
    return [
        one
        for one, key, values in choices
        if not any(key == other and "" not in fewer and fewer < values for _, other, fewer in choices)
    ]


def _condition(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`" if "=" in text or ">" in text else text


def _sentence(phrase: str) -> str:
    return f"{phrase[0].upper()}{phrase[1:]}.".replace("|", "\\|")


def explained(config: RunConfig) -> str:
    """The configuration as YAML; a value from conf/presets.yaml has the table's line beside it as a comment."""
    reasons = origins(config, model_shape(config.model).parameters)
    lines: list[str] = []
    path: list[str] = []
    for line in yaml.safe_dump(plain(config), sort_keys=False).splitlines():
        name, depth = line.strip().partition(":")[0], (len(line) - len(line.lstrip())) // 2
        path[depth:] = [name]
        reason = reasons.get(".".join(path))
        lines.append(f"{line}  # {reason}" if reason else line)
    return "\n".join(lines)


def plain(config: RunConfig) -> dict[str, Any]:
    """The configuration in YAML's types: mappings, lists and scalars."""
    values = asdict(config)
    for learner in (values["actor"], values["critic"]):
        learner["optimizer"]["betas"] = list(learner["optimizer"]["betas"])
    return values
