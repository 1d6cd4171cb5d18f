"""Every option of a run, declared once: type, default, help, unit, choices, bounds, and conditions.

Checks, `--help`, docs/configuration.md and error messages are made from the fields of these classes; conf/ holds named
sets of values that differ from the defaults. Some options (config.presets.LISTS) follow from the model and the hardware
by the table conf/presets.yaml, unless a run sets them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.config.option import option, section
from rlhfspec_mega.config.schema.generation import (
    DataConfig,
    ReallocationConfig,
    RolloutConfig,
    SpeculationConfig,
)
from rlhfspec_mega.config.schema.reward import RewardConfig
from rlhfspec_mega.config.schema.supervised import ENGINES_RUN, SUPERVISED, TASKS, SupervisedConfig
from rlhfspec_mega.config.schema.system import (
    ClusterConfig,
    LauncherConfig,
    LoggerConfig,
    PlacementConfig,
    ReshardingConfig,
)
from rlhfspec_mega.config.schema.training import (
    CRITIC,
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    ModelConfig,
    TrainerConfig,
    WarmupConfig,
)


@dataclass
class RunConfig:
    """A whole run."""

    name: str = option("tiny", "the run writes to output_dir/name; --multirun appends the job's number", common=True)
    output_dir: str = option("outputs", "where runs write")
    dry_run: str = option(
        "false",
        "print the plan of the run, on any machine, and start nothing: true for a person, json for a program",
        choices=("false", "true", "json"),
        common=True,
    )
    task: str = option(
        "rl",
        "what the run does; rl: generate and train; sft: learn the data's answers; reward_model: learn which of two "
        "responses is better; evaluate: answer held-out prompts",
        choices=TASKS,
        common=True,
    )
    seed: int = option(0, "of initialization, prompts and sampling noise", least=0, common=True)
    model: ModelConfig = section(ModelConfig, "shape and place of the model")
    actor: ActorConfig = section(ActorConfig, "Megatron-core: parallel sizes, precision, optimizer")
    trainer: TrainerConfig = section(TrainerConfig, "sizes of a step, and what happens every so many steps")
    critic: CriticConfig = section(CriticConfig, "the value model of PPO", only_with=CRITIC)
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "advantages, policy loss, KL divergence", only_with="task=rl")
    rollout: RolloutConfig = section(RolloutConfig, "generation of responses")
    speculation: SpeculationConfig = section(
        SpeculationConfig,
        "speculative decoding: how much is drafted, and how the draft is kept fresh",
        only_with=ENGINES_RUN,
        was=("drafting",),
    )
    supervised: SupervisedConfig = section(
        SupervisedConfig, "supervised tasks: how long, how many at a time", only_with=SUPERVISED
    )
    reallocation: ReallocationConfig = section(
        ReallocationConfig, "samples that move between engines", only_with=ENGINES_RUN
    )
    placement: PlacementConfig = section(PlacementConfig, "which model lies on which devices", only_with=ENGINES_RUN)
    reward: RewardConfig = section(
        RewardConfig, "where rewards come from, and how they are shaped", only_with=ENGINES_RUN
    )
    data: DataConfig = section(DataConfig, "prompts")
    cluster: ClusterConfig = section(ClusterConfig, "hardware: nodes and devices")
    launcher: LauncherConfig = section(LauncherConfig, "how workers are started and watched")
    resharding: ReshardingConfig = section(ReshardingConfig, "weights on their way to the engines")
    logger: LoggerConfig = section(LoggerConfig, "what is written where")
    sft_warmup: WarmupConfig = section(
        WarmupConfig, "supervised warm-up that makes the tiny and the small model", was=("warmup",)
    )
