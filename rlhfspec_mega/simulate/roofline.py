"""Cost curves from a roofline model with stated parameters, for hardware that is not available."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import group_options
from rlhfspec_mega.config.schema.system import GpuConfig
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve, MigrationTimes

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# Weights of the draft (one layer and its vocabulary head) as a share of those of the model (conf/model/NAME.yaml).
DRAFT_SHARE = {"8b": 0.05, "32b": 0.03}
CURVES = tuple(f"{gpu}-{model}" for gpu in group_options()["cluster/gpu"] for model in DRAFT_SHARE)
# Typical values, which were assumed and not measured: shares of the peaks in the GPU's data sheet
# (conf/cluster/gpu/NAME.yaml) that are reached, and overheads.
REACHED = SimpleNamespace(
    memory_bandwidth=0.75,
    compute=0.6,
    network=0.8,  # for KV that migrates to another host
    host=0.9,  # for weights that are read from host memory
    memory=0.85,  # share of the memory for weights and KV
    link=0.7,  # between GPUs of a node
    all_reduce_start=1e-5,  # seconds of an all-reduce of a few bytes
    pass_overhead=1e-3,  # seconds added to each forward pass, launches and sampling included
)
# Tokens per step with shared noise at temperature 1 on high-entropy text, measured with a 14M target and a 3M draft of
# eight layers' depth (the lower of two such tables). It is not known whether large models reach these values.
DRAFTING = SimpleNamespace(
    tokens=(1, 2, 4, 8, 16, 32, 64),  # draft tokens per sample that may be chosen
    depths=(1, 2, 4, 8, 8, 8, 8),  # layers drafted for each
    tokens_per_step=(1.75, 2.27, 2.98, 3.61, 4.28, 4.87, 5.31),  # accepted draft tokens + 1, for each
    draft_pass_overhead=3e-4,  # seconds added to each pass of the draft
)
# downtime: seconds of a migration's stage two. copy_share: share of both engines' time that a stage-one copy takes.
ENGINE = SimpleNamespace(slots=256, downtime=0.02, copy_share=0.05)


def roofline(name: str) -> CostCurves:
    """Curves of a dense model on one GPU with 256 slots. `name` is one of CURVES; see `engine_roofline`."""
    gpu_name, _, model = name.partition("-")
    config = load_config(["cluster=8n8g", f"cluster/gpu={gpu_name}", f"model={model}"])
    shape, share = model_shape(config.model), DRAFT_SHARE[model]
    memory = config.cluster.gpu.memory_gib * 2**30 * REACHED.memory
    return engine_roofline(name, config.cluster.gpu, shape, share, gpus=1, slots=ENGINE.slots, memory=memory)


def engine_roofline(
    name: str, gpu: GpuConfig, shape: ModelShape, draft_share: float, *, gpus: int, slots: int, memory: float
) -> CostCurves:
    """Curves of an engine for a dense model in bfloat16, with tensor parallelism over its GPUs.

    A pass over x tokens takes the time of reading all weights once or that of 2 FLOP per weight and token, whichever is
    longer, and with several GPUs that of two all-reduces per layer. Attention is a separate phase in each layer and
    adds the time of reading the KV cache. Adaptive drafting uses, for each batch, the number of draft tokens with the
    most tokens per second, which may be 0.

    Args:
        draft_share: weights of the draft as a share of the model's; 0: there is no draft.
        gpus: of the engine.
        memory: bytes of each GPU for weights and KV.

    Returns the curves; `source` has all parameters.
    """
    bandwidth = gpus * gpu.memory_bandwidth * 1e9 * REACHED.memory_bandwidth
    compute = gpus * gpu.bf16_tflops * 1e12 * REACHED.compute
    kv_bytes = kv_bytes_per_token(shape)
    weights = 2.0 * shape.parameters
    kv_pass = kv_bytes / bandwidth

    def model_pass(tokens: int) -> float:
        passed = max(weights / bandwidth, 2.0 * shape.parameters * tokens / compute)
        return passed + shape.num_layers * 2 * all_reduce_seconds(gpu, gpus, 2.0 * tokens * shape.hidden_size)

    batches = tuple(batch for batch in BATCHES if batch <= max(slots, 1))
    plain = [REACHED.pass_overhead + model_pass(batch) for batch in batches]
    best = [
        min([(seconds, 1.0, 0), *(_drafted(model_pass, draft_share, batch) if draft_share else ())])
        for batch, seconds in zip(batches, plain, strict=True)
    ]
    room = gpus * memory - weights * (1.0 + draft_share)
    seconds, gained, draft_tokens = zip(*best, strict=True)
    # The KV cache is read once for all tokens of a step.
    drafting = DecodeCurve(batches, seconds, tuple(kv_pass / tokens for tokens in gained))
    return CostCurves(
        name=name,
        source={
            "kind": "roofline",
            "device": asdict(gpu),
            "reached": vars(REACHED),
            "target": shape.identity() | {"draft_share": draft_share},
            "drafting": vars(DRAFTING),
            "engine": vars(ENGINE) | {"slots": slots, "gpus": gpus},
            "draft_tokens": list(draft_tokens),  # per sample, at each batch of the curve
        },
        slots=slots,
        kv_tokens=max(int(room / kv_bytes), 1),
        plain=DecodeCurve(batches, tuple(plain), (kv_pass,) * len(batches)),
        drafting=drafting if draft_share else None,
        prefill_seconds=2.0 * shape.parameters / compute,
        scoring_seconds=2.0 * shape.parameters / compute,
        scoring_start=weights / gpus / (gpu.host_bandwidth * 1e9 * REACHED.host),
        migration=MigrationTimes(
            ENGINE.downtime, kv_bytes / (gpu.network_bandwidth * 1e9 * REACHED.network), ENGINE.copy_share
        ),
    )


def _drafted(model_pass: Callable[[int], float], draft_share: float, batch: int) -> Iterator[tuple[float, float, int]]:
    """Seconds per token, tokens per step and draft tokens of a sample, for each number of draft tokens."""
    for number, depth, gained in zip(DRAFTING.tokens, DRAFTING.depths, DRAFTING.tokens_per_step, strict=True):
        per_pass = batch * -(-number // depth)
        draft = depth * (DRAFTING.draft_pass_overhead + draft_share * model_pass(per_pass))
        verify = REACHED.pass_overhead + model_pass(batch * (1 + number))
        yield (draft + verify) / gained, gained, number


def all_reduce_seconds(gpu: GpuConfig, gpus: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes over GPUs of one node, by a ring; 0 for one GPU."""
    if gpus < 2:
        return 0.0
    return REACHED.all_reduce_start + 2 * size * (gpus - 1) / gpus / (gpu.link_bandwidth * 1e9 * REACHED.link)


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Bytes of the keys and values of one token in bfloat16."""
    return 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
