"""What transformers imports as a module, and names of it."""

from torchvision._unused import unused as __getattr__  # noqa: F401
