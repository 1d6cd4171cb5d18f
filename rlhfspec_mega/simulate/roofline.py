"""Cost curves from a roofline with stated parameters, for hardware that is not at hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve, MigrationTimes

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Device:
    """An accelerator, by its data sheet and the share of it that is reached.

    Attributes:
        bytes_per_second, flops_per_second: peaks, of memory and of dense products in bf16.
        memory_efficiency, compute_efficiency: reached shares of the peaks.
        memory_bytes: of which `memory_used` is for weights and KV.
        host_bytes_per_second: from host memory, for weights that wait there.
        link_bytes_per_second: between devices of different hosts, for KV that migrates.
        pass_overhead: seconds of a forward pass however small, launches and sampling included.
    """

    name: str
    bytes_per_second: float
    flops_per_second: float
    memory_efficiency: float
    compute_efficiency: float
    memory_bytes: float
    memory_used: float
    host_bytes_per_second: float
    link_bytes_per_second: float
    pass_overhead: float


@dataclass(frozen=True)
class Target:
    """A dense model in bf16 on one device, and its draft.

    Attributes:
        parameters: of the model.
        kv_bytes: of one token in the KV cache.
        draft_share: parameters of the draft, one layer and its vocabulary head, over the model's.
    """

    name: str
    parameters: float
    kv_bytes: float
    draft_share: float


@dataclass(frozen=True)
class Drafting:
    """What speculation yields.

    Attributes:
        tokens: draft tokens per sample that may be chosen, ascending.
        depths: layers drafted for each.
        tokens_per_step: accepted draft tokens and one, for each.
        draft_pass_overhead: seconds of one pass of the draft however small.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    tokens_per_step: tuple[float, ...]
    draft_pass_overhead: float


@dataclass(frozen=True)
class Engine:
    """How the engine is set up.

    Attributes:
        downtime: seconds of a migration's stage two.
        copy_share: of both devices' time that stage one takes.
    """

    slots: int
    downtime: float
    copy_share: float


# Data sheet of the H200 SXM (4.8 TB/s, 989 TFLOP/s, 141 GB), PCIe 5 x16 and one 400 Gb/s port per device; the shares
# reached, overheads and migration are assumptions of the usual size, not measurements.
H200 = Device(
    name="H200 SXM",
    bytes_per_second=4.8e12,
    flops_per_second=9.89e14,
    memory_efficiency=0.75,
    compute_efficiency=0.6,
    memory_bytes=141e9,
    memory_used=0.85,
    host_bytes_per_second=5e10,
    link_bytes_per_second=4e10,
    pass_overhead=1e-3,
)
# Shapes of Llama-3.1-8B (32 layers, 8 KV heads of 128) and Qwen3-32B (64 layers, 8 KV heads of 128).
TARGETS = {
    "h200-8b": Target("8B, bf16", 8.0e9, 2 * 2 * 32 * 8 * 128, 0.05),
    "h200-32b": Target("32B, bf16", 32.8e9, 2 * 2 * 64 * 8 * 128, 0.03),
}
# Tokens per step with shared noise at temperature 1 on high-entropy text, as measured with a 14M target and a 3M draft
# of eight layers' depth: the lower of two such tables. Whether large models reach it is not known.
DRAFTING = Drafting(
    tokens=(1, 2, 4, 8, 16, 32, 64),
    depths=(1, 2, 4, 8, 8, 8, 8),
    tokens_per_step=(1.75, 2.27, 2.98, 3.61, 4.28, 4.87, 5.31),
    draft_pass_overhead=3e-4,
)
ENGINE = Engine(slots=256, downtime=0.02, copy_share=0.05)


def roofline(
    name: str, target: Target, device: Device = H200, drafting: Drafting = DRAFTING, engine: Engine = ENGINE
) -> CostCurves:
    """Curves of a model on a device; all parameters are in their `source`.

    A pass over x tokens takes the longer of reading all weights once and of 2 FLOP per weight and token; attention,
    a phase of its own in each layer, adds the reading of the KV cache. Adaptive drafting takes for each batch the
    number of draft tokens that gives the most tokens per second, none included.
    """
    memory = device.bytes_per_second * device.memory_efficiency
    compute = device.flops_per_second * device.compute_efficiency
    weights = 2.0 * target.parameters
    kv_pass = target.kv_bytes / memory

    def model_pass(tokens: int) -> float:
        return max(weights / memory, 2.0 * target.parameters * tokens / compute)

    plain = [device.pass_overhead + model_pass(batch) for batch in BATCHES]
    best = []
    for batch, seconds in zip(BATCHES, plain, strict=True):
        choices = [(seconds, 1.0, 0)]
        for number, depth, gained in zip(drafting.tokens, drafting.depths, drafting.tokens_per_step, strict=True):
            per_pass = batch * -(-number // depth)
            draft = depth * (drafting.draft_pass_overhead + target.draft_share * model_pass(per_pass))
            verify = device.pass_overhead + model_pass(batch * (1 + number))
            choices.append(((draft + verify) / gained, gained, number))
        best.append(min(choices))
    room = device.memory_bytes * device.memory_used - weights * (1.0 + target.draft_share)
    parameters = {
        "device": asdict(device),
        "target": asdict(target),
        "drafting": asdict(drafting),
        "engine": asdict(engine),
        "draft_tokens": [number for _, _, number in best],  # of a sample, at each of the curve's batches
    }
    return CostCurves(
        name=name,
        source={"kind": "roofline"} | parameters,
        slots=engine.slots,
        kv_tokens=int(room / target.kv_bytes),
        plain=DecodeCurve(BATCHES, tuple(plain), (kv_pass,) * len(BATCHES)),
        # One reading of the KV cache serves all tokens of a step.
        drafting=DecodeCurve(
            BATCHES,
            tuple(seconds for seconds, _, _ in best),
            tuple(kv_pass / gained for _, gained, _ in best),
        ),
        prefill_seconds=2.0 * target.parameters / compute,
        scoring_seconds=2.0 * target.parameters / compute,
        scoring_start=weights / device.host_bytes_per_second,
        migration=MigrationTimes(engine.downtime, target.kv_bytes / device.link_bytes_per_second, engine.copy_share),
    )
