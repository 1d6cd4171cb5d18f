"""The entry point `sglang.srt.plugins`: registers the hooks in every process of SGLang that loads plug-ins.

SGLang loads all installed plug-ins unless SGLANG_PLUGINS lists some. This one does nothing unless it is listed, so that
it does not affect other uses of SGLang in the same environment. If a plug-in or a hook fails, SGLang logs that and
continues without it, which here would mean sampling with other noise. The scheduler therefore checks, before it
starts, that every hook was applied and no setting bypasses them, and otherwise ends with an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.sglang_engine import cpu_kernels, history_control, kv, pins, seams, shared_noise
from rlhfspec_mega.rollout.sglang_engine.choice import DraftChoice, attach, read_shapes
from rlhfspec_mega.rollout.sglang_engine.history import HistoryDrafts
from rlhfspec_mega.rollout.sglang_engine.shared_noise import MOST_ROWS, DraftNoise, last_positions
from rlhfspec_mega.rollout.sglang_engine.states import StateSwitch, allow_trees, start_with_largest, width_of_state
from rlhfspec_mega.rollout.sglang_engine.survival import NodeScores
from rlhfspec_mega.rollout.sglang_engine.weights import DRAFTS

NAME = "rlhfspec_mega"  # of the entry point
# Settings under which something else samples, and the value that does not.
BYPASSES = {
    "speculative_use_rejection_sampling": False,
    "rl_on_policy_target": None,
    "incremental_streaming_output": False,
}


class DraftHooks:
    """The draft's hooks share buffers, made on first use, before any graph is captured."""

    def __init__(self) -> None:
        self._noise: DraftNoise | None = None
        self._scores: NodeScores | None = None

    def set_requests(self, worker: Any, batch: Any, *rest: Any, **named: Any) -> None:
        """Before a method of EagleDraftWorker: use the seeds of this batch's requests.

        Raises RunError for a class of drafts without hooked logits: it would seldom agree with the target.
        """
        if (model := type(worker.draft_runner.model).__name__) not in DRAFTS:
            raise RunError(f"A draft of class {model} does not get the shared noise; use an EAGLE-3 draft of {DRAFTS}.")
        info = batch.sampling_info
        if info is not None and info.sampling_seed is not None and len(batch.reqs):
            choice = DraftChoice.current
            self._of(info.sampling_seed.device).fill(info, choice.sharpness if choice else 1.0)

    def perturb(
        self, result: Any, model: Any, input_ids: Any, positions: Any, batch: Any, *rest: Any, **named: Any
    ) -> Any:
        """After the draft model's forward pass: its logits become perturbed scores, in the buffer that they lie in."""
        logits = getattr(result, "next_token_logits", None)
        if logits is None or not len(logits):
            return result
        if model.hot_token_id is not None:
            model.hot_token_id = model.hot_token_id.to(logits.device)
        at = last_positions(positions, len(logits), batch.extend_seq_lens)
        self._of(logits.device).perturb(logits, at, batch.batch_size, model.hot_token_id)
        return result

    def keep_scores(self, result: Any, scores: Any, *rest: Any, **named: Any) -> None:
        """After organize_draft_results, which has taken the likeliest nodes of these: how likely they are."""
        choice = DraftChoice.current
        if choice is None or choice.shapes.branches == 1:
            return
        if self._scores is None:
            self._scores = NodeScores(scores[0].device, MOST_ROWS, choice.shapes.counts[-1])
        self._scores.keep(scores)

    def hand_scores(self, result: Any, worker: Any, batch: Any, *rest: Any, **named: Any) -> None:
        """After a tree was drafted: what its nodes promise is for the choice of a step to come."""
        choice = DraftChoice.current
        if choice is not None and self._scores is not None and len(batch.reqs):
            choice.drafted(self._scores.nodes(len(batch.reqs), worker.topk, worker.draft_runner.tp_group))

    def _of(self, device: Any) -> DraftNoise:
        if self._noise is None:
            self._noise = DraftNoise(device)
        return self._noise


def normalize(
    original: Callable[..., Any], norm: Any, x: Any, residual: Any = None, post_residual_addition: Any = None
) -> Any:
    """Around RMSNorm.forward_cuda: its kernel knows half precision only, and PyTorch's operations any.

    Tokens of engines in float32 can be held against those of other engines.
    """
    forward = norm.forward_native if x.dtype == torch.float32 else partial(original, norm)
    return forward(x, residual, post_residual_addition)


