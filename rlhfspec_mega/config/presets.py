"""Options that follow from the model's size and the hardware, by the table conf/presets.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import yaml

from rlhfspec_mega.config.hardware import device_memory
from rlhfspec_mega.config.names import CONF_DIR, known
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.schema.system import ClusterConfig
from rlhfspec_mega.planning.memory import GIB

FILE = "presets.yaml"
# Options that each list of the file sets, with their names in the file.
LISTS = {
    "parallel": {
        "actor.tensor_parallel": "actor_tp",
        "actor.pipeline_parallel": "actor_pp",
        "actor.sequence_parallel": "sequence_parallel",
        "actor.recompute": "recompute",
        "actor.dtype": "dtype",
        "actor.optimizer.lr": "lr",
        "rollout.sglang.tensor_parallel": "engine_tp",
        "rollout.sglang.mem_fraction_static": "engine_memory",
        "placement.reference_tensor_parallel": "reference_tp",
    },
    "workload": {
        "rollout.engine": "engine",
        "rollout.max_prompt_tokens": "prompt",
        "rollout.max_new_tokens": "response",
        "rollout.max_running_requests": "requests",
        "rollout.chunked_prefill_size": "prefill",
        "trainer.prompts_per_step": "prompts",
        "trainer.samples_per_prompt": "samples",
        "trainer.max_tokens_per_microbatch": "microbatch",
    },
    "placement": {"placement.reference": "reference"},
    "critic": {"critic.optimizer.lr": "lr"},
    "schedule": {"actor.optimizer.schedule": "actor"},
    "launcher": {"launcher.kind": "kind"},
    "sft_warmup": {"sft_warmup.lr": "lr"},
}


def from_presets() -> list[str]:
    """Options that the table sets if nothing else does."""
    return [key for names in LISTS.values() for key in names]


@dataclass(frozen=True)
class Line:
    """A line of the table: the models and hardware it applies to, and the values it gives."""

    billions: float
    use: dict[str, Any]
    nodes: int = 1
    devices: int = 1
    gpu_gib: float = 0.0

    def fits(self, weights: int, cluster: ClusterConfig) -> bool:
        return (
            weights <= self.billions * 1e9
            and cluster.nodes >= self.nodes
            and cluster.devices_per_node >= self.devices
            and device_memory(cluster) >= self.gpu_gib * GIB
        )

    def __str__(self) -> str:
        hardware = [f"{self.nodes} nodes"] if self.nodes > 1 else []
        hardware += [f"{self.devices} devices a node"] if self.devices > 1 else []
        hardware += [f"{self.gpu_gib:g} GiB a GPU"] if self.gpu_gib else []
        return f"up to {self.billions:g} billion weights" + (f", at least {', '.join(hardware)}" if hardware else "")


@cache
def _table() -> dict[str, list[Line]]:
    content = yaml.safe_load((CONF_DIR / FILE).read_text(encoding="utf-8"))
    return {name: [Line(**line) for line in lines] for name, lines in content.items()}


def presets(weights: int, cluster: ClusterConfig) -> dict[str, tuple[Any, Line]]:
    """Option -> (value, line of the table) for a model of this many weights; options without a line are left out."""
    found = {}
    for name, names in LISTS.items():
        line = next((line for line in _table()[name] if line.fits(weights, cluster)), None)
        values = {key: line.use.get(short, known()[key].default) for key, short in names.items()} if line else {}
        found.update({key: (value, line) for key, value in values.items() if line})
    return found


def origins(config: RunConfig, weights: int) -> dict[str, str]:
    """Map each option that has the preset table's value to a description of the line of the table it comes from.

    `weights` is the model's number of parameters, which selects the line.
    """
    found = presets(weights, config.cluster).items()
    return {key: f"conf/{FILE}: {line}" for key, (value, line) in found if attrgetter(key)(config) == value}
