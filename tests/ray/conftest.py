"""Real Ray clusters of this machine: make test-ray."""

from tests.e2e.conftest import model

__all__ = ["model"]
