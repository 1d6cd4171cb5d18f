"""The stand-ins for SGLang's CPU kernels give what its own Triton kernels give, run by Triton's interpreter.

The interpreter is chosen before Triton is imported: this file runs itself as a script in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhfspec_mega.rollout.sglang_engine import cpu_kernels
from rlhfspec_mega.rollout.sglang_engine.cpu_kernels import slots, trees
from tests.eagle_trees import random_trees, slot_table

if __name__ == "__main__":
    cpu_kernels.prepare()
    from sglang.kernels.ops.kvcache import cache_move
    from sglang.kernels.ops.speculative import cache_locs, eagle
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative import eagle_utils, spec_utils
    from sglang.srt.utils import next_power_of_2
    from triton.runtime import interpreter

ROOT = Path(__file__).resolve().parents[2]
UNTOUCHED = -77
WIDTH = 200  # of the table of slots: more than the kernels copy at once

HERE = find_spec("sglang") is not None and not torch.cuda.is_available()  # with a GPU come other kernels
pytestmark = pytest.mark.skipif(not HERE, reason="no SGLang on a CPU")


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def blank(batch: int, count: int, mask_cells: int, rng: random.Random) -> list[Tensor]:
    """Mask, positions, index, next_token and next_sibling as SGLang makes them, but for what nobody should read."""
    mask = torch.tensor(rng.choices([True, False], k=mask_cells))
    return [mask, torch.full((batch * count,), UNTOUCHED), *(torch.full((batch, count), -1) for _ in range(3))]


def drafted_by_sglang(rng: random.Random, batch: int, branches: int, depth: int) -> tuple[Tensor, Tensor]:
    """Its lists of parents and of the chosen nodes, from random chances."""
    generator, scores, rows = torch.Generator().manual_seed(rng.randrange(2**32)), None, []
    for layer in range(depth):
        parents = batch if layer == 0 else batch * branches
        chances, tokens = torch.rand(parents, 11, generator=generator).softmax(dim=-1).topk(branches)
        _, _, scores, row = spec_utils.select_top_k_tokens(layer, chances, tokens, None, scores, branches)
        rows.append(row)
    lists = [list(column) for column in zip(*rows, strict=True)]
    most = min(12, sum(part.shape[1] for part in lists[1]))
    return eagle_utils.organize_draft_results(*lists, 1 + rng.randint(1, most))[:2]


def build_tree(rng: random.Random) -> None:
    """Also with nodes whose parent was not chosen, and for fewer layers than the tree has."""
    batch, branches, depth = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 5)
    tree = random_trees(rng, batch, branches, depth, closed=False)
    of_sglang = drafted_by_sglang(rng, batch, branches, depth)
    for parents, selected in ((tree.parents, tree.selected), of_sglang):
        lengths, count = torch.tensor([rng.randint(1, 6) for _ in range(batch)]), selected.shape[1] + 1
        for mode in (eagle_utils.TreeMaskMode.FULL_MASK, eagle_utils.TreeMaskMode.QLEN_ONLY):
            columns = int(lengths.sum()) if mode == eagle_utils.TreeMaskMode.FULL_MASK else 0
            ours = blank(batch, count, (columns + batch * count) * count, rng)
            theirs = [one.clone() for one in ours]
            sizes = (branches, rng.choice([depth, rng.randint(1, depth)]), count, mode)
            trees.build_tree_kernel_efficient_cpu(parents, selected, lengths, *ours, *sizes)
            eagle_utils.sgl_build_tree_kernel_triton(parents, selected, lengths, *theirs, *sizes)
            same(ours, theirs)


def verify(rng: random.Random) -> None:
    """Few tokens, so that siblings have equal ones."""
    tree = random_trees(rng, rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 5))
    cells, most = tree.batch * tree.count, rng.randint(1, tree.depth + 1)
    layout, lengths = blank(tree.batch, tree.count, cells * tree.count, rng), torch.ones(tree.batch, dtype=torch.long)
    sizes = (tree.branches, tree.depth, tree.count, eagle_utils.TreeMaskMode.QLEN_ONLY)
    eagle_utils.sgl_build_tree_kernel_triton(tree.parents, tree.selected, lengths, *layout, *sizes)
    tokens, choices = (torch.tensor(rng.choices(range(3), k=cells)).view(tree.batch, -1) for _ in range(2))
    outs = []
    for function in (trees.verify_tree_greedy_cpu, eagle_utils.verify_tree_greedy_triton):
        outs.append([torch.full(size, -1, dtype=torch.int32) for size in ((cells,), (tree.batch, most), (tree.batch,))])
        function(*outs[-1], tokens, *layout[2:], choices)
    same(*outs)


def fill(rng: random.Random) -> None:
    batch, most = rng.randint(1, 4), rng.randint(1, 6)
    size, lengths = batch * most, torch.tensor([rng.randint(1, most) for _ in range(batch)], dtype=torch.int32)
    tokens = torch.tensor(rng.choices(range(1000), k=size), dtype=torch.int32)
    ours, theirs = (torch.full((batch,), UNTOUCHED, dtype=torch.int32) for _ in range(2))
    trees.fill_bonus_tokens_cpu(tokens, lengths, ours, most)
    eagle.fill_bonus_tokens[(batch,)](tokens, lengths, theirs, most)
    same([ours], [theirs])
    accepted = torch.tensor([rng.choice([-1, rng.randrange(size)]) for _ in range(size)], dtype=torch.int32)
    held, ours, theirs = tokens.long(), torch.full((size,), UNTOUCHED), torch.full((size,), UNTOUCHED)
    trees.fill_accept_out_cache_loc_cpu(accepted, held, ours)
    eagle.fill_accept_out_cache_loc[(size,)](accepted, held, theirs, next_power_of_2(size))
    same([ours], [theirs])


def assign_spans(rng: random.Random) -> None:
    """assign_extend_cache_locs reads spans of the table, assign_req_to_token_pool writes them."""
    batch = rng.randint(1, 4)
    table, rows = slot_table(rng, batch, WIDTH)
    starts, ends = torch.tensor([sorted(rng.choices(range(WIDTH + 1), k=2)) for _ in range(batch)]).T.contiguous()
    ours, theirs = (torch.full((int((ends - starts).sum()) + 2,), UNTOUCHED) for _ in range(2))
    slots.assign_extend_cache_locs_cpu(rows, table, starts, ends, ours, WIDTH)
    upper, new = next_power_of_2(batch), torch.arange(len(ours)) + 20_000
    cache_locs.assign_extend_cache_locs[(batch,)](rows, table, starts, ends, theirs, WIDTH, upper)
    same([ours], [theirs])
    ours, theirs = table.clone(), table.clone()
    slots.assign_req_to_token_pool_cpu(rows, ours, starts, ends, new, WIDTH)
    allocation.assign_req_to_token_pool[(batch,)](rows, theirs, starts, ends, new, WIDTH, upper)
    same([ours], [theirs])


def draft_slots(rng: random.Random) -> None:
    """assign_draft_cache_locs_contiguous, and generate_draft_decode_kv_indices for every layer of a draft."""
    batch, branches, steps = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 5)
    (table, rows), wide = slot_table(rng, batch, WIDTH), batch * branches
    lengths = torch.tensor([rng.randint(1, WIDTH - branches * steps) for _ in range(batch)])
    ours, theirs = (torch.full((wide * steps,), UNTOUCHED) for _ in range(2))
    slots.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, ours, WIDTH, branches, steps)
    cache_locs.assign_draft_cache_locs_contiguous[(batch,)](rows, table, lengths, theirs, WIDTH, branches, steps)
    same([ours], [theirs])
    seen = slots.build_draft_decode_metadata_cpu(table, rows, lengths, branches, steps, WIDTH)
    flat, bounds = torch.full((steps, wide * WIDTH), UNTOUCHED), torch.zeros(steps, wide + 1, dtype=torch.int32)
    sizes = (WIDTH, wide * WIDTH, wide + 1, *(next_power_of_2(size) for size in (batch, steps, wide)), 1)
    of_branches, grid = lengths.repeat_interleave(branches), (steps, batch, branches)
    cache_locs.generate_draft_decode_kv_indices[grid](rows, table, lengths, flat, bounds, of_branches, *sizes)
    for step in range(steps):
        parts = [row[: length + step + 1] for row, length in zip(seen, of_branches.tolist(), strict=True)]
        same([torch.cat(parts).long()], [flat[step, : int(bounds[step, -1])]])


def copy_kv(rng: random.Random) -> None:
    """Rows of several sizes, by address, to slots that others leave."""
    row_bytes, moved = torch.tensor([40, 129, 300]), rng.randint(0, 9)
    ours = [torch.tensor(rng.choices(range(256), k=12 * size)).byte().view(12, size) for size in row_bytes.tolist()]
    theirs = [one.clone() for one in ours]
    into = torch.tensor([*rng.sample(range(1, 12), moved), 0, 0])  # filled up as SGLang does
    out_of = torch.tensor([*rng.choices(range(1, 12), k=moved), 0, 0])
    places = [torch.tensor([one.data_ptr() for one in buffers], dtype=torch.uint64) for buffers in (ours, theirs)]
    slots.copy_all_layer_kv_cache_cpu(places[0], row_bytes, into, out_of)
    cache_move.copy_all_layer_kv_cache_tiled[(3, 3)](places[1], row_bytes, into, out_of, len(into), 16, 128)
    same(ours, theirs)


COMPARISONS = {part.__name__: part for part in (build_tree, verify, fill, assign_spans, draft_slots, copy_kv)}


def to_index(number: Any) -> int:
    """Of a loaded number that bounds a loop: Triton 3.6's interpreter does it in a way that NumPy 2.4 refuses."""
    return int(number.handle.data.item())


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    """By comparison; empty where there is none."""
    command = [sys.executable, "-m", "tests.sglang.test_cpu_kernels_triton"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_kernel_gives_the_same(name: str, faults: dict[str, str]) -> None:
    assert not faults[name], faults[name]


def main() -> None:
    patch = interpreter._patch_lang_tensor
    interpreter._patch_lang_tensor = lambda t, scope: (patch(t, scope), scope.set_attr(t, "__index__", to_index))
    found = dict.fromkeys(COMPARISONS, "")
    for name, compare in COMPARISONS.items():
        try:
            for seed in range(40):
                compare(random.Random(seed))
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
