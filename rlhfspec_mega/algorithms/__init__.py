"""One file for each algorithm: the models it needs, how it makes experience of samples, and what it updates."""
