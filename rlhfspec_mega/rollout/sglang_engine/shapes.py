"""Shapes of the chains or trees that SGLang's EAGLE drafts; SGLang captures CUDA graphs for each of them."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.config.schema.generation import SpeculationConfig

COUNTS = (0, 1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)  # numbers of draft tokens to choose from, up to the largest asked
# Positions that SGLang keeps free of a request's tokens, whatever it drafts: tp_worker takes 5 of the longest prompt.
ALWAYS_SPARE = 8


@dataclass(frozen=True)
class DraftShapes:
    """Chains or trees to choose from, by number of draft tokens.

    Attributes:
        counts: numbers of draft tokens to choose from, ascending; 0 decodes plainly.
        depth: layers of the deepest one.
        branches: children of a node, and nodes per layer that get children (SGLang's topk); 1: chains.
    """

    counts: tuple[int, ...] = (0,)
    depth: int = 0
    branches: int = 1

    def depth_of(self, count: int) -> int:
        """Number of layers that are drafted for this number of draft tokens."""
        return min(count, self.depth)

    def with_middle_only(self) -> tuple[DraftShapes, int]:
        """Return the shapes for the middle number of draft tokens, and that number.

        Plain decoding stays, for a collapse.
        """
        middle = self.counts[len(self.counts) // 2]
        return DraftShapes(tuple(sorted({0, middle})), self.depth_of(middle), self.branches), middle

    @property
    def spare_positions(self) -> int:
        """Positions of the context that must stay free beyond prompt and response.

        SGLang reserves the positions of a step (managers.utils, its reserved tokens; none where history drafts, for
        which this is more than is needed). It also allocates two steps
        ahead, into a row that is longer than the context only by the largest number of draft tokens
        (mem_cache.allocation_sizing), without a check.
        """
        if not self.depth:
            return ALWAYS_SPARE
        step, most = max(self.branches * self.depth, self.counts[-1] + 1), self.counts[-1] + 1
        return ALWAYS_SPARE + step + max(0, step - most)


def chains(most: int) -> DraftShapes:
    """Chains of up to this many draft tokens, including plain decoding."""
    return DraftShapes(_up_to(most), most)


def trees(most: int, depth: int, branches: int) -> DraftShapes:
    """Trees of up to this many draft tokens and layers, including plain decoding.

    Fewer if there are not that many nodes.
    """
    if branches == 1:
        return chains(min(most, depth))
    nodes = branches + (depth - 1) * branches**2  # nodes that SGLang chooses from
    most = min(most, nodes)
    return DraftShapes(_up_to(most), min(depth, most), branches)


def shapes_of(speculation: SpeculationConfig, as_trees: bool) -> tuple[DraftShapes, int | None]:
    """Return the shapes that a policy lets SGLang choose from, and the number that it fixes.

    Plain decoding is for a collapse.

    Args:
        as_trees: trees instead of chains.
    """
    if speculation.policy == "fixed":
        found = (
            trees(speculation.num_draft_tokens, speculation.num_steps, speculation.topk)
            if as_trees
            else chains(speculation.num_steps)
        )
        most = found.counts[-1]
        return DraftShapes((0, most), found.depth, found.branches), most
    depth = speculation.max_num_steps
    return trees(speculation.max_num_draft_tokens, depth, speculation.topk) if as_trees else chains(depth), None


def shape_of_history(speculation: SpeculationConfig) -> DraftShapes:
    """The trees that are verified where history drafts: all of one size."""
    return DraftShapes((speculation.num_draft_tokens,), speculation.num_draft_tokens)


def _up_to(most: int) -> tuple[int, ...]:
    return tuple(sorted({count for count in COUNTS if count < most} | {0, most}))
