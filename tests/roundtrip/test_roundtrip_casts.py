"""`--dtype` gives torch's bits, leaves alone what is not a float, and says so in `config.json`; verify knows of it."""

from __future__ import annotations

import json
import re

import pytest
import torch
from damage import flip, region, row_bytes
from safetensors.torch import save_file
from tiny_models import assert_same, config_of, loaded, save, side_files, stored

from shardctl.options import DestinationOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MESHES = {"hf": None, "tp2-fsdp2": Mesh.of(tp=2, fsdp=2)}


def cast(tensors, dtype, keep=r"(?!)"):
    """What torch makes of it: floats are cast, everything else is left alone."""
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)

    def new(name, tensor):
        kept = tensor.dtype == torch.float32 and re.search(keep, name)
        return tensor if tensor.dtype not in floats or kept else tensor.to(TORCH[dtype])

    return {name: new(name, tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("to", TORCH)
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
def test_casts_are_those_of_torch(tmp_path, source, to, mesh):
    tiny = save(tmp_path / "source", {**config_of("llama"), "dtype": source})
    before = stored(tiny.path)
    made = reshard(tiny.path, tmp_path / "cast", ReshardOptions(mesh=MESHES[mesh], dtype=to))
    reshard(tmp_path / "cast", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), cast(before, to))
    assert not made.warnings
    found = verify(tmp_path / "cast", VerifyOptions(level="full", against=tiny.path))
    assert found.ok, found.findings
    assert found.digest == digest(tmp_path / "back").digest == made.record.digest
    assert made.record.source_digest == digest(tiny.path).digest
    model = loaded(tmp_path / "cast", tiny.kind)
    assert model.dtype == TORCH[to]
    assert_same(model.state_dict(), cast(tiny.model.state_dict(), to))


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_the_config_says_the_new_type_and_nothing_else_changes(tmp_path, spelling):
    tiny = save(tmp_path / "source", config_of("llama"))
    told = json.loads((tiny.path / "config.json").read_text())
    told[spelling] = told.pop("dtype")
    (tiny.path / "config.json").write_text(json.dumps(told))
    reshard(tiny.path, tmp_path / "cast", ReshardOptions(mesh=Mesh.of(tp=2), dtype="fp16"))
    assert json.loads((tmp_path / "cast/config.json").read_text()) == told | {spelling: "float16"}
    before, after = side_files(tiny.path), side_files(tmp_path / "cast")
    assert {n: b for n, b in after.items() if n != "config.json"} == {
        n: b for n, b in before.items() if n != "config.json"
    }


def test_without_anything_to_cast_the_config_stays_as_it_is(tiny, tmp_path):
    source = tiny("llama").path
    reshard(source, tmp_path / "same", ReshardOptions(dtype="bf16"))
    assert side_files(tmp_path / "same") == side_files(source)
    assert digest(tmp_path / "same").digest == digest(source).digest


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_not_a_float_is_left_alone(tmp_path, mesh):
    tensors = {
        "weight": torch.randn(8, 8, generator=torch.Generator().manual_seed(0)),
        "position_ids": torch.arange(16).reshape(2, 8),
        "mask": torch.tensor([True, False] * 4),
        "eighth": torch.arange(64, dtype=torch.float32).reshape(8, 8).to(torch.float8_e4m3fn),
        "small": torch.arange(8, dtype=torch.int8),
        "complex": torch.complex(torch.ones(4), torch.zeros(4)),
    }
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source/model.safetensors")
    (tmp_path / "rules.toml").write_text('[rules]\n"weight" = ["tp", "fsdp"]\n"**" = []\n')
    source_options = SourceOptions(rules=tmp_path / "rules.toml")
    reshard(
        tmp_path / "source",
        tmp_path / "cast",
        ReshardOptions(mesh=MESHES[mesh], dtype="bf16"),
        source_options=source_options,
    )
    reshard(tmp_path / "cast", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), cast(tensors, "bf16"))
    assert verify(tmp_path / "cast", VerifyOptions(level="full", against=tmp_path / "source")).ok


@pytest.mark.parametrize("mesh", MESHES)
def test_keep_fp32_keeps_what_it_names(tmp_path, mesh):
    tiny = save(tmp_path / "source", {**config_of("llama"), "dtype": "float32"})
    keep = r"norm|embed"
    reshard(tiny.path, tmp_path / "cast", ReshardOptions(mesh=MESHES[mesh], dtype="bf16", keep_fp32=keep))
    reshard(tmp_path / "cast", tmp_path / "back", ReshardOptions(to="hf"))
    expected = cast(stored(tiny.path), "bf16", keep)
    assert {t.dtype for t in expected.values()} == {torch.float32, torch.bfloat16}
    assert_same(stored(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "cast/config.json").read_text())["dtype"] == "bfloat16"
    assert verify(tmp_path / "cast", VerifyOptions(level="full", against=tiny.path)).ok


SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 65504.0, 65519.99, 65520.0, 3.4e38, 1.00390625, 1e30]


@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_overflow_is_counted_and_said_and_the_bits_are_torchs(tmp_path, to):
    values = torch.tensor(SPECIAL + [-v for v in SPECIAL])
    (tmp_path / "source").mkdir()
    save_file({"a": values.clone(), "b": values[3:6].clone()}, tmp_path / "source/model.safetensors")
    allowed = DestinationOptions(allow_overflow=True)
    made = reshard(tmp_path / "source", tmp_path / "cast", ReshardOptions(dtype=to), destination_options=allowed)
    expected = cast({"a": values, "b": values[3:6]}, to)
    found = stored(tmp_path / "cast")
    nan = values.isnan()
    assert_same({"a": found["a"][~nan], "b": found["b"]}, {"a": expected["a"][~nan], "b": expected["b"]})
    assert found["a"][nan].isnan().all()
    became = int((expected["a"].isinf() & values.isfinite()).sum())
    assert became
    assert [w for w in made.warnings if "infinite" in w] == [
        f"a: {became} finite values became infinite in {'BF16' if to == 'bf16' else 'F16'}"
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_one_element_off_after_a_cast_is_found(tmp_path, mesh):
    tiny = save(tmp_path / "source", {**config_of("llama"), "dtype": "float32"})
    reshard(tiny.path, tmp_path / "cast", ReshardOptions(mesh=MESHES[mesh], dtype="bf16"))
    file, name = next((tmp_path / "cast").glob("*.safetensors")), "model.layers.0.mlp.up_proj.weight"
    flip(file, region(file, name)[0] + row_bytes(file, name) + 2 * 2)
    for level in ("quick", "full"):
        found = verify(tmp_path / "cast", VerifyOptions(level=level, against=tiny.path))
        wrong = {finding.check: finding for finding in found.findings if finding.severity == "error"}
        where = f"{name} differs from {tiny.path} in 1 elements, first at {wrong['identity'].box} in {file.name}"
        assert wrong["identity"].message.startswith(f"{where} (apart by ")
        assert wrong["identity"].tensor == name
        assert ("digest" in wrong) == (level == "full")


def test_diff_between_types_says_so(tiny, tmp_path):
    reshard(tiny("llama").path, tmp_path / "cast", ReshardOptions(dtype="fp32"))
    kinds = {change.kind for change in diff(tiny("llama").path, tmp_path / "cast").changes}
    assert kinds == {"dtype"}