def settle(*given: Any) -> None:
    """Before GPU memory is given back: wait for what may still read it.

    SGLang does not wait, and died of illegal memory accesses there. By its code, the draft reads accepted tokens after
    the last result of a batch, and copies of the model's buffers are under way when their memory goes.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def hooks() -> list[tuple[str, Any, str]]:
    """(target, hook, kind) of all, `kind` a name of HookType."""
    draft = DraftHooks()
    return [
        (seams.SEEDS.target, shared_noise.keep_seeds, "AROUND"),
        (seams.PLAIN.target, shared_noise.choose, "AROUND"),
        (seams.VERIFY.target, shared_noise.verify, "AROUND"),
        (f"{seams.DRAFT_LOGITS.target}.forward", draft.perturb, "AFTER"),
        *((seam.target, draft.set_requests, "BEFORE") for seam in seams.DRAFTING),
        (seams.ORGANISE.target, draft.keep_scores, "AFTER"),
        (seams.DRAFT.target, draft.hand_scores, "AFTER"),
        (seams.UNSUPPORTED.target, allow_trees, "AROUND"),
        (seams.FIRST_STATE.target, start_with_largest, "AROUND"),
        (seams.WIDTHS.target, width_of_state, "AROUND"),
        (seams.CONTROLLER.target, StateSwitch, "REPLACE"),
        (seams.CORPUS.target, HistoryDrafts, "REPLACE"),
        (seams.CORPUS_ROOM.target, history_control.make_room, "AFTER"),
        (seams.CORPUS_DRAFT.target, history_control.draft, "AROUND"),
        (seams.CORPUS_UPDATE.target, history_control.keep_nothing, "AROUND"),
        (seams.NORM.target, normalize, "AROUND"),
        (seams.RELEASE.target, settle, "BEFORE"),
        *cpu_kernels.hooks(),
    ]


def install() -> None:
    """Register all hooks, where SGLANG_PLUGINS names this plug-in."""
    if NAME not in os.environ.get("SGLANG_PLUGINS", "").split(","):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from tqdm import tqdm

    registered = hooks()

    def check(original: Callable[..., None], scheduler: Any, server_args: Any, *given: Any, **named: Any) -> None:
        check_server_args(server_args, [target for target, _, _ in registered if target not in HookRegistry._patched])
        tqdm.set_lock(threading.RLock())  # its own lock stays in /dev/shm when this process is killed
        original(scheduler, server_args, *given, **named)
        attach(scheduler)
        history_control.attach(scheduler)
        kv.attach(scheduler)

    HookRegistry.register(seams.SCHEDULER.target, check, HookType.AROUND)  # first: what follows may fail
    if pins.missing(cpu_kernels.device()) is None:
        for target, hook, kind in registered:
            HookRegistry.register(target, hook, HookType[kind])


def apply_here() -> None:
    """Have the hooks in this process, which resolves the arguments of an engine; its schedulers load plug-ins anew.

    SGLang loads plug-ins once in a process: an engine that was started before without this one would keep it away.
    Raises RunError for hooks that could not be applied.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    if seams.FIRST_STATE.target not in HookRegistry._patched:
        install()
        HookRegistry.apply_hooks()
    needed = seams.UNSUPPORTED.target, seams.FIRST_STATE.target
    _check_applied([target for target in needed if target not in HookRegistry._patched])


def _check_applied(lost: Sequence[str]) -> None:
    if lost:
        raise RunError(f"SGLang has not applied the hooks of {', '.join(lost)}; its log says why.")


def check_server_args(server_args: Any, lost: Sequence[str]) -> None:
    """Check, in the scheduler, that the hooks determine all sampling and drafting.

    Args:
        lost: targets whose hooks were not applied.

    Raises:
        UserError: another version of SGLang, or a setting that bypasses the hooks.
        RunError: a hook was not applied, or speculation is not adaptive or does not start with the largest number of
            draft tokens, because the process that resolved SGLang's arguments did not have the hooks.
    """
    if (wrong := pins.missing(cpu_kernels.device())) is not None:
        raise UserError(f"The plug-in {NAME} cannot be used: {wrong}.")
    for name, fine in BYPASSES.items():
        if getattr(server_args, name) != fine:
            raise UserError(f"{name}={getattr(server_args, name)} samples past the plug-in {NAME}: set it to {fine}.")
    _check_applied(lost)
    if (config := server_args.speculative_adaptive_config) is not None:
        first, wanted = server_args.speculative_num_draft_tokens, read_shapes(config).counts[-1] + 1
        if not server_args.speculative_adaptive or first != wanted:
            raise RunError(
                f"SGLang starts with {first} draft tokens, adaptive={server_args.speculative_adaptive}, and "
                f"{config} needs {wanted} and adaptive speculation: remove the options of speculation from "
                "rollout.sglang.engine_kwargs."
            )
