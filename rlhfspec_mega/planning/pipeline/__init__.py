"""Schedules of one or two models' pipelines on the same devices (RLHFuse, arXiv 2409.13221)."""
