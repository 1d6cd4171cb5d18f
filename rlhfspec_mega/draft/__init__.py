"""The draft: an EAGLE-3 layer that reads its target's hidden states, its directory format, and its training."""
