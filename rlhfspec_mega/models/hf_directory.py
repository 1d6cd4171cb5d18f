"""A Hugging Face model directory: the shape in config.json, safetensors read lazily, a streaming writer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ARCHITECTURES, ModelShape
from rlhfspec_mega.types import TensorInfo

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
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


def read_shape(path: Path | str) -> ModelShape:
    """Shape of the model in directory `path`, with transformers' defaults for what config.json leaves out.

    Raises UserError for a missing or damaged config.json and for every feature that ModelShape cannot express.
    """
    path = Path(path)
    config = read_json(path / CONFIG, "the directory of a Hugging Face model holds one")
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{path / CONFIG} describes a model of type {architecture!r}: use one of {', '.join(ARCHITECTURES)}."
        )
    refuse_features(path, config)
    hidden, heads = positive(path, config, "hidden_size"), positive(path, config, "num_attention_heads")
    kv_heads = positive(path, config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(f"{path / CONFIG} has {heads} attention heads, not a multiple of its {kv_heads} KV heads.")
    theta, scaling = read_rope(path, config)
    return ModelShape(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=positive(path, config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=positive(path, config, "head_dim", ARCHITECTURES[architecture].head_dim or hidden // heads),
        ffn_size=positive(path, config, "intermediate_size"),
        vocab_size=positive(path, config, "vocab_size"),
        max_positions=positive(path, config, "max_position_embeddings"),
        rope_theta=theta,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_scaling=scaling,
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
        """Read the index and open the files. Raises UserError for a missing, truncated or damaged file."""
        self.path = Path(path)
        if (self.path / INDEX).exists():
            index = read_json(self.path / INDEX, "download the directory again")
            files = sorted(set(index.get("weight_map", {}).values()))
        else:
            files = [WEIGHTS]
        self._handles: dict[str, Any] = {}
        for file in files:
            handle = self._open(file)
            self._handles.update(dict.fromkeys(handle.keys(), handle))

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
        return LazyTensor(TensorInfo(name, tuple(view.get_shape()), _DTYPES.get(dtype, dtype)), view)

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
            if found.shape != tensor.shape or found.dtype not in _DTYPES.values():
                wrong.append(f"{found.name} is {list(found.shape)} {found.dtype}, not {list(tensor.shape)}")
        if wrong:
            raise UserError(f"The weights in {self.path} do not fit its config.json: {listed(wrong)}.")

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, framework="pt")
        except FileNotFoundError:
            hint = "download the directory again" if file != WEIGHTS else "other formats must be converted to it first"
            raise UserError(f"{self.path} has no file {file}: {hint}.") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.path / file} is damaged or truncated ({error}): download it again.") from None


def write_directory(
    path: Path | str,
    shape: ModelShape,
    tensors: Iterable[tuple[str, Tensor]],
    source: Path | str | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write a directory that transformers loads, holding at most one shard (or one tensor) in memory.

    The directory appears under its name only when complete, replacing an older model of that name.

    Args:
        tensors: every full tensor of the shape, in any order; each is copied, so its memory may be reused at once.
        source: directory from which tokenizer files and the special token ids are taken.
        max_shard_bytes: size above which a new file is begun.

    Raises:
        RunError: `tensors` is not exactly what the shape asks for.
        UserError: `path` exists and is no model directory.
    """
    path = Path(path)
    if path.exists() and not (path / CONFIG).exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists and is not a Hugging Face model: move it away or export to another place.")
    with appearing(path) as partial:
        dtype = _write_weights(partial, _checked(shape, tensors), max_shard_bytes)
        source_config: dict[str, Any] = {}
        if source is not None:
            source_config = read_json(Path(source) / CONFIG, "a Hugging Face directory holds one")
            for file in _TOKENIZER_FILES:
                if (Path(source) / file).exists():
                    shutil.copy(Path(source) / file, partial / file)
        write_json(partial / CONFIG, config_of(shape, dtype, source_config))


