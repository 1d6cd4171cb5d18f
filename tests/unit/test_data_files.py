"""JSONL and Parquet data: rows in order; every fault named by file and line."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from rlhfspec_mega.data.files import read_files
from rlhfspec_mega.errors import UserError

ROWS = [{"question": f"What is {i}+1? é", "answer": f"It is {i}+1={i + 1}\n#### {i + 1}"} for i in range(5)]
PAIRS = [(row["question"], row["answer"]) for row in ROWS]


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path):
    return read_files([path], "question", "answer")


def test_jsonl_and_parquet_give_the_same_rows(tmp_path):
    jsonl = write(tmp_path / "a.jsonl", "\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    parquet = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet, row_group_size=2)
    assert read(jsonl) == PAIRS
    assert read(parquet) == PAIRS
    assert read_files([jsonl, parquet], "question", "answer") == PAIRS * 2


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in ROWS))
    assert read(path) == PAIRS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"line 2: not JSON"),
        ("[1, 2]", r"line 2: a JSON list"),
        ('{"question": "x"}', r"line 2: no column 'answer' \(it has: question\)"),
        ('{"question": 7, "answer": "x"}', r"line 2: column 'question' holds 7, not a string"),
        ('{"question": "x", "answer": null}', r"line 2: column 'answer' holds None"),
        (b'{"question": "\xff", "answer": "x"}', r"line 2: not UTF-8"),
        ('{"question": " ", "answer": "x"}', r"line 2: column 'question' is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "train.jsonl", json.dumps(ROWS[0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError, match=r"train\.jsonl, " + message):
        read(path)


def test_a_bad_parquet_row_is_named(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*ROWS, {"question": "x", "answer": None}]), path)
    with pytest.raises(UserError, match=r"train\.parquet, row 6: column 'answer' holds None"):
        read(path)


def test_missing_empty_unknown_and_broken_files(tmp_path):
    with pytest.raises(UserError, match=r"no data file .*gone\.jsonl"):
        read(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match=r"empty\.jsonl is empty"):
        read(write(tmp_path / "empty.jsonl", "\n"))
    with pytest.raises(UserError, match=r"neither \.jsonl nor \.parquet"):
        read(write(tmp_path / "a.csv", "question,answer\n"))
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read(write(tmp_path / "a.parquet", "nothing"))
    empty = tmp_path / "empty.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS).slice(0, 0), empty)
    with pytest.raises(UserError, match=r"empty\.parquet is empty"):
        read(empty)
