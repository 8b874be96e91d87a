"""All 22 types of safetensors, every shape that is odd, and every bit pattern: copied, cut and digested as bits."""

from __future__ import annotations

import json
import random
from math import prod

import pytest
from damage import data_start, header

from shardctl.base.dtype import BY_NAME, DTYPES
from shardctl.base.errors import UnsupportedError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

SHAPES = {"matrix": (8, 16), "cube": (4, 2, 16), "vector": (16,), "scalar": (), "none": (0,), "no rows": (0, 8)}
"""The last dims are even, because two F4 share a byte; four F6 share three."""
EXACT = {"no columns": (8, 0), "hollow": (2, 0, 4)}


def write(path, tensors):
    """A safetensors file made by hand, as no library writes all types: `{name: (type, shape, bytes)}`."""
    place, told = 0, {}
    for name, (dtype, shape, data) in tensors.items():
        told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, place + len(data)]}
        place += len(data)
    text = json.dumps(told).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values()))


def read(path):
    """What `write` wrote."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        data = file.read_bytes()[data_start(file) :]
        for name, array in header(file).items():
            if name != "__metadata__":
                start, stop = array["data_offsets"]
                found[name] = (array["dtype"], tuple(array["shape"]), data[start:stop])
    return found


def tensors():
    """Every type in every shape that its width allows, filled with random bytes: NaNs, BOOL 255 and all."""
    chance, made = random.Random(0), {}
    for dtype in DTYPES:
        for label, shape in (SHAPES | EXACT).items():
            if prod(shape) * dtype.bits % 8 == 0:
                nbytes = prod(shape) * dtype.bits // 8
                made[f"{dtype}.{label}"] = (dtype.name, shape, chance.randbytes(nbytes))
    return made


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    path = tmp_path_factory.mktemp("dtypes") / "source"
    write(path / "model.safetensors", tensors())
    (path.parent / "rules.toml").write_text(
        '[rules]\n"*.matrix" = ["tp", "fsdp"]\n"*.cube" = ["fsdp", "", "tp"]\n"*.vector" = [["tp", "fsdp"]]\n'
        '"*.no rows" = ["tp"]\n"*.no columns" = ["tp"]\n"**" = []\n'
    )
    return path


def test_there_are_22_types(every):
    assert len({dtype for dtype, *_ in read(every).values()}) == 22


def test_hf_to_hf_keeps_every_bit(every, tmp_path):
    reshard(every, tmp_path / "hf", ReshardOptions(max_shard_size=500))
    assert len(list(tmp_path.glob("hf/*.safetensors"))) > 10
    assert read(tmp_path / "hf") == read(every) == tensors()
    assert digest(tmp_path / "hf").digest == digest(every).digest
    assert verify(tmp_path / "hf", VerifyOptions(level="full", against=every)).ok


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(fsdp=2), Mesh.of(tp=2, fsdp=2), Mesh.of(fsdp=4)], ids=str)
def test_through_a_mesh_and_back_keeps_every_bit(every, tmp_path, mesh):
    source_options = SourceOptions(rules=every.parent / "rules.toml")
    reshard(every, tmp_path / "ranks", ReshardOptions(mesh=mesh), source_options=source_options)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert read(tmp_path / "back") == tensors()
    assert digest(tmp_path / "ranks").digest == digest(every).digest
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=every), source_options=source_options).ok


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("F32", [0x7FC00001, 0x7F800001, 0xFFC12345, 0xFF800001, 0x80000000, 0x00000001, 0x7F800000, 0xFFFFFFFF]),
        ("F16", [0x7E01, 0x7C01, 0xFE12, 0xFC01, 0x8000, 0x0001, 0x7C00, 0xFFFF]),
        ("BF16", [0x7FC1, 0x7F81, 0xFFC2, 0xFF81, 0x8000, 0x0001, 0x7F80, 0xFFFF]),
        ("F64", [0x7FF8000000000001, 0x7FF0000000000001, 0xFFF8 << 48, 1 << 63, 1, 0x7FF0 << 48, 2**64 - 1, 0]),
        ("F8_E4M3", [0x7F, 0xFF, 0x80, 0x01, 0x7E, 0xFE, 0x00, 0x08]),
        ("BOOL", [0, 1, 255, 2, 128, 254, 1, 0]),
        ("I64", [2**63 - 1, 1 << 63, 2**64 - 1, 0, 1, 2**53 + 1, 2**32, 7]),
    ],
)
def test_nan_payloads_signalling_nans_and_bool_255_are_bits_like_any_others(tmp_path, dtype, values):
    size = BY_NAME[dtype].bits // 8
    data = b"".join(value.to_bytes(size, "little") for value in values)
    write(tmp_path / "source/model.safetensors", {"w": (dtype, (4, 2), data)})
    (tmp_path / "rules.toml").write_text('[rules]\n"w" = ["tp", "fsdp"]\n')
    source_options = SourceOptions(rules=tmp_path / "rules.toml")
    reshard(
        tmp_path / "source",
        tmp_path / "ranks",
        ReshardOptions(mesh=Mesh.of(tp=2, fsdp=2)),
        source_options=source_options,
    )
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert read(tmp_path / "back") == {"w": (dtype, (4, 2), data)}
    assert digest(tmp_path / "ranks").digest == digest(tmp_path / "source").digest
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=tmp_path / "source")).ok


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES if d.bits % 8])
def test_a_cut_within_a_byte_is_refused_and_says_where(tmp_path, dtype):
    """Three ranks would have to share a byte of a row of eight."""
    data = random.Random(1).randbytes(BY_NAME[dtype].bits * 2 * 8 // 8)
    write(tmp_path / "source/model.safetensors", {"w": (dtype, (2, 8), data)})
    (tmp_path / "rules.toml").write_text('[rules]\n"w" = ["", "fsdp"]\n')
    source_options = SourceOptions(rules=tmp_path / "rules.toml")
    with pytest.raises(UnsupportedError, match=r"^w \[2, 8\] is F[46].* cannot be cut at \[0:2, 0:3\]"):
        reshard(
            tmp_path / "source", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(fsdp=3)), source_options=source_options
        )
