"""The stand-ins for SGLang's CPU kernels against loops in plain Python and attention in double precision."""

from __future__ import annotations

import math
import random
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhfspec_mega.rollout.sglang_engine.cpu_kernels import attention, slots, trees
from tests.eagle_trees import EagleTrees, random_trees, slot_table

SEED, BATCH, BRANCHES, DEPTH = st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)
MODES = st.sampled_from([trees.FULL_MASK, trees.QUERIES_ONLY])
UNTOUCHED = -77


def laid_out(tree: EagleTrees, lengths: list[int], mode: int, committed: Tensor) -> list[Tensor]:
    """Mask, positions, index, next_token and next_sibling; `committed` is what the mask holds before."""
    shape = (tree.batch, tree.count)
    positions, index = torch.full((tree.batch * tree.count,), UNTOUCHED), torch.full(shape, UNTOUCHED)
    out = [committed.clone(), positions, index, torch.full(shape, -1), torch.full(shape, -1)]
    trees.build_tree_kernel_efficient_cpu(
        tree.parents, tree.selected, torch.tensor(lengths), *out, tree.branches, tree.depth, tree.count, mode
    )
    return out


def expected_mask(tree: EagleTrees, lengths: list[int], mode: int, committed: list[bool]) -> list[bool]:
    found: list[bool] = []
    for b, length in enumerate(lengths):
        for node in range(tree.count):
            if mode == trees.FULL_MASK:
                found += committed[len(found) : len(found) + length]
            seen = {0, *tree.path(b, node)}
            found += [other in seen for other in range(tree.count)]
    return found


def links(tree: EagleTrees) -> tuple[list[list[int]], list[list[int]]]:
    """First child and next sibling of every node, -1 for none."""
    first = [[-1] * tree.count for _ in range(tree.batch)]
    following = [[-1] * tree.count for _ in range(tree.batch)]
    for b in range(tree.batch):
        for node in range(tree.count):
            children = tree.children(b, node)
            first[b][node] = children[0] if children else -1
            for child, sibling in pairwise(children):
                following[b][child] = sibling
    return first, following


@given(SEED, BATCH, BRANCHES, DEPTH, MODES, st.booleans())
def test_trees_are_laid_out(seed: int, batch: int, branches: int, depth: int, mode: int, closed: bool) -> None:
    rng = random.Random(seed)
    tree = random_trees(rng, batch, branches, depth, closed=closed)
    lengths = [rng.randint(1, 6) for _ in range(batch)]
    width = sum(lengths) * tree.count if mode == trees.FULL_MASK else 0
    committed = [rng.random() < 0.5 for _ in range(width + batch * tree.count**2)]
    mask, positions, index, next_token, next_sibling = laid_out(tree, lengths, mode, torch.tensor(committed))
    assert mask.tolist() == expected_mask(tree, lengths, mode, committed)
    for b, length in enumerate(lengths):
        depths = [len([at for at in tree.path(b, node) if at > 0]) for node in range(tree.count)]
        assert positions.view(batch, -1)[b].tolist() == [length + one for one in depths]
    assert index.flatten().tolist() == list(range(batch * tree.count))
    first, following = links(tree)
    assert next_token.tolist() == first
    assert next_sibling.tolist() == following


def test_a_tree_drawn_by_hand() -> None:
    """Layers of 2: nodes 0 and 1, then 2 and 3 below 0, 4 and 5 below 1; then 6 and 7 below 5, 8 and 9 below 2."""
    parents, selected = torch.tensor([[-1, 0, 1, 5, 2]]), torch.tensor([[0, 1, 2, 3, 5, 7]])
    above = [[-1, 0, 0, 1, 1, 2, 5]]
    tree = EagleTrees(2, 3, 7, parents, selected, above)
    mask, positions, _, next_token, next_sibling = laid_out(tree, [10], trees.QUERIES_ONLY, torch.ones(49).bool())
    rows = ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1010011"]
    assert mask.view(7, 7).int().tolist() == [[int(cell) for cell in row] for row in rows]
    assert positions.tolist() == [10, 11, 11, 12, 12, 12, 13]
    assert next_token.tolist() == [[1, 3, 5, -1, -1, 6, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1, -1]]


