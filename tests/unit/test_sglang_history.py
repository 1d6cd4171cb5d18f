"""HistoryDrafts without SGLang: requests that come, grow and leave, and the trees that are made for them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.history.propose import Proposed
from rlhfspec_mega.rollout.sglang_engine.history import HistoryDrafts, on_path, trees_of
from rlhfspec_mega.rollout.sglang_engine.history_control import newest_tokens
from rlhfspec_mega.types import FinishedText

VOCABULARY, NODES = 50, 5
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


@dataclass
class Request:
    """What is read of SGLang's Req."""

    rid: str
    origin_input_ids: array[int]
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    ended: str = ""  # how
    seed: int = 7
    top_k: int = 1  # greedy

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(
            temperature=1.0, top_k=self.top_k, max_new_tokens=64, stop_token_ids=[0], sampling_seed=self.seed
        )

    @property
    def output_ids_through_stop(self) -> array[int]:
        return self.output_ids

    @property
    def finished_reason(self) -> SimpleNamespace:
        return SimpleNamespace(to_json=lambda: {"type": self.ended})

    def finished(self) -> bool:
        return bool(self.ended)


def request(name: str, prompt: list[int], output: list[int]) -> Request:
    return Request(f"{name}/1/", array("q", prompt), array("q", output))


def drafts(slots: int = 4) -> HistoryDrafts:
    made = HistoryDrafts(capacity=4096, draft_token_num=NODES, max_trie_depth=18)
    made.make_room(slots, VOCABULARY)
    return made


def best_chain(made: tuple[np.ndarray, np.ndarray], tree: int = 0) -> list[int]:
    """The tokens of the nodes that each see all nodes before: the first proposals where nothing branches."""
    tokens, sees = made[0].reshape(-1, NODES)[tree], made[1].reshape(-1, NODES, NODES)[tree]
    chain = [0]
    for node in range(1, NODES):
        if sees[node, : node + 1].all():
            chain.append(node)
        else:
            break
    return [int(tokens[node]) for node in chain]


def test_what_followed_before_is_proposed_with_overlap_and_without() -> None:
    for newest in ([], TEXT[6:8]):
        made = drafts()
        made.remember([FinishedText("earlier", TEXT[:4], TEXT[4:])], anew=True)
        one = request("one", TEXT[:4], TEXT[4 : 8 - len(newest)])
        assert best_chain(made.draft([one], [newest])) == TEXT[7 : 7 + NODES]


def test_a_request_goes_on_from_its_own_tokens() -> None:
    """Each step's tokens are stored once: with overlap those of a step come as newest, then as output."""
    made, one = drafts(), request("one", [2, 3], TEXT[:1])
    made.draft([one], [TEXT[1:3]])
    one.output_ids = array("q", TEXT[:3])
    made.draft([one], [TEXT[3:6]])
    one.output_ids, one.ended = array("q", [*TEXT, 0]), "stop"
    made.take_tally()
    two = request("two", [2, 3], TEXT[:8])
    assert best_chain(made.draft([two], [[]])) == TEXT[7 : 7 + NODES]
    assert made._history._store.clock[0] > 0 and len(made._free) == 3


def test_accepted_tokens_are_counted_once_and_padding_is_not() -> None:
    made = drafts()
    made.remember([FinishedText("earlier", TEXT[:4], TEXT[4:])], anew=True)
    one = request("one", TEXT[:4], TEXT[4:8])
    made.draft([one], [[]])
    one.output_ids = array("q", TEXT[4:11])  # three tokens: two draft tokens and the target's own
    made.draft([one], [[]])
    tally = made.take_tally()
    assert (tally.sample_steps, tally.accepted, tally.recalled) == (1, 2, 2)
    assert tally.verified == NODES - 1
    one.output_ids, one.ended = array("q", TEXT[4:13]), "length"
    made.remember([], anew=True)
    assert made.take_tally().accepted == 1, "the last step shows when the sample has ended"
    assert made.take_tally().sample_steps == 0


def test_own_samples_are_not_stored_twice() -> None:
    made, one = drafts(), request("own", [1, 2, 3, 4], TEXT[:9])
    made.draft([one], [[]])
    one.ended = "stop"
    before = int(made._history._store.clock[0])
    made.remember([FinishedText("own", (1, 2, 3, 4), TEXT[:9])], anew=False)
    assert int(made._history._store.clock[0]) == before
    made.remember([FinishedText("own", (1, 2, 3, 4), TEXT[:9])], anew=False)
    assert int(made._history._store.clock[0]) > before, "of a later step, from another engine"


def test_a_sample_that_went_elsewhere_is_stored_when_it_has_ended() -> None:
    """And what ended under earlier weights is nobody's to tell of any more."""
    made, one = drafts(), request("gone", [1, 2, 3, 4], TEXT[:9])
    made.draft([one], [[]])
    one.ended = "abort"
    before = int(made._history._store.clock[0])
    made.remember([FinishedText("gone", (1, 2, 3, 4), TEXT)], anew=False)
    assert int(made._history._store.clock[0]) > before
    two = request("two", [1, 2], TEXT[:3])
    made.draft([two], [[]])
    two.ended = "stop"
    made.take_tally()
    made.reset()
    assert not made._ended


