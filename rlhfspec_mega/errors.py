"""Errors whose message is a complete sentence for the user: what is wrong and what to do."""


class UserError(Exception):
    """Bad input: printed as one sentence, without a stack trace, exit status 2."""


class RunError(Exception):
    """A run that cannot go on (a deadline, a checksum): printed with phase and ranks, exit status 1."""


class CheckpointError(RunError):
    """A checkpoint could not be saved; workers and earlier checkpoints are intact, so the run may go on."""


class WorkerDied(RunError):
    """A worker process ended; the driver knows what work it held and may restart it."""


class SilentEngineError(RunError):
    """The processes behind an engine exist but no longer answer; the worker that notices this ends itself."""


class RewardServiceAway(RunError):
    """The remote reward service has not answered for reward.remote.deadline."""


class Stopped(Exception):
    """A signal stopped the run after a step and a checkpoint (exit status 75); it can be resumed."""

    def __init__(self, steps: int, name: str) -> None:
        super().__init__(
            f"Stopped by {name} after {steps} step{'' if steps == 1 else 's'} with a checkpoint: the same command with "
            "trainer.resume=true goes on."
        )
