"""The file of trace events: JSON after every append, mended after any cut, and never written twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhfspec_mega.observe.timeline import TraceFile

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    return json.loads(path.read_text(encoding="utf-8"))


def event(number: int) -> str:
    return json.dumps({"ph": "X", "name": f'step {number} }},]"', "args": {"list": [1, {"a": 2}]}})


def whole_lines(data: bytes) -> list[Event]:
    """The documented rule: what follows the last whole line goes, a comma before the bracket is dropped."""
    text = data[: data.rfind(b"\n") + 1].decode().rstrip("\n]").rstrip(",")
    return json.loads(f"{text}]") if text.startswith("[") else []


def test_the_file_is_json_after_every_append_and_after_a_cut_behind_any_line(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path)
    file.append([])
    assert not path.exists()
    numbers = [[0], [1, 2], [], [3, 4, 5], [6]]
    for upto, new in enumerate(numbers, start=1):
        file.append([event(number) for number in new])
        expected = [json.loads(event(number)) for group in numbers[:upto] for number in group]
        assert read(path) == expected and file.events == len(expected)
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines) + 1):
        assert whole_lines(b"".join(lines[:kept])) == expected[: max(kept - 1, 0)]


def test_a_run_goes_on_with_a_file_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path)
    file.append([event(0)])
    before = path.read_bytes()
    file.append([event(1), event(2)])
    after = path.read_bytes()
    same = len(before) - len(b"\n]")
    cut = [after[:size] for size in range(len(after) + 1)]
    # Killed in the middle of the second append: its first bytes lie over the old end.
    torn = [after[:size] + before[size:] for size in range(same, len(before))]
    ends = [after.index(event(number).encode()) + len(event(number)) for number in range(3)]
    for data in cut + torn:
        path.write_bytes(data)
        survived = sum(data.startswith(after[:end]) for end in ends)
        again = TraceFile(path)
        assert again.events == survived
        again.append(["{}"])
        assert read(path) == [*(json.loads(event(number)) for number in range(survived)), {}]
    path.write_bytes(after)
    assert TraceFile(path).events == 3


def test_what_is_written_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path)
    file.append(["1"] * 1000)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"1", b"2", 1))  # the next append would restore it if it wrote everything
    file.append(["3"])
    assert read(path) == [2, *[1] * 999, 3]
