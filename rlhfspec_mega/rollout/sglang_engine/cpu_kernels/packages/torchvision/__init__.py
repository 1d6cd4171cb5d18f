"""Stands for torchvision, whose builds fail beside torch's build for CPUs: SGLang and transformers name it on import.

Models of text use nothing of it.
"""

__version__ = "0.28.0"
