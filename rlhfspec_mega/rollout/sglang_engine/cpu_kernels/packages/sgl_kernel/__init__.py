"""Replaces SGLang's kernel package on a CPU; see rlhfspec_mega.rollout.sglang_engine.cpu_kernels.

`torch.ops.sgl_kernel.convert_weight_packed` is missing on purpose: without it SGLang uses its native torch code.
"""

import torch

from rlhfspec_mega.rollout.sglang_engine.cpu_kernels.attention import decode_attention_cpu, extend_attention_cpu
from rlhfspec_mega.rollout.sglang_engine.cpu_kernels.slots import (  # noqa: F401
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from rlhfspec_mega.rollout.sglang_engine.cpu_kernels.trees import (  # noqa: F401
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

for operator in (decode_attention_cpu, extend_attention_cpu):
    setattr(torch.ops.sgl_kernel, operator.__name__, operator)