def test_tokens_that_came_are_new_once_with_a_prefill_in_between_and_without() -> None:
    """With overlap scheduling a step's tokens are not in the output yet when the next step is drafted, unless a prefill
    came in between; SGLang's record of the step's tokens is the same in both cases."""
    accepted = torch.tensor([[TEXT[1], TEXT[2], 0], [TEXT[4], 0, 0]])
    info = SimpleNamespace(accept_tokens=accepted.flatten(), accept_lens=torch.tensor([2, 1]))
    pair = [request("a", [5, 5], TEXT[:1]), request("b", [7], TEXT[3:4])]
    lengths = torch.tensor([2 + 3 - 1, 1 + 2 - 1])
    batch = SimpleNamespace(reqs=pair, spec_info=info, seq_lens_cpu=lengths)
    assert newest_tokens(batch) == [TEXT[1:3], TEXT[4:5]]
    pair[0].output_ids = array("q", TEXT[:3])
    assert newest_tokens(batch) == [[], TEXT[4:5]]
    pair[1].output_ids = array("q", TEXT[3:5])
    assert newest_tokens(batch) == [[], []]


def test_slots_are_given_back_and_requests_begin_anew() -> None:
    """Three times as many requests as slots; one that SGLang retracts, whose output is shorter afterwards."""
    made = drafts(slots=2)
    for number in range(6):
        pair = [request(f"{number}.{member}", [number, member], TEXT[:5]) for member in range(2)]
        made.draft(pair, [[], []])
    pair[0].output_ids, pair[1].output_ids = array("q", TEXT[:1]), array("q", TEXT[:6])
    tokens, _ = made.draft(pair, [[], []])
    assert tokens.reshape(2, NODES)[:, 0].tolist() == [TEXT[0], TEXT[5]]
    assert made.take_tally().sample_steps == 1, "of the other one"
    assert len(made._followed) == 2 and not made._free


def test_two_ranks_draft_the_same() -> None:
    ranks = [drafts(), drafts()]
    for end in range(3, len(TEXT)):
        made = [
            rank.draft([Request("a/1/", array("q", [5]), array("q", TEXT[:end]), top_k=50)], [[]]) for rank in ranks
        ]
        assert all((one == other).all() for one, other in zip(*made, strict=True))


@st.composite
def forests(draw: st.DrawFn) -> tuple[Proposed, int]:
    """Trees of up to NODES - 1 nodes for a few requests, and how many these are."""
    batch = draw(st.integers(1, 4))
    rows, parents, depths, tokens = list[int](), list[int](), list[int](), list[int]()
    for row in range(batch):
        first = len(rows)
        for node in range(draw(st.integers(0, NODES - 1))):
            above = draw(st.integers(-1, node - 1))
            rows.append(row)
            parents.append(first + above if above >= 0 else -1)
            depths.append(1 + (depths[first + above] if above >= 0 else 0))
            tokens.append(draw(st.integers(0, 3)))
    ints = [np.array(values, np.int64) for values in (rows, parents, depths, tokens)]
    zeros = np.zeros(len(rows), np.int64)
    return Proposed(*ints, zeros, zeros, np.zeros(len(rows))), batch


@given(forests())
def test_a_node_sees_its_ancestors_and_itself(made: tuple[Proposed, int]) -> None:
    proposed, batch = made
    last = np.arange(batch) + 10
    tokens, sees = trees_of(last, proposed, NODES)
    tokens, sees = tokens.reshape(batch, NODES), sees.reshape(batch, NODES, NODES)
    for row in range(batch):
        own = np.flatnonzero(proposed.rows == row).tolist()
        for place in range(NODES):
            wanted = {0, place}
            node = own[place - 1] if 0 < place <= len(own) else -1
            assert tokens[row, place] == (proposed.tokens[node] if node >= 0 else last[row])
            while node >= 0:
                wanted.add(1 + own.index(node))
                node = int(proposed.parents[node])
            assert set(np.flatnonzero(sees[row, place]).tolist()) == wanted


@given(forests(), st.data())
def test_a_node_is_accepted_if_its_path_came(made: tuple[Proposed, int], data: st.DataObject) -> None:
    proposed, batch = made
    came = [data.draw(st.lists(st.integers(0, 3), max_size=NODES)) for _ in range(batch)]
    flat = np.array([token for tokens in came for token in tokens], np.int64)
    found = on_path(proposed, flat, np.cumsum([len(tokens) for tokens in came]))
    for node in range(len(proposed.rows)):
        path, at = list[int](), node
        while at >= 0:
            path.insert(0, int(proposed.tokens[at]))
            at = int(proposed.parents[at])
        assert found[node] == (path == came[proposed.rows[node]][:-1][: len(path)])
