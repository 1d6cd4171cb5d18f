"""Writes docs/configuration.md from the schema of the options: python -m tools.configuration."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.config.describe import document

FILE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"


def main() -> None:
    FILE.write_text(document(), encoding="utf-8")
    print(f"{FILE} is written.")


if __name__ == "__main__":
    main()
