"""One file per algorithm: which models it needs, how it turns samples into experience, and what it updates."""
