"""Megatron distributed checkpoints: written by all ranks, loadable under any other TP, PP and DP sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron import adamw_fixes, random_state
from rlhfspec_mega.megatron.build import unwrap
from rlhfspec_mega.megatron.checkpoint_files import SavedPart
from rlhfspec_mega.megatron.checkpoint_staging import METADATA, StagedState, name_of, sharded_models
from rlhfspec_mega.megatron.checkpoint_writer import WriteFailed, write
from rlhfspec_mega.megatron.saving_groups import SavingGroups

# Megatron saves these with the moments; a resumed run follows its configuration instead.
_CONFIGURED = ("max_lr", "min_lr", "start_wd", "end_wd", "weight_decay", "betas", "eps")
# The layers of Transformer Engine hold the norm before a linear layer in that layer, and name it so in checkpoints.
_NORMS_IN_LAYERS = {
    "decoder.layers.input_layernorm.": "decoder.layers.self_attention.linear_qkv.layer_norm_",
    "decoder.layers.pre_mlp_layernorm.": "decoder.layers.mlp.linear_fc1.layer_norm_",
}


def load_weights(directory: Path, chunks: list[Any], groups: ProcessGroupCollection) -> None:
    """Read the weights alone out of any distributed checkpoint, under any parallel sizes; collective over all ranks.

    Raises megatron's CheckpointingException if the directory is not such a checkpoint.
    """
    stored = dist_checkpointing.load_tensors_metadata(str(directory))
    for chunk in chunks:
        (wanted,) = sharded_models([chunk], groups).values()
        spellings = {ours: theirs for ours, theirs in _NORMS_IN_LAYERS.items() if f"{theirs}weight" in stored}
        apply_prefix_mapping(wanted, spellings)
        with torch.no_grad():
            state = dist_checkpointing.load({"model": wanted}, str(directory))
        unwrap(chunk).load_state_dict(state["model"])


def save(staged: StagedState, directory: Path, groups: SavingGroups) -> SavedPart:
    """Write a staged state into an existing empty directory; collective over all ranks.

    Returns this rank's files by name; if a rank could not write, every rank gets the reason instead (see WriteFailed).
    """
    try:
        return SavedPart(write(staged, directory, groups), None)
    except WriteFailed as error:
        return SavedPart({}, str(error))


def load(directory: Path, chunks: list[Any], optimizer: Any, scheduler: Any, groups: ProcessGroupCollection) -> bool:
    """Read what `save` wrote, under the model's current parallel sizes; collective over all ranks.

    Returns whether random states were restored: they belong to ranks, so only under the layout they were saved with.
    Raises megatron's CheckpointingException if the directory is not such a checkpoint.
    """
    wanted: dict[str, Any] = sharded_models(chunks, groups)
    metadata = METADATA | {"dp_cp_group": groups.dp_cp}
    wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    wanted["scheduler"] = scheduler.state_dict()
    same_grid = dist_checkpointing.load_common_state_dict(str(directory))["grid"] == random_state.grid(groups)
    if same_grid:
        wanted["random_state"] = random_state.sharded_random_state(groups)
    with torch.no_grad():
        state = dist_checkpointing.load(wanted, str(directory))
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(state[name_of(index, chunks)])
    configured = [{name: group[name] for name in _CONFIGURED if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    scheduler.load_state_dict(state["scheduler"])
    if adamw_fixes.needs_fixes():
        adamw_fixes.unshare_steps(optimizer)
    if same_grid:
        random_state.restore_random_state(state["random_state"])
    return same_grid
