"""On a GPU: the reference's weights rest in host memory between two calls, and its log-probs are the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract.test_megatron_parity import make_models
from tests.contract.test_scoring import Beside, is_the_transformers, samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_scores_are_those_of_a_cpu(tmp_path: Path) -> None:
    model, given = make_models(tmp_path / "models")["llama"], samples()
    with Beside(model, tmp_path, 1, options=("cluster.device=cuda", "cluster.devices_per_node=1")) as beside:
        scoring = beside.scoring_of(given)
        for part in (given[:4], given[4:]):  # the weights go away, and come back
            for one in part:
                scoring.add(*one)
            beside.finish(scoring)
        assert is_the_transformers(scoring, given, model)
