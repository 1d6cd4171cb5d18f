"""A target of high entropy without downloads: a small Llama trained on the English text of the Python installation.

    python -m benchmarks.text_target --steps 600

The text is that of pydoc's topics and of the docstrings of the standard library; a token is a byte. The model is
trained in plain torch (minutes on one core), kept in the cache as an ordinary Hugging Face directory, and gets its
EAGLE-3 draft from benchmarks.samples like any other target.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import math
import os
import random
import shutil
import sysconfig
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec_mega.bootstrap.cache import cache_root
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.data.tokenizer import load_tokenizer, make_byte_tokenizer
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.types import TensorInfo

STEPS = 600
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, POSITIONS = 128, 4, 4, 2, 384, 1024  # the sizes of model=tiny
BATCH, WINDOW = 16, 160  # sequences and bytes of a training step
LEARNING_RATE, WARMUP_STEPS = 4e-3, 40
SHORTEST = 80  # characters of a docstring worth keeping
HELD_OUT_EVERY = 20  # one passage in this many is kept for prompts
_RECIPE_VERSION = 1  # part of the cache key: raise it when the recipe's code changes


@cache
def passages(split: str) -> tuple[str, ...]:
    """Pieces of English of the Python installation, "train" or "eval": none is in both."""
    from pydoc_data.topics import topics

    texts = dict.fromkeys([*topics.values(), *_docstrings(Path(sysconfig.get_paths()["stdlib"]))])
    held_out = {text for text in texts if hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_EVERY == 0}
    return tuple(text for text in texts if (text in held_out) == (split == "eval"))


def text_prompts(split: str, count: int, length: int, bos: int) -> list[tuple[int, ...]]:
    """`count` pieces of the split's passages ("train" or "eval"), `length` tokens each, <bos> included."""
    texts = [text.encode() for text in passages(split)]
    pieces = [text[at : at + length - 1] for text in texts for at in range(0, len(text) - length + 1, length)]
    chosen = random.Random(0).sample(pieces, min(count, len(pieces)))
    return [(bos, *chosen[number % len(chosen)]) for number in range(count)]


def text_target(steps: int = STEPS) -> Path:
    """Directory of the model, from the cache or trained now."""
    corpus = "\0".join(passages("train")).encode()
    recipe = (_RECIPE_VERSION, steps, HIDDEN, LAYERS, BATCH, WINDOW, LEARNING_RATE, hashlib.sha256(corpus).hexdigest())
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:10]
    directory = cache_root(load_config([])) / f"text-{key}"
    if not (directory / "config.json").exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".text.") as temporary:
            partial = Path(temporary) / "model"
            _train(partial, torch.frombuffer(bytearray(corpus), dtype=torch.uint8), steps)
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(partial, directory)
    return directory


def _docstrings(library: Path) -> list[str]:
    """Docstrings of the standard library's modules, classes and functions, in the order of the files' names."""
    found = []
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a file for another version of Python
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        found += [text for node in nodes if len(text := ast.get_docstring(node) or "") >= SHORTEST]
    return found


def _train(directory: Path, corpus: torch.Tensor, steps: int) -> None:
    """Next-byte prediction on random windows, each behind a <bos>; AdamW, linear warm-up, cosine decay."""
    make_byte_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    model = _initial_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    offsets, bos = torch.arange(WINDOW), torch.full((BATCH, 1), tokenizer.bos_token_id)
    started = time.monotonic()
    for step in range(steps):
        rate = min((step + 1) / WARMUP_STEPS, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        starts = torch.randint(len(corpus) - WINDOW, (BATCH, 1), generator=generator)
        tokens = torch.cat((bos, corpus[starts + offsets].long()), dim=1)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49 or step == steps - 1:
            print(f"text target {step + 1}/{steps}: {loss:.3f} nats, {time.monotonic() - started:.0f} s", flush=True)
    model.save_pretrained(directory)


def _initial_model(tokenizer: object) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),  # type: ignore[arg-type]
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,  # type: ignore[attr-defined]
        eos_token_id=tokenizer.eos_token_id,  # type: ignore[attr-defined]
        pad_token_id=tokenizer.pad_token_id,  # type: ignore[attr-defined]
    )
    model = LlamaForCausalLM(config).float()
    parameters = dict(model.named_parameters())
    infos = [TensorInfo(name, tuple(p.shape), "float32") for name, p in parameters.items()]
    with torch.no_grad():
        for name, tensor in initial_tensors(infos, LAYERS, seed=0):
            parameters[name].copy_(tensor)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training; the cache keeps one model per number")
    torch.set_num_threads(1)
    print(text_target(parser.parse_args().steps))


if __name__ == "__main__":
    main()
