"""Models, tokenizers and drafts that are made here on first use, and kept."""
