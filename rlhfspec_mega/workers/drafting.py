"""The drafting of one engine: its policy, the models that the policy reads, and when these are reset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, StepCost
from rlhfspec_mega.planning.modes import ModeChoice
from rlhfspec_mega.planning.oversight import MonitoredPolicy
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.planning.strategy import Adaptive, CalibratedPolicy, Uniform, make_policy
from rlhfspec_mega.planning.throughput import throughput_of
from rlhfspec_mega.planning.tree import DraftingPolicy
from rlhfspec_mega.types import DraftingTally

FORMAT = 11  # of `DraftingController.state_dict`


class DraftingController:
    """The models of cost and acceptance of one engine, and the drafting policy that reads them.

    Args:
        draft: shape of the draft model; None: everything is drafted from history.
        recalls: whether the engine keeps earlier text to draft from.
        temperature: of training samples; acceptance is judged by these alone.
        deterministic: decisions depend neither on the clock nor on what this engine has decoded before: costs are
            nominal, and an idle engine resets its models, so that samples decode alike on every engine.
        machine: what costs depend on besides the two shapes: device, dtype, slots, threads.
        state: from `state_dict`; ignored if its format, machine or shapes differ. Without it costs are measured before
            the first sample.

    Attributes:
        policy: the drafting policy that the engine asks in each step.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        shape: ModelShape,
        draft: DraftShape | None,
        recalls: bool,
        temperature: float,
        deterministic: bool,
        machine: str,
        state: Any,
    ) -> None:
        self._config, self._sizes = config, (shape.parameters, draft.parameters if draft else 0)
        self._deterministic, self._recalls = deterministic, recalls
        self._key = f"format {FORMAT}, {machine}, {draft}"
        self._measured, self._rehearsed = deterministic, False
        self._set_models()
        known = not deterministic and isinstance(state, dict) and state.get("key") == self._key
        if known:
            self._measured = state["measured"]
            self._cost.load_state_dict(state["cost"])
            self._acceptance.load_state_dict(state["acceptance"])
        self.policy = MonitoredPolicy(
            self._decide(self._acceptance, self._cost), config.collapse_ratio, not deterministic, temperature
        )
        if known:
            self.policy.watch.usual = state["usual"]
            if self._modes and state["modes"]:
                self._modes.load_state_dict(state["modes"])

    def _set_models(self) -> None:
        self._cost = CostModel.nominal(*self._sizes) if self._deterministic else CostModel()
        self._acceptance = AcceptanceModel()

    @property
    def _modes(self) -> ModeChoice | None:
        policy = self.policy.policy
        return policy.modes if isinstance(policy, CalibratedPolicy) else None

    def _decide(self, acceptance: AcceptanceModel, cost: CostModel) -> DraftingPolicy:
        policy = make_policy(self._config, acceptance, cost)
        assert policy is not None, "an engine that speculates has a drafting policy"
        if isinstance(policy, CalibratedPolicy):
            policy.recalls = self._recalls
        return policy

    def prepare(self, measure: Callable[[], Sequence[StepCost]], rehearse: Callable[[DraftingPolicy], None]) -> None:
        """Prepare an idle engine for samples: measure costs and rehearse, once, or under `deterministic` reset models.

        Args:
            rehearse: decodes with a policy that learns for nothing.
        """
        if not self._measured:
            self._measured = True
            if costs := measure():
                self._cost.fit(costs)
        if self._deterministic:
            self._set_models()
            self.policy.replace_policy(self._decide(self._acceptance, self._cost))
        elif not self._rehearsed:
            self._rehearsed = True
            rehearse(self._decide(AcceptanceModel(), copy.deepcopy(self._cost)))

    def pace(self, slots: int, length: int, temperature: float) -> Throughput:
        """Decode throughput for samples of this many tokens, by batch size: measured, or else predicted.

        A policy that does not go by costs may draft at any batch size; plain decoding is assumed for it.
        """
        overseen, policy = self.policy, self.policy.policy
        drafts = self._sizes[1] > 0 and overseen.watch.may_draft
        forecast = drafts and isinstance(policy, Adaptive | Uniform)
        return throughput_of(
            self._cost,
            self._acceptance if forecast else None,
            slots=slots,
            length=length,
            temperature=temperature,
            width=policy.width,
            depth=policy.max_depth,
            max_nodes=policy.max_nodes,
            fixed_depth=isinstance(policy, Uniform),
            modes=self._modes,
        )

    def take_tally(self) -> DraftingTally:
        """What speculation did since the last call, with how well acceptance was predicted."""
        tally, report, policy = self.policy.take_tally(), self._acceptance.report(), self.policy.policy
        # A policy that learns no acceptance has no predictions of its own to report.
        if report.observations and isinstance(policy, CalibratedPolicy) and policy.learns_acceptance:
            tally.calibration_error = report.calibration_error
            tally.predicted_accepted, tally.realised_accepted = report.recent_predicted, report.recent_realised
        return tally

    def state_dict(self) -> dict[str, Any] | None:
        """The learnt models as JSON; None in a deterministic run, whose models are of no use to another run."""
        if self._deterministic:
            return None
        return {
            "key": self._key,
            "measured": self._measured,
            "usual": self.policy.watch.usual,
            "cost": self._cost.state_dict(),
            "acceptance": self._acceptance.state_dict(),
            "modes": self._modes.state_dict() if self._modes else None,
        }
