"""Models, tokenizers and drafts that are built on first use and cached."""
