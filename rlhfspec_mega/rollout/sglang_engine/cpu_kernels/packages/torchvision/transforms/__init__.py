"""What transformers lists modes of."""

from enum import Enum


class InterpolationMode(Enum):
    """As torchvision names them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
