"""Options of prompts, engines, speculative decoding, and reallocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhfspec_mega.config.option import option, section
from rlhfspec_mega.config.schema.supervised import ENGINES_RUN
from rlhfspec_mega.config.schema.training import DTYPES

# Conditions that several options share.
DRAFTS, SPECULATES, OF_TREES = "a draft", "draft tokens", "rollout.sglang.trees=true or rollout.engine=torch"
SIZED, LAYERED = f"{OF_TREES} or history as the only source", f"{DRAFTS} or rollout.engine=torch"
REFRESHES = (DRAFTS, "speculation.refresh_every>0")
BUILT_IN, FILES = "data.kind=chain_sums", "data.kind=files"


@dataclass
class DataConfig:
    kind: str = option("chain_sums", "the built-in task, or files of yours", choices=("chain_sums", "files"))
    train: list[str] = option([], "JSONL or Parquet files", common=True, only_with=FILES)
    eval: list[str] = option([], "JSONL or Parquet files of held-out prompts", only_with=FILES)
    prompt_column: str = option("question", "column of the prompt", only_with=FILES)
    answer_column: str = option("answer", "column of the reference answer", only_with=FILES)
    chosen_column: str = option("chosen", "column of the better response", only_with=(FILES, "task=reward_model"))
    rejected_column: str = option("rejected", "column of the worse response", only_with=(FILES, "task=reward_model"))
    chat_template: bool = option(False, "put the prompt into the tokenizer's chat template", only_with=FILES)
    shuffle: bool = option(True, "read prompts in random order")
    max_terms: int = option(60, "terms of the longest sum", least=2, only_with=BUILT_IN)
    median_terms: float = option(5.0, "terms of half of all sums, at most", above=0, only_with=BUILT_IN)
    sigma_terms: float = option(0.8, "spread of their lognormal distribution", least=0, only_with=BUILT_IN)
    max_operand: int = option(9, "largest term", least=1, only_with=BUILT_IN)
    max_sum: int = option(20, "partial sums stay between 0 and this", least=1, only_with=BUILT_IN)


@dataclass
class SGLangConfig:
    tensor_parallel: int = option(1, "GPUs of an engine", least=1, only_with="rollout.engine=sglang")
    mem_fraction_static: float | None = option(
        None,
        "share of a GPU's memory for weights and KV; null: half where the actor or the reference shares it, else "
        "SGLang's choice",
        above=0,
        below=1,
        only_with=("rollout.engine=sglang", "a GPU"),
        was=("rollout.sglang.memory",),
    )
    enable_memory_saver: bool = option(
        True,
        "give GPU memory back while the actor on the same devices trains",
        only_with=("rollout.engine=sglang", "placement.mode=colocated"),
        was=("rollout.sglang.sleep",),
    )
    trees: bool = option(
        False,
        "draft trees of speculation.topk branches rather than chains",
        only_with=("rollout.engine=sglang", DRAFTS),
    )
    engine_kwargs: dict[str, Any] = option(
        {},
        "further arguments of sglang.Engine; they win",
        only_with="rollout.engine=sglang",
        was=("rollout.sglang.options",),
    )


@dataclass
class RolloutConfig:
    engine: str = option("torch", "which engine decodes", choices=("torch", "sglang"))
    engines: int | None = option(None, "engines; null: as many as the devices hold", least=1)
    temperature: float = option(1.0, "of sampling", least=0, common=True, only_with=ENGINES_RUN)
    max_prompt_tokens: int = option(256, "longest prompt; longer ones are left out", unit="tokens", least=1)
    max_new_tokens: int = option(320, "longest response", unit="tokens", least=1, common=True)
    max_running_requests: int = option(
        64, "samples decoded at once on an engine", least=1, common=True, was=("rollout.slots",)
    )
    chunked_prefill_size: int = option(
        512, "prompt tokens of one engine step", unit="tokens", least=1, was=("rollout.prefill_chunk",)
    )
    dtype: str | None = option(None, "of the engines' weights; null: the actor's", choices=DTYPES)
    # Bounded: when the actor restarts, an engine that answers later would be considered stuck.
    poll_interval: float = option(
        0.2,
        "longest time an engine decodes before it answers",
        unit="seconds",
        above=0,
        most=5,
        was=("rollout.poll_seconds",),
    )
    sglang: SGLangConfig = section(SGLangConfig, "SGLang's own options")


@dataclass
class SpeculationConfig:
    policy: str = option(
        "adaptive", "how the number of draft tokens is chosen", choices=("off", "adaptive", "uniform", "fixed")
    )
    draft_model_path: str | None = option(
        None,
        "directory of an EAGLE-3 draft (python -m tools.train_draft makes one); null: only models made here have one",
        common=True,
        only_with="speculation.policy=adaptive|uniform|fixed",
        was=("drafting.path",),
    )
    sources: list[str] = option(
        ["draft", "history"],
        "where draft tokens come from: the draft model; what engines have generated before (with SGLang only without "
        "the draft model, and a fixed number)",
        choices=("draft", "history"),
        common=True,
        only_with="speculation.policy=adaptive|uniform|fixed",
    )
    history_tokens: int = option(
        262144,
        "newest tokens that each engine keeps to draft from, at most 41 bytes each; the torch engine twice under "
        "trainer.deterministic, SGLang on each of its GPUs",
        unit="tokens",
        least=1024,
        only_with="draft tokens from history",
    )
    max_num_steps: int = option(
        8,
        "most layers of a draft tree, with SGLang the longest chain",
        least=1,
        only_with=("speculation.policy=adaptive", SPECULATES),
        was=("drafting.max_depth",),
    )
    max_num_draft_tokens: int = option(
        32,
        "most draft tokens of a sample; the target's own token is not counted",
        least=1,
        only_with=("speculation.policy=adaptive|uniform", SPECULATES, OF_TREES),
        was=("drafting.max_tokens",),
    )
    topk: int = option(
        4,
        "children of a node; uniform and fixed: also nodes of a layer that are drafted from",
        least=1,
        only_with=("speculation.policy=adaptive|uniform|fixed", DRAFTS, OF_TREES),
        was=("drafting.width",),
    )
    tail_weight: float = option(
        0.0,
        "a sample weighs (response tokens + 1) to this power; above 0 favours long ones",
        least=0,
        only_with=("speculation.policy=adaptive", SPECULATES, "rollout.engine=torch"),
        was=("drafting.tail_weight",),
    )
    num_steps: int = option(
        6,
        "layers of a draft tree, with SGLang the length of a chain",
        least=1,
        only_with=("speculation.policy=fixed|uniform", SPECULATES, LAYERED),
        was=("drafting.depth",),
    )
    num_draft_tokens: int = option(
        8,
        "draft tokens of a sample; the target's own token is not counted",
        least=1,
        only_with=("speculation.policy=fixed", SPECULATES, SIZED),
        was=("drafting.tokens",),
    )
    refresh_every: int = option(
        4,
        "steps of task=rl between refreshes of the draft; more, so that they take 1% of the time, where learning costs "
        "more than the draft gains; 0: never, and no memory is kept for them",
        unit="steps",
        least=0,
        common=True,
        only_with=DRAFTS,
    )
    refresh_seconds: float = option(
        2.0, "time of a refresh", unit="seconds", above=0, only_with=(*REFRESHES, "trainer.deterministic=false")
    )
    refresh_steps: int = option(
        20, "optimizer steps of a refresh", least=1, only_with=(*REFRESHES, "trainer.deterministic=true")
    )
    buffer_tokens: int = option(
        65536,
        "newest tokens kept to refresh from, with their hidden states",
        unit="tokens",
        least=1,
        only_with=REFRESHES,
    )
    refresh_lr: float = option(
        5e-4, "learning rate of a refresh", above=0, only_with=REFRESHES, was=("drafting.learning_rate",)
    )
    collapse_ratio: float = option(
        0.5,
        "drafting stops where the draft's best first token is accepted less often than this share of what was usual; "
        "each weight update tries it again",
        least=0,
        most=1,
        only_with=DRAFTS,
    )


@dataclass
class ReallocationConfig:
    policy: str = option(
        "adaptive",
        "what is done about engines that end at different times: nothing, a queue of samples, or samples that move",
        choices=("off", "queue", "adaptive"),
    )
    least_gain: float = option(
        0.1,
        "share of the time left that moves must save",
        least=0,
        only_with=("reallocation.policy=adaptive", "trainer.deterministic=false"),
    )
    cool_down: float = option(
        1.0,
        "time in which a sample is not moved again",
        unit="seconds",
        least=0,
        only_with=("reallocation.policy=adaptive", "trainer.deterministic=false"),
    )
    tolerance: float = option(
        0.03,
        "packing the tail onto few engines may delay the end of the rollout by this share of the time that is left",
        least=0,
        only_with=(
            "reallocation.policy=adaptive",
            "trainer.deterministic=false",
            "frozen models on generation devices",
        ),
    )
