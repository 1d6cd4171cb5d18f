"""SGLang's runtime states (buffers and CUDA graphs), one for each number of draft tokens, and the switch between them.

SGLang's own controller has one state for each number of layers and supports only chains; the hooks here allow trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhfspec_mega.rollout.sglang_engine.choice import DraftChoice, read_shapes

NO_STEPS = NO_COUNT = -1
DRAFT_EXTEND = "draft_extend"  # as SGLang names the pass in which its draft reads what was accepted


def allow_trees(original: Callable[..., str | None], server_args: Any) -> str | None:
    """Around adaptive_unsupported_reason: what it says apart from trees, which only its own controller cannot do."""
    branches, server_args.speculative_eagle_topk = server_args.speculative_eagle_topk, 1
    try:
        return original(server_args)
    finally:
        server_args.speculative_eagle_topk = branches


def start_with_largest(original: Callable[..., None], server_args: Any) -> None:
    """Around _init_adaptive_speculative_params: SGLang's buffers are for its first state: the largest tree."""
    original(server_args)
    if server_args.speculative_eagle_topk > 1:
        server_args.speculative_num_draft_tokens = read_shapes(server_args.speculative_adaptive_config).counts[-1] + 1


def width_of_state(original: Callable[..., int], *, phase: str, **named: Any) -> int:
    """Around resolve_num_tokens_per_req: graphs of the draft's reading are as wide as the state they are captured for.

    By SGLang they are as wide as the first state's, and of use to it alone.
    """
    if phase == DRAFT_EXTEND:
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_num_draft_tokens)
    return original(phase=phase, **named)


class StateSwitch:
    """In the place of AdaptiveController: builds a state for each number of draft tokens and makes one live.

    Args:
        worker: an EAGLEWorkerV2.
        config_path: see DraftChoice.
    """

    def __init__(self, worker: Any, config_path: str | None = None) -> None:
        self._worker, self._choice = worker, DraftChoice(config_path)
        self._states: dict[int, Any] = {}
        self._live = NO_COUNT

    def register(self, state: Any) -> None:
        """The state that SGLang has built itself."""
        self._live = state.speculative_num_draft_tokens - 1
        self._states[self._live] = state

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        """Build the others, for these sizes of batches; None: without graphs."""
        shapes = self._choice.shapes
        for count in shapes.counts:
            if count not in self._states:
                self._states[count] = self._worker.build_adaptive_runtime_state(
                    speculative_num_steps=shapes.depth_of(count),
                    speculative_num_draft_tokens=count + 1,
                    cuda_graph_bs=cuda_graph_bs,
                )

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Before a step of so many requests."""
        count = self._choice.begin(batch_size)
        if count != self._live:
            self._worker.speculative_num_steps = NO_STEPS  # or a state of as many layers would be taken for the same
            self._worker.apply_runtime_state(self._states[count])
            self._live = count
            _drop_override_record()

    def on_verify_complete(self, num_correct_drafts_per_req: Sequence[int], batch_size: int) -> None:
        """When a step's result has come."""
        self._choice.verified(num_correct_drafts_per_req)


def _drop_override_record() -> None:
    """SGLang keeps a record of every one, to be looked at; there are several in a second, for days."""
    from sglang.srt.runtime_context import get_context

    del get_context()._overrides_log[-1:]
