"""Acceptance against a walk down each tree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.sampling.verify import accepted_nodes


@given(trees=st.lists(st.lists(st.integers(0, 20), max_size=12), min_size=1, max_size=4), data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_accepted_nodes_are_the_path_of_the_targets_choices(trees: list[list[int]], data: st.DataObject) -> None:
    """Of few tokens, so that siblings, and roots and their own choice, are often the same."""
    parents, roots = list[int](), list[int]()
    for tree in trees:
        root = len(parents)
        roots.append(root)
        parents.append(root)
        for number, above in enumerate(tree):
            parents.append(root + above % (number + 1))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=len(parents), max_size=len(parents)))
    choices = data.draw(st.lists(st.integers(0, 2), min_size=len(parents), max_size=len(parents)))
    expected = np.zeros(len(parents), np.bool_)
    for root in roots:
        here: int | None = root
        while here is not None:
            expected[here] = True
            children = [n for n in range(len(parents)) if parents[n] == here and n not in roots]
            here = next((child for child in children if tokens[child] == choices[here]), None)
    found = accepted_nodes(np.array(choices), np.array(tokens), np.array(parents))
    assert (found == expected).all()
