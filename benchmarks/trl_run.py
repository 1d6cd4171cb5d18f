"""One run of TRL on the built-in task, with the settings of a run of this project; benchmarks.trl starts it.

    torchrun --nproc-per-node 2 -m benchmarks.trl_run --algorithm grpo --seed 0 --model START_MODEL --out DIR

Same prompts in the same order, same reward function, samples, optimizer, temperature and KL weight. Needs TRL:
pip install -e '.[trl]'.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.data.chain_sums import ChainSums, answer_text
from rlhfspec_mega.reward.chain_sums import reward

TIMES_FILE = "times.json"
TRAINERS = {"grpo": ("GRPOTrainer", "GRPOConfig"), "rloo": ("RLOOTrainer", "RLOOConfig")}


def rewards(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The run's reward, as TRL calls reward functions."""
    return [reward(*sample).value for sample in zip(prompts, completions, answer, strict=True)]


def settings(config: RunConfig, algorithm: str, processes: int, out: Path) -> dict[str, Any]:
    """TRL's settings for what the run's configuration says."""
    samples = config.trainer.prompts_per_step * config.trainer.samples_per_prompt
    optimizer, policy = config.actor.optimizer, config.algorithm
    same = {
        "output_dir": str(out / "trl"),
        "max_steps": config.trainer.steps,
        "per_device_train_batch_size": samples // processes,
        "num_generations": config.trainer.samples_per_prompt,
        "max_completion_length": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "beta": policy.kl_coef,
        "epsilon": policy.clip_ratio_low,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.warmup_steps,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_grad,
        "seed": config.seed,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if processes > 1:
        same["ddp_backend"] = "gloo"
    # The mean over all tokens of a step, as algorithm.loss_agg_mode=token-mean; RLOO's loss is TRL's own.
    return same | ({"loss_type": "dapo", "scale_rewards": "group"} if algorithm == "grpo" else {})


def train(config: RunConfig, algorithm: str, model: Path, out: Path) -> None:
    """Train, export the model to `out`/model, and write the times of its steps and of generation in them."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Times(TrainerCallback):
        """When each step ended, and the seconds of generation in each."""

        def __init__(self) -> None:
            self.ended: list[float] = []
            self.generation: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.generation.append(0.0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ended.append(time.time())

    times = Times()
    actor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generate = actor.generate

    def timed(*arguments: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        found = generate(*arguments, **named)
        times.generation[-1] += time.perf_counter() - begun
        return found

    actor.generate = timed
    chains = ChainSums.from_config(config.data, config.seed)
    texts = [chains.prompt_text("train", n) for n in range(config.trainer.steps * config.trainer.prompts_per_step)]
    data = Dataset.from_dict({"prompt": texts, "answer": [answer_text(text) for text in texts]})
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    made, kind = (getattr(trl, name) for name in TRAINERS[algorithm])
    trainer = made(
        model=actor,
        reward_funcs=rewards,
        args=kind(**settings(config, algorithm, processes, out)),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[times],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        trainer.save_model(str(out / "model"))
        figures = {"ended": times.ended, "generation": times.generation, "processes": processes}
        (out / TIMES_FILE).write_text(json.dumps(figures) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=sorted(TRAINERS), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(
        [f"algorithm={arguments.algorithm}", f"seed={arguments.seed}", f"trainer.steps={arguments.steps}"]
    )
    train(config, arguments.algorithm, arguments.model, arguments.out)


if __name__ == "__main__":
    main()
