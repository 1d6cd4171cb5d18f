"""Weights of a draft with their optimizer: one distillation step, and the measure that decides between two drafts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfspec_mega.draft.agreement import TOP, agreement, expected_accepted
from rlhfspec_mega.draft.buffer import batches
from rlhfspec_mega.draft.examples import Example
from rlhfspec_mega.draft.network import Batch, Network
from rlhfspec_mega.draft.shape import DraftShape, draft_tensors

STEPS = 5  # of training-time test, and draft tokens of the measured chains
_STEP_WEIGHT = 0.8  # of each step's loss, relative to the step before
_CLIP = 1.0  # norm of the gradient
_RESIDUAL_GAIN = 0.5  # of a new draft's projections that are added to the states an entry read
_MEASURED_TOKENS = 1024  # of one batch of the measure
_MEASURED_LOGITS = 2**24  # that the measure computes at once, bounded so that memory does not grow with the vocabulary
_WEIGHT, _MOMENTS, _TAKEN = "weight.", ("exp_avg", "exp_avg_sq"), "steps_taken"


class Target:
    """What a draft imitates: the target's embedding and rows of its head.

    Args:
        embedding, head: [vocab, hidden]; copied.
        target_ids: int64 [draft vocabulary]; None: the whole vocabulary.
        temperature: sampling temperature of the samples.
    """

    def __init__(self, embedding: Tensor, head: Tensor, target_ids: Tensor | None, temperature: float):
        self.embedding = embedding.detach().float().clone()
        self._head, self._ids = head.detach().float().clone(), target_ids
        self.temperature = temperature

    @property
    def draft_head(self) -> Tensor:
        """The rows of the draft's vocabulary."""
        return self._head if self._ids is None else self._head[self._ids]

    def probabilities(self, states: Tensor) -> Tensor:
        """The target's probabilities of the draft's vocabulary, float32 [C, draft vocabulary].

        Other tokens have the rest.

        A greedy target is imitated at temperature 1.
        """
        p = F.linear(states, self._head).div_(self.temperature or 1.0).softmax(dim=-1)
        return p if self._ids is None else p[:, self._ids]

    def best(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities [C, K] of the most probable tokens of the draft's vocabulary, and these tokens, int64 [C, K].

        At temperature 0: the chosen token alone, with probability 1, or 0 if it lies outside the draft's vocabulary.
        """
        if self.temperature > 0:
            p = self.probabilities(states)
            return p.topk(min(TOP, p.shape[-1]), dim=-1)
        logits = F.linear(states, self._head)
        known = logits if self._ids is None else logits[:, self._ids]
        best = known.max(dim=-1, keepdim=True)
        return (best.values >= logits.max(dim=-1, keepdim=True).values).float(), best.indices

    def agreement(self, best: tuple[Tensor, Tensor], logits: Tensor) -> Tensor:
        """Probability [N] that the target and a draft with `logits` [N, draft vocabulary] choose the same token.

        At temperature 0 whether they do.

        Args:
            best: as `best` returns it, [N, K] each.
        """
        p, tokens = best
        if self.temperature == 0:
            return p[:, 0] * (tokens[:, 0] == logits.argmax(dim=-1))
        return agreement(p, (logits / self.temperature).softmax(dim=-1).gather(-1, tokens))


class Learner:
    """AdamW on a draft's float32 weights.

    Args:
        weights: by DraftModel.tensors() names; copied, and trained on their device.
    """

    def __init__(self, shape: DraftShape, weights: Mapping[str, Tensor], learning_rate: float):
        self.weights = {name: tensor.detach().float().clone().requires_grad_() for name, tensor in weights.items()}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._shape = shape

    def step(self, target: Target, examples: Sequence[Example]) -> float:
        """One optimizer step towards the target's distributions.

        Returns the first draft step's loss per predicted token.

        The gradient keeps about 3 * STEPS + 2 float32 tensors [cells, draft vocabulary].
        """
        batch = Batch(examples, target.embedding.device)
        network = Network(self._shape, self.weights, target.embedding)
        wanted = target.probabilities(batch.states)
        temperature = target.temperature or 1.0
        losses = []
        for prediction in network.unroll(batch, STEPS):
            log_q = (network.logits(prediction.states) / temperature).log_softmax(dim=-1)
            losses.append(-(wanted[prediction.cells] * log_q).sum() / len(wanted))
        loss = torch.stack([_STEP_WEIGHT**step * part for step, part in enumerate(losses)]).sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), _CLIP)
        self.optimizer.step()
        return float(losses[0].detach())

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of weights and moments, flat, and the number of steps taken."""
        state, steps = {}, torch.zeros(())
        for name, weight in self.weights.items():
            moments = self.optimizer.state.get(weight, {})
            steps = moments.get("step", steps)
            state[f"{_WEIGHT}{name}"] = weight.detach().clone()
            for moment in _MOMENTS:
                state[f"{moment}.{name}"] = moments.get(moment, torch.zeros_like(weight)).detach().clone()
        return state | {_TAKEN: steps.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, or its weights alone; the tensors are copied."""
        self.optimizer.state.clear()
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state[f"{_WEIGHT}{name}"])
                if _TAKEN in state:
                    moments = {moment: state[f"{moment}.{name}"].to(weight.device).clone() for moment in _MOMENTS}
                    self.optimizer.state[weight] = {"step": state[_TAKEN].cpu().clone(), **moments}


def state_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state that `weights_of` can read, without an optimizer's state."""
    return {f"{_WEIGHT}{name}": tensor for name, tensor in weights.items()}


def weights_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in a state of Learner.state_dict, by DraftModel.tensors() names."""
    return {name.removeprefix(_WEIGHT): tensor for name, tensor in state.items() if name.startswith(_WEIGHT)}


def initial_draft(shape: DraftShape, head: Tensor, seed: int) -> dict[str, Tensor]:
    """Weights of a new draft, by DraftModel.tensors() names: norms 1, matrices normal with variance 1 / inputs.

    Args:
        head: the target's rows of the draft's vocabulary, [draft vocabulary, hidden]; the draft's head starts as they.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for info in draft_tensors(shape):
        if "norm" in info.name:
            tensor = torch.ones(info.shape)
        else:
            gain = _RESIDUAL_GAIN if info.name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            tensor = torch.randn(info.shape, generator=generator) * gain * info.shape[1] ** -0.5
        weights[info.name] = tensor.to(head.device)
    return weights | {"lm_head.weight": head.detach().float().clone()}


def measured_batches(examples: Sequence[Example]) -> list[list[Example]]:
    """Batches for the measure, always the same, in an order in which the first ones are a fair sample."""
    return batches(examples, _MEASURED_TOKENS, random.Random(0))


def accepted_by_depth(
    shape: DraftShape, weights: Mapping[str, Tensor], target: Target, examples: Sequence[Example]
) -> Tensor:
    """[STEPS]: mean over all response tokens of the expected accepted length of chains of 1 .. STEPS draft tokens."""
    lengths = [accepted_lengths(shape, weights, target, batch) for batch in measured_batches(examples)]
    return torch.cat(lengths).mean(dim=0) if lengths else torch.zeros(STEPS)


@torch.no_grad()
def accepted_lengths(
    shape: DraftShape, weights: Mapping[str, Tensor], target: Target, examples: Sequence[Example]
) -> Tensor:
    """Expected accepted lengths [C, STEPS] from each response token of one batch on, of chains of 1 .. STEPS tokens.

    On the CPU: a GPU has no deterministic sum along the depth.
    """
    network = Network(shape, weights, target.embedding)
    batch = Batch(examples, target.embedding.device)
    rows = max(1, _MEASURED_LOGITS // len(target.embedding))
    best = [target.best(states) for states in batch.states.split(rows)]
    p, tokens = (torch.cat(parts) for parts in zip(*best, strict=True))
    agreements = torch.zeros(len(p), STEPS)
    for step, prediction in enumerate(network.unroll(batch, STEPS)):
        parts = [
            target.agreement((p[cells], tokens[cells]), network.logits(states))
            for states, cells in zip(prediction.states.split(rows), prediction.cells.split(rows), strict=True)
        ]
        agreements[prediction.roots.cpu(), step] = torch.cat(parts).cpu()
    return expected_accepted(agreements)
