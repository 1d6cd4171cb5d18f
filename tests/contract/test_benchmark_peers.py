"""The outside peer decodes what the engine decodes, and its limits are said."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.peers import Method, Peer, check_greedy
from benchmarks.samples import Sampled, Target, load_target, sample
from rlhfspec_mega.data.tokenizer import make_byte_tokenizer
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape

SHAPE = ModelShape("llama", 32, 2, 4, 2, 8, 48, 259, 128, 500.0, 1e-5, True)
PROMPTS = [(257, *text) for text in (b"1+2=", b"one two three one two", b"x", b"aaaa")]
LENGTH = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    directory = Path(tmp_path_factory.mktemp("peer")) / "model"
    generator = torch.Generator().manual_seed(0)
    tensors = [
        (info.name, torch.randn(info.shape, generator=generator) * 0.25 + ("norm" in info.name))
        for info in mapping_for("llama").hf_tensors(SHAPE)
    ]
    write_directory(directory, SHAPE, tensors)
    make_byte_tokenizer(directory)
    return load_target(directory)


@pytest.fixture(scope="module")
def peer(target) -> Peer:
    return Peer(target, assistant=target)


@pytest.fixture(scope="module")
def greedy(target) -> list[Sampled]:
    return sample(target, PROMPTS, temperature=0.0, max_new_tokens=LENGTH, seed=0, forced=True)


@pytest.mark.parametrize(("method", "batch"), [(m, 1) for m in Method] + [(Method.PLAIN, 3)])
def test_greedy_tokens_are_those_of_the_engine(target, peer, greedy, method: Method, batch: int):
    decoded = peer.decode(PROMPTS, LENGTH, method=method, temperature=0.0, batch=batch)
    check_greedy(target, greedy, decoded.tokens)
    assert [len(tokens) for tokens in decoded.tokens] == [LENGTH] * len(PROMPTS)
    assert decoded.tokens_per_second == pytest.approx(LENGTH * len(PROMPTS) / decoded.seconds)


@pytest.mark.parametrize("method", Method)
def test_sampled_lengths_are_forced(peer, target, method: Method):
    decoded = peer.decode(PROMPTS[:2], LENGTH, method=method, temperature=1.0)
    assert all(len(tokens) == LENGTH and target.tokenizer.eos_token_id not in tokens for tokens in decoded.tokens)


def test_a_wrong_token_is_found(target, greedy):
    response = list(greedy[1].response)
    response[7] = (response[7] + 1) % 256
    theirs = [sampled.response for sampled in greedy]
    theirs[1] = tuple(response)
    with pytest.raises(RunError, match="part at token 7"):
        check_greedy(target, greedy, theirs)


def test_what_transformers_cannot_do_is_refused(target, peer):
    for method in (Method.LOOKUP, Method.ASSISTED):
        with pytest.raises(UserError, match="one sequence at a time"):
            peer.decode(PROMPTS, LENGTH, method=method, batch=2)
    with pytest.raises(UserError, match="needs an assistant"):
        Peer(target).decode(PROMPTS, LENGTH, method=Method.ASSISTED)


def test_another_tokenizer_is_refused(target, tmp_path):
    class Other:
        pad_token_id = eos_token_id = 0

        @staticmethod
        def get_vocab() -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(UserError, match="another tokenizer"):
        Peer(target, assistant=dataclasses.replace(target, tokenizer=Other()))
