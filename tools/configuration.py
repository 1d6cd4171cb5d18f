"""Writes docs/configuration.md and docs/metrics.md from the tables in the code: python -m tools.configuration."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.config import describe
from rlhfspec_mega.observe import metrics

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {"configuration.md": describe.document, "metrics.md": metrics.document}


def main() -> None:
    for name, text in PAGES.items():
        (DOCS / name).write_text(text(), encoding="utf-8")
        print(f"Wrote {DOCS / name}.")


if __name__ == "__main__":
    main()