@settings(max_examples=200)
@given(SEED, BATCH, BRANCHES, DEPTH, st.integers(0, 3))
def test_the_targets_choices_are_followed(seed: int, batch: int, branches: int, depth: int, short: int) -> None:
    """Few tokens, so that siblings have equal ones: the first of them counts. At most `most` nodes, root included."""
    rng = random.Random(seed)
    tree = random_trees(rng, batch, branches, depth)
    tokens, choices = ([[rng.randrange(3) for _ in range(tree.count)] for _ in range(batch)] for _ in range(2))
    most, total = max(1, depth + 1 - short), batch * tree.count
    predicts = torch.full((total,), UNTOUCHED, dtype=torch.int32)
    accepted = torch.full((batch, most), -1, dtype=torch.int32)
    numbers = torch.empty(batch, dtype=torch.int32)
    index, (first, following) = torch.arange(total).view(batch, -1), links(tree)
    trees.verify_tree_greedy_cpu(
        predicts, accepted, numbers, torch.tensor(tokens), index, torch.tensor(first), torch.tensor(following),
        torch.tensor(choices),
    )  # fmt: skip
    wanted = [UNTOUCHED] * total
    for b in range(batch):
        path = [0]
        while len(path) < most:
            fitting = [one for one in tree.children(b, path[-1]) if tokens[b][one] == choices[b][path[-1]]]
            if not fitting:
                break
            path.append(fitting[0])
        for node in path:
            wanted[b * tree.count + node] = choices[b][node]
        assert numbers[b] == len(path) - 1
        assert accepted[b].tolist() == [b * tree.count + node for node in path] + [-1] * (most - len(path))
    assert predicts.tolist() == wanted


@given(SEED, BATCH, st.integers(1, 5))
def test_what_was_accepted_is_gathered(seed: int, batch: int, most: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, most) for _ in range(batch)]
    tokens = [[rng.randrange(1000) for _ in range(most)] for _ in range(batch)]
    bonus = torch.full((batch,), UNTOUCHED, dtype=torch.int32)
    trees.fill_bonus_tokens_cpu(torch.tensor(tokens).int().flatten(), torch.tensor(lengths).int(), bonus, most)
    assert bonus.tolist() == [row[length - 1] for row, length in zip(tokens, lengths, strict=True)]

    held = rng.sample(range(1000), batch * most)
    accepted = [[rng.randrange(len(held)) if at < n else -1 for at in range(most)] for n in lengths]
    out = torch.full((batch * most,), UNTOUCHED)
    trees.fill_accept_out_cache_loc_cpu(torch.tensor(accepted).int(), torch.tensor(held), out)
    wanted = [held[node] for row in accepted for node in row if node >= 0]
    assert out.tolist() == wanted + [UNTOUCHED] * (len(out) - len(wanted))


def test_what_trees_do_not_have_is_refused() -> None:
    tree = random_trees(random.Random(0), 1, 2, 2)
    with pytest.raises(NotImplementedError, match="mode 2"):
        laid_out(tree, [3], 2, torch.zeros(tree.count, dtype=torch.uint8))
    with pytest.raises(NotImplementedError, match="several layers"):
        trees.rotate_input_ids_cpu(torch.zeros(3))


WIDTH = 24  # of the table of slots


@given(SEED, BATCH)
def test_slots_are_noted_and_found_by_position(seed: int, batch: int) -> None:
    rng = random.Random(seed)
    table, rows = slot_table(rng, batch, WIDTH)
    spans = [sorted(rng.choices(range(WIDTH + 1), k=2)) for _ in range(batch)]  # some empty
    starts, ends = (torch.tensor(column) for column in zip(*spans, strict=True))
    places = [(row, at) for row, span in zip(rows.tolist(), spans, strict=True) for at in range(*span)]

    found = torch.full((len(places) + 3,), UNTOUCHED)
    slots.assign_extend_cache_locs_cpu(rows, table, starts, ends, found, WIDTH)
    assert found.tolist() == [int(table[place]) for place in places] + [UNTOUCHED] * 3

    new, wanted = torch.tensor(rng.choices(range(20_000, 30_000), k=len(places)), dtype=torch.long), table.clone()
    for place, slot in zip(places, new.tolist(), strict=True):
        wanted[place] = slot
    slots.assign_req_to_token_pool_cpu(rows, table, starts, ends, new, WIDTH)
    assert torch.equal(table, wanted)


@given(SEED, BATCH, st.integers(1, 3), st.integers(1, 5))
def test_branches_have_slots_of_their_own(seed: int, batch: int, branches: int, steps: int) -> None:
    rng = random.Random(seed)
    table, rows = slot_table(rng, batch, WIDTH)
    lengths = [rng.randint(1, WIDTH - branches * steps) for _ in range(batch)]
    ends, shape = torch.tensor(lengths), (WIDTH, branches, steps)
    found = torch.full((batch * branches * steps,), UNTOUCHED)
    slots.assign_draft_cache_locs_contiguous_cpu(rows, table, ends, found, *shape)
    seen = slots.build_draft_decode_metadata_cpu(table, rows, ends, branches, steps, WIDTH)
    assert seen.shape == (batch * branches, WIDTH)
    wanted = []
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        for branch in range(branches):
            own = [int(table[row, length + branch * steps + step]) for step in range(steps)]
            wanted += own
            of_branch = seen[i * branches + branch].tolist()
            assert of_branch[: length + steps] == table[row, :length].tolist() + own
    assert found.tolist() == wanted


