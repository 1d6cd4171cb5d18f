"""The acceptance rule of shared-noise speculative sampling: a draft token counts if it is the target's own choice."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.compiled import compiled

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@compiled
def accepted_nodes(choices: Ints, tokens: Ints, parents: Ints) -> Bools:
    """Which nodes of a forest of draft tokens lie on the path that the target itself takes.

    The output never depends on the draft: a tree yields the target's choice at every accepted node, under the noise of
    the position (drafter-invariant speculative decoding, arXiv 2408.07978, 2506.05632).

    Args:
        choices: [N], the target's choice after each node.
        tokens: [N], the node's own token.
        parents: [N], index of the parent, which comes before; a root is its own. Roots are committed tokens and always
            accepted.

    Returns:
        [N]; in each tree the accepted nodes are one path from the root, also if siblings have the same token.
    """
    accepted, passed = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.bool_)
    for node in range(len(tokens)):
        parent = parents[node]
        if parent == node:
            accepted[node] = True
        elif accepted[parent] and not passed[parent] and tokens[node] == choices[parent]:
            accepted[node] = passed[parent] = True
    return accepted
