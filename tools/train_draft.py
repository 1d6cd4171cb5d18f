"""Train a first EAGLE-3 draft for a Hugging Face model, on the model's own samples.

    python -m tools.train_draft --model DIR --out DRAFT --prompts prompts.jsonl --samples 4096 --draft-vocab 32000

DRAFT is a directory that SGLang can load too; a run uses it with speculation.draft_model_path=DRAFT. Without --prompts,
the prompts of the built-in task are used. All samples are kept in memory with their hidden states: 4 * hidden size
numbers per token.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlhfspec_mega.errors import RunError, UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory of the target")
    parser.add_argument("--out", type=Path, required=True, help="directory for the draft")
    parser.add_argument("--prompts", help="JSONL or Parquet file of prompts; default: the built-in task's")
    parser.add_argument("--prompt-column", default="question")
    parser.add_argument("--chat-template", action="store_true", help="prompts are user messages")
    parser.add_argument("--samples", type=int, default=4096, help="responses to sample (default 4096)")
    parser.add_argument("--members", type=int, default=2, help="responses to one prompt (default 2)")
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=256,
        help="longer prompts are left out; error messages call this rollout.max_prompt_tokens (default 256)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=1200, help="training steps (default 1200)")
    parser.add_argument("--batch-tokens", type=int, default=512, help="tokens per training step (default 512)")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--ffn-size", type=int, help="width of the draft's feed-forward network (default: the model's)")
    parser.add_argument("--draft-vocab", type=int, help="most frequent tokens in the draft's vocabulary (default: all)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    arguments = parser.parse_args()
    try:
        train_draft(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def train_draft(arguments: argparse.Namespace) -> None:
    """Sample, train and write the draft. Raises UserError for an unusable model, prompt, number or output directory."""
    numbers = ("samples", "members", "steps", "batch_tokens", "learning_rate", "temperature")
    for name in (*numbers, "max_prompt_tokens", "max_new_tokens"):
        if getattr(arguments, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0.")
    if arguments.draft_vocab is not None and arguments.draft_vocab < 2:
        raise UserError("--draft-vocab must be at least 2.")
    if arguments.ffn_size is not None and arguments.ffn_size < 1:
        raise UserError("--ffn-size must be at least 1.")
    from rlhfspec_mega.bootstrap.first_draft import DraftRecipe, make_draft
    from rlhfspec_mega.config.schema.generation import DataConfig
    from rlhfspec_mega.data.prompts import make_prompts
    from rlhfspec_mega.data.tokenizer import load_tokenizer
    from rlhfspec_mega.generation import stop_tokens
    from rlhfspec_mega.observe.console import Console

    _check_device(arguments.device)
    _check_out(arguments.out)
    recipe = DraftRecipe(
        prompts=-(-arguments.samples // arguments.members),
        members=arguments.members,
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        batch_tokens=arguments.batch_tokens,
        draft_vocab=arguments.draft_vocab,
        ffn_size=arguments.ffn_size,
    )
    tokenizer = load_tokenizer(arguments.model)
    data = DataConfig(
        kind="files" if arguments.prompts else "chain_sums",
        train=[arguments.prompts] if arguments.prompts else [],
        prompt_column=arguments.prompt_column,
        answer_column=arguments.prompt_column,  # not used, because answers are not needed
        chat_template=arguments.chat_template,
    )
    stream, _ = make_prompts(data, tokenizer, arguments.max_prompt_tokens, 0, seed=recipe.seed)
    prompts = [prompt.tokens for prompt in stream.next_batch(recipe.prompts)]
    with Console(recipe.steps) as console:
        stops = stop_tokens(tokenizer, arguments.model)
        make_draft(arguments.model, arguments.out, prompts, stops, recipe, console, arguments.device)
        console.note(f"The draft is in {arguments.out}: use it with speculation.draft_model_path={arguments.out}.")


def _check_device(name: str) -> None:
    import torch

    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {name} is not known: use cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}, but torch finds no NVIDIA GPU on this machine: use --device cpu.")


def _check_out(out: Path) -> None:
    """Raise UserError before any work if the draft could not be written to `out`."""
    from rlhfspec_mega.draft.directory import check_place

    check_place(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made ({error.strerror}): choose another place.") from None
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out} cannot be made (no permission to write there): choose another place.")


if __name__ == "__main__":
    sys.exit(main())
