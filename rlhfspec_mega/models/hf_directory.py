"""A Hugging Face model directory: safetensors read lazily, and written tensor by tensor."""

from __future__ import annotations

import glob
import itertools
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.hf_config import CONFIG, config_of, listed, read_json, write_json
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.safetensors_file import DTYPES, safetensors_file, size_of
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.types import TensorInfo

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_AGAIN = "download the directory again"
MAX_SHARD_BYTES = 4 << 30  # of a file, unless one tensor is larger
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class LazyTensor:
    """A tensor in a safetensors file; indexing with slices reads that part only."""

    def __init__(self, info: TensorInfo, view: Any) -> None:
        self.info = info
        self._view = view

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def __getitem__(self, index: Any, /) -> Tensor:
        return self._view[index]


class HfWeights:
    """Lazy reader of the weights in a directory: model.safetensors or an index with its shards."""

    def __init__(self, path: Path | str) -> None:
        """Read the index and open the files.

        Raises UserError for a missing, truncated or damaged file, and where two files could be meant for a tensor:
        every tool must read the same model here.
        """
        self.path = Path(path)
        index = self._index()
        self._handles: dict[str, Any] = {}
        held_by: dict[str, str] = {}
        for file in sorted(set(index.values())) or [WEIGHTS]:
            handle = self._open(file)
            names: list[str] = handle.keys()  # the handle itself cannot be iterated over
            for name in names:
                if name in held_by:
                    raise UserError(f"{self.path} holds {name} in {held_by[name]} and in {file}: {_AGAIN}.")
                held_by[name], self._handles[name] = file, handle
        for name, file in index.items():
            if held_by.get(name) != file:
                raise UserError(f"{self.path / INDEX} says that {file} holds {name}, which it does not: {_AGAIN}.")

    def names(self) -> list[str]:
        return list(self._handles)

    def info(self, name: str) -> TensorInfo:
        return self.lazy(name).info

    def get(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. Raises UserError when the directory does not hold it."""
        return self.lazy(name)[:]

    def lazy(self, name: str) -> LazyTensor:
        """Return a handle to the tensor without reading it, so that a layout can read only the part it needs.

        Raises UserError if there is no such tensor.
        """
        if name not in self._handles:
            raise UserError(f"{self.path} has no tensor {name}: the directory is incomplete or of another model.")
        view = self._handles[name].get_slice(name)
        dtype = view.get_dtype()
        return LazyTensor(TensorInfo(name, tuple(view.get_shape()), DTYPES.get(dtype, dtype)), view)

    def check(self, tensors: Sequence[TensorInfo]) -> None:
        """Compare with names and shapes of `tensors`; dtypes and tensors beyond these do not matter.

        Raises UserError naming the tensors that are missing, or have another shape or no floating-point dtype.
        """
        missing = [tensor.name for tensor in tensors if tensor.name not in self._handles]
        if missing:
            raise UserError(
                f"{self.path} lacks {listed(missing)}: the directory is incomplete or does not fit its config.json."
            )
        wrong = []
        for tensor in tensors:
            found = self.info(tensor.name)
            if found.shape != tensor.shape or found.dtype not in DTYPES.values():
                wrong.append(f"{found.name} is {list(found.shape)} {found.dtype}, not {list(tensor.shape)}")
        if wrong:
            raise UserError(f"The weights in {self.path} do not fit its config.json: {listed(wrong)}.")

    def _index(self) -> dict[str, str]:
        """The file of each tensor, by name; empty where there is no index."""
        if not (self.path / INDEX).exists():
            return {}
        files = read_json(self.path / INDEX, _AGAIN).get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise UserError(f"{self.path / INDEX} has no weight_map from names to files: {_AGAIN}.")
        if (self.path / WEIGHTS).exists() and set(files.values()) != {WEIGHTS}:
            raise UserError(
                f"{self.path} holds {WEIGHTS} and {INDEX}, which names other files: remove what is not the model."
            )
        return files

    def _open(self, file: str) -> Any:
        try:
            if not (self.path / file).is_file():
                hint = _AGAIN if file != WEIGHTS else "other formats must be converted to it first"
                raise UserError(f"{self.path} has no file {file}: {hint}.")
            return safe_open(self.path / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.path / file} is damaged or truncated ({error}): download it again.") from None


def write_directory(
    path: Path | str,
    shape: ModelShape,
    tensors: Iterable[tuple[str, Tensor]],
    source: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory that transformers loads. It appears only when complete, in place of an older model.

    Args:
        tensors: every full tensor of the shape, all of one dtype, in any order; each is copied at once, so its memory
            may be reused.
        source: see `new_directory`.
        max_shard_bytes: size above which a new file is begun.

    Raises:
        RunError: `tensors` is not exactly what the shape asks for.
        UserError: `path` exists and is no model directory.
    """
    stream = iter(_checked(shape, tensors))
    first = next(stream)
    with new_directory(path, shape, str(first[1].dtype).removeprefix("torch."), source, max_shard_bytes) as written:
        for name, tensor in itertools.chain([first], stream):
            written[name].copy_(tensor.detach())


@contextmanager
def new_directory(
    path: Path | str,
    shape: ModelShape,
    dtype: str,
    source: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Iterator[dict[str, Tensor]]:
    """A new model directory: its tensors by name, in the files to be written; each must be filled inside the block.

    The directory appears under its name only when complete, replacing an older model of that name.

    Args:
        source: directory from which tokenizer files and the special token ids are taken.

    Raises:
        UserError: `path` exists and is no model directory.
        OSError: it cannot be written.
    """
    path = Path(path)
    if path.exists() and not (path / CONFIG).exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists and is not a Hugging Face model: move it away or export to another place.")
    with appearing(path) as partial, ExitStack() as files:
        shards = _shards(mapping_for(shape.architecture).hf_tensors(shape, dtype), max_shard_bytes)
        written: dict[str, Tensor] = {}
        for name, infos in shards.items():
            written |= files.enter_context(safetensors_file(partial / name, infos))
        yield written
        files.close()
        if len(shards) > 1:
            weight_map = {info.name: name for name, infos in shards.items() for info in infos}
            total = sum(tensor.nbytes for tensor in written.values())
            write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        if source is not None:
            copy_tokenizer(Path(source), partial)
        # Last: without it, what a killed process leaves is no model.
        write_config(partial, shape, dtype, source)


def write_config(directory: Path, shape: ModelShape, dtype: str, source: Path | str | None) -> None:
    """Write the config.json of a shape; special token ids are those of `source`.

    A classifier's score is read at the last token that is not `pad_token_id`. One that was made of a language model
    learnt to give it at the end-of-text token, so that must not count as padding.
    """
    given = _config_of_source(source)
    no_padding = given.get("pad_token_id") is None or (_pads_with_end(given) and not _has_value_head(given))
    if shape.value_head and source is not None and no_padding:
        given["pad_token_id"] = _padding_token(Path(source))
    write_json(directory / CONFIG, config_of(shape, dtype, given))


def scores_before_end(directory: Path | str) -> bool:
    """Whether it holds a classifier whose score is read before the end-of-text token, which is its padding, too."""
    given = _config_of_source(directory)
    return _has_value_head(given) and _pads_with_end(given)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the tokenizer's files, and the generation config, of a Hugging Face directory into another."""
    for file in _TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copy(source / file, directory / file)


def copy_hf_files(source: Path, directory: Path) -> None:
    """Copy config.json and the tokenizer of a Hugging Face directory into another, made if it is missing."""
    directory.mkdir(exist_ok=True)
    copy_tokenizer(source, directory)
    shutil.copy(source / CONFIG, directory / CONFIG)


def _padding_token(source: Path) -> int | None:
    """The tokenizer's padding token, by which transformers finds the end of a text to classify; None if it is EOS."""
    try:
        names = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        numbers = {token["content"]: int(token["id"]) for token in added}
        pad, end = (_content(names.get(name)) for name in ("pad_token", "eos_token"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return numbers.get(pad) if pad is not None and pad != end else None


def _has_value_head(config: dict[str, Any]) -> bool:
    return any("ForSequenceClassification" in name for name in config.get("architectures") or ())


def _pads_with_end(config: dict[str, Any]) -> bool:
    ends = config.get("eos_token_id")
    return config.get("pad_token_id") in (ends if isinstance(ends, list) else [ends])


def _content(token: Any) -> str | None:
    """The text of a special token, which tokenizer_config.json has as text or as a mapping."""
    return token.get("content") if isinstance(token, dict) else token


def _config_of_source(source: Path | str | None) -> dict[str, Any]:
    return {} if source is None else read_json(Path(source) / CONFIG, "a Hugging Face directory holds one")


def _shards(tensors: Sequence[TensorInfo], max_shard_bytes: int) -> dict[str, list[TensorInfo]]:
    """The tensors of each file, in the order given; a file holds several only if they are at most so many bytes."""
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + size_of(tensor) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += size_of(tensor)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _checked(shape: ModelShape, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass `tensors` on; raise RunError unless they are exactly those of the shape, each once and of one dtype."""
    wanted = {tensor.name: tensor.shape for tensor in mapping_for(shape.architecture).hf_tensors(shape)}
    dtypes = set()
    for name, tensor in tensors:
        dtypes.add(tensor.dtype)
        if wanted.pop(name, None) != tuple(tensor.shape) or len(dtypes) > 1:
            raise RunError(
                f"Export got an unknown, repeated or wrongly shaped tensor {name} {list(tensor.shape)} {tensor.dtype}."
            )
        yield name, tensor
    if wanted:
        raise RunError(f"Export did not get {listed(list(wanted))}.")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its name on success and vanishes on failure.

    What a killed process of this machine left is removed.
    """
    made_by = f".{path.name}.partial-{socket.gethostname()}-"
    for left in path.parent.glob(f"{glob.escape(made_by)}*"):
        if not Path("/proc", left.name.removeprefix(made_by)).exists():
            shutil.rmtree(left, ignore_errors=True)
    partial = path.with_name(f"{made_by}{os.getpid()}")
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
