"""Rows of the generation benchmark: kept over an interruption, and what is computed from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contenders import ADAPTIVE, BANDIT, EMA_TIERS, FIXED, OFF, PUBLISHED, UNIFORM
from benchmarks.generation import summarize
from benchmarks.generation_rows import Row, Rows, ratios, regret
from benchmarks.scenarios import batch_scenario


def row(name: str, adaptive: list[float], off: list[float], rival: list[float]) -> Row:
    times = {"a": adaptive, "o": off, "r": rival} | dict.fromkeys(PUBLISHED, rival)
    selected = {ADAPTIVE: "a", OFF: "o", UNIFORM: "r", FIXED: "r", EMA_TIERS: "r", BANDIT: "r"}
    return {"scenario": {"name": name, "lengths": [1]}, "judging": times, "selected": selected, "gains": {}}


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    path, scenario = tmp_path / "rows.jsonl", batch_scenario(1, 8, 1.0)
    rows = Rows(path, {"repeats": (1, 2)})
    assert rows.row(scenario) is None
    rows.add(row(scenario.name, [1.0], [1.0], [1.0]))
    again = Rows(path, {"repeats": (1, 2)})
    assert again.row(scenario) == rows.found[0] and again.found == rows.found
    with path.open("a") as file:
        file.write('{"scenario": {"na')  # killed while it wrote
    assert Rows(path, {"repeats": (1, 2)}).found == rows.found
    assert Rows(path, {"repeats": (1, 3)}).row(scenario) is None, "measured under other conditions"
    assert len(path.with_name("rows.jsonl.old").read_text().splitlines()) == 2


def test_regret_is_judged_on_repeats_that_did_not_choose() -> None:
    # The rival looks better by chance in the even repeats, and is as much worse in the odd ones.
    chance = row("x", [1.0] * 6, [2.0] * 6, [0.8, 1.25] * 3)
    assert regret(chance) == pytest.approx(0.5 * ((1 - 1.25) + 0.0))
    assert regret(row("x", [1.0] * 6, [2.0] * 6, [0.8] * 6)) == pytest.approx(0.2)


def test_summary_of_rows() -> None:
    rows = [row("batch 1 T=1", [1.0] * 8, [2.0] * 8, [1.1] * 8), row("chat decay", [1.0] * 8, [1.5] * 8, [0.9] * 8)]
    found = summarize(rows)
    assert found["speedup_batch_1"] == 2.0 and found["speedup_chat_decay"] == 1.5
    assert found["worst_vs_rivals"] == 0.9 and found["worst_vs_off"] == 1.5
    assert found["vs_bandit"] == pytest.approx((1.1 * 0.9) ** 0.5)
    assert ratios(rows[0])[OFF].value == 2.0
