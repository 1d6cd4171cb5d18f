"""Plan, pack and unpack of buckets as properties; the checksum against a plain Python sum and against damage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.resharding.buckets import checksum, pack, plan_buckets, unpack
from rlhfspec_mega.types import TensorInfo

TENSORS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
        st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
        st.integers(0, 2),  # owner
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(specs=TENSORS, bucket_bytes=st.integers(16, 700))
def test_every_element_travels_exactly_once(specs, bucket_bytes):
    tensors = [TensorInfo(f"t{i}", tuple(shape), dtype) for i, (shape, dtype, _) in enumerate(specs)]
    owners = {f"t{i}": owner for i, (_, _, owner) in enumerate(specs)}
    full = {info.name: torch.randn(info.shape).to(getattr(torch, info.dtype)) for info in tensors}
    arrived = {name: torch.full((tensor.numel(),), torch.nan, dtype=tensor.dtype) for name, tensor in full.items()}
    buckets = plan_buckets(tensors, owners.__getitem__, bucket_bytes)
    assert buckets == plan_buckets(tensors, owners.__getitem__, bucket_bytes)
    assert [bucket.id for bucket in buckets] == list(range(len(buckets)))
    buffer = torch.randint(0, 256, (bucket_bytes,), dtype=torch.uint8)
    for bucket in buckets:
        assert 0 < bucket.bytes <= bucket_bytes
        assert all(piece.offset % 16 == 0 for piece in bucket.pieces)
        assert {owners[name] for name in bucket.names} == {bucket.owner}
        buffer.random_(0, 256)
        sent = pack(bucket, full.items(), buffer)
        assert sent.numel() == bucket.bytes
        for name, start, values in unpack(bucket, sent.clone()):
            target = arrived[name][start : start + values.numel()]
            assert target.isnan().all()
            target.copy_(values)
    assert all(torch.equal(arrived[name].view(full[name].shape), full[name]) for name in full)


def test_small_tensors_are_whole_and_large_ones_cut():
    tensors = [TensorInfo("a", (3,), "float32"), TensorInfo("b", (40,), "float32"), TensorInfo("c", (4,), "float32")]
    buckets = plan_buckets(tensors, lambda name: 0, 64)
    pieces = [[(piece.name, piece.start, piece.count, piece.offset) for piece in bucket.pieces] for bucket in buckets]
    assert pieces == [[("a", 0, 3, 0)], [("b", 0, 16, 0)], [("b", 16, 16, 0)], [("b", 32, 8, 0), ("c", 0, 4, 32)]]


def test_same_tensors_give_the_same_bytes_and_the_planned_dtype():
    tensors = [TensorInfo("a", (3,), "bfloat16"), TensorInfo("b", (1,), "float32")]
    [bucket] = plan_buckets(tensors, lambda name: 4, 1000)
    full = {"a": torch.randn(3), "b": torch.randn(1), "ignored": torch.randn(9)}
    sums = {checksum(pack(bucket, full.items(), torch.full((64,), fill, dtype=torch.uint8))) for fill in (0, 255)}
    assert len(sums) == 1
    [(_, _, a), _] = unpack(bucket, pack(bucket, full.items(), torch.empty(64, dtype=torch.uint8)))
    assert torch.equal(a, full["a"].bfloat16())


def test_missing_tensors_and_tiny_buckets_are_refused():
    tensors = [TensorInfo("a", (3,), "float32"), TensorInfo("b", (3,), "float32")]
    [bucket] = plan_buckets(tensors, lambda name: 1, 64)
    with pytest.raises(RunError, match="stage 1 was not given b"):
        pack(bucket, [("a", torch.zeros(3))], torch.empty(64, dtype=torch.uint8))
    with pytest.raises(UserError, match="bucket_mib"):
        plan_buckets(tensors, lambda name: 0, 8)


def plain_checksum(data: bytes) -> int:
    """The checksum with Python integers, word by word."""
    mask, chunk_words = (1 << 64) - 1, 1 << 18

    def weight(position: int) -> int:
        z = (position + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return (z ^ (z >> 31)) | 1

    def words(part: bytes) -> list[int]:
        return [int.from_bytes(part[i : i + 4], "little", signed=True) for i in range(0, len(part), 4)]

    whole = len(data) // 4 * 4
    full = words(data[:whole])
    chunks = [full[i : i + chunk_words] for i in range(0, max(len(full), 1), chunk_words)]
    total = len(data)
    for chunk in [*chunks, words(data[whole:].ljust(4, b"\0"))]:
        total = (total * 0x9E3779B97F4A7C15 + sum(word * weight(i) for i, word in enumerate(chunk))) & mask
    return total


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), start=st.integers(0, 5))
def test_checksum_equals_plain_arithmetic(data, start):
    whole = torch.tensor(list(b"\7" * start + data), dtype=torch.uint8)
    assert checksum(whole[start:]) == plain_checksum(data)


def test_checksum_over_several_chunks():
    torch.manual_seed(0)
    data = torch.randint(0, 256, (2 * 4 * (1 << 18) + 4099,), dtype=torch.uint8)
    assert checksum(data) == plain_checksum(bytes(data.tolist()))


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=50), data=st.data())
def test_checksum_sees_changed_and_swapped_words(words, data):
    i, j = (data.draw(st.integers(0, len(words) - 1)) for _ in "ij")
    tensor = torch.tensor(words, dtype=torch.int32)
    changed, swapped = tensor.clone(), tensor.clone()
    changed[i] ^= 1 << data.draw(st.integers(0, 30))
    swapped[[i, j]] = swapped[[j, i]]
    assert checksum(changed) != checksum(tensor)
    assert (checksum(swapped) == checksum(tensor)) == (words[i] == words[j])
    assert checksum(torch.cat([tensor, tensor.new_zeros(1)])) != checksum(tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checksum_is_the_same_on_the_gpu():
    data = torch.randn(3_000_001)
    assert checksum(data.cuda()) == checksum(data)
