"""Cost curves from a roofline with stated parameters, for hardware that is not at hand."""

from __future__ import annotations

from types import SimpleNamespace

from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve, MigrationTimes

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


# Data sheet of the H200 SXM (4.8 TB/s, 989 TFLOP/s, 141 GB), PCIe 5 x16 and one 400 Gb/s port per device; the shares
# reached, overheads and migration are assumptions of the usual size, not measurements.
H200 = SimpleNamespace(
    name="H200 SXM",
    bytes_per_second=4.8e12,  # peaks, of memory and of dense products in bf16
    flops_per_second=9.89e14,
    memory_efficiency=0.75,  # reached shares of the peaks
    compute_efficiency=0.6,
    memory_bytes=141e9,
    memory_used=0.85,  # for weights and KV
    host_bytes_per_second=5e10,  # from host memory, for weights that wait there
    link_bytes_per_second=4e10,  # between devices of different hosts, for KV that migrates
    pass_overhead=1e-3,  # seconds of a forward pass however small, launches and sampling included
)
# Shapes of Llama-3.1-8B (32 layers, 8 KV heads of 128) and Qwen3-32B (64 layers, 8 KV heads of 128).
# kv_bytes are of one token; draft_share is the draft's parameters, one layer and its vocabulary head, over the model's.
TARGETS = {
    "h200-8b": SimpleNamespace(name="8B, bf16", parameters=8.0e9, kv_bytes=2 * 2 * 32 * 8 * 128, draft_share=0.05),
    "h200-32b": SimpleNamespace(name="32B, bf16", parameters=32.8e9, kv_bytes=2 * 2 * 64 * 8 * 128, draft_share=0.03),
}
# Tokens per step with shared noise at temperature 1 on high-entropy text, as measured with a 14M target and a 3M draft
# of eight layers' depth: the lower of two such tables. Whether large models reach it is not known.
DRAFTING = SimpleNamespace(
    tokens=(1, 2, 4, 8, 16, 32, 64),  # draft tokens per sample that may be chosen
    depths=(1, 2, 4, 8, 8, 8, 8),  # layers drafted for each
    tokens_per_step=(1.75, 2.27, 2.98, 3.61, 4.28, 4.87, 5.31),  # accepted draft tokens and one, for each
    draft_pass_overhead=3e-4,  # seconds of one pass of the draft however small
)
# Seconds of a migration's stage two; share of both devices' time that stage one takes.
ENGINE = SimpleNamespace(slots=256, downtime=0.02, copy_share=0.05)


def roofline(name: str, target: SimpleNamespace) -> CostCurves:
    """Curves of a dense model in bf16 on an H200; all parameters are in their `source`.

    A pass over x tokens takes the longer of reading all weights once and of 2 FLOP per weight and token; attention,
    a phase of its own in each layer, adds the reading of the KV cache. Adaptive drafting takes for each batch the
    number of draft tokens that gives the most tokens per second, none included.
    """
    memory = H200.bytes_per_second * H200.memory_efficiency
    compute = H200.flops_per_second * H200.compute_efficiency
    weights = 2.0 * target.parameters
    kv_pass = target.kv_bytes / memory

    def model_pass(tokens: int) -> float:
        return max(weights / memory, 2.0 * target.parameters * tokens / compute)

    plain = [H200.pass_overhead + model_pass(batch) for batch in BATCHES]
    best = []
    for batch, seconds in zip(BATCHES, plain, strict=True):
        choices = [(seconds, 1.0, 0)]
        for number, depth, gained in zip(DRAFTING.tokens, DRAFTING.depths, DRAFTING.tokens_per_step, strict=True):
            per_pass = batch * -(-number // depth)
            draft = depth * (DRAFTING.draft_pass_overhead + target.draft_share * model_pass(per_pass))
            verify = H200.pass_overhead + model_pass(batch * (1 + number))
            choices.append(((draft + verify) / gained, gained, number))
        best.append(min(choices))
    room = H200.memory_bytes * H200.memory_used - weights * (1.0 + target.draft_share)
    parameters = {
        "device": vars(H200),
        "target": vars(target),
        "drafting": vars(DRAFTING),
        "engine": vars(ENGINE),
        "draft_tokens": [number for _, _, number in best],  # of a sample, at each of the curve's batches
    }
    return CostCurves(
        name=name,
        source={"kind": "roofline"} | parameters,
        slots=ENGINE.slots,
        kv_tokens=int(room / target.kv_bytes),
        plain=DecodeCurve(BATCHES, tuple(plain), (kv_pass,) * len(BATCHES)),
        # One reading of the KV cache serves all tokens of a step.
        drafting=DecodeCurve(
            BATCHES, tuple(seconds for seconds, _, _ in best), tuple(kv_pass / gained for _, gained, _ in best)
        ),
        prefill_seconds=2.0 * target.parameters / compute,
        scoring_seconds=2.0 * target.parameters / compute,
        scoring_start=weights / H200.host_bytes_per_second,
        migration=MigrationTimes(ENGINE.downtime, target.kv_bytes / H200.link_bytes_per_second, ENGINE.copy_share),
    )
