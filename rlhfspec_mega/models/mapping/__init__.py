"""HF <-> Megatron: one table per architecture, used by loading, resharding and export."""

from __future__ import annotations

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.mapping import llama, qwen2, qwen3
from rlhfspec_mega.models.mapping.table import Mapping

MAPPINGS = {mapping.architecture: mapping for mapping in (llama.MAPPING, qwen2.MAPPING, qwen3.MAPPING)}


def mapping_for(architecture: str) -> Mapping:
    """Mapping table of an architecture. Raises UserError for an unknown one."""
    if architecture not in MAPPINGS:
        raise UserError(f"The architecture {architecture!r} is not supported: use one of {', '.join(MAPPINGS)}.")
    return MAPPINGS[architecture]
