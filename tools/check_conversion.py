"""Compares a Megatron distributed checkpoint with the Hugging Face directory that it was made from, or the other way.

    python -m tools.check_conversion Qwen3-8B qwen3_8b_megatron --text "The capital of France is Paris."

Every tensor must be the same bit by bit (after rounding, if the two have different dtypes). Then both sides compute the
log-probs of the text in float32, one with transformers and one with Megatron-core, on the CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.model_directory import find_model
from tools.command import exit_status, progress_in_bytes

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-3  # nats: two float32 implementations of one model differ by less
TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42."


def compare_tensors(hf: Path, checkpoint: Path) -> int:
    """Compare all tensors; returns their number.

    Raises:
        UserError: one of the two is damaged or of another model.
        RunError: names the first tensor that differs.
    """
    import torch

    from rlhfspec_mega.checkpoints.verifying import require_intact
    from rlhfspec_mega.conversion.from_megatron import MegatronWeights
    from rlhfspec_mega.conversion.hf_source import exact_weights

    shape = read_shape(hf)
    require_intact(checkpoint)
    theirs, ours = exact_weights(hf, shape), MegatronWeights(checkpoint, shape)
    dtype, compared = getattr(torch, ours.dtype), 0
    with progress_in_bytes("comparing", shape.parameters * dtype.itemsize) as progress:
        for names in ours.parameters():
            merged = [torch.empty(theirs.info(name).shape, dtype=dtype) for name in names]
            ours.read_into(names, merged)
            for name, tensor in zip(names, merged, strict=True):
                if not same_bits(theirs.get(name).to(dtype), tensor):
                    raise RunError(f"{name} differs between {hf} and {checkpoint}.")
                progress(tensor.nbytes)
            compared += len(names)
    return compared


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype are the same bit by bit: NaN is then equal to itself, and 0.0 is not -0.0."""
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest absolute difference between two lists of one length; NaN if any difference is NaN."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    # max() passes over a NaN that is not the first.
    return math.nan if any(math.isnan(difference) for difference in differences) else max(differences)


def numbers_of_transformers(hf: Path, tokens: list[int]) -> list[float]:
    """Log-prob of every token but the first; of a classifier, the score after every token but the last."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if read_shape(hf).value_head:
        classifier = AutoModelForSequenceClassification.from_pretrained(hf, dtype=torch.float32)
        with torch.no_grad():
            hidden = classifier.base_model(torch.tensor([tokens])).last_hidden_state
            return classifier.score(hidden)[0, :-1, 0].tolist()
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def numbers_of_megatron(hf: Path, checkpoint: Path, tokens: list[int]) -> list[float]:
    """The same by one Megatron rank."""
    import torch

    import rlhfspec_mega.megatron.quick_start  # noqa: F401
    from rlhfspec_mega.config.schema.training import ActorConfig
    from rlhfspec_mega.megatron.description import ParallelSizes, describe
    from rlhfspec_mega.megatron.model import MegatronModel
    from rlhfspec_mega.megatron.process import join, leave, seed_megatron
    from rlhfspec_mega.megatron.rendezvous import Rendezvous
    from rlhfspec_mega.rl.experience import Experience
    from rlhfspec_mega.rl.microbatch import Shard

    described = describe("check", read_shape(hf), ActorConfig(dtype="float32"), ParallelSizes(), temperature=1.0)
    with tempfile.TemporaryDirectory() as directory:
        join(Rendezvous(f"file://{directory}/meet", 0, 1, 600.0), torch.device("cpu"))
        try:
            model = MegatronModel(described, [0], torch.device("cpu"), 600.0)
            seed_megatron(0, model.position)
            model.load_distributed(checkpoint)
            samples = Experience.of([tokens[:1]], [tokens[1:]])
            found = model.columns(Shard.cut(samples, [[0]]).batches())
        finally:
            leave()
    assert found is not None
    return found[0].tolist()


def check(arguments: argparse.Namespace) -> None:
    """Compare; raises UserError for bad input and RunError for a difference."""
    model = find_model(arguments.megatron, arguments.hf)
    if model.checkpoint is None:
        raise UserError(f"{arguments.megatron} is no Megatron distributed checkpoint: it has no metadata.json.")
    warnings.simplefilter("ignore")  # Megatron's, about kernels that a CPU does not need
    print(f"{compare_tensors(arguments.hf, model.checkpoint)} tensors are the same bit by bit.")
    from rlhfspec_mega.data.tokenizer import load_tokenizer

    tokens = load_tokenizer(arguments.hf).encode(arguments.text)
    if len(tokens) < 2:
        raise UserError(f"--text {arguments.text!r} has {len(tokens)} tokens: give a longer one.")
    theirs = numbers_of_transformers(arguments.hf, tokens)
    ours = numbers_of_megatron(arguments.hf, model.checkpoint, tokens)
    worst = largest_difference(theirs, ours)
    mean = sum(theirs) / len(theirs)
    what = "Scores" if read_shape(arguments.hf).value_head else "Log-probs"
    print(f"{what} of {len(theirs)} tokens (mean {mean:.4f}) differ by {worst:.1e} at most.")
    if not math.isfinite(worst):
        raise RunError("A difference is not finite: a number of one of the two is infinite or none at all.")
    if worst > TOLERANCE:
        raise RunError(f"That is more than {TOLERANCE:g}: the two are not the same model.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf", type=Path, help="Hugging Face directory, with tokenizer")
    parser.add_argument("megatron", type=Path, help="Megatron distributed checkpoint, or a step_N directory of a run")
    parser.add_argument("--text", default=TEXT, help="whose log-probs are compared")
    arguments = parser.parse_args()
    return exit_status(lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
