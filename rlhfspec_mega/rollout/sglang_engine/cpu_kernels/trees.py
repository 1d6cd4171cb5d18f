"""Draft trees and their verification, in place of SGLang's csrc/speculative kernels."""

from __future__ import annotations

import torch
from torch import Tensor

FULL_MASK, QUERIES_ONLY = 0, 1  # SGLang's TreeMaskMode


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    branches: int,
    depth: int,
    count: int,
    mode: int,
) -> None:
    """Lay out the trees of a batch (eagle_utils.cu and spec_tree.py, build_tree_kernel_efficient).

    Args:
        parents: int64 [B, ...] which drafted node each group of `branches` children belongs to.
        selected: int64 [B, count - 1] the chosen nodes, by number of all that were drafted, ascending.
        lengths: [B] committed positions.
        mask: bool, flat: what each node sees; of FULL_MASK behind columns of the committed positions, left as they are.
        positions: out, [B x count].
        index, next_token, next_sibling: out, [B, count]: numbers in the batch; first child and next sibling in the
            tree, left at -1 where there is none.

    Raises NotImplementedError for another mode, which packs bits.
    """
    if mode not in (FULL_MASK, QUERIES_ONLY):
        raise NotImplementedError(f"These stand-ins have no tree mask of mode {mode}, which packs bits.")
    before = 0
    for b, length in enumerate(lengths.tolist()):
        above = _parents(parents[b].tolist(), selected[b].tolist(), branches)
        index[b] = torch.arange(b * count, (b + 1) * count)
        for node in range(count - 1, 0, -1):
            if above[node] >= 0:
                next_sibling[b, node] = next_token[b, above[node]]
                next_token[b, above[node]] = node
        width = length + count if mode == FULL_MASK else count
        start = before * count + b * count * count if mode == FULL_MASK else b * count * count
        rows = mask[start : start + width * count].view(count, width)[:, width - count :]
        rows.zero_()
        rows[:, 0] = 1
        for node in range(count):
            at, steps = node, 0
            while at > 0 and steps < depth:
                rows[node, at] = 1
                at, steps = above[at], steps + 1
            positions[b * count + node] = length + steps
        before += length


def _parents(groups: list[int], chosen: list[int], branches: int) -> list[int]:
    """The parent of each node of a tree, by place among the chosen ones.

    0 is the root, -1 a node that was not chosen.
    """
    place = {number: at + 1 for at, number in reversed(list(enumerate(chosen)))}
    found = [-1]
    for number in chosen:
        group = number // branches
        found.append(0 if group == 0 else place.get(groups[group], -1))
    return found


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's choices from the root of each tree (eagle_utils.cu, VerifyTreeGreedy).

    Args:
        predicts: out, flat [B x count]: the target's choice behind each accepted node.
        accept_index: out, [B, most + 1]: numbers in the batch of the root and the accepted nodes.
        accept_token_num: out, [B] accepted nodes.
        candidates, retrive_*: [B, count] tokens of the trees and their layout, as from `build_tree_kernel_efficient`.
        target_predict: [B x count] the target's choice behind each node.
    """
    chosen = target_predict.view(-1)
    for b in range(len(candidates)):
        at, accepted, last = 0, 0, int(retrive_index[b, 0])
        accept_index[b, 0] = last
        while accepted + 1 < accept_index.shape[1]:
            at = int(retrive_next_token[b, at])
            while at != -1 and int(candidates[b, at]) != int(chosen[last]):
                at = int(retrive_next_sibling[b, at])
            if at == -1:
                break
            predicts[last] = chosen[last].to(predicts.dtype)
            accepted, last = accepted + 1, int(retrive_index[b, at])
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = chosen[last].to(predicts.dtype)


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """bonus [B] = the last of each request's accepted tokens, `stride` apart (eagle.py, fill_bonus_tokens)."""
    rows = torch.arange(len(lengths)) * stride
    bonus[: len(lengths)] = tokens.view(-1)[rows + lengths.long() - 1].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    """out = slots of the accepted nodes, closed up; -1 stands for none (eagle.py, fill_accept_out_cache_loc)."""
    flat = accepted.view(-1)
    found = slots[flat[flat > -1].long()]
    out[: len(found)] = found


def rotate_input_ids_cpu(*given: object) -> None:
    """For drafts with several layers, which this project does not have."""
    raise NotImplementedError("These stand-ins have nothing for drafts of several layers.")


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    batch: int,
    count: int,
) -> None:
    """Lay out the trees of a batch by what their nodes see (ngram_utils.cu, reconstructIndicesFromTreeMask).

    Args:
        mask: bool, flat [B x count x count], what each node sees: its ancestors, which come before, and itself.
        lengths: [B] committed positions.
        positions, index, next_token, next_sibling: out, as of `build_tree_kernel_efficient_cpu`.
    """
    sees = mask.view(batch, count, count).bool()
    positions.copy_((sees.sum(dim=2) - 1 + lengths[:, None]).flatten())
    index.copy_(torch.arange(batch * count).view(batch, count))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for b in range(batch):
        for node in range(count - 1, 0, -1):
            parent = int(sees[b, node, :node].nonzero()[-1])
            next_sibling[b, node] = next_token[b, parent]
            next_token[b, parent] = node
