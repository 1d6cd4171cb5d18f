"""A discrete-event simulation of rollouts under the planning objects of real runs; all its figures are simulated."""
