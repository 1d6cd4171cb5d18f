"""The entry point `sglang.srt.plugins`: registers the hooks in every process of SGLang that loads plug-ins.

SGLang logs a plug-in or a hook that fails and goes on without it, which would sample by another noise. So the scheduler
looks, before it starts, whether every hook was applied, and ends with a sentence if not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.sglang_engine import pins, seams, shared_noise
from rlhfspec_mega.rollout.sglang_engine.shared_noise import DraftNoise, last_positions
from rlhfspec_mega.rollout.sglang_engine.steps import ProfiledSteps


class DraftHooks:
    """The draft's hooks share the buffers of its noise, made on first use, before any graph is captured."""

    def __init__(self) -> None:
        self._noise: DraftNoise | None = None

    def drafts_for(self, worker: Any, batch: Any, *rest: Any, **named: Any) -> None:
        """Before a method of EagleDraftWorker: these requests' seeds count."""
        info = batch.sampling_info
        if info is not None and info.sampling_seed is not None and len(batch.reqs):
            self._of(info.sampling_seed.device).fill(info)

    def perturb(self, result: Any, model: Any, input_ids: Any, positions: Any, batch: Any, *rest: Any) -> Any:
        """After the draft model's forward pass: its logits become perturbed scores."""
        logits = getattr(result, "next_token_logits", None)
        if logits is None or not len(logits):
            return result
        if model.hot_token_id is not None:
            model.hot_token_id = model.hot_token_id.to(logits.device)
        at = last_positions(positions, len(logits), batch.extend_seq_lens)
        noise = self._of(logits.device)
        result.next_token_logits = noise.perturbed(logits, at, batch.batch_size, model.hot_token_id)
        return result

    def _of(self, device: Any) -> DraftNoise:
        if self._noise is None:
            self._noise = DraftNoise(device)
        return self._noise


def hooks() -> list[tuple[str, Any, str]]:
    """(target, hook, kind) of all, `kind` a name of HookType."""
    draft = DraftHooks()
    return [
        (seams.SEEDS.target, shared_noise.keep_seeds, "AROUND"),
        (seams.PLAIN.target, shared_noise.choose, "AROUND"),
        (seams.VERIFY.target, shared_noise.verify, "AROUND"),
        (f"{seams.DRAFT_LOGITS.target}.forward", draft.perturb, "AFTER"),
        *((seam.target, draft.drafts_for, "BEFORE") for seam in seams.DRAFTING),
        (seams.STEPS.target, ProfiledSteps, "REPLACE"),
    ]


def install() -> None:
    """Register all hooks. Raises UserError for another version of SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrong = pins.missing()
    if wrong is not None:
        raise UserError(f"The plug-in cannot be used: {wrong}.")
    registered = hooks()
    for target, hook, kind in registered:
        HookRegistry.register(target, hook, HookType[kind])

    def check(original: Callable[..., None], *given: Any, **named: Any) -> None:
        if lost := [target for target, _, _ in registered if target not in HookRegistry._patched]:
            raise RunError(f"SGLang has not applied the hooks of {', '.join(lost)}; its log says why.")
        original(*given, **named)

    HookRegistry.register(seams.SCHEDULER.target, check, HookType.AROUND)
