"""What `inspect --stats` says of values: exact sums, equal for any bands, threads and layouts, rounded once."""

from __future__ import annotations

import json
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardctl
from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import MemoryBudgetError, SourceError
from shardctl.models import describe_model
from shardctl.verify.value_statistics import UNIT_EXPONENT, ValueSums, compute_root, measure_values

FIXTURES = Path(__file__).parents[2] / "fixtures"
UNIT = Fraction(2) ** UNIT_EXPONENT


def make_values():
    """Values of each type with numbers of every size, zeros of both signs, infinities and NaN."""
    random = np.random.default_rng(0)
    wide = 10.0 ** random.uniform(-320, 308, 500) * random.choice([-1, 1], 500)
    mixed = np.concatenate([random.standard_normal(500), wide, [0.0, -0.0, 5e-324, np.inf, -np.inf, np.nan]])
    with np.errstate(over="ignore"):
        floats = {"F64": mixed, "F32": mixed.astype(np.float32), "F16": mixed.astype(np.float16)}
        floats["BF16"] = mixed.astype(ml_dtypes.bfloat16)
    floats |= {"F8_E5M2": mixed[:500].astype(ml_dtypes.float8_e5m2), "F8_E8M0": np.arange(255, dtype=np.uint8)}
    for name, kind in (("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz)):
        floats[name] = np.arange(256, dtype=np.uint8).view(kind)
    floats["F8_E8M0"] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    integers = {
        name: random.integers(np.iinfo(kind).min, np.iinfo(kind).max, 300, dtype=kind, endpoint=True)
        for name, kind in zip(
            ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"),
            (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
            strict=True,
        )
    }
    integers["I64"][0] = np.iinfo(np.int64).min
    return floats, integers | {"BOOL": random.integers(0, 2, 300).astype(np.bool_)}


def test_sums_are_those_of_rational_numbers_whatever_the_bands():
    floats, integers = make_values()
    for name, values in (floats | integers).items():
        numbers = [int(each) for each in values] if name in integers else [float(each) for each in values]
        finite = [Fraction(each) for each in numbers if abs(each) < np.inf]
        data = values.view(np.uint8)
        found = measure_values(data, BY_NAME[name])
        assert found.total * UNIT == sum(finite), name
        assert found.squares * UNIT**2 == sum(each * each for each in finite), name
        assert found.largest == float(max(map(abs, finite))), name
        assert found.zeros == sum(each == 0 for each in numbers), name
        assert found.nans == sum(each != each for each in numbers), name  # noqa: PLR0124 - a NaN is not itself
        assert found.nans + found.infinities == len(numbers) - len(finite), name
        for count in (1, 7, 100):
            bands = [band.view(np.uint8) for band in np.array_split(values, count)]
            sums = ValueSums()
            for band in bands[::-1]:
                sums = sums.plus(measure_values(band, BY_NAME[name]))
            assert sums == found, (name, count)


def test_two_numbers_in_a_byte_and_parts_of_complex_numbers_count():
    pairs = np.arange(256, dtype=np.uint8)
    found = measure_values(pairs, BY_NAME["F4"]).describe()
    every = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (found.elements, found.largest, found.mean, found.zeros) == (512, 6.0, 0.0, 64)
    assert found.norm == np.sqrt(64 * sum(each**2 for each in every))
    assert measure_values(np.complex64([3 + 4j]).view(np.uint8), BY_NAME["C64"]).describe().norm == 5


def test_norm_and_mean_are_rounded_once():
    random, exact = np.random.default_rng(1), Context(prec=1000, Emax=10**6, Emin=-(10**6))
    squares = [*random.integers(1, 2**62, 200).tolist(), 1, 2, 3, (2**53 + 1) ** 2, (2**53 + 1) ** 2 * 4 + 1]
    for number in squares:
        root = Fraction(exact.sqrt(Decimal(number)))
        for exponent in (UNIT_EXPONENT, -30, 0):
            units = number << 2 * (exponent - UNIT_EXPONENT)
            assert compute_root(units) == float(root * Fraction(2) ** exponent), (number, exponent)
    third = measure_values(np.float32([1, 0, 0]).view(np.uint8), BY_NAME["F32"]).describe()
    assert third.mean == 1 / 3
    huge = measure_values(np.full(4, 1.7e308).view(np.uint8), BY_NAME["F64"]).describe()
    assert (huge.norm, huge.mean) == (np.inf, 1.7e308)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Layouts of a model with a tensor of three bands at the smallest block."""
    place = tmp_path_factory.mktemp("stats")
    config = json.loads((FIXTURES / "configs" / "llama.json").read_text())
    config |= {"vocab_size": 4000, "hidden_size": 48, "num_hidden_layers": 12, "num_attention_heads": 4}
    random, shapes = np.random.default_rng(7), {each.name: each.shape for each in describe_model(config).own()}
    (place / "hf").mkdir()
    (place / "hf" / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays, place / "hf" / "model.safetensors", {"format": "pt"})
    shardctl.reshard(place / "hf", place / "ranks", to="ranks", tp=2, fsdp=3)
    shardctl.reshard(place / "hf", place / "dcp", to="dcp")
    return place / "hf", place / "ranks", place / "dcp"


def test_layouts_threads_and_memory_do_not_change_a_digit(model):
    plain = shardctl.inspect(model[0], stats=True, tensors=True)
    for source in model:
        for memory, threads in (("1GiB", 3), ("52MiB", 1)):
            found = shardctl.inspect(source, stats=True, memory=memory, threads=threads)
            assert found.statistics == plain.statistics, (source, memory)
    arrays = load_file(model[0] / "model.safetensors")
    assert plain.statistics.total.elements == plain.parameters
    for each in plain.statistics.tensors:
        values = arrays[each.name].astype(np.float64)
        assert each.values.norm == pytest.approx(np.linalg.norm(values), rel=1e-12)
        assert each.values.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
        assert each.values.largest == np.abs(values).max()
    layers = [layer.name for layer in plain.statistics.layers]
    assert layers.index("model.layers.2") < layers.index("model.layers.10")
    assert sum(layer.tensors for layer in plain.statistics.layers) == len(plain.statistics.tensors)
    assert "F32  model.layers.11.mlp.up_proj.weight" in str(plain)
    document = plain.to_dict()["statistics"]
    assert document["total"]["norm"] == plain.statistics.total.norm
    assert "statistics" not in shardctl.inspect(model[0]).to_dict()


def test_quantized_weights_count_as_the_numbers_that_they_mean(tmp_path):
    source = FIXTURES / "mlx" / "affine-tied"
    shardctl.reshard(source, tmp_path / "plain", dtype="fp32")
    packed = shardctl.inspect(source, stats=True).statistics
    plain = shardctl.inspect(tmp_path / "plain", stats=True).statistics
    assert {each.name: each.values for each in packed.tensors} == {each.name: each.values for each in plain.tensors}
    assert any("decoded to F32" in note for note in packed.notes)
    trained = shardctl.inspect(FIXTURES / "dcp" / "accelerate", stats=True).statistics
    assert "optimizer states were not counted" in trained.notes


def test_what_has_no_values_or_too_little_memory_is_refused(model):
    with pytest.raises(SourceError, match="no weights, only a config"):
        shardctl.inspect(FIXTURES / "configs" / "albert.json", stats=True)
    with pytest.raises(SourceError, match="GGUF"):
        shardctl.inspect(FIXTURES / "gguf" / "llama.gguf", stats=True)
    with pytest.raises(MemoryBudgetError, match="cannot hold this reading of values"):
        shardctl.inspect(model[0], stats=True, memory="41MiB")


def test_values_that_are_not_finite_are_counted(tmp_path):
    save_file({"w": np.float32([np.nan, np.inf, -3, 4, 0]), "n": np.int64([-7])}, tmp_path / "model.safetensors")
    found = shardctl.inspect(tmp_path, stats=True, progress=(updates := []).append)
    assert found.to_dict()["statistics"]["tensors"] == [
        {
            "name": name,
            "dtype": dtype,
            "values": dict(
                zip(("elements", "norm", "mean", "largest", "zeros", "nans", "infinities"), values, strict=True)
            ),
        }
        for name, dtype, values in (
            ("n", "I64", (1, 7.0, -7.0, 7.0, 0, 0, 0)),
            ("w", "F32", (5, 5.0, 1 / 3, 4.0, 1, 1, 1)),
        )
    ]
    assert updates[-1].done_bytes == updates[-1].total_bytes == 28
