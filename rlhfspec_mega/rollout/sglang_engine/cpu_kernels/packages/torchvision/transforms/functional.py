"""What SGLang and transformers import by name."""

from torchvision._unused import unused as __getattr__  # noqa: F401
from torchvision.transforms import InterpolationMode  # noqa: F401
