"""Options of hardware, launcher, placement, resharding, and logging."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.config.option import option, section


@dataclass
class PlacementConfig:
    mode: str = option(
        "colocated", "actor and engines share devices, or have their own", choices=("colocated", "separate")
    )
    training_nodes: int | None = option(
        None,
        "the actor's nodes, the others generate; under Ray, nodes offer the resource `training` or `generation`; null: "
        "by devices, whatever node they are on",
        least=1,
        only_with="placement.mode=separate",
    )
    reference: str = option(
        "auto",
        "devices of the frozen models, reference and reward model: those of the engines, where they score finished "
        "samples while others decode, or the actor's; auto: generation, but actor under trainer.deterministic",
        choices=("auto", "generation", "actor"),
        only_with="a frozen model",
    )
    reference_tensor_parallel: int = option(
        1, "devices of one replica of the frozen models", least=1, only_with="frozen models on generation devices"
    )

    fuse: str = option(
        "auto",
        "actor and critic train in one pass, pipelines in opposite directions, so that one fills the other's bubbles: "
        "auto: where the pipelines allow it and a gain of 5% is predicted; always: in every update",
        choices=("auto", "off", "always"),
        only_with="a critic",
    )


@dataclass
class GpuConfig:
    """A data sheet, for planner and simulator; a run reads its own GPUs instead where it can."""

    name: str = option("none", "name of the GPU")
    memory_gib: float = option(0.0, "memory of a GPU", unit="GiB", least=0)
    memory_bandwidth: float = option(0.0, "bandwidth of its memory", unit="GB/s", least=0)
    bf16_tflops: float = option(0.0, "dense matrix products in bfloat16", unit="TFLOP/s", least=0)
    link_bandwidth: float = option(0.0, "between two GPUs of a node, each way", unit="GB/s", least=0)
    network_bandwidth: float = option(0.0, "of a GPU's network port", unit="GB/s", least=0)
    host_bandwidth: float = option(0.0, "between a GPU and its host's memory", unit="GB/s", least=0)


@dataclass
class ClusterConfig:
    device: str = option(
        "cpu", "what a device is; auto: the GPUs of this machine, if any", choices=("auto", "cpu", "cuda")
    )
    nodes: int = option(1, "machines", least=1)
    devices_per_node: int = option(2, "GPUs of a node, or processes that stand for them", least=1, common=True)
    threads_per_worker: int = option(1, "CPU threads of a worker", least=1)
    costs: str | None = option(
        None,
        "file of measured costs (tools.calibrate) for the times that dry_run predicts; null: from the data sheet",
        only_with="dry_run=true|json",
    )
    gpu: GpuConfig = section(GpuConfig, "the GPU, from its data sheet")


@dataclass
class LauncherConfig:
    kind: str = option(
        "local", "processes on this machine, or actors of Ray", choices=("local", "ray"), was=("cluster.launcher",)
    )
    address: str | None = option(
        None,
        "of a running Ray cluster; null: RAY_ADDRESS, else an instance of the run's own on this machine",
        only_with="launcher.kind=ray",
        was=("cluster.address",),
    )
    call_timeout: float = option(
        600.0, "longest wait for one answer of a worker", unit="seconds", above=0, was=("cluster.deadline_seconds",)
    )
    start_timeout: float = option(
        900.0, "longest wait for workers to start", unit="seconds", above=0, was=("cluster.start_seconds",)
    )
    # Bounded: workers send a heartbeat once a second.
    heartbeat_timeout: float = option(
        60.0,
        "a worker without a sign of life for so long is given up",
        unit="seconds",
        least=5,
        was=("cluster.silence_seconds",),
    )
    max_restarts: int = option(
        3,
        "restarts of each engine, each replica of the frozen models and the actor between two finished steps",
        least=0,
        was=("cluster.max_restarts",),
    )


@dataclass
class ReshardingConfig:
    transport: str = option(
        "auto",
        "how new weights travel to the engines; auto: shared_memory where the run starts all workers on this machine, "
        "collective with several nodes or a Ray cluster that it joins",
        choices=("auto", "shared_memory", "collective", "object_store"),
    )
    bucket_mib: float = option(256.0, "weights sent at once", unit="MiB", above=0)


@dataclass
class LoggerConfig:
    console: bool = option(True, "progress on the screen")
    tensorboard: bool = option(True, "write TensorBoard files; metrics.jsonl is always written", common=True)
    plots: bool = option(True, "draw curves.png, and of RL live_samples.png, at the end of the run")
    wandb: bool = option(False, "write to Weights & Biases")
    wandb_project: str = option("rlhfspec_mega", "its project", only_with="logger.wandb=true")
    rollouts_per_step: int = option(0, "samples written to rollouts.jsonl each step; 0: all", least=0)
