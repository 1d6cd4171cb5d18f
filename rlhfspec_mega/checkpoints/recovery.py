"""Continuing from a checkpoint: when a run is resumed, and when a rank of the actor has died."""

from __future__ import annotations

from typing import Any

from rlhfspec_mega import checkpoints
from rlhfspec_mega.errors import RunError, UserError, WorkerDied
from rlhfspec_mega.observe.reporter import Reporter
from rlhfspec_mega.run import Run


def driver_state(run: Run) -> dict[str, Any]:
    """What a checkpoint holds besides the actor's part, as JSON."""
    return {
        "prompts": run.prompts.state_dict(),
        "ledger": run.ledger.state_dict(),
        "policy_version": run.system.policy_version,
        "algorithm": run.algorithm.state_dict(),
        "texts": run.system.texts.state_dict(),
    }


def resume(run: Run) -> int:
    """Load the newest good checkpoint, if there is one; returns the number of finished steps."""
    state = checkpoints.load_latest(run.directory, run.system.learners, run.console.note)
    if state is None:
        run.prompts.load_state_dict(run.beginning["prompts"])
        run.ledger.load_state_dict(run.beginning["ledger"])
        run.algorithm.load_state_dict(run.beginning["algorithm"])
        run.system.texts.load_state_dict(())
        return 0
    run.prompts.load_state_dict(state["prompts"])
    run.ledger.load_state_dict(state["ledger"])
    run.algorithm.load_state_dict(state.get("algorithm", run.beginning["algorithm"]))
    run.system.texts.load_state_dict(state.get("texts", ()))
    done = int(state["step"])
    if state["policy_version"] != done:
        raise UserError(
            f"The checkpoint of {done} steps in {run.directory} holds policy version {state['policy_version']}: it is "
            "none of a synchronous run; start another with another name=."
        )
    if done > run.config.trainer.steps:
        raise UserError(f"{run.directory} has done {done} steps: resume it with trainer.steps={done} or more.")
    return done


def recover(run: Run, reporter: Reporter, death: WorkerDied) -> int:
    """Restart the actor and go back to the last checkpoint; returns the step to continue with.

    Raises RunError if the actor has died too often without a finished step in between.
    """
    with run.phases.measure("recover"):
        run.saver.forget()
        while True:
            run.console.note(f"{death} The actor is started anew from the last checkpoint.")
            if not run.system.may_restart_actor():
                most = run.config.launcher.max_restarts
                raise RunError(f"{death} It was restarted launcher.max_restarts={most} times without a step between.")
            try:
                run.system.restart_actor()
                run.system.load_start_weights()
                step = resume(run)
            except WorkerDied as another:
                death = another
                continue
            reporter.rewind(step)
            return step