def test_a_branch_ends_where_the_table_does() -> None:
    table, rows = slot_table(random.Random(0), 2, WIDTH)
    seen = slots.build_draft_decode_metadata_cpu(table, rows, torch.tensor([WIDTH - 2, WIDTH]), 1, 5, WIDTH)
    assert torch.equal(seen, table[rows])


@given(SEED, st.integers(0, 9))
def test_rows_of_kv_move_to_slots_that_others_leave(seed: int, moved: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [((12, 2, 3), torch.float32), ((12, 5), torch.bfloat16), ((12, 1), torch.float64)]
    buffers = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in shapes]
    into, out_of = rng.sample(range(1, 12), moved), rng.choices(range(1, 12), k=moved)
    into, out_of = [*into, 0, 0], [*out_of, 0, 0]  # which is how SGLang fills them up
    wanted = [buffer.clone() for buffer in buffers]
    for old, new in zip(buffers, wanted, strict=True):
        for target, source in zip(into, out_of, strict=True):
            new[target] = old[source]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    row_bytes = torch.tensor([buffer[0].nbytes for buffer in buffers])
    slots.copy_all_layer_kv_cache_cpu(addresses, row_bytes, torch.tensor(into), torch.tensor(out_of))
    for buffer, one in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer, one)


class Requests:
    """Requests with KV of their own in buffers that hold NaN elsewhere."""

    def __init__(self, seed: int, lengths: list[int], kv_heads: int, dtype: torch.dtype = torch.float32) -> None:
        rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.lengths, self.rows = torch.tensor(lengths), torch.tensor(rng.sample(range(6), len(lengths)))
        self.table = torch.tensor([rng.choices(range(8), k=16) for _ in range(6)], dtype=torch.int32)  # nobody's
        self.keys, self.values = (torch.full((128, kv_heads, 4), math.nan, dtype=dtype) for _ in range(2))
        free, self.slots = rng.sample(range(8, 128), sum(lengths)), []
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            self.slots.append([free.pop() for _ in range(length)])
            self.table[row, :length] = torch.tensor(self.slots[-1])
        for buffer in (self.keys, self.values):
            for slot in chain.from_iterable(self.slots):
                buffer[slot] = self.random(kv_heads, 4)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.keys.dtype)

    def naive(self, query: Tensor, request: int, places: list[int], scale: float) -> Tensor:
        """Attention of one query [H, D] to these positions of a request."""
        rows, heads = [self.slots[request][place] for place in places], []
        for head, one in enumerate(query.double()):
            shared = head * self.keys.shape[1] // len(query)
            weights = [math.exp(scale * float(one @ self.keys[row, shared].double())) for row in rows]
            parts = [w * self.values[row, shared].double() for w, row in zip(weights, rows, strict=True)]
            heads.append(sum(parts, torch.zeros(4).double()) / sum(weights))
        return torch.stack(heads)


PLAIN = (0.0, False, 0)  # no soft cap, no cross attention, no sliding window
LENGTHS, HEADS = st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)])


def extend(held: Requests, q: Tensor, extends: list[int], starts: list[int], mask: Tensor | None) -> Tensor:
    out = torch.full_like(q, math.nan)
    counts = (torch.tensor(extends).int(), torch.tensor(starts).int(), max(extends))
    attention.extend_attention_cpu(
        q, q, q, out, held.keys, held.values, held.table, held.rows, held.lengths, *counts, 0.6, *PLAIN, None, None,
        mask,
    )  # fmt: skip
    return out


