"""Errors whose message is a complete sentence for the user: what is wrong and what to do."""


class UserError(Exception):
    """Bad input: printed as one sentence, without a stack trace, exit status 2."""


class RunError(Exception):
    """A run that cannot go on (a deadline, a checksum): printed with phase and ranks, exit status 1."""


class CheckpointError(RunError):
    """A checkpoint that could not be saved; workers and earlier checkpoints are untouched, so the run may go on."""


class WorkerDied(RunError):
    """A worker process ended. Another may take its place: the work it held is known to the driver."""


class SilentEngineError(RunError):
    """The processes behind an engine are there and do nothing any more: a worker that sees it ends, as if they died."""


class Stopped(Exception):
    """A run that a signal stopped after a step and a checkpoint: exit status 75, to be resumed."""

    def __init__(self, steps: int, name: str) -> None:
        super().__init__(
            f"Stopped by {name} after {steps} step{'' if steps == 1 else 's'} with a checkpoint: the same command with "
            "trainer.resume=true goes on."
        )
