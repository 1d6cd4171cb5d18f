"""Replaces torchvision, which does not build with torch for CPUs; SGLang and transformers import it by name.

Text models do not use it.
"""

__version__ = "0.28.0"
