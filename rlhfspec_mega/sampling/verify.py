"""The acceptance rule of shared-noise speculative sampling: a draft token counts if it is the target's own choice."""

from __future__ import annotations

import torch


def accepted_nodes(
    choices: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor, depth: int
) -> torch.Tensor:
    """Which nodes of a forest of draft tokens lie on the path that the target itself takes.

    The output never depends on the draft: a tree yields the target's choice at every accepted node, under the noise of
    the position (drafter-invariant speculative decoding, arXiv 2408.07978, 2506.05632).

    Args:
        choices: int64 [N], the target's choice after each node.
        tokens: int64 [N], the node's own token.
        parents: int64 [N], index of the parent; a root is its own.
        roots: bool [N]; roots are committed tokens and always accepted.
        depth: depth of the deepest node, roots having 0.

    Returns:
        bool [N]; in each tree the accepted nodes are one path from the root.
    """
    accepted = (tokens == choices[parents]) | roots
    for _ in range(depth - 1):  # a node at depth 1 has only its root above it
        accepted &= accepted[parents]
    return accepted
