"""The pinned SGLang has every name that the plug-in hooks, and a renamed one is noticed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhfspec_mega.rollout.sglang_engine import pins, plugin, seams
from rlhfspec_mega.rollout.sglang_engine.engine import ALL_MEMORY
from rlhfspec_mega.rollout.sglang_engine.seams import SEAMS, Seam
from rlhfspec_mega.rollout.sglang_engine.survival import NodeScores
from tests.sglang_wheel import Sources

OF_FUNCTIONS = [(seam, name) for seam in SEAMS for name in seam.parameters if name not in ("self", "cls")]
OF_BODIES = [seam for seam in SEAMS if seam.attributes]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """22 MB, without what it depends on."""
    directory = tmp_path_factory.mktemp("sglang")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(directory), f"sglang=={pins.VERSION}"], check=True, timeout=200)
    (found,) = directory.glob("*.whl")
    return found


def renamed(wheel: Path, seam: Seam, *words: str) -> Sources:
    text = Sources(wheel).text(seam.module)
    assert text is not None
    either = "|".join(map(re.escape, words))
    return Sources(wheel, {seam.module: re.sub(rf"\b({either})\b", r"\1_renamed", text)})


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.target)
def test_it_is_there(wheel: Path, seam: Seam) -> None:
    assert Sources(wheel).fault(seam) is None


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.target)
def test_another_name_is_noticed(wheel: Path, seam: Seam) -> None:
    assert renamed(wheel, seam, seam.name.split(".")[-1]).fault(seam) == f"no {seam.target}"


@pytest.mark.parametrize(("seam", "name"), OF_FUNCTIONS, ids=lambda part: getattr(part, "target", part))
def test_a_renamed_parameter_is_noticed(wheel: Path, seam: Seam, name: str) -> None:
    assert "takes" in str(renamed(wheel, seam, name).fault(seam))


@pytest.mark.parametrize("seam", OF_BODIES, ids=lambda seam: seam.target)
def test_each_renamed_attribute_is_noticed(wheel: Path, seam: Seam) -> None:
    fault = renamed(wheel, seam, *seam.attributes).fault(seam)
    assert fault == f"{seam.target} does not speak of {list(seam.attributes)}"


def test_every_hook_is_of_a_seam() -> None:
    known = {seam.target for seam in SEAMS} | {f"{seams.DRAFT_LOGITS.target}.forward"}
    assert {target for target, _, _ in plugin.hooks()} <= known


def test_the_kinds_of_hooks_exist(wheel: Path) -> None:
    text = Sources(wheel).text("sglang.srt.plugins.hook_registry")
    assert text is not None
    for kind in {kind for _, _, kind in plugin.hooks()}:
        assert re.search(rf"^    {kind} = ", text, re.MULTILINE)


def test_the_parts_of_memory_exist(wheel: Path) -> None:
    text = Sources(wheel).text("sglang.srt.constants")
    assert text is not None
    for part in ALL_MEMORY:
        assert re.search(rf'^GPU_MEMORY_TYPE_\w+ = "{part}"$', text, re.MULTILINE)


@pytest.mark.parametrize(("branches", "layers", "count"), [(2, 1, 2), (2, 3, 6), (4, 3, 8), (3, 5, 20)])
def test_what_trees_promise_is_read_as_sglang_lays_it_out(wheel: Path, branches: int, layers: int, count: int) -> None:
    """SGLang's own functions draft a tree from random chances and take its likeliest nodes."""
    sources, rng = Sources(wheel), torch.Generator().manual_seed(branches * layers)
    named = sources.functions("sglang.srt.utils.common", ["fast_topk"], {"torch": torch})
    firsts = ["_select_top_k_tokens_first", "_select_top_k_tokens_later", "select_top_k_tokens"]
    named = sources.functions("sglang.srt.speculative.spec_utils", firsts, named)
    named = sources.functions(
        "sglang.srt.speculative.eagle_utils",
        ["organize_draft_results"],
        named | {"maybe_detect_oob": lambda *given: None, "List": list},
    )
    batch, scores, rows = 3, None, []
    for layer in range(layers):
        parents = 1 if layer == 0 else branches
        chances, tokens = torch.rand(batch * parents, 11, generator=rng).softmax(dim=-1).topk(branches)
        _, _, scores, row = named["select_top_k_tokens"](layer, chances, tokens, None, scores, branches)
        rows.append(row)
    score_list, token_list, parent_list = (list(column) for column in zip(*rows, strict=True))
    chosen = named["organize_draft_results"](score_list, token_list, parent_list, count + 1)[1]
    kept = NodeScores("cpu", rows=batch, nodes=32)
    kept.keep(score_list)
    survival, depths = kept.nodes(batch, branches).read()
    flat = torch.cat(score_list, dim=1).flatten(1)
    torch.testing.assert_close(torch.tensor(survival[:, :count]).sum(1), flat.gather(1, chosen).sum(1))
    of_place = torch.cat([torch.full((part.shape[1],), layer + 1) for layer, part in enumerate(token_list)])
    wanted = of_place[chosen].sort(dim=1).values
    assert torch.equal(torch.tensor(depths[:, :count]).sort(dim=1).values, wanted)
