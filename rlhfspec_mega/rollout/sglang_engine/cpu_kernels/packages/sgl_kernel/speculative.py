"""See the package."""

from rlhfspec_mega.rollout.sglang_engine.cpu_kernels.trees import reconstruct_indices_from_tree_mask  # noqa: F401
