"""Discrete-event simulation of rollouts with the planning code of real runs. All its results are simulated values."""
