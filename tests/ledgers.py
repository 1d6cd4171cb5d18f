"""Ledgers of made-up samples."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.types import Prompt, Sample


def finished_ledger(names: Sequence[str]) -> Ledger:
    """Samples of these names have been generated."""
    ledger = Ledger()
    finish_more(ledger, names)
    return ledger


def finish_more(ledger: Ledger, names: Sequence[str]) -> None:
    """As have these."""
    ledger.open([Sample(name, 0, Prompt(0, "", "", (1,)), 0) for name in names], Purpose.EVALUATE)
    ledger.custody.give(0, names)
    for name in names:
        assert ledger.custody.finished(0, name)