def _write_weights(partial: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> str:
    """Write the shards and, where there are several, their index. Returns the dtype of the first tensor."""
    shards: list[list[str]] = []
    total, dtype = 0, "float32"
    for shard in _shards(tensors, max_shard_bytes):
        save_file(shard, partial / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        if not shards:
            dtype = str(next(iter(shard.values())).dtype).removeprefix("torch.")
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        (partial / "0.safetensors").rename(partial / WEIGHTS)
        return dtype
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (partial / f"{number}.safetensors").rename(partial / file)
        weight_map.update(dict.fromkeys(names, file))
    write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return dtype


def _shards(tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        # The copy is of this tensor alone, even where it is a view of a larger buffer that the caller fills again.
        shard[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        size += tensor.nbytes
    yield shard


def _checked(shape: ModelShape, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass `tensors` on; raise RunError unless they are exactly those of the shape, each once."""
    wanted = {tensor.name: tensor.shape for tensor in mapping_for(shape.architecture).hf_tensors(shape)}
    for name, tensor in tensors:
        if wanted.pop(name, None) != tuple(tensor.shape):
            raise RunError(f"Export got an unknown, repeated or wrongly shaped tensor {name} {list(tensor.shape)}.")
        yield name, tensor
    if wanted:
        raise RunError(f"Export did not get {listed(list(wanted))}.")


def config_of(shape: ModelShape, dtype: str, source_config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a shape."""
    config = {
        "architectures": [ARCHITECTURES[shape.architecture].hf_class],
        "model_type": shape.architecture,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        **rope_config(shape),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    special = {key: source_config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**config, **special}


def rope_config(shape: ModelShape) -> dict[str, Any]:
    """RoPE settings for config.json, in the spellings before and since transformers 5."""
    scaling: dict[str, Any] | None = None
    if shape.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **shape.rope_scaling}
        scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    return {
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": shape.rope_theta},
    }


def refuse_features(path: Path, config: dict[str, Any]) -> None:
    """Raise UserError for a feature that changes the computation and that this project does not implement."""
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    windows = config.get("use_sliding_window") and config.get("sliding_window") is not None
    refused = {
        "mixture of experts": any(config.get(key) for key in ("num_experts", "num_local_experts")),
        "sliding-window attention": bool(layer_types) or windows,
        "a bias in attention (attention_bias)": config.get("attention_bias"),
        "a bias in the MLP (mlp_bias)": config.get("mlp_bias"),
        f"the activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "quantized weights": config.get("quantization_config"),
        "partial rotary embedding": _rope(config).get("partial_rotary_factor", 1.0) != 1.0,
    }
    for feature, present in refused.items():
        if present:
            raise UserError(f"{path / CONFIG} asks for {feature}, which is not supported: choose another one.")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings in one dictionary, from the spellings before and since transformers 5 (the older one wins)."""
    top = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return {**top, **(config.get("rope_scaling") or config.get("rope_parameters") or {})}


def read_rope(path: Path, config: dict[str, Any]) -> tuple[float, dict[str, float] | None]:
    """RoPE base and, where present, the parameters of Llama-3's scaling."""
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{path / CONFIG} asks for RoPE scaling {kind!r}: only 'default' and 'llama3' are supported.")
    missing = [key for key in _LLAMA3_ROPE if key not in rope]
    if missing:
        raise UserError(f"{path / CONFIG} asks for llama3 RoPE scaling without {listed(missing)}: add it.")
    return theta, {key: float(rope[key]) for key in _LLAMA3_ROPE}


def positive(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A size in the config.json of directory `path`. Raises UserError unless it is a positive whole number."""
    value = config.get(key) if config.get(key) is not None else default
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{path / CONFIG} has {key} = {value!r}: a positive whole number is needed.")
    return value


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError, with `hint` at its end, for a missing or damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {hint}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): {hint}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: {hint}.")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its name on success and vanishes on failure."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
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
