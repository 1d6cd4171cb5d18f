"""Text from JSONL and Parquet files: a column of prompts and others beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import UserError


def read_files(paths: Sequence[str | Path], prompt_column: str, answer_column: str) -> list[tuple[str, str]]:
    """(prompt, answer) of every row, in file and line order. Raises UserError as `read_columns`."""
    return [(prompt, answer) for prompt, answer in read_columns(paths, prompt_column, [answer_column])]


def read_columns(
    paths: Sequence[str | Path], prompt_column: str, other_columns: Sequence[str]
) -> list[tuple[str, ...]]:
    """The prompt and the other columns of every row, in file and line order.

    Raises:
        UserError: a file is missing, empty or of another kind, or a row is bad; file and line (JSONL) or row are named,
            counted from 1.
    """
    rows: list[tuple[str, ...]] = []
    for path in map(Path, paths):
        before = len(rows)
        for place, record in _records(path):
            prompt = _text(record, prompt_column, place)
            if not prompt.strip():
                raise UserError(f"{place}: column {prompt_column!r} is empty; remove this row.")
            rows.append((prompt, *(_text(record, column, place) for column in other_columns)))
        if len(rows) == before:
            raise UserError(f"{path} is empty; a data file needs at least one row with {prompt_column!r}.")
    return rows


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place for messages, row) of one file."""
    if not path.is_file():
        raise UserError(f"There is no data file {path}; correct data.train or data.eval.")
    if path.suffix == ".jsonl":
        return _jsonl_records(path)
    if path.suffix == ".parquet":
        return _parquet_records(path)
    raise UserError(f"{path} is neither .jsonl nor .parquet; convert it to one of these.")


def _jsonl_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                record = json.loads(text) if text.strip() else None
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: not UTF-8 ({error.reason}); save the file as UTF-8.") from error
            except ValueError as error:
                raise UserError(f"{place}: not JSON ({error}); each line must be one JSON object.") from error
            if not text.strip():
                continue  # blank lines, as at the end of many files, hold no row
            if not isinstance(record, dict):
                raise UserError(f"{place}: a JSON {type(record).__name__}; each line must be one JSON object.")
            yield place, record


def _parquet_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}); write it again.") from error


def _text(record: Mapping[str, Any], column: str, place: str) -> str:
    if column not in record:
        raise UserError(
            f"{place}: no column {column!r} (it has: {', '.join(map(str, record))}); "
            "set data.prompt_column, data.answer_column, or chosen_column and rejected_column."
        )
    value = record[column]
    if not isinstance(value, str):
        raise UserError(f"{place}: column {column!r} holds {value!r}, not a string; correct this row.")
    return value
