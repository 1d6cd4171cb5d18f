"""The dataclass schema of a run's configuration; conf/ holds the values. Units and choices stand beside each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """Shape and paths only. With `path`, the shape comes from that directory's config.json."""

    name: str = "tiny"
    path: str | None = None  # a Hugging Face directory (config.json, *.safetensors, tokenizer files)
    hub_name: str | None = None  # where the weights are published; downloaded by the user, never by a run
    architecture: str = "llama"  # llama | qwen2 | qwen3
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 384
    vocab_size: int | None = None  # null: the tokenizer's
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    cache_dir: str | None = None  # models made here; null: ~/.cache/rlhfspec_mega


@dataclass
class OptimizerConfig:
    lr: float = 1e-4
    schedule: str = "constant"  # constant | linear | cosine
    warmup_steps: int = 5  # optimizer steps
    min_lr_ratio: float = 0.1  # of lr, at the end of linear and cosine
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # global norm


@dataclass
class ActorConfig:
    """Megatron-core parallel sizes, precision and optimizer."""

    tensor_parallel: int = 2
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline rank; above 1: interleaved schedule
    data_parallel: int | None = None  # null: devices / (tensor * pipeline)
    sequence_parallel: bool = False
    dtype: str = "float32"  # float32 | bfloat16
    recompute: bool = False  # full activation recomputation
    overlap_p2p: bool = False  # overlap pipeline communication (NCCL only)
    batch_p2p: bool = False  # batch pipeline communication
    logprob_chunk: int = 2048  # tokens whose fp32 logits exist at once
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class TrainerConfig:
    """The four knobs, the number of steps, and what happens every k steps."""

    prompts_per_step: int = 16
    samples_per_prompt: int = 8
    samples_per_update: int | None = None  # null: all samples of the step in one update
    max_tokens_per_microbatch: int = 1024
    steps: int = 60
    eval_every: int = 20  # 0: never
    eval_prompts: int = 256
    checkpoint_every: int = 0  # 0: only at the end
    keep_checkpoints: int = 2
    resume: bool = False
    # The same bits again, whatever the clock does or an engine dies of; from SGLang the same tokens up to near ties.
    deterministic: bool = False
    export: bool = True  # final weights as a Hugging Face directory


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"  # grpo | rloo | import path: rewards [prompts, members] -> advantages, or one a token
    loss: str | None = None  # null: clipped policy gradient | import path: a TokenLoss of one's own
    normalize_by_std: bool = True  # grpo only
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_average: str = "token"  # token | sample
    kl_coef: float = 0.01
    kl_in: str = "loss"  # loss | reward
    kl_estimator: str = "k3"  # k1 | k2 | k3
    overlong: str = "keep"  # keep | mask | penalize
    overlong_penalty: float = 0.5  # taken off the reward when overlong=penalize
    importance_cap: float | None = None  # truncated importance sampling of engine vs actor; null: off
    shuffle_advantages: bool = False  # control experiment: nothing must be learnt


@dataclass
class SGLangConfig:
    tensor_parallel: int = 1  # GPUs of an engine
    memory: float | None = None  # share of a GPU's memory for weights and KV; null: half if colocated, else SGLang's
    sleep: bool = True  # colocated: give GPU memory back while the actor trains
    trees: bool = False  # draft trees of drafting.width branches rather than chains
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of sglang.Engine; they win


@dataclass
class RolloutConfig:
    engine: str = "torch"  # torch | sglang
    engines: int | None = None  # null: one per device
    temperature: float = 1.0
    max_prompt_tokens: int = 256
    max_new_tokens: int = 320
    slots: int = 64  # samples decoded at once on an engine
    prefill_chunk: int = 512  # prompt tokens per engine step
    dtype: str | None = None  # null: the actor's
    poll_seconds: float = 0.05  # longest time an engine decodes before it answers
    sglang: SGLangConfig = field(default_factory=SGLangConfig)


