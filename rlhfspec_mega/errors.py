"""Errors whose message is a complete sentence for the user: what is wrong and what to do."""


class UserError(Exception):
    """Bad input: printed as one sentence, without a stack trace, exit status 2."""


class RunError(Exception):
    """A run that cannot go on (a dead worker, a deadline, a checksum): printed with phase and ranks, exit status 1."""
