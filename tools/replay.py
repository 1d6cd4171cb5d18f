r"""Replays a saved rollout through the trainer, without engines, for instance with other parallel sizes.

    python -m tools.replay outputs/tiny/rollouts.jsonl --step 0 --out replay_pp2 \
        actor.tensor_parallel=1 actor.pipeline_parallel=2 model.path=DIR

DIR is the model with which the step began; for step 0 this is `start_model` in the run's summary.json.
Writes OUT/replay.json (per-token log-probs of every sample, and metrics of the update) and OUT/model (the weights after
the update).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import RunError, UserError


def replay(rollouts: Path, step: int, out: Path, overrides: list[str]) -> dict[str, Any]:
    """Recompute log-probs and repeat the step's updates from the weights of model.path; returns replay.json's data.

    Raises:
        UserError: configuration, rollouts or model are unusable.
        RunError: a worker failed.
    """
    from rlhfspec_mega.algorithms.choice import make_algorithm
    from rlhfspec_mega.algorithms.policy_gradient import ACTOR, REFERENCE
    from rlhfspec_mega.config.checks import check_config
    from rlhfspec_mega.config.compose import load_config
    from rlhfspec_mega.config.model_shape import model_shape
    from rlhfspec_mega.observe.rollouts import read_rollouts
    from rlhfspec_mega.system.export import export_model
    from rlhfspec_mega.system.setup import Setup
    from rlhfspec_mega.system.system import System
    from rlhfspec_mega.trainer import step_generator

    config = load_config([*overrides, f"output_dir={out.parent}", f"name={out.name}"])
    if config.algorithm.kl_coef > 0:
        config.placement.reference = ACTOR  # a replay has no engines
    sizes = check_config(config)
    if config.model.path is None:
        raise UserError("A replay needs the model with which the step began: give its directory as model.path=DIR.")
    samples = read_rollouts(rollouts, step)
    members = len({sample.member for sample in samples})
    if len(samples) % members:
        raise UserError(
            f"{rollouts} has incomplete groups of step {step}: replay a run with logger.rollouts_per_step=0."
        )
    out.mkdir(parents=True)
    shape = model_shape(config.model)
    model = Path(config.model.path)
    algorithm = make_algorithm(config.algorithm, members, min(sizes.samples_per_update, len(samples)), config.critic)
    reference = model if REFERENCE in algorithm.models else None
    setup = Setup(config, sizes, shape, out, sizes.total_updates, model, reference=reference, with_engines=False)
    with System(setup) as system:
        system.load_start_weights()
        experience = algorithm.experience(samples)
        algorithm.add_rewards(samples, experience)
        if system.reference is not None:
            algorithm.add_reference(experience, system.reference)
        metrics = algorithm.add_old_logprobs(experience, system.actor)
        if system.critic is not None:
            algorithm.add_values(experience, system.critic)
        generator = step_generator(config, step)
        metrics |= algorithm.add_advantages(experience, generator)
        began = time.perf_counter()
        metrics |= algorithm.update(experience, system.learners, step, generator, system.fused)
        metrics["timing_s/update"] = time.perf_counter() - began
        export_model(system.training, out / "model", model)
    algorithm.note_on_samples(samples, experience)
    result = {"metrics": metrics, "logprobs": {sample.sample_id: sample.old_logprobs for sample in samples}}
    (out / "replay.json").write_text(json.dumps(result), encoding="utf-8")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl of a run that logged all its samples")
    parser.add_argument("--step", type=int, default=0, help="step to replay (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="directory to create for the results")
    parser.add_argument("overrides", nargs="*", help="option=value, as for train.py")
    arguments = parser.parse_intermixed_args()
    try:
        result = replay(arguments.rollouts, arguments.step, arguments.out, arguments.overrides)
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    for name, value in result["metrics"].items():
        print(f"{name:28} {value:.6g}")


if __name__ == "__main__":
    main()
