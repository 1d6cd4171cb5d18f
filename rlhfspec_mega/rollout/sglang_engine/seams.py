"""Every name of SGLang that the plug-in hooks, calls or reads; tests compare this list with SGLang's installed code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """A function, method or class of SGLang that this project depends on.

    Attributes:
        module: where it is defined.
        name: qualified name in the module.
        parameters: parameters that must come first, in this order; others may follow.
        attributes: names that its source (of a class also its base's in the same module) must contain.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    attributes: tuple[str, ...]

    @property
    def target(self) -> str:
        """The name for HookRegistry.register."""
        return f"{self.module}.{self.name}"


def _seam(module: str, name: str, parameters: str = "", attributes: str = "") -> Seam:
    """A Seam in a module of sglang.srt; parameters and attributes are separated by spaces."""
    return Seam(f"sglang.srt.{module}", name, tuple(parameters.split()), tuple(attributes.split()))


_BATCH_INFO, _EAGLE = "sampling.sampling_batch_info", "speculative.eagle_worker_v2"
_ADAPTIVE, _AMX = "speculative.adaptive_spec_params", "layers.attention.intel_amx_backend"
_ENGINE, _TOKENIZER = "entrypoints.engine", "managers.tokenizer_control_mixin"
_NGRAM = "speculative.ngram_worker"
_ALLOCATOR, _RADIX = "mem_cache.allocator.base", "mem_cache.radix_cache"

# Sampling: seeds of requests, the plain sampler, verification, the draft's logits.
SEEDS = _seam(
    _BATCH_INFO,
    "SamplingBatchInfo.from_schedule_batch",
    "cls batch vocab_size",
    "reqs sampling_params sampling_seed device",
)
PLAIN = _seam("layers.sampler", "Sampler._sample_from_probs", "self probs sampling_info positions simple_sampling_case")
VERIFY = _seam(
    "speculative.eagle_utils",
    "eagle_sample",
    "verify_input batch logits_output",
    "is_all_greedy next_token_logits draft_token_num verify_tree_greedy_func",
)
DRAFT_LOGITS = _seam("models.llama_eagle3", "LlamaForCausalLMEagle3", "", "LlamaForCausalLM hot_token_id")
DRAFT = _seam(_EAGLE, "EagleDraftWorker.draft", "self batch")
DRAFTING = (
    DRAFT,
    _seam(_EAGLE, "EagleDraftWorker._draft_extend_for_prefill", "self batch"),
    _seam(_EAGLE, "EagleDraftWorker._draft_extend_for_decode", "self batch batch_result"),
)

# Engines in float32.
NORM = _seam("layers.layernorm", "RMSNorm.forward_cuda", "self x residual post_residual_addition", "forward_native")

# Engines that give GPU memory back.
RELEASE = _seam("utils.torch_memory_saver_adapter", "_TorchMemorySaverAdapterReal.pause", "self tag")

# SGLang on a CPU, where its attention backend forgets the lengths that it has prepared for drafting and verification.
_LAYER = "self q k v layer forward_batch"
AMX_DECODE = _seam(_AMX, "IntelAMXAttnBackend.forward_decode", _LAYER, "draft_decode_metadata seq_lens")
AMX_EXTEND = _seam(_AMX, "IntelAMXAttnBackend.forward_extend", _LAYER, "extend_metadata seq_lens")

# How many draft tokens: SGLang's adaptive speculation, whose controller is replaced, and what trees promise.
CONTROLLER = _seam(
    "speculative.adaptive_runtime_state",
    "AdaptiveController",
    "",
    "register init_states activate_step_by_batch on_verify_complete build_adaptive_runtime_state",
)
UNSUPPORTED = _seam(_ADAPTIVE, "adaptive_unsupported_reason", "server_args", "speculative_eagle_topk")
ORGANISE = _seam(
    "speculative.eagle_utils", "organize_draft_results", "score_list token_list parents_list num_draft_token"
)
FIRST_STATE = _seam(
    "arg_groups.speculative_hook",
    "_init_adaptive_speculative_params",
    "server_args",
    "speculative_num_draft_tokens speculative_adaptive_config speculative_eagle_topk",
)
WIDTHS = _seam("speculative.spec_utils", "resolve_num_tokens_per_req", "", "phase draft_extend")

# Draft tokens from history: SGLang's NGRAM speculation, whose index is replaced.
CORPUS = _seam(
    "speculative.cpp_ngram.ngram_corpus", "NgramCorpus", "", "reset erase_match_state draft_token_num capacity"
)
CORPUS_ROOM = _seam(_NGRAM, "NGRAMWorker.alloc_memory_pool", "self", "max_batch_size model_runner")
CORPUS_DRAFT = _seam(
    _NGRAM,
    "NGRAMWorker._prepare_draft_tokens",
    "self batch",
    "reqs spec_info accept_tokens accept_lens batch_get",
)
CORPUS_UPDATE = _seam(_NGRAM, "NGRAMWorker._update_ngram_corpus", "self batch", "batch_put")

# That the hooks were applied: SGLang logs a hook that could not be and goes on without it.
SCHEDULER = _seam("managers.scheduler", "Scheduler.__init__", "self server_args")

# Arguments that the engine is started with, and settings that would go around the hooks.
_SERVER_ARGUMENTS = """
    model_path load_format skip_tokenizer_init dtype context_length max_running_requests pp_max_micro_batch_size
    chunked_prefill_size tp_size enable_memory_saver page_size sampling_backend log_level mem_fraction_static
    speculative_algorithm speculative_draft_model_path speculative_draft_load_format speculative_num_steps
    speculative_eagle_topk speculative_num_draft_tokens speculative_adaptive speculative_adaptive_config
    custom_weight_loader enable_draft_weights_cpu_backup device attention_backend grammar_backend disable_cuda_graph
    speculative_ngram_capacity speculative_ngram_max_bfs_breadth max_total_tokens sleep_on_idle
    speculative_use_rejection_sampling rl_on_policy_target incremental_streaming_output
"""
_SCHEDULER_PARTS = (
    "ps tp_rank tp_worker draft_worker running_batch last_batch req_to_token_pool token_to_kv_pool_allocator "
    "tree_cache forward_stream"
)

SEAMS = (
    *(SEEDS, PLAIN, VERIFY, DRAFT_LOGITS, *DRAFTING, NORM, RELEASE, AMX_DECODE, AMX_EXTEND),
    *(CONTROLLER, UNSUPPORTED, ORGANISE, FIRST_STATE, WIDTHS, SCHEDULER),
    *(CORPUS, CORPUS_ROOM, CORPUS_DRAFT, CORPUS_UPDATE),
    _seam(_NGRAM, "NGRAMWorker", "", "ngram_corpus batch_get erase_match_state draft_token_num"),
    _seam("plugins", "load_plugins", "", "apply_hooks"),
    _seam("plugins.hook_registry", "HookRegistry", "", "register apply_hooks _patched"),
    _seam("server_args", "ServerArgs", "", _SERVER_ARGUMENTS),
    # What the hooks of sampling read; pp_proxy_tensors comes by name.
    _seam(
        _BATCH_INFO, "SamplingBatchInfo", "", "temperatures top_ks is_all_greedy sampling_seed filter_batch merge_batch"
    ),
    _seam("models.llama", "LlamaForCausalLM.forward", "self input_ids positions forward_batch", "pp_proxy_tensors"),
    _seam("managers.schedule_batch", "ScheduleBatch", "", "reqs sampling_info forward_mode device seq_lens_cpu"),
    _seam("managers.schedule_batch", "FINISH_ABORT", "", "to_json abort"),
    _seam("managers.overlap_utils", "decide_needs_cpu_seq_lens", "", "is_ngram"),
    _seam("distributed.parallel_state", "GroupCoordinator", "", "world_size cpu_group first_rank"),
    _seam(
        "sampling.sampling_params",
        "SamplingParams",
        "",
        "sampling_seed temperature top_k max_new_tokens stop_token_ids",
    ),
    _seam("model_executor.forward_batch_info", "ForwardBatch", "", "batch_size extend_seq_lens"),
    _seam("layers.logits_processor", "LogitsProcessorOutput", "", "next_token_logits"),
    _seam("speculative.eagle_info", "EagleVerifyInput", "", "draft_token_num positions"),
    # On a CPU.
    _seam(
        "arg_groups.overrides",
        "_attention_backend_platform_fallbacks",
        "view",
        "cpu_has_amx_support attention_backend intel_amx",
    ),
    _seam("models.registry", "import_model_classes", "", "SGLANG_DISABLED_MODEL_ARCHS"),
    # Switching between numbers of draft tokens.
    _seam("runtime_context", "get_spec"),
    _seam("runtime_context", "get_context"),
    _seam("runtime_context", "RuntimeContext.override", "self source", "_overrides_log"),
    _seam("arg_groups.speculative_hook", "_maybe_disable_adaptive", "", "adaptive_unsupported_reason"),
    _seam(
        "speculative.eagle_draft_extend_cuda_graph_runner",
        "EAGLEDraftExtendCudaGraphRunner.__init__",
        "",
        "resolve_num_tokens_per_req draft_extend",
    ),
    _seam(_EAGLE, "EAGLEWorkerV2.__init__", "self server_args", "adaptive_controller config_path"),
    _seam(_EAGLE, "EAGLEWorkerV2._override_worker_state", "", "speculative_num_draft_tokens"),
    _seam(_EAGLE, "EAGLEWorkerV2.init_cuda_graphs", "", "register init_states cuda_graph_bs"),
    _seam(
        _EAGLE,
        "EAGLEWorkerV2.build_adaptive_runtime_state",
        "self speculative_num_steps speculative_num_draft_tokens cuda_graph_bs",
    ),
    _seam(
        _EAGLE, "EAGLEWorkerV2.apply_runtime_state", "self state", "speculative_num_steps speculative_num_draft_tokens"
    ),
    _seam(_EAGLE, "EAGLEWorkerV2.activate_step_by_batch", "self batch_size"),
    _seam(_EAGLE, "EAGLEWorkerV2.on_verify_complete_cpu", "self num_correct_drafts_per_req batch_size"),
    _seam(_EAGLE, "EAGLEWorkerV2", "", "draft_worker draft_runner"),
    _seam(_EAGLE, "EagleDraftWorker", "", "topk organize_draft_results draft_runner tp_group"),
    _seam("distributed.parallel_state", "GroupCoordinator.broadcast", "self input_ src", "world_size"),
    _seam("mem_cache.allocation_sizing", "get_alloc_reserve_per_decode", "server_args"),
    _seam(
        "mem_cache.allocation_sizing",
        "get_req_to_token_extra_context_len",
        "server_args",
        "max_speculative_num_draft_tokens",
    ),
    _seam("managers.utils", "compute_num_reserved_tokens", "server_args", "max_speculative_num_draft_tokens"),
    _seam(_ADAPTIVE, "resolve_candidate_steps_from_config", "cfg_path", "candidate_steps"),
    # What the engine calls and reads.
    _seam(_ENGINE, "Engine", "", "loop tokenizer_manager shutdown"),
    _seam(_ENGINE, "Engine.async_generate", "self prompt sampling_params input_ids", "return_logprob stream rid"),
    _seam(_ENGINE, "Engine.collective_rpc", "self method", "parameters"),
    _seam(_ENGINE, "Engine.get_server_info", "self"),
    _seam(_ENGINE, "Engine.release_memory_occupation", "self tags"),
    _seam(_ENGINE, "Engine.resume_memory_occupation", "self tags"),
    _seam(_ENGINE, "Engine._serialize_tensors_per_rank", "self tensors load_format"),
    _seam("managers.scheduler", "Scheduler.handle_rpc_request", "self recv_req", "getattr method"),
    _seam("managers.scheduler", "Scheduler", "", _SCHEDULER_PARTS),
    _seam("managers.tokenizer_manager", "TokenizerManager.abort_request", "self rid"),
    _seam(
        "managers.tokenizer_manager",
        "TokenizerManager",
        "",
        "output_ids meta_info finish_reason output_token_logprobs cached_tokens model_config",
    ),
    _seam("configs.model_config", "ModelConfig", "", "vocab_size"),
    _seam(_TOKENIZER, "TokenizerControlMixin.update_weights_from_tensor", "self obj request"),
    _seam(_TOKENIZER, "TokenizerControlMixin.flush_cache", "self timeout_s"),
    _seam(_TOKENIZER, "TokenizerControlMixin.get_loads", "self"),
    _seam(
        "managers.load_snapshot",
        "LoadSnapshot",
        "",
        "num_used_tokens total_prefill_uncached_tokens total_prefill_busy_us",
    ),
    _seam("managers.io_struct", "FlushCacheReqOutput", "", "success"),
    _seam(
        "managers.io_struct",
        "UpdateWeightsFromTensorReqInput",
        "",
        "serialized_named_tensors flush_cache disable_draft_model load_format",
    ),
    # The KV of a request, and the cache that keeps it.
    _seam(
        "managers.schedule_batch",
        "Req",
        "",
        "rid sampling_params req_pool_idx kv_committed_len finished origin_input_ids output_ids "
        "output_ids_through_stop finished_reason",
    ),
    _seam("mem_cache.memory_pool", "ReqToTokenPool", "", "req_to_token"),
    _seam("mem_cache.memory_pool", "MHATokenToKVPool", "", "k_buffer v_buffer"),
    _seam(_ALLOCATOR, "BaseTokenToKVPoolAllocator.alloc", "self need_size"),
    _seam(_ALLOCATOR, "BaseTokenToKVPoolAllocator.free", "self free_index"),
    _seam(_ALLOCATOR, "BaseTokenToKVPoolAllocator.available_size", "self"),
    _seam(_RADIX, "RadixCache.insert", "self params", "is_eagle prefix_len key value"),
    _seam(_RADIX, "RadixKey.__init__", "self token_ids extra_key is_bigram"),
    _seam(_RADIX, "RadixCache.evict", "self params", "num_tokens"),
    _seam("mem_cache.base_prefix_cache", "InsertParams", "", "key value"),
    _seam("mem_cache.base_prefix_cache", "EvictParams", "", "num_tokens"),
    _seam("managers.tp_worker", "TpModelWorker", "", "model_runner"),
    _seam("model_executor.model_runner", "ModelRunner", "", "token_to_kv_pool"),
)
