"""Reads the KV of running samples from SGLang's pools and inserts it into the radix cache of another SGLang engine.

There it is treated like the KV of a finished request: it may be evicted when memory is needed, and a request whose
tokens begin with it is prefilled only from its end on. It therefore affects only the time, not the results.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rollout.migration.staging import Layout

logger = logging.getLogger(__name__)

METHOD = "rlhfspec_mega_kv"  # of schedulers, from `attach` on
READ, WRITE, WOKEN = "read", "write", "woken"
TARGET, DRAFT = "target", "draft"


class KvAccess:
    """Reads and writes the KV of samples in a running SGLang engine, for migration.

    It asks the tensor-parallel ranks by SGLang's `collective_rpc`; the KV itself goes through files, one of each rank
    with the KV of its attention heads.

    Args:
        engine: a started `sglang.Engine` with pages of one token.
        directory: an empty one, in memory where there is such a file system.
        shapes: by part (TARGET, DRAFT) the layers, key-value heads and head size.
        dtype: of the KV, e.g. "bfloat16".
        ranks: tensor-parallel ranks, which divide the heads of every part.
    """

    def __init__(
        self, engine: Any, directory: Path, shapes: Mapping[str, tuple[int, int, int]], dtype: str, ranks: int
    ) -> None:
        self._engine, self._directory, self._shapes = engine, directory, dict(shapes)
        self._dtype, self._ranks = dtype, ranks

    @property
    def parts(self) -> tuple[str, ...]:
        """Whose KV there is."""
        return tuple(self._shapes)

    def layout(self, positions: int) -> Layout:
        """Of a sample of so many tokens."""
        shapes = {part: (layers, 2, heads, positions, size) for part, (layers, heads, size) in self._shapes.items()}
        return Layout(self._dtype, shapes)

    def read(self, rid: str, part: str, first: int, last: int) -> Tensor:
        """[layers, 2, kv_heads, rows, head_dim] of a request's positions; fewer rows where it does not have them."""
        path = self._directory / "read"
        self._engine.collective_rpc(METHOD, action=READ, path=str(path), rid=rid, part=part, first=first, last=last)
        layers, heads, size = self._shapes[part]
        dtype, own = getattr(torch, self._dtype), [_taken(_file(path, rank, part)) for rank in range(self._ranks)]
        if not own[0]:
            return torch.empty(layers, 2, heads, 0, size, dtype=dtype)
        shape = layers, 2, heads // self._ranks, -1, size
        return torch.cat([torch.frombuffer(bytearray(data), dtype=dtype).view(shape) for data in own], dim=2)

    def write(self, tokens: Sequence[int], kv: Mapping[str, Tensor]) -> None:
        """Keep the KV of the first of these tokens: of all parts, as `read` returns it, equally many rows.

        Where SGLang cannot, the tokens are prefilled: its log says why.
        """
        path, rows = self._directory / "write", min(part.shape[3] for part in kv.values())
        _tokens(path).write_bytes(array("q", tokens).tobytes())
        for part, tensor in kv.items():
            for rank, own in enumerate(tensor[:, :, :, :rows].chunk(self._ranks, dim=2)):
                _write(_file(path, rank, part), own)
        try:
            self._engine.collective_rpc(METHOD, action=WRITE, path=str(path), rows=rows)
        except AssertionError:  # how it tells of an error
            logger.warning("SGLang did not take %d tokens of KV; they are prefilled.", rows)
        finally:
            for file in self._directory.glob("write.*"):
                file.unlink()


def kv_shapes(shape: ModelShape, draft: DraftShape | None) -> dict[str, tuple[int, int, int]]:
    """Layers, key-value heads and head size of target and draft, which has one layer."""
    found = {TARGET: (shape.num_layers, shape.num_kv_heads, shape.head_dim)}
    return found | ({DRAFT: (1, draft.num_kv_heads, draft.head_dim)} if draft else {})


def divides(ranks: int, shapes: Mapping[str, tuple[int, int, int]]) -> bool:
    """Whether each rank has heads of its own: otherwise some are kept by several ranks."""
    return all(heads % ranks == 0 for _, heads, _ in shapes.values())


