"""Every name of SGLang that the plug-in takes hold of, and what it relies on there; tests hold a wheel against it."""

from __future__ import annotations

from dataclasses import dataclass

_SPEC = "sglang.srt.speculative"


@dataclass(frozen=True)
class Seam:
    """A function, method or class of SGLang.

    Attributes:
        module: where it is defined.
        name: qualified, in the module.
        parameters: of the function, in order, those that are relied upon; the rest may follow.
        attributes: names that its body (of a class: its body or its base's in the same module) must speak of.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """As HookRegistry.register takes it."""
        return f"{self.module}.{self.name}"


# Sampling: seeds of requests, the plain sampler, verification, the draft's logits.
SEEDS = Seam(
    "sglang.srt.sampling.sampling_batch_info",
    "SamplingBatchInfo.from_schedule_batch",
    ("cls", "batch", "vocab_size"),
    ("reqs", "sampling_params", "sampling_seed", "device"),
)
BATCH_INFO = Seam(
    "sglang.srt.sampling.sampling_batch_info",
    "SamplingBatchInfo",
    (),
    ("temperatures", "top_ks", "is_all_greedy", "sampling_seed", "filter_batch", "merge_batch"),
)
PLAIN = Seam(
    "sglang.srt.layers.sampler",
    "Sampler._sample_from_probs",
    ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
)
VERIFY = Seam(
    f"{_SPEC}.eagle_utils",
    "eagle_sample",
    ("verify_input", "batch", "logits_output"),
    ("is_all_greedy", "next_token_logits", "draft_token_num", "verify_tree_greedy_func"),
)
DRAFT_LOGITS = Seam(
    "sglang.srt.models.llama_eagle3", "LlamaForCausalLMEagle3", (), ("LlamaForCausalLM", "hot_token_id")
)
FORWARD = Seam(
    "sglang.srt.models.llama",
    "LlamaForCausalLM.forward",
    ("self", "input_ids", "positions", "forward_batch"),
    ("pp_proxy_tensors",),  # comes by name
)
DRAFT = Seam(f"{_SPEC}.eagle_worker_v2", "EagleDraftWorker.draft", ("self", "batch"))
EXTEND_PREFILL = Seam(f"{_SPEC}.eagle_worker_v2", "EagleDraftWorker._draft_extend_for_prefill", ("self", "batch"))
EXTEND_DECODE = Seam(
    f"{_SPEC}.eagle_worker_v2", "EagleDraftWorker._draft_extend_for_decode", ("self", "batch", "batch_result")
)
DRAFTING = DRAFT, EXTEND_PREFILL, EXTEND_DECODE

# Engines in float32.
NORM = Seam(
    "sglang.srt.layers.layernorm",
    "RMSNorm.forward_cuda",
    ("self", "x", "residual", "post_residual_addition"),
    ("forward_native",),
)

# SGLang on a CPU, where its attention backend forgets the lengths that it has prepared for drafting and verification.
_AMX = "sglang.srt.layers.attention.intel_amx_backend"
_LAYER = ("self", "q", "k", "v", "layer", "forward_batch")
AMX_DECODE = Seam(_AMX, "IntelAMXAttnBackend.forward_decode", _LAYER, ("draft_decode_metadata", "seq_lens"))
AMX_EXTEND = Seam(_AMX, "IntelAMXAttnBackend.forward_extend", _LAYER, ("extend_metadata", "seq_lens"))
_CPU = (
    Seam(
        "sglang.srt.arg_groups.overrides",
        "_attention_backend_platform_fallbacks",
        ("view",),
        ("cpu_has_amx_support", "attention_backend", "intel_amx"),
    ),
    Seam("sglang.srt.models.registry", "import_model_classes", (), ("SGLANG_DISABLED_MODEL_ARCHS",)),
)

# How many draft tokens: SGLang's adaptive speculation, whose controller is replaced, and what trees promise.
CONTROLLER = Seam(
    f"{_SPEC}.adaptive_runtime_state",
    "AdaptiveController",
    (),
    ("register", "init_states", "activate_step_by_batch", "on_verify_complete", "build_adaptive_runtime_state"),
)
UNSUPPORTED = Seam(
    f"{_SPEC}.adaptive_spec_params", "adaptive_unsupported_reason", ("server_args",), ("speculative_eagle_topk",)
)
ORGANISE = Seam(
    f"{_SPEC}.eagle_utils", "organize_draft_results", ("score_list", "token_list", "parents_list", "num_draft_token")
)
FIRST_STATE = Seam(
    "sglang.srt.arg_groups.speculative_hook",
    "_init_adaptive_speculative_params",
    ("server_args",),
    ("speculative_num_draft_tokens", "speculative_adaptive_config", "speculative_eagle_topk"),
)
WIDTHS = Seam(f"{_SPEC}.spec_utils", "resolve_num_tokens_per_req", (), ("phase", "draft_extend"))
_SWITCHING = (
    Seam("sglang.srt.runtime_context", "get_spec"),
    Seam("sglang.srt.runtime_context", "get_context"),
    Seam("sglang.srt.runtime_context", "RuntimeContext.override", ("self", "source"), ("_overrides_log",)),
    Seam("sglang.srt.plugins", "load_plugins", (), ("apply_hooks",)),
    Seam("sglang.srt.arg_groups.speculative_hook", "_maybe_disable_adaptive", (), ("adaptive_unsupported_reason",)),
    Seam(
        f"{_SPEC}.eagle_draft_extend_cuda_graph_runner",
        "EAGLEDraftExtendCudaGraphRunner.__init__",
        (),
        ("resolve_num_tokens_per_req", "draft_extend"),
    ),
    Seam(f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2._override_worker_state", (), ("speculative_num_draft_tokens",)),
    Seam(
        "sglang.srt.distributed.parallel_state",
        "GroupCoordinator.broadcast",
        ("self", "input_", "src"),
        ("world_size",),
    ),
    Seam("sglang.srt.mem_cache.allocation_sizing", "get_alloc_reserve_per_decode", ("server_args",)),
    Seam(
        "sglang.srt.mem_cache.allocation_sizing",
        "get_req_to_token_extra_context_len",
        ("server_args",),
        ("max_speculative_num_draft_tokens",),
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2",
        "EAGLEWorkerV2.__init__",
        ("self", "server_args"),
        ("adaptive_controller", "config_path"),
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2.init_cuda_graphs", (), ("register", "init_states", "cuda_graph_bs")
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2",
        "EAGLEWorkerV2.build_adaptive_runtime_state",
        ("self", "speculative_num_steps", "speculative_num_draft_tokens", "cuda_graph_bs"),
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2",
        "EAGLEWorkerV2.apply_runtime_state",
        ("self", "state"),
        ("speculative_num_steps", "speculative_num_draft_tokens"),
    ),
    Seam(f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2.activate_step_by_batch", ("self", "batch_size")),
    Seam(
        f"{_SPEC}.eagle_worker_v2",
        "EAGLEWorkerV2.on_verify_complete_cpu",
        ("self", "num_correct_drafts_per_req", "batch_size"),
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2",
        "EagleDraftWorker",
        (),
        ("topk", "organize_draft_results", "draft_runner", "tp_group"),
    ),
    Seam(f"{_SPEC}.adaptive_spec_params", "resolve_candidate_steps_from_config", ("cfg_path",), ("candidate_steps",)),
    Seam(
        "sglang.srt.managers.utils",
        "compute_num_reserved_tokens",
        ("server_args",),
        ("max_speculative_num_draft_tokens",),
    ),
)

# That the hooks were applied: SGLang logs a hook that could not be and goes on without it.
SCHEDULER = Seam("sglang.srt.managers.scheduler", "Scheduler.__init__", ("self", "server_args"))
REGISTRY = Seam("sglang.srt.plugins.hook_registry", "HookRegistry", (), ("register", "apply_hooks", "_patched"))

# What the engine calls and reads.
_IO = "sglang.srt.managers.io_struct"
CALLS = (
    Seam(
        "sglang.srt.entrypoints.engine",
        "Engine.async_generate",
        ("self", "prompt", "sampling_params", "input_ids"),
        ("return_logprob", "stream", "rid"),
    ),
    Seam("sglang.srt.entrypoints.engine", "Engine", (), ("loop", "tokenizer_manager", "shutdown")),
    Seam("sglang.srt.entrypoints.engine", "Engine.collective_rpc", ("self", "method"), ("parameters",)),
    Seam("sglang.srt.managers.scheduler", "Scheduler.handle_rpc_request", ("self", "recv_req"), ("getattr", "method")),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler",
        (),
        (
            *("ps", "tp_rank", "tp_worker", "draft_worker", "running_batch", "last_batch", "req_to_token_pool"),
            *("token_to_kv_pool_allocator", "tree_cache", "forward_stream"),
        ),
    ),
    Seam("sglang.srt.entrypoints.engine", "Engine.release_memory_occupation", ("self", "tags")),
    Seam("sglang.srt.entrypoints.engine", "Engine.resume_memory_occupation", ("self", "tags")),
    Seam("sglang.srt.entrypoints.engine", "Engine._serialize_tensors_per_rank", ("self", "tensors", "load_format")),
    Seam("sglang.srt.managers.tokenizer_manager", "TokenizerManager.abort_request", ("self", "rid")),
    Seam(
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager",
        (),
        ("output_ids", "meta_info", "finish_reason", "output_token_logprobs", "cached_tokens", "model_config"),
    ),
    Seam("sglang.srt.configs.model_config", "ModelConfig", (), ("vocab_size",)),
    Seam(
        "sglang.srt.managers.tokenizer_control_mixin",
        "TokenizerControlMixin.update_weights_from_tensor",
        ("self", "obj", "request"),
    ),
    Seam("sglang.srt.managers.tokenizer_control_mixin", "TokenizerControlMixin.flush_cache", ("self", "timeout_s")),
    Seam("sglang.srt.managers.tokenizer_control_mixin", "TokenizerControlMixin.get_loads", ("self",)),
    Seam(
        "sglang.srt.managers.load_snapshot",
        "LoadSnapshot",
        (),
        ("num_used_tokens", "max_total_num_tokens", "total_prefill_uncached_tokens", "total_prefill_busy_us"),
    ),
    Seam(_IO, "FlushCacheReqOutput", (), ("success",)),
    Seam(
        _IO,
        "UpdateWeightsFromTensorReqInput",
        (),
        ("serialized_named_tensors", "flush_cache", "disable_draft_model", "load_format"),
    ),
    Seam(
        "sglang.srt.sampling.sampling_params",
        "SamplingParams",
        (),
        ("max_new_tokens", "stop_token_ids"),
    ),
)

# The KV of a request, and the cache that keeps it.
_MEM = "sglang.srt.mem_cache"
KV = (
    Seam("sglang.srt.managers.schedule_batch", "Req", (), ("rid", "req_pool_idx", "kv_committed_len", "finished")),
    Seam(f"{_MEM}.memory_pool", "ReqToTokenPool", (), ("req_to_token",)),
    Seam(f"{_MEM}.memory_pool", "MHATokenToKVPool", (), ("k_buffer", "v_buffer")),
    Seam(f"{_MEM}.allocator.base", "BaseTokenToKVPoolAllocator.alloc", ("self", "need_size")),
    Seam(f"{_MEM}.allocator.base", "BaseTokenToKVPoolAllocator.free", ("self", "free_index")),
    Seam(f"{_MEM}.allocator.base", "BaseTokenToKVPoolAllocator.available_size", ("self",)),
    Seam(f"{_MEM}.radix_cache", "RadixCache.insert", ("self", "params"), ("is_eagle", "prefix_len", "key", "value")),
    Seam(f"{_MEM}.radix_cache", "RadixKey.__init__", ("self", "token_ids", "extra_key", "is_bigram")),
    Seam(f"{_MEM}.radix_cache", "RadixCache.evict", ("self", "params"), ("num_tokens",)),
    Seam(f"{_MEM}.base_prefix_cache", "InsertParams", (), ("key", "value")),
    Seam(f"{_MEM}.base_prefix_cache", "EvictParams", (), ("num_tokens",)),
    Seam("sglang.srt.managers.tp_worker", "TpModelWorker", (), ("model_runner",)),
    Seam("sglang.srt.model_executor.model_runner", "ModelRunner", (), ("token_to_kv_pool",)),
    Seam(f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2", (), ("draft_worker", "draft_runner")),
)

# Arguments that the engine is started with.
OPTIONS = Seam(
    "sglang.srt.server_args",
    "ServerArgs",
    (),
    (
        *("model_path", "load_format", "skip_tokenizer_init", "dtype", "context_length", "max_running_requests"),
        *(
            "pp_max_micro_batch_size",
            "chunked_prefill_size",
            "tp_size",
            "enable_memory_saver",
            "page_size",
            "sampling_backend",
            "log_level",
        ),
        *("mem_fraction_static", "speculative_algorithm", "speculative_draft_model_path"),
        *("speculative_draft_load_format", "speculative_num_steps", "speculative_eagle_topk"),
        *("speculative_num_draft_tokens", "speculative_adaptive", "speculative_adaptive_config"),
        *("custom_weight_loader", "enable_draft_weights_cpu_backup", "device", "attention_backend", "grammar_backend"),
        *("disable_cuda_graph", "max_total_tokens", "sleep_on_idle"),
    ),
)

# What the hooks read of SGLang's records and settings.
RECORDS = (
    Seam(
        "sglang.srt.managers.schedule_batch", "ScheduleBatch", (), ("reqs", "sampling_info", "forward_mode", "device")
    ),
    Seam("sglang.srt.managers.schedule_batch", "Req", (), ("rid", "sampling_params")),
    Seam("sglang.srt.sampling.sampling_params", "SamplingParams", (), ("sampling_seed", "temperature", "top_k")),
    Seam("sglang.srt.model_executor.forward_batch_info", "ForwardBatch", (), ("batch_size", "extend_seq_lens")),
    Seam("sglang.srt.layers.logits_processor", "LogitsProcessorOutput", (), ("next_token_logits",)),
    Seam(f"{_SPEC}.eagle_info", "EagleVerifyInput", (), ("draft_token_num", "positions")),
    Seam(
        "sglang.srt.server_args",
        "ServerArgs",
        (),
        ("speculative_use_rejection_sampling", "rl_on_policy_target", "incremental_streaming_output"),
    ),
)

SEAMS = (
    *(SEEDS, BATCH_INFO, PLAIN, VERIFY, DRAFT_LOGITS, FORWARD, *DRAFTING, NORM),
    *(AMX_DECODE, AMX_EXTEND, *_CPU),
    *(CONTROLLER, UNSUPPORTED, ORGANISE, FIRST_STATE, WIDTHS, *_SWITCHING),
    *(SCHEDULER, REGISTRY, *CALLS, OPTIONS, *KV, *RECORDS),
)
