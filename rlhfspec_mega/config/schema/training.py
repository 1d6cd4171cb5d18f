"""Options of the model, the actor, the step and the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.config.option import option, section
from rlhfspec_mega.config.schema.supervised import ENGINES_RUN, LEARNS, RL
from rlhfspec_mega.models.shape import ARCHITECTURES

DTYPES = ("float32", "bfloat16")
BUILT_IN_LOSS = "algorithm.loss=null"
CRITIC = "a critic"


@dataclass
class ModelConfig:
    name: str = option("tiny", "name of the model in messages and of the run's directory")
    path: str | None = option(
        None,
        "directory of a Hugging Face model, or Megatron distributed checkpoint with its config.json",
        common=True,
    )
    hub_name: str | None = option(None, "where the weights of this shape are published; you download them")
    architecture: str = option("llama", "of the decoder layers", choices=tuple(ARCHITECTURES))
    hidden_size: int = option(128, "width of the residual stream", least=1)
    num_layers: int = option(4, "decoder layers", least=1)
    num_heads: int = option(4, "attention heads", least=1)
    num_kv_heads: int = option(2, "key-value heads", least=1)
    head_dim: int = option(32, "width of an attention head", least=1)
    ffn_size: int = option(384, "width of the feed-forward network", least=1)
    vocab_size: int | None = option(None, "rows of the embedding; null: as many as the tokenizer has", least=1)
    max_positions: int = option(1024, "longest sequence", unit="tokens", least=1)
    rope_theta: float = option(10000.0, "base of the rotary embedding", above=0)
    norm_eps: float = option(1e-5, "epsilon of RMSNorm", above=0)
    tie_embeddings: bool = option(True, "whether the output head is the embedding")
    cache_dir: str | None = option(None, "where models made here are kept; null: ~/.cache/rlhfspec_mega")


@dataclass
class OptimizerConfig:
    lr: float = option(1e-4, "learning rate", above=0, common=True)
    schedule: str = option("constant", "of the learning rate", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(5, "in which the learning rate rises", unit="optimizer steps", least=0)
    min_lr_ratio: float = option(0.1, "share of lr at the end", least=0, most=1, only_with=".schedule=cosine|linear")
    betas: tuple[float, float] = option((0.9, 0.99), "Adam's decay rates of the moments", least=0, below=1)
    eps: float = option(1e-8, "Adam's epsilon", above=0)
    weight_decay: float = option(0.0, "decoupled, as in AdamW", least=0)
    clip_grad: float = option(1.0, "largest global norm of the gradient", above=0)


@dataclass
class ActorConfig:
    tensor_parallel: int = option(1, "GPUs that share each layer", least=1, common=True)
    pipeline_parallel: int = option(1, "stages that share the layers", least=1, common=True)
    virtual_pipeline: int = option(
        1, "model chunks of a stage; above 1: interleaved schedule", least=1, only_with="actor.pipeline_parallel>1"
    )
    data_parallel: int | None = option(
        None, "copies of the actor; null: as many as the devices hold", least=1, common=True
    )
    sequence_parallel: bool = option(False, "split activations between tensor-parallel ranks too")
    dtype: str = option("float32", "of weights and activations", choices=DTYPES)
    recompute: bool = option(False, "recompute all activations in the backward pass")
    overlap_p2p: bool = option(
        False, "overlap communication between stages with computation (NCCL)", only_with="actor.pipeline_parallel>1"
    )
    batch_p2p: bool = option(
        False, "send and receive between stages in one call", only_with="actor.pipeline_parallel>1"
    )
    logprob_chunk: int = option(2048, "tokens whose float32 logits exist at once", unit="tokens", least=1)
    optimizer: OptimizerConfig = section(OptimizerConfig, "Adam and its schedule")


@dataclass
class TrainerConfig:
    prompts_per_step: int = option(16, "prompts of a step", least=1, common=True, only_with=RL)
    samples_per_prompt: int = option(
        8, "responses sampled for each prompt, a group", least=1, common=True, only_with=ENGINES_RUN
    )
    mini_batch_size: int | None = option(
        None,
        "samples of one optimizer step; null: all of a step",
        least=1,
        common=True,
        only_with=RL,
        was=("trainer.samples_per_update",),
    )
    max_tokens_per_microbatch: int = option(
        1024, "most tokens of one forward and backward pass", unit="tokens", least=1, common=True
    )
    sequence_packing: bool = option(
        True,
        "sequences of a micro-batch one after the other in one row, kept apart by the attention, instead of padded",
    )
    steps: int = option(60, "generate-and-update steps", least=1, common=True, only_with=RL)
    eval_every: int = option(
        20,
        "steps between evaluations on held-out prompts; 0: never",
        unit="steps",
        least=0,
        common=True,
        only_with=RL,
    )
    eval_prompts: int = option(256, "held-out prompts", least=1, only_with="trainer.eval_every>0 or task=evaluate")
    checkpoint_every: int = option(
        0, "steps between checkpoints; 0: at the end only", unit="steps", least=0, common=True, only_with=LEARNS
    )
    async_save: bool = option(True, "write checkpoints in the background, from a copy in host memory", only_with=RL)
    save_before_end: int = option(
        0,
        "save and stop if another step, as long as the longest so far, would end less than this before the job does "
        "(as Slurm or time_limit says); 0: never",
        unit="seconds",
        least=0,
    )
    time_limit: int = option(
        0,
        "how long the run may take from the start of its process, where Slurm does not say it; 0: no limit",
        unit="seconds",
        least=0,
        only_with="trainer.save_before_end>0",
    )
    keep_checkpoints: int = option(2, "newest checkpoints that are kept", least=1)
    resume: bool = option(
        False, "go on from the newest checkpoint of the run of this name", common=True, only_with=LEARNS
    )
    deterministic: bool = option(
        False,
        "runs of the same command give the same bits, however fast processes are and whichever die; with SGLang the "
        "same tokens up to near ties",
    )
    export_every: int = option(
        0,
        "steps between exports of the weights to Hugging Face directories exports/step_N; 0: never",
        unit="steps",
        least=0,
        only_with=RL,
    )
    export: bool = option(True, "write the final weights as a Hugging Face directory")


@dataclass
class CriticConfig:
    path: str | None = option(
        None,
        "Hugging Face directory that the critic starts from, a language model or a reward model of the same tokenizer; "
        "null: the actor's",
    )
    tensor_parallel: int | None = option(None, "GPUs that share each layer; null: as many as of the actor", least=1)
    pipeline_parallel: int | None = option(None, "stages that share the layers; null: as many as of the actor", least=1)
    warmup_steps: int = option(0, "in which only the critic learns", unit="steps", least=0)
    gae_lambda: float = option(1.0, "of the returns that the critic learns", least=0, most=1)
    value_clip: float | None = option(
        None, "a value counts as moved by at most this much in a step; null: no clip", above=0
    )
    optimizer: OptimizerConfig = section(OptimizerConfig, "Adam and its schedule")


@dataclass
class AlgorithmConfig:
    adv_estimator: str = option(
        "grpo",
        "how advantages follow from rewards: grpo, rloo, gae (PPO, with a critic), or the import path "
        "package.module.function of your own, from rewards [prompts, members] to advantages of the same shape",
        was=("algorithm.advantage",),
    )
    loss: str | None = option(
        None, "import path package.module.function of a policy loss of your own; null: PPO's clipped policy gradient"
    )
    norm_adv_by_std: bool = option(
        True, "divide GRPO's advantages by the group's standard deviation", was=("algorithm.normalize_by_std",)
    )
    clip_ratio_low: float = option(
        0.2,
        "the ratio of probabilities is clipped below 1 minus this",
        above=0,
        only_with=BUILT_IN_LOSS,
        was=("algorithm.clip_low",),
    )
    clip_ratio_high: float = option(
        0.2,
        "the ratio of probabilities is clipped above 1 plus this",
        above=0,
        only_with=BUILT_IN_LOSS,
        was=("algorithm.clip_high",),
    )
    clip_ratio_c: float | None = option(
        None,
        "largest ratio that counts where the advantage is negative (dual clip); null: none",
        above=1,
        only_with=BUILT_IN_LOSS,
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus in the loss", least=0, only_with=BUILT_IN_LOSS)
    ppo_epochs: int = option(1, "passes over the samples of a step", least=1)
    early_stop_kl: float | None = option(
        None,
        "the actor learns no more in a step once a mini-batch diverges by more (actor/approx_kl); null: never",
        unit="nats",
        above=0,
        only_with=BUILT_IN_LOSS,
    )
    gamma: float = option(1.0, "discount per token", above=0, most=1, only_with=CRITIC)
    gae_lambda: float = option(
        1.0, "of the policy's advantages", least=0, most=1, only_with=(CRITIC, "algorithm.gae_lambda_alpha=null")
    )
    gae_lambda_alpha: float | None = option(
        None,
        "lambda is 1 - 1 / (this x response length) instead, as in VAPO; null: gae_lambda",
        above=0,
        only_with=CRITIC,
    )
    whiten_advantages: bool = option(True, "to mean 0 and deviation 1 over the tokens of a step", only_with=CRITIC)
    loss_agg_mode: str = option(
        "token-mean",
        "mean over all response tokens, or over samples of each sample's mean",
        choices=("token-mean", "seq-mean-token-mean"),
        was=("algorithm.loss_average",),
    )
    kl_coef: float = option(
        0.01, "weight of the KL divergence from the reference; 0: no reference", least=0, common=True
    )
    kl_in: str = option(
        "loss", "where the divergence is taken off", choices=("loss", "reward"), only_with="algorithm.kl_coef>0"
    )
    kl_loss_type: str = option(
        "k3",
        "estimator of the divergence (Schulman, joschu.net/blog/kl-approx.html)",
        choices=("k1", "k2", "k3"),
        only_with="algorithm.kl_coef>0",
        was=("algorithm.kl_estimator",),
    )
    target_kl: float | None = option(
        None,
        "divergence of a sample that kl_coef is adapted to (Ziegler et al. 2019); null: kl_coef stays",
        unit="nats",
        above=0,
        only_with=(CRITIC, "algorithm.kl_coef>0", "algorithm.kl_in=reward"),
    )
    kl_horizon: int = option(
        10000,
        "over which it is adapted",
        unit="samples",
        least=1,
        only_with=(CRITIC, "algorithm.kl_coef>0", "algorithm.kl_in=reward"),
    )
    overlong: str = option(
        "keep",
        "what becomes of a response cut off at rollout.max_new_tokens: it counts, is masked, or is penalized",
        choices=("keep", "mask", "penalize"),
    )
    overlong_penalty: float = option(
        0.5, "taken off the reward of such a response", least=0, only_with="algorithm.overlong=penalize"
    )
    tis_clip: float | None = option(
        None,
        "cap of truncated importance sampling between engine and actor; null: off",
        above=0,
        only_with=BUILT_IN_LOSS,
        was=("algorithm.importance_cap",),
    )
    shuffle_advantages: bool = option(False, "control experiment: advantages change places, so nothing is learnt")


@dataclass
class WarmupConfig:
    lr: float = option(2.5e-3, "learning rate, falls linearly to zero", above=0)
    warmup_steps: int = option(20, "in which the learning rate rises", unit="optimizer steps", least=0)
    max_steps: int = option(400, "longest warm-up", unit="optimizer steps", least=1)
    examples_per_step: int = option(64, "examples of a step", least=1)
    eval_every: int = option(25, "steps between evaluations", unit="optimizer steps", least=1)
    eval_prompts: int = option(200, "held-out prompts", least=1)
    target_exact: float = option(0.5, "held-out exact reward at which it stops", least=0, most=1)
    least_exact: float = option(0.3, "below this at the end, the warm-up has failed", least=0, most=1)