def decode(held: Requests, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
    out, last = torch.full_like(q, math.nan), torch.tensor([row[-1] for row in held.slots])
    attention.decode_attention_cpu(
        q, held.keys, held.values, out, k, v, last, torch.empty(0), held.table, held.rows, held.lengths, 0.6, *PLAIN,
        None, None,
    )  # fmt: skip
    return out


@given(SEED, LENGTHS, HEADS, st.booleans())
def test_decoding_attends_to_all_of_a_request(seed: int, lengths: list[int], heads: tuple[int, int], new: bool) -> None:
    held, batch = Requests(seed, lengths, heads[1]), len(lengths)
    k, v = held.random(batch, heads[1], 4), held.random(batch, heads[1], 4)
    wanted = [held.keys.clone(), held.values.clone()]
    if new:
        for i, row in enumerate(held.slots):
            wanted[0][row[-1]], wanted[1][row[-1]] = k[i], v[i]
            held.keys[row[-1]] = held.values[row[-1]] = math.nan
    q = held.random(batch, heads[0], 4)
    out = decode(held, q, *((k.flatten(1), v.flatten(1)) if new else (None, None)))
    for buffer, one in zip((held.keys, held.values), wanted, strict=True):
        assert torch.equal(buffer.nan_to_num(9e9), one.nan_to_num(9e9))
    for i, length in enumerate(lengths):
        torch.testing.assert_close(out[i].double(), held.naive(q[i], i, list(range(length)), 0.6), rtol=0, atol=1e-5)


@given(SEED, LENGTHS, HEADS, st.booleans())
def test_new_tokens_attend_to_those_before(seed: int, lengths: list[int], heads: tuple[int, int], masked: bool) -> None:
    """Or to those before the new ones and whom a mask names. The last request's queries come first."""
    rng, held = random.Random(seed), Requests(seed, lengths, heads[1])
    extends = [rng.randint(1, length) for length in lengths]
    starts = [sum(extends[i + 1 :]) for i in range(len(extends))]
    seen = [[[key <= query for key in range(n)] for query in range(n)] for n in extends]
    if masked:
        seen = [[[key == query or rng.random() < 0.5 for key in range(n)] for query in range(n)] for n in extends]
    mask = torch.tensor([cell for block in seen for row in block for cell in row]) if masked else None
    q = held.random(sum(extends), heads[0], 4)
    out = extend(held, q, extends, starts, mask)
    for i, (length, count, start) in enumerate(zip(lengths, extends, starts, strict=True)):
        for query in range(count):
            places = [*range(length - count), *(length - count + key for key in range(count) if seen[i][query][key])]
            wanted = held.naive(q[start + query], i, places, 0.6)
            torch.testing.assert_close(out[start + query].double(), wanted, rtol=0, atol=1e-5)


@given(SEED, BATCH, st.integers(1, 3), st.integers(1, 3))
def test_nodes_of_a_tree_attend_to_their_path(seed: int, batch: int, branches: int, depth: int) -> None:
    rng = random.Random(seed)
    tree = random_trees(rng, batch, branches, depth)
    prefixes = [rng.randint(0, 3) for _ in range(batch)]
    mask = laid_out(tree, prefixes, trees.QUERIES_ONLY, torch.ones(batch * tree.count**2, dtype=torch.bool))[0]
    held = Requests(seed, [one + tree.count for one in prefixes], 2)
    q = held.random(batch * tree.count, 4, 4)
    out = extend(held, q, [tree.count] * batch, [b * tree.count for b in range(batch)], mask)
    for b, prefix in enumerate(prefixes):
        for node in range(tree.count):
            places = [*range(prefix), *(prefix + at for at in tree.path(b, node))]
            wanted = held.naive(q[b * tree.count + node], b, places, 0.6)
            torch.testing.assert_close(out[b * tree.count + node].double(), wanted, rtol=0, atol=1e-5)


def test_bfloat16() -> None:
    held = Requests(0, [9, 2, 5], 2, torch.bfloat16)
    q = held.random(3, 4, 4)
    out = decode(held, q, held.random(3, 2, 4), held.random(3, 2, 4))
    ends = extend(held, q, [1, 1, 1], [0, 1, 2], None)
    assert out.dtype == torch.bfloat16
    for i, length in enumerate((9, 2, 5)):
        wanted = held.naive(q[i], i, list(range(length)), 0.6)
        for found in (out[i], ends[i]):
            torch.testing.assert_close(found.double(), wanted, rtol=2**-6, atol=2**-6)


REFUSED = [(30.0, False, 0, None), (0.0, True, 0, None), (0.0, False, 1, None), (*PLAIN, torch.ones(1))]


@pytest.mark.parametrize(("cap", "cross", "window", "sinks"), REFUSED)
def test_what_attention_does_not_have_is_refused(cap: float, cross: bool, window: int, sinks: Tensor | None) -> None:
    held, one, others = Requests(0, [2], 1), torch.ones(1), (cap, cross, window, None, sinks)
    q, buffers, requests = held.random(1, 1, 4), (held.keys, held.values), (held.table, held.rows, held.lengths)
    with pytest.raises(NotImplementedError, match="soft cap"):
        attention.decode_attention_cpu(q, *buffers, q, None, None, one, one, *requests, 1.0, *others)
    extends = (one.int(), one.int() - 1, 1)
    with pytest.raises(NotImplementedError, match="soft cap"):
        attention.extend_attention_cpu(q, q, q, q, *buffers, *requests, *extends, 1.0, *others, None)
