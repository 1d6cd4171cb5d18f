"""Conversion between Hugging Face and Megatron: bitwise there and back, nothing half-written, bad input refused."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rlhfspec_mega.bootstrap.converted import hf_directory_of
from rlhfspec_mega.checkpoints.directory import CheckpointDirectory
from rlhfspec_mega.checkpoints.manifest import Manifest
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.megatron.checkpoint_files import sync_and_sum
from rlhfspec_mega.models.hf_directory import HfWeights, write_directory
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.model_directory import find_model
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.console import Console
from tools import check_conversion, hf_to_megatron, megatron_to_hf
from tools.command import exit_status

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ModelShape("llama", 16, 4, 4, 2, 4, 24, 50, 64, 1e4, 1e-5, False)


def model(path: Path, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32, shard: int = 1 << 30) -> Path:
    """A random model with a file of a tokenizer."""
    generator = torch.Generator().manual_seed(5)
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    stream = ((info.name, torch.randn(info.shape, generator=generator).to(dtype)) for info in tensors)
    write_directory(path, shape, stream, max_shard_bytes=shard)
    (path / "tokenizer.json").write_text("{}")
    return path


def run(tool, *words: object) -> None:
    """Run a tool in this process; raises what it raises."""
    tool.convert(tool.parser().parse_args([str(word) for word in words]))


def same(one: Path, other: Path) -> bool:
    a, b = HfWeights(one), HfWeights(other)
    return set(a.names()) == set(b.names()) and all(torch.equal(a.get(name), b.get(name)) for name in a.names())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shard", [3000, 1 << 30])
def test_there_and_back_is_bitwise(tmp_path: Path, architecture: str, tied: bool, shard: int) -> None:
    shape = ModelShape(architecture, 16, 4, 4, 2, 4, 24, 50, 64, 1e4, 1e-5, tied)
    source = model(tmp_path / "hf", shape, torch.bfloat16, shard)
    run(hf_to_megatron, source, tmp_path / "m", "--tensor-parallel", 2, "--pipeline-parallel", 2)
    run(megatron_to_hf, tmp_path / "m", tmp_path / "back", "--max-shard-gib", shard / 2**30)
    assert same(source, tmp_path / "back")
    assert HfWeights(tmp_path / "back").info("model.norm.weight").dtype == "bfloat16"
    assert len(list((tmp_path / "m").glob("*.distcp"))) == 4
    assert len(list((tmp_path / "back").glob("*.safetensors"))) == len(list(source.glob("*.safetensors")))
    assert (tmp_path / "back" / "tokenizer.json").exists() and (tmp_path / "m" / "tokenizer.json").exists()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_sizes_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensor, pipeline = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 3]))
    groups = tensor * data.draw(st.integers(1, 2))
    shape = ModelShape(
        data.draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        hidden_size=8 * data.draw(st.integers(1, 3)),
        num_layers=pipeline * data.draw(st.integers(1, 2)),
        num_heads=groups * data.draw(st.integers(1, 3)),
        num_kv_heads=groups,
        head_dim=2 * data.draw(st.integers(1, 3)),
        ffn_size=tensor * data.draw(st.integers(1, 9)),
        vocab_size=data.draw(st.integers(1, 700)),
        max_positions=64,
        rope_theta=1e4,
        norm_eps=1e-5,
        tie_embeddings=data.draw(st.booleans()),
    )
    root = tmp_path_factory.mktemp("sizes")
    source = model(root / "hf", shape)
    run(hf_to_megatron, source, root / "m", "--tensor-parallel", tensor, "--pipeline-parallel", pipeline)
    run(megatron_to_hf, root / "m", root / "back")
    assert same(source, root / "back")


def test_dtypes_are_converted(tmp_path: Path) -> None:
    source = model(tmp_path / "hf")
    run(hf_to_megatron, source, tmp_path / "m", "--dtype", "bfloat16")
    run(megatron_to_hf, tmp_path / "m", tmp_path / "back", "--dtype", "float32")
    a, b = HfWeights(source), HfWeights(tmp_path / "back")
    assert all(torch.equal(a.get(name).bfloat16().float(), b.get(name)) for name in a.names())
    assert b.info("lm_head.weight").dtype == "float32"


def test_a_large_embedding_is_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfspec_mega.conversion.to_megatron._PIECE", 1000)
    source = model(tmp_path / "hf")
    run(hf_to_megatron, source, tmp_path / "m", "--tensor-parallel", 2)
    with (tmp_path / "m" / ".metadata").open("rb") as file:
        chunks = pickle.load(file).state_dict_metadata["output_layer.weight"].chunks
    assert len(chunks) > 2 and max(chunk.sizes.numel() * 4 for chunk in chunks) <= 1024
    run(megatron_to_hf, tmp_path / "m", tmp_path / "back")
    assert same(source, tmp_path / "back")


def edit_config(path: Path, **changes: object) -> None:
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | changes))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_metadata(path: Path, change: Callable[[dict], object]) -> None:
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata.state_dict_metadata)
    with (path / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


BAD_HF: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "cannot be read"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json cannot be read"),
    "config is no JSON": (lambda p: (p / "config.json").write_text("{"), "is not valid JSON"),
    "another architecture": (lambda p: edit_config(p, model_type="gpt2"), "model of type 'gpt2'"),
    "experts": (lambda p: edit_config(p, num_experts=8), "asks for mixture of experts"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "has no file model.safetensors"),
    "truncated weights": (lambda p: cut(p / "model.safetensors"), "damaged or truncated"),
    "a tensor is missing": (lambda p: edit_tensors(p, lambda t: t.pop("lm_head.weight")), "lacks lm_head.weight"),
    "a layer too many": (lambda p: edit_config(p, num_hidden_layers=3), "holds model.layers.3.input_layernorm.weight"),
    "a layer too few": (lambda p: edit_config(p, num_hidden_layers=5), "lacks model.layers.4."),
    "another width": (lambda p: edit_config(p, intermediate_size=32), r"gate_proj.weight is \[24, 16\] float32"),
    "another vocabulary": (lambda p: edit_config(p, vocab_size=51), r"embed_tokens.weight is \[50, 16\]"),
    "tied, but another head": (lambda p: edit_config(p, tie_word_embeddings=True), "lm_head.weight differs from"),
    "an unknown bias": (
        lambda p: edit_tensors(p, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(16)})),
        "o_proj.bias, which a llama model",
    ),
    "several dtypes": (
        lambda p: edit_tensors(p, lambda t: t.update({"model.norm.weight": torch.ones(16).bfloat16()})),
        "are bfloat16, float32: choose one",
    ),
    "whole numbers": (
        lambda p: edit_tensors(p, lambda t: t.update({"model.norm.weight": torch.ones(16).int()})),
        "model.norm.weight is",
    ),
}


@pytest.mark.parametrize("fault", BAD_HF)
def test_a_bad_hugging_face_directory_is_refused(tmp_path: Path, fault: str) -> None:
    spoil, sentence = BAD_HF[fault]
    spoil(model(tmp_path / "hf"))
    with pytest.raises(UserError, match=sentence) as found:
        run(hf_to_megatron, tmp_path / "hf", tmp_path / "m")
    assert "\n" not in str(found.value) and str(found.value).endswith(".")
    assert not [path for path in tmp_path.iterdir() if path.name != "hf"]


BAD_MEGATRON: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "does not exist"),
    "not finished": (lambda p: (p / "metadata.json").unlink(), "incomplete Megatron checkpoint"),
    "another format": (lambda p: (p / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "of format zarr"),
    "damaged format": (lambda p: (p / "metadata.json").write_text("{"), "the checkpoint is damaged"),
    "no metadata": (lambda p: (p / ".metadata").unlink(), r"has no \.metadata"),
    "damaged metadata": (lambda p: cut(p / ".metadata"), r"\.metadata is damaged"),
    "a file is missing": (lambda p: (p / "__0_0.distcp").unlink(), "lacks the file __0_0.distcp"),
    "a file is truncated": (lambda p: cut(p / "__0_0.distcp"), "is truncated"),
    "a tensor is missing": (
        lambda p: edit_metadata(p, lambda m: m.pop("decoder.layers.mlp.linear_fc2.weight")),
        "lacks decoder.layers.mlp.linear_fc2.weight of layer 0",
    ),
    "a block is missing": (
        lambda p: edit_metadata(p, lambda m: m["output_layer.weight"].chunks.pop()),
        "does not hold all of output_layer.weight",
    ),
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json with it"),
    "layers of another model": (lambda p: edit_config(p, num_hidden_layers=2), "does not fit its config.json"),
    "a bias too few": (lambda p: edit_config(p, model_type="qwen2"), "lacks decoder.layers.self_attention.linear_qkv"),
    "tied in config.json": (lambda p: edit_config(p, tie_word_embeddings=True), "holds output_layer.weight"),
    "another vocabulary": (lambda p: edit_config(p, vocab_size=500), "an embedding of 128 rows"),
    "old format": (
        lambda p: [shutil.rmtree(p), (p / "mp_rank_00").mkdir(parents=True)],
        "in Megatron's old format",
    ),
    "no checkpoint at all": (lambda p: [shutil.rmtree(p), p.mkdir()], "is no Megatron distributed checkpoint"),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("converted")
    run(hf_to_megatron, model(root / "hf"), root / "m")
    return root / "m"


@pytest.mark.parametrize("fault", BAD_MEGATRON)
def test_a_bad_megatron_checkpoint_is_refused(tmp_path: Path, converted: Path, fault: str) -> None:
    spoil, sentence = BAD_MEGATRON[fault]
    spoil(Path(shutil.copytree(converted, tmp_path / "m")))
    with pytest.raises(UserError, match=sentence) as found:
        run(megatron_to_hf, tmp_path / "m", tmp_path / "hf")
    assert "\n" not in str(found.value) and str(found.value).endswith(".")
    assert {path.name for path in tmp_path.iterdir()} <= {"m"}


# Checkpoints of a run


@pytest.fixture
def run_dir(tmp_path: Path, converted: Path) -> Path:
    """A run with one checkpoint, step_2, of a format that the run's workers write, and its manifest."""
    directory = tmp_path / "run"
    checkpoint = directory / "checkpoints" / "step_2"
    shutil.copytree(converted, checkpoint / "actor")
    (checkpoint / "state.json").write_text("{}")
    names = [str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()]
    Manifest(2, {}, sync_and_sum(checkpoint, names)).write(checkpoint)
    return directory


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a changed bit": (
        lambda p: flip_a_bit(p / "actor" / "__0_0.distcp"),
        "the checksum of actor/__0_0.distcp is wrong",
    ),
    "another length": (lambda p: (p / "actor" / "common.pt").write_bytes(b"x"), "common.pt has 1 bytes instead of"),
    "a missing file": (lambda p: (p / "state.json").unlink(), "state.json cannot be read"),
    "a damaged manifest": (lambda p: cut(p / "manifest.json"), "its manifest.json cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_of_a_run_is_not_converted(run_dir: Path, tmp_path: Path, damage: str) -> None:
    """The reader compares no checksum: without the manifest, a changed bit is a changed weight."""
    checkpoint = run_dir / "checkpoints" / "step_2"
    run(megatron_to_hf, checkpoint, tmp_path / "good")
    spoil, sentence = DAMAGE[damage]
    spoil(checkpoint)
    for source in (checkpoint, checkpoint / "actor"):
        with pytest.raises(UserError, match=sentence) as found:
            run(megatron_to_hf, source, tmp_path / "hf")
        assert "\n" not in str(found.value) and str(found.value).endswith("put back a good copy.")
    assert not (tmp_path / "hf").exists()


def test_a_run_does_not_start_from_a_damaged_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    checkpoint = run_dir / "checkpoints" / "step_2"
    config = load_config([f"model.path={checkpoint}", f"model.cache_dir={tmp_path / 'cache'}"])
    flip_a_bit(checkpoint / "actor" / "__0_0.distcp")
    with pytest.raises(UserError, match=r"the checksum of actor/__0_0\.distcp is wrong"):
        hf_directory_of(config, checkpoint, SHAPE, Console(1, enabled=False))
    assert not list(tmp_path.glob("cache/**/config.json"))


def test_a_checkpoint_that_a_run_put_aside_is_not_used(run_dir: Path, tmp_path: Path) -> None:
    directory = CheckpointDirectory(run_dir / "checkpoints")
    with pytest.raises(UserError, match=r"name one of them, for instance .*step_2\."):
        find_model(run_dir)
    directory.mark_bad(2)
    assert find_model(run_dir).checkpoint is None, "a bad one is not suggested"
    bad = directory.set_aside()[0]
    for name in (bad.name, directory.partial(2).name, "step_2.replaced"):
        bad = bad.rename(bad.with_name(name))
        for source in (bad, bad / "actor"):
            with pytest.raises(UserError, match=f"{name} is no checkpoint to use"):
                run(megatron_to_hf, source, tmp_path / "hf")


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_an_impossible_size_of_a_file_is_refused(tmp_path: Path, converted: Path, size: str) -> None:
    with pytest.raises(UserError, match=f"--max-shard-gib {size} must be a number above 0"):
        run(megatron_to_hf, converted, tmp_path / "hf", f"--max-shard-gib={size}")


# check_conversion


def test_tensors_are_compared_bit_by_bit(tmp_path: Path) -> None:
    source = model(tmp_path / "hf")
    edit_tensors(source, lambda t: t["model.norm.weight"].__setitem__(slice(0, 2), torch.tensor([float("nan"), 0.0])))
    run(hf_to_megatron, source, tmp_path / "m")
    assert check_conversion.compare_tensors(source, tmp_path / "m") == len(HfWeights(source).names())
    edit_tensors(source, lambda t: t["model.norm.weight"].__setitem__(1, -0.0))
    with pytest.raises(RunError, match=r"model\.norm\.weight differs"):
        check_conversion.compare_tensors(source, tmp_path / "m")


def test_check_conversion_verifies_a_runs_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    actor = run_dir / "checkpoints" / "step_2" / "actor"
    flip_a_bit(actor / "__0_0.distcp")
    with pytest.raises(UserError, match=r"the checksum of actor/__0_0\.distcp is wrong"):
        check_conversion.compare_tensors(model(tmp_path / "hf"), actor)


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_log_probs_that_are_no_numbers_fail(
    tmp_path: Path, converted: Path, monkeypatch: pytest.MonkeyPatch, strange: float, place: int
) -> None:
    theirs = [-1.0, -2.0]
    ours = [*theirs[:place], strange, *theirs[place + 1 :]]
    monkeypatch.setattr(check_conversion, "compare_tensors", lambda *_: 0)
    monkeypatch.setattr(check_conversion, "numbers_of_transformers", lambda *_: theirs)
    monkeypatch.setattr(check_conversion, "numbers_of_megatron", lambda *_: ours)
    words = SimpleNamespace(encode=lambda text: [0, 1, 2])
    monkeypatch.setattr("rlhfspec_mega.data.tokenizer.load_tokenizer", lambda _: words)
    with pytest.raises(RunError, match="A difference is not finite"):
        check_conversion.check(Namespace(hf=converted, megatron=converted, text="a b c"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tensor-parallel", "3"], "A tensor-parallel size of 3 does not divide the model's 4 attention heads"),
        (["--pipeline-parallel", "3"], "A pipeline-parallel size of 3 does not divide the model's 4 layers"),
        (["--tensor-parallel", "0"], "A tensor-parallel size of 0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(hf_to_megatron, model(tmp_path / "hf"), tmp_path / "m", *words)


def test_what_exists_is_never_replaced(tmp_path: Path, converted: Path) -> None:
    source = model(tmp_path / "hf")
    with pytest.raises(UserError, match="exists already"):
        run(hf_to_megatron, source, source)
    with pytest.raises(UserError, match="exists already"):
        run(megatron_to_hf, converted, source)


def test_a_full_disk_leaves_nothing(tmp_path: Path, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert exit_status(lambda: run(megatron_to_hf, converted, tmp_path / "hf")) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tool", ["hf_to_megatron", "megatron_to_hf"])
def test_a_killed_conversion_leaves_no_directory_that_loads(tmp_path: Path, tool: str) -> None:
    shape = ModelShape("llama", 256, 8, 4, 2, 64, 1024, 2000, 64, 1e4, 1e-5, False)
    source = hf = model(tmp_path / "hf", shape)
    if tool == "megatron_to_hf":
        source = tmp_path / "m"
        run(hf_to_megatron, hf, source)
    finished = 0
    for moment in range(2):
        out = tmp_path / f"out{moment}"
        command = [sys.executable, "-m", f"tools.{tool}", source, out]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(tmp_path.glob(f".{out.name}.partial*/*")):
            time.sleep(0.001)
        time.sleep(0.004 * moment)
        process.kill()
        process.wait()
        finished += out.exists()
        for left in tmp_path.glob(f".{out.name}.partial*"):
            assert (not (left / "metadata.json").exists() and not (left / "config.json").exists()) or out.exists()
        if not out.exists():
            run({"hf_to_megatron": hf_to_megatron, "megatron_to_hf": megatron_to_hf}[tool], source, out)
            assert not list(tmp_path.glob(f".{out.name}.partial*"))
        if tool == "hf_to_megatron":
            run(megatron_to_hf, out, tmp_path / f"back{moment}")
            out = tmp_path / f"back{moment}"
        assert same(hf, out)
    assert finished < 2, "no kill came in time"
