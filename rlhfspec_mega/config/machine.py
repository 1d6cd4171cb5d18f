"""Checks whether the machine has what a run needs: a launcher, devices, memory."""

from __future__ import annotations

import importlib.util
import os

from rlhfspec_mega.config.device_plan import USABLE, device_plans, fullest_device
from rlhfspec_mega.config.hardware import device_memory, device_type, gpu_memory, host_memory
from rlhfspec_mega.config.reach import ray_address
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import ENGINE_BYTES, uses_sglang
from rlhfspec_mega.config.sizes import Sizes
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.memory import GIB, saving_bytes
from rlhfspec_mega.stop import JOB_END

PROCESS_BYTES = int(0.4 * GIB)  # an idle worker with torch and Megatron loaded: 0.35 GiB were measured


def check_launcher(config: RunConfig) -> None:
    """Raises UserError for a launcher that is not installed or does not reach all nodes."""
    cluster, launcher, transport = config.cluster, config.launcher, config.resharding.transport
    if launcher.kind == "local":
        if cluster.nodes > 1:
            raise UserError(
                f"cluster.nodes={cluster.nodes}, but launcher=local starts processes on one machine: add "
                "launcher=ray, or set cluster.nodes=1."
            )
        if transport == "object_store":
            raise UserError("resharding.transport=object_store is Ray's: add launcher=ray, or use transport=auto.")
        return
    if importlib.util.find_spec("ray") is None:
        raise UserError("launcher=ray needs the package ray: pip install 'rlhfspec-mega[ray]', or use launcher=local.")
    if cluster.nodes > 1 and ray_address(launcher) is None:
        raise UserError(
            f"cluster.nodes={cluster.nodes} needs a running Ray cluster: `ray start --head` on one node, `ray start "
            "--address=HEAD:6379` on the others, then add launcher.address=auto."
        )
    if cluster.nodes > 1 and transport == "shared_memory":
        raise UserError("resharding.transport=shared_memory ends at one machine: use resharding.transport=auto.")


def check_devices(config: RunConfig) -> None:
    """Raises UserError for more GPUs than this machine has."""
    if device_type(config.cluster) == "cpu":
        return
    if config.launcher.kind == "ray" and ray_address(config.launcher):
        return  # the GPUs are on other machines: Ray checks before any worker starts
    wanted, there = config.cluster.devices_per_node, len(gpu_memory())
    if there == 0:
        raise UserError("cluster.device=cuda, but torch finds no NVIDIA GPU on this machine: use cluster=local.")
    if wanted > there:
        plural = "s" if there > 1 else ""
        raise UserError(
            f"cluster.devices_per_node={wanted}, but this machine has {there} GPU{plural}: set "
            f"cluster.devices_per_node={there} and parallel sizes that fit, or cluster.device=cpu."
        )


def check_memory(config: RunConfig, shape: ModelShape, sizes: Sizes) -> None:
    """Compare the plan with what the machine has: on a CPU, whose memory all workers share; on GPUs, on each of them.

    Raises UserError if the run does not fit.
    """
    actor, engine, draft = sizes.actor_memory, sizes.engine_memory, sizes.draft_memory
    parts = (
        f"per actor rank {actor.weights / GIB:,.1f} weights, {actor.gradients / GIB:,.1f} gradients, "
        f"{actor.optimizer / GIB:,.1f} optimizer, {actor.activations / GIB:,.1f} activations; "
        f"per engine {(engine.weights + engine.packed) / GIB:,.1f} weights, {engine.kv / GIB:,.1f} KV, "
        f"{engine.scores / GIB:,.1f} scores"
    )
    if draft.engine:
        of_draft = f"{draft.actor / GIB:,.1f} on one actor rank, {draft.engine / GIB:,.1f} on each engine"
        parts += f"; for the draft {of_draft}"
    for model, memory in sizes.frozen_memory.items():
        parts += f"; for each rank of the {model} model {memory / GIB:,.1f}"
    if device_type(config.cluster) == "cpu":
        placement, of_engine = sizes.placement, engine.total + draft.engine
        workers = sum(map(len, placement.processes().values()))
        need = sizes.actor_ranks * (actor.total + actor.weights) + sizes.engines * of_engine
        need += sum(len(placement.devices(model)) * memory for model, memory in sizes.frozen_memory.items())
        need += draft.actor + workers * PROCESS_BYTES + (sizes.engines * ENGINE_BYTES if uses_sglang(config) else 0)
        need += saving_bytes(shape, config.actor.dtype) if config.trainer.async_save else 0
        need, have = need // config.cluster.nodes, host_memory()
        where, hint = "this machine", "choose a smaller model or a machine with GPUs"
    elif not device_memory(config.cluster):
        return  # the GPUs' memory is unknown
    else:
        fullest = fullest_device(device_plans(config, shape, sizes))
        need, have = fullest.most, int(USABLE * fullest.capacity)
        where = "each GPU"
        hint = "raise actor.tensor_parallel or pipeline_parallel, set actor.recompute=true, or lower "
        hint += "rollout.max_running_requests"
        hint += "" if uses_sglang(config) else ", or use rollout=sglang, whose engines span GPUs"
        hint += ", or set speculation.refresh_every=0" if draft.actor else ""
    if need > have:
        raise UserError(
            f"Model {config.model.path or config.model.name} with {shape.parameters / 1e9:,.1f} billion weights needs "
            f"about {need / GIB:,.0f} GiB on {where} and {have / GIB:,.0f} GiB can be used ({parts}): {hint}."
        )


def check_job_end(config: RunConfig) -> None:
    """Raises UserError if a checkpoint is to be saved before the job ends, but the time of that end is not known."""
    trainer = config.trainer
    if trainer.save_before_end > 0 and trainer.time_limit == 0 and JOB_END not in os.environ:
        raise UserError(
            f"trainer.save_before_end={trainer.save_before_end} needs the job's end, and {JOB_END} is not set: add "
            "trainer.time_limit=SECONDS."
        )
    text = os.environ.get(JOB_END, "0")
    if trainer.save_before_end > 0 and not text.isdigit():
        raise UserError(
            f"trainer.save_before_end={trainer.save_before_end} needs the job's end, and {JOB_END}={text} is no number "
            f"of seconds: unset {JOB_END} and add trainer.time_limit=SECONDS."
        )