def attach(scheduler: Any) -> None:
    """Give a scheduler the method that KvAccess calls, and the engine when it has its memory back."""

    def act(action: str, path: str = "", part: str = "", rows: int = 0, **request: Any) -> None:
        rank = scheduler.ps.tp_rank
        if action == READ:
            _write(_file(Path(path), rank, part), gather(scheduler, part, **request))
            return
        if action == WOKEN:  # rows that pad a batch up to a graph's size read this one, which nothing else writes
            scheduler.req_to_token_pool.req_to_token[0].zero_()
            return
        tokens = array("q")
        tokens.frombytes(_tokens(Path(path)).read_bytes())
        keep(scheduler, tokens, rows, {part: _file(Path(path), rank, part) for part in pools(scheduler)})

    setattr(scheduler, METHOD, act)


def pools(scheduler: Any) -> dict[str, Any]:
    """Return the KV pools of target and draft by name; a token has the same slot in both."""
    found = {TARGET: scheduler.tp_worker.model_runner.token_to_kv_pool}
    drafter = scheduler.draft_worker.draft_worker if scheduler.draft_worker is not None else None
    if drafter is not None:  # None where history drafts
        found[DRAFT] = drafter.draft_runner.token_to_kv_pool
    return found


def gather(scheduler: Any, part: str, rid: str, first: int, last: int) -> Tensor:
    """[layers, 2, heads, rows, size] of a decoding request's committed positions from `first` to `last`."""
    pool, slots = pools(scheduler)[part], torch.zeros(0, dtype=torch.int64)
    prefilled = scheduler.last_batch  # may not have joined those that decode yet
    for request in (*scheduler.running_batch.reqs, *(prefilled.reqs if prefilled else ())):
        if request.rid == rid and not request.finished():
            row = scheduler.req_to_token_pool.req_to_token[request.req_pool_idx]
            slots = row[first : min(last, request.kv_committed_len)].long()
    if torch.cuda.is_available():  # the pass under way may still write what was just prefilled
        torch.cuda.current_stream().wait_stream(scheduler.forward_stream)
    slots = slots.to(pool.k_buffer[0].device)
    layers = [torch.stack((k[slots], v[slots])) for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    return torch.stack(layers).transpose(2, 3).cpu()


def keep(scheduler: Any, tokens: array[int], rows: int, files: Mapping[str, Path]) -> None:
    """Put KV of the first `rows` tokens into the radix cache, in the place of what was used longest ago.

    Nothing where all the rest is in use.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    # With a draft, keys are pairs of neighbours: one token more than there are slots.
    named = rows + 1 if tree.is_eagle else rows
    parts = {part: _rows(files[part], pool, rows) for part, pool in pools(scheduler).items()}
    if (lacking := rows - allocator.available_size()) > 0:
        tree.evict(EvictParams(num_tokens=lacking))
    if len(tokens) < named or (slots := allocator.alloc(rows)) is None:
        return
    if torch.cuda.is_available():  # the pass under way may still write slots of a sample that has just ended
        torch.cuda.current_stream().wait_stream(scheduler.forward_stream)
    for part, pool in pools(scheduler).items():
        for layer, (k, v) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True)):
            k[slots], v[slots] = parts[part][layer, 0], parts[part][layer, 1]
    key = RadixKey(tokens[:named], None, is_bigram=tree.is_eagle)
    known = tree.insert(InsertParams(key=key, value=slots.to(torch.int64))).prefix_len
    allocator.free(slots[:known])


def _rows(file: Path, pool: Any, rows: int) -> Tensor:
    """[layers, 2, rows, heads, size] on the pool's device."""
    like = pool.k_buffer[0]
    data = torch.frombuffer(bytearray(file.read_bytes()), dtype=like.dtype).to(like.device)
    return data.view(len(pool.k_buffer), 2, like.shape[1], rows, like.shape[2]).transpose(2, 3)


def _file(path: Path, rank: int, part: str) -> Path:
    return path.with_suffix(f".{part}.{rank}")


def _taken(file: Path) -> bytes:
    """What is in a file, which lies in memory, and was its only use."""
    data = file.read_bytes()
    file.unlink()
    return data


def _tokens(path: Path) -> Path:
    return path.with_suffix(".tokens")


def _write(path: Path, tensor: Tensor) -> None:
    path.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
