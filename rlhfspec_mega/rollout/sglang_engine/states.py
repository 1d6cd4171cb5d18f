"""SGLang's runtime states (buffers and CUDA graphs), one for each number of draft tokens, and the switch between them.

SGLang's own controller has one state for each number of layers and supports only chains; the hooks here allow trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhfspec_mega.rollout.sglang_engine.choice import DraftChoice, read_shapes

NO_STEPS = NO_COUNT = -1
DRAFT_EXTEND = "draft_extend"  # SGLang's name of the pass in which the draft reads accepted tokens


def allow_trees(original: Callable[..., str | None], server_args: Any) -> str | None:
    """Hook around adaptive_unsupported_reason.

    Returns its reasons except trees, which only SGLang's controller cannot do.
    """
    branches, server_args.speculative_eagle_topk = server_args.speculative_eagle_topk, 1
    try:
        return original(server_args)
    finally:
        server_args.speculative_eagle_topk = branches


def start_with_largest(original: Callable[..., None], server_args: Any) -> None:
    """Hook around _init_adaptive_speculative_params.

    Starts with the largest tree, for which SGLang sizes its buffers.
    """
    original(server_args)
    if server_args.speculative_eagle_topk > 1:
        server_args.speculative_num_draft_tokens = read_shapes(server_args.speculative_adaptive_config).counts[-1] + 1


def width_of_state(original: Callable[..., int], *, phase: str, **named: Any) -> int:
    """Hook around resolve_num_tokens_per_req.

    CUDA graphs of the draft's reading are as wide as the state they belong to.

    SGLang makes all of them as wide as the first state's, so that only this state could use them.
    """
    if phase == DRAFT_EXTEND:
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_num_draft_tokens)
    return original(phase=phase, **named)


class StateSwitch:
    """Replaces AdaptiveController: builds a state for each number of draft tokens and activates one.

    Args:
        worker: an EAGLEWorkerV2.
        config_path: see DraftChoice.
    """

    def __init__(self, worker: Any, config_path: str | None = None) -> None:
        self._worker, self._choice = worker, DraftChoice(config_path)
        self._states: dict[int, Any] = {}
        self._live = NO_COUNT

    def register(self, state: Any) -> None:
        """Add the state that SGLang has built itself."""
        self._live = state.speculative_num_draft_tokens - 1
        self._states[self._live] = state

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        """Build the other states, for these batch sizes; None: without CUDA graphs."""
        shapes = self._choice.shapes
        for count in shapes.counts:
            if count not in self._states:
                self._states[count] = self._worker.build_adaptive_runtime_state(
                    speculative_num_steps=shapes.depth_of(count),
                    speculative_num_draft_tokens=count + 1,
                    cuda_graph_bs=cuda_graph_bs,
                )

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Activate the state for the next step of a batch of this size."""
        count = self._choice.begin(batch_size)
        if count != self._live:
            self._worker.speculative_num_steps = (
                NO_STEPS  # otherwise SGLang would consider a state with as many layers the same
            )
            self._worker.apply_runtime_state(self._states[count])
            self._live = count
            _drop_override_record()

    def on_verify_complete(self, num_correct_drafts_per_req: Sequence[int], batch_size: int) -> None:
        """Process the result of a step."""
        self._choice.verified(num_correct_drafts_per_req)


def _drop_override_record() -> None:
    """Delete the record that SGLang keeps of every switch: there are several per second, for days."""
    from sglang.srt.runtime_context import get_context

    del get_context()._overrides_log[-1:]
