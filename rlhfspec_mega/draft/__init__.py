"""The draft: an EAGLE-3 layer that reads its target's states, its directory, and how it learns and stays fresh."""
