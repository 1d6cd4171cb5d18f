"""Megatron-core itself loads what hf_to_megatron writes, under other parallel sizes than those of its blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.errors import WorkerDied
from rlhfspec_mega.models.hf_directory import HfWeights, write_directory
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from tests.megatron_probe import start_probes
from tools import hf_to_megatron


def test_megatron_loads_a_converted_checkpoint(tmp_path: Path) -> None:
    cluster, probes = start_probes(tmp_path, 2)
    try:
        for architecture, tied in [("llama", False), ("qwen2", True), ("qwen3", False), ("llama", True)]:
            shape = ModelShape(architecture, 16, 4, 4, 2, 8, 24, 300, 64, 1e4, 1e-5, tied)
            name = f"{architecture}-{tied}"
            hf, converted = tmp_path / name, tmp_path / f"{name}-m"
            tensors = mapping_for(architecture).hf_tensors(shape)
            write_directory(hf, shape, ((info.name, torch.randn(info.shape)) for info in tensors))
            words = [str(hf), str(converted), "--tensor-parallel", "2", "--pipeline-parallel", "2"]
            hf_to_megatron.convert(hf_to_megatron.parser().parse_args(words))
            for config in (ActorConfig(tensor_parallel=2), ActorConfig(pipeline_parallel=2)):
                probes.call("build", config, hf, 1.0, False, phase="test")
                probes.call("call", "load_distributed", converted, phase="test")
                loaded: dict[str, torch.Tensor] = {}
                for part in probes.call("weights", phase="test"):
                    loaded |= part or {}
                wanted = HfWeights(hf)
                assert set(loaded) == set(wanted.names())
                assert all(torch.equal(loaded[name], wanted.get(name)) for name in loaded)
    finally:
        cluster.close()


def test_a_checkpoint_without_a_parameter_does_not_load(tmp_path: Path) -> None:
    """Megatron does not leave a weight as it was where the checkpoint has none: the test above proves something."""
    shape = ModelShape("llama", 16, 2, 4, 2, 8, 24, 300, 64, 1e4, 1e-5, True)
    untied = ModelShape("llama", 16, 2, 4, 2, 8, 24, 300, 64, 1e4, 1e-5, False)
    for name, one in (("tied", shape), ("untied", untied)):
        tensors = mapping_for("llama").hf_tensors(one)
        write_directory(tmp_path / name, one, ((info.name, torch.randn(info.shape)) for info in tensors))
    words = [str(tmp_path / "tied"), str(tmp_path / "m")]
    hf_to_megatron.convert(hf_to_megatron.parser().parse_args(words))
    cluster, probes = start_probes(tmp_path, 1)
    try:
        probes.call("build", ActorConfig(), tmp_path / "untied", 1.0, False, phase="test")
        with pytest.raises(WorkerDied):
            probes.call("call", "load_distributed", tmp_path / "m", phase="test")
        assert "output_layer.weight" in (tmp_path / "logs" / "probe-0.log").read_text()
    finally:
        cluster.close()
