"""Derived sizes against hand-counted examples and the relations that must hold between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sizes import derive_sizes, size_rows
from rlhfspec_mega.errors import UserError


def default_run() -> RunConfig:
    config = RunConfig()
    config.actor.tensor_parallel = 2  # as conf/presets.yaml has it
    return config


def sizes_of(config: RunConfig):  # type: ignore[no-untyped-def]
    return derive_sizes(config, model_shape(config.model))


def test_default_run_by_hand() -> None:
    sizes = sizes_of(default_run())
    assert (sizes.devices, sizes.actor_ranks, sizes.data_parallel, sizes.engines) == (2, 2, 1, 2)
    assert (sizes.samples_per_step, sizes.samples_per_update, sizes.updates_per_step) == (128, 128, 1)
    assert (sizes.max_sequence, sizes.total_updates) == (576, 60)


@pytest.mark.parametrize(
    ("mode", "devices", "engines", "expected"),
    [
        ("colocated", 8, None, (8, 4, 8)),  # four copies of TP2, an engine on every device
        ("colocated", 7, None, (6, 3, 7)),  # one device has an engine only
        ("colocated", 8, 3, (8, 4, 3)),
        ("separate", 8, None, (4, 2, 4)),  # half and half
        ("separate", 8, 2, (6, 3, 2)),  # what the engines leave
        ("separate", 3, None, (2, 1, 1)),
    ],
)
def test_worlds(mode: str, devices: int, engines: int | None, expected: tuple[int, int, int]) -> None:
    config = default_run()
    config.placement.mode, config.rollout.engines = mode, engines
    config.cluster.devices_per_node = devices
    config.trainer.prompts_per_step = 12
    sizes = sizes_of(config)
    assert (sizes.actor_ranks, sizes.data_parallel, sizes.engines) == expected


def test_training_nodes_are_counted_in_devices_and_leave_some_to_generate() -> None:
    config = default_run()
    config.placement.mode, config.cluster.nodes, config.cluster.devices_per_node = "separate", 4, 2
    config.trainer.prompts_per_step = 12
    config.placement.training_nodes = 1
    sizes = sizes_of(config)
    assert (sizes.actor_ranks, sizes.engines) == (2, 6)
    config.placement.training_nodes = 4
    with pytest.raises(UserError, match=r"training_nodes=4 leaves none of cluster\.nodes=4 to generate"):
        sizes_of(config)


@given(
    prompts=st.integers(1, 64),
    members=st.integers(2, 16),
    update=st.one_of(st.none(), st.integers(1, 512)),
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2, 4]),
    devices=st.integers(1, 16),
)
def test_sizes_add_up_or_are_refused(
    prompts: int, members: int, update: int | None, tensor: int, pipeline: int, devices: int
) -> None:
    config = default_run()
    config.trainer.prompts_per_step, config.trainer.samples_per_prompt = prompts, members
    config.trainer.mini_batch_size = update
    config.actor.tensor_parallel, config.actor.pipeline_parallel = tensor, pipeline
    config.cluster.devices_per_node = devices
    copies = devices // (tensor * pipeline)
    of_step = prompts * members
    of_update = update or of_step
    fits = copies >= 1 and of_step % of_update == 0
    if not fits:
        with pytest.raises(UserError):
            sizes_of(config)
        return
    sizes = sizes_of(config)
    assert sizes.data_parallel == copies
    assert sizes.updates_per_step * sizes.samples_per_update == of_step
    assert 0 <= sizes.samples_per_rank * copies - sizes.samples_per_update < copies
    assert sizes.total_updates * sizes.samples_per_update == config.trainer.steps * of_step


def reference_of(config: RunConfig) -> tuple[list[tuple[int, ...]], str, int]:
    """Devices by rank, in whose processes, and bytes of a rank."""
    sizes = sizes_of(config)
    place = sizes.placement.places.get("reference")
    said = {what: where for what, _, where in size_rows(config, sizes)}.get("memory of the reference", "")
    assert ("actor" in said, "engines" in said) == (bool(place and place.within), bool(place and not place.within))
    return (place.devices, place.within, sizes.frozen_memory["reference"]) if place else ([], "", 0)


def test_a_reference_is_counted_where_it_lies() -> None:
    config = default_run()
    weights = 4 * sizes_of(config).parameters
    devices, within, memory = reference_of(config)
    assert (devices, within) == ([(0,), (1,)], "") and memory > weights
    config.placement.reference_tensor_parallel = 2
    devices, within, of_half = reference_of(config)
    assert (devices, within) == ([(0,), (1,)], "") and weights / 2 < of_half < memory
    config.placement.reference_tensor_parallel = 1
    for config.placement.reference, config.trainer.deterministic in (("actor", False), ("auto", True)):
        devices, within, of_half = reference_of(config)
        assert (devices, within) == ([(0,), (1,)], "actor") and weights / 2 <= of_half < memory
    config.algorithm.kl_coef = 0.0
    assert reference_of(config) == ([], "", 0)


@pytest.mark.parametrize(
    ("mode", "nodes", "of_node", "tensor", "first_of_replicas"),
    [
        ("separate", 1, 8, 2, [4, 6]),
        ("separate", 1, 8, 3, [4]),  # one device is left over
        ("colocated", 2, 3, 2, [0, 4]),  # 2 and 3 lie on two nodes
        ("colocated", 2, 4, 4, [0, 4]),
    ],
)
def test_replicas_share_generation_devices_and_no_two_nodes(
    mode: str, nodes: int, of_node: int, tensor: int, first_of_replicas: list[int]
) -> None:
    config = default_run()
    config.placement.mode, config.placement.reference_tensor_parallel = mode, tensor
    config.cluster.nodes, config.cluster.devices_per_node = nodes, of_node
    devices, _, _ = reference_of(config)
    assert devices == [(first + rank,) for first in first_of_replicas for rank in range(tensor)]


def test_a_replica_that_finds_no_room_is_refused() -> None:
    config = default_run()
    config.placement.reference_tensor_parallel = 4
    with pytest.raises(UserError, match=r"reference_tensor_parallel=4 .* 2 generation .*placement.reference=actor"):
        sizes_of(config)


def test_a_draft_is_counted_where_there_is_one() -> None:
    config = default_run()
    learning = sizes_of(config).draft_memory
    config.speculation.refresh_every = 0
    still = sizes_of(config).draft_memory
    assert learning.actor > still.actor > 0 and learning.engine == still.engine > 0
    config.speculation.policy, config.speculation.num_draft_tokens = (
        "fixed",
        2,
    )  # instead of 32: less room behind the longest sample
    assert 0 < sizes_of(config).draft_memory.engine < still.engine
    assert "memory of the draft" in {row[0] for row in size_rows(config, sizes_of(config))}
    config.speculation.policy = "off"
    plain = sizes_of(config)
    assert (plain.draft_memory.actor, plain.draft_memory.engine) == (0, 0)
    assert "memory of the draft" not in {row[0] for row in size_rows(config, plain)}


def test_table_shows_every_figure() -> None:
    config = default_run()
    config.trainer.mini_batch_size = 32
    rows = {name: (value, why) for name, value, why in size_rows(config, sizes_of(config))}
    assert rows["samples per step"] == ("128", "16 x 8")
    assert rows["updates per step"] == ("4", "32 samples each")
    assert rows["waves per step"] == ("1", "128 decode at once")
    assert rows["actor ranks"] == ("2", "tensor 2 x pipeline 1 x data 1")
    assert rows["longest sequence"][0] == "576 tokens"