@dataclass
class DraftingConfig:
    """Speculative decoding: how much to draft, and how the draft is kept fresh. A policy reads only what names it."""

    policy: str = "adaptive"  # off | adaptive | uniform | fixed
    path: str | None = None  # directory of a draft; null: made along with a model made here
    max_depth: int = 8  # adaptive: layers
    max_tokens: int = 32  # adaptive, uniform: draft tokens of a sample
    width: int = 4  # adaptive, uniform, fixed: children of a node; uniform, fixed: also nodes drafted from per layer
    tail_weight: float = 0.0  # adaptive: samples weigh (response tokens + 1) to this power
    depth: int = 6  # uniform, fixed: layers
    tokens: int = 8  # fixed: draft tokens of a sample
    refresh_every: int = 4  # steps between refreshes of the draft; 0: never
    refresh_seconds: float = 2.0  # time budget of a refresh
    refresh_steps: int = 20  # optimizer steps of a refresh under trainer.deterministic, in place of the time budget
    buffer_tokens: int = 65536  # newest tokens kept to refresh from, with their hidden states
    learning_rate: float = 5e-4  # of the refresh
    collapse_ratio: float = 0.5  # drafting stops where the best first token hits less often than this share of usual


@dataclass
class ReallocationConfig:
    """What is done about engines that end at different times; nothing under trainer.deterministic."""

    policy: str = "adaptive"  # off | queue | adaptive
    least_gain: float = 0.1  # adaptive: share of the time left that moves must save
    cool_down: float = 1.0  # adaptive: seconds in which a sample is not moved again
    tolerance: float = 0.03  # adaptive: share of the time left by which packing the tail may delay its end


@dataclass
class PlacementConfig:
    """Which model lies on which devices."""

    mode: str = "colocated"  # colocated | separate
    reference: str = "auto"  # generation | actor | auto: on the actor's ranks under trainer.deterministic
    reference_tensor_parallel: int = 1  # generation: engines' devices of one replica, which scores while all are free


@dataclass
class RewardConfig:
    function: str = "rlhfspec_mega.reward.chain_sums.reward"  # import path of a callable
    time_limit: float = 5.0  # seconds per sample
    arguments: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the callable


@dataclass
class DataConfig:
    kind: str = "chain_sums"  # chain_sums | files
    train: list[str] = field(default_factory=list)  # files: JSONL or Parquet
    eval: list[str] = field(default_factory=list)
    prompt_column: str = "question"
    answer_column: str = "answer"
    chat_template: bool = False
    shuffle: bool = True
    max_terms: int = 60  # chain_sums: longest chain (answers of up to 300 characters)
    median_terms: float = 5.0
    sigma_terms: float = 0.8
    max_operand: int = 9
    max_sum: int = 20  # chain_sums: partial sums stay in 0..max_sum


@dataclass
class ClusterConfig:
    launcher: str = "local"  # local | ray
    address: str | None = None  # of a running Ray cluster; null: RAY_ADDRESS, else an own instance on this machine
    device: str = "cpu"  # auto | cpu | cuda
    nodes: int = 1
    devices_per_node: int = 2
    threads_per_worker: int = 1
    deadline_seconds: float = 600.0  # longest wait for any one answer
    start_seconds: float = 180.0  # longest wait for workers to start
    silence_seconds: float = 60.0  # a worker without a sign of life for so long is given up
    max_restarts: int = 3  # of one engine, and of the actor, between two finished steps


@dataclass
class ReshardingConfig:
    transport: str = "auto"  # auto (by where the workers are) | shared_memory | collective | object_store
    bucket_mib: float = 256.0


@dataclass
class LoggerConfig:
    console: bool = True
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "rlhfspec_mega"
    rollouts_per_step: int = 0  # samples written to rollouts.jsonl each step; 0: all


@dataclass
class WarmupConfig:
    """Supervised warm-up that makes the tiny and small models."""

    lr: float = 2.5e-3  # falls linearly to zero at max_steps
    warmup_steps: int = 20
    max_steps: int = 400
    examples_per_step: int = 64
    eval_every: int = 25
    eval_prompts: int = 200
    target_exact: float = 0.5  # stop at or above this held-out greedy exact reward
    least_exact: float = 0.3  # below this at the end, the warm-up has failed


@dataclass
class RunConfig:
    """A whole run."""

    name: str = "tiny"
    output_dir: str = "outputs"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    reallocation: ReallocationConfig = field(default_factory=ReallocationConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
