"""Names that are imported and never used."""

from __future__ import annotations


def unused(name: str) -> type:
    """A module's __getattr__: returns a class that cannot be used but whose attributes may serve as default values."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*given: object, **named: object) -> None:
        raise NotImplementedError(f"torchvision's {name} is not here: install torchvision to work with images.")

    class Meta(type):
        def __getattr__(cls, attribute: str) -> str:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return attribute

    return Meta(name, (), {"__init__": refuse})
