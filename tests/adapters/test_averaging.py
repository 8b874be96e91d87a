"""Sums of checkpoints: each element is the exact sum, rounded once, whatever the layouts and the processor."""

import json
import os
import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from shardctl.base.errors import ChangedError, DestinationError, SourceError, UnsupportedError, UsageError
from shardctl.models import describe_model
from shardctl.models.adaptation.weighted_sum import sum_weighted
from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.dry_run import rehearse_reshard
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

TYPES = {"F32": (np.float32, np.uint32), "F16": (np.float16, np.uint16), "BF16": (ml_dtypes.bfloat16, np.uint16)}
TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
WEIGHTS = {
    "halves": [Fraction(1, 2)] * 2,
    "thirds": [Fraction(1, 3)] * 3,
    "decimals": [Fraction("0.3"), Fraction("0.7")],
    "EMA": [Fraction("0.999") ** 2, Fraction("0.001") * Fraction("0.999"), Fraction("0.001")],
    "difference": [Fraction(1), Fraction("0.7"), Fraction("-0.7")],
}


def nearest(exact: Fraction, kind: str) -> object:
    """The number of a type that is nearest to a rational one, and even on a tie: found among neighbors."""
    number, unsigned = TYPES[kind]
    near = np.array([float(exact)]).astype(np.float32).astype(number).view(unsigned).astype(np.int64)
    found = [np.array([near[0] + step]).astype(unsigned).view(number)[0] for step in (-1, 0, 1)]
    finite = [each for each in found if np.isfinite(float(each))]
    return min(
        finite, key=lambda each: (abs(Fraction(float(each)) - exact), int(np.array([each]).view(unsigned)[0]) & 1)
    )


def add_exactly(values: list[np.ndarray], weights: list[Fraction], kind: str) -> np.ndarray:
    """The reference: rational numbers, an element at a time."""
    rows = zip(*(each.reshape(-1).tolist() for each in values), strict=True)
    sums = [
        nearest(sum((w * Fraction(x) for w, x in zip(weights, row, strict=True)), Fraction()), kind) for row in rows
    ]
    return np.array(sums, TYPES[kind][0]).reshape(values[0].shape)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("spread", ["normal", "close", "wide", "small integers"])
def test_sums_are_the_exact_ones_rounded_once(kind, weights, spread):
    random, count, factors = np.random.default_rng(5), 1000, WEIGHTS[weights]
    base, step = random.standard_normal(count), float(np.finfo(np.float16).eps if kind == "F16" else 2.0**-7)
    values = []
    for _ in factors:
        found = {
            "normal": random.standard_normal(count),
            "close": base * (1 + random.integers(-2, 3, count) * step),
            "wide": random.standard_normal(count) * 2.0 ** random.integers(-20, 10, count),
            "small integers": random.integers(-40, 40, count) * 2.0**-10,
        }[spread]
        values.append(found.astype(np.float32).astype(TYPES[kind][0]))
    found = sum_weighted(values, factors, kind)
    expected = add_exactly(values, factors, kind)
    assert np.array_equal(found, expected)
    assert found.dtype == TYPES[kind][0]


def test_what_is_not_finite_stays_so_and_what_does_not_fit_becomes_infinite():
    values = [np.float32([np.inf, np.nan, np.inf, 3e38]), np.float32([1, 1, -np.inf, 3e38])]
    half = sum_weighted(values, [Fraction(1, 2)] * 2, "F32")
    assert np.array_equal(half, np.float32([np.inf, np.nan, np.nan, 3e38]), equal_nan=True)
    assert sum_weighted(values, [Fraction(1), Fraction(1)], "F32")[3] == np.inf


def test_an_average_of_equal_tensors_has_their_bits():
    values = np.random.default_rng(1).integers(0, 1 << 16, 1 << 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    values = values[np.isfinite(values)]
    for weights in ([Fraction(1, 3)] * 3, WEIGHTS["EMA"], WEIGHTS["halves"]):
        found = sum_weighted([values] * len(weights), weights, "BF16")
        assert np.array_equal(found.view(np.uint16), values.view(np.uint16))


def make(place, seed, kind="F32", changes=None):
    torch.manual_seed(seed)
    place.mkdir(parents=True)
    tensors = {t.name: torch.randn(t.shape).to(TORCH[kind]) for t in describe_model(CONFIG).own()}
    tensors |= changes or {}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / "tokenizer.json").write_text(json.dumps({"made by": seed}))
    return place, tensors


def read(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def expect(states, weights, kind="F32"):
    return {
        name: torch.from_numpy(
            add_exactly([s[name].float().numpy() for s in states], weights, kind).astype(np.float32)
        ).to(TORCH[kind])
        for name in states[0]
    }


def test_three_layouts_are_averaged_and_verified(tmp_path):
    """Config and tokenizer are the first one's; DCP has none, and ranks are cut."""
    first, one = make(tmp_path / "a", 1)
    second, two = make(tmp_path / "b", 2)
    _, three = make(tmp_path / "c", 3)
    reshard(second, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    dcp.save(three, checkpoint_id=tmp_path / "dcp", no_dist=True)
    others = (str(tmp_path / "ranks"), str(tmp_path / "dcp"))
    options = {"average_with": others, "average_weights": "0.5,0.25,0.25"}
    planned = rehearse_reshard(first, tmp_path / "out", ReshardOptions(to="hf", **options))
    assert "the sum 1/2 * a + 1/4 * ranks + 1/4 * dcp" in planned.describe_writing("out")
    done = reshard(first, tmp_path / "out", ReshardOptions(to="hf", **options))
    assert planned.conversion.read_bytes == done.read_bytes == 3 * sum(each.nbytes for each in one.values())
    expected = expect([one, two, three], [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)])
    found = read(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "out/tokenizer.json").read_text() == (first / "tokenizer.json").read_text()
    assert done.record.options["average"] == "1/2 * a + 1/4 * ranks + 1/4 * dcp"
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=first, **options)).ok
    wrong = verify(tmp_path / "out", VerifyOptions(level="full", against=first, average_with=others))
    assert not wrong.ok
    with pytest.raises(UsageError, match=r"is the sum 1/2 \* a"):
        verify(tmp_path / "out", VerifyOptions(level="full", against=first))
    cut = reshard(first, tmp_path / "cut", ReshardOptions(mesh=Mesh.of(tp=2, pp=2), **options))
    assert cut.record.digest == done.record.digest


def test_a_cast_rounds_the_exact_sum_once(tmp_path):
    first, one = make(tmp_path / "a", 1)
    second, two = make(tmp_path / "b", 2)
    options = {"average_with": (str(second),), "average_weights": "1/3,2/3"}
    reshard(first, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16", **options))
    expected = expect([one, two], [Fraction(1, 3), Fraction(2, 3)], "BF16")
    found = read(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=first, **options)).ok


def test_an_ema_follows_the_steps_of_a_run(tmp_path):
    states = [make(tmp_path / "run" / f"checkpoint-{step}", step, "BF16")[1] for step in (90, 100, 1100)]
    done = reshard(tmp_path / "run", tmp_path / "out", ReshardOptions(to="hf", ema="0.9"))
    decay = Fraction("0.9")
    weights = [decay**2, (1 - decay) * decay, 1 - decay]
    expected = expect(states, weights, "BF16")
    found = read(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == {"made by": 1100}
    assert "81/100 * checkpoint-90" in done.record.options["average"]
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=tmp_path / "run", ema="0.9")).ok
    served = reshard(tmp_path / "run", tmp_path / "served", ReshardOptions(consumer="transformers", ema="0.9"))
    assert served.record.digest == done.record.digest


def test_a_difference_is_added(tmp_path):
    (first, one), (second, two), (third, three) = (make(tmp_path / str(n), n, "BF16") for n in (1, 2, 3))
    options = {"add_difference": (str(second), str(third)), "scale": "0.7"}
    reshard(first, tmp_path / "out", ReshardOptions(to="hf", **options))
    expected = expect([one, two, three], WEIGHTS["difference"], "BF16")
    found = read(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=first, **options)).ok


def test_a_sum_is_proved_by_running_it(tmp_path):
    first, _ = make(tmp_path / "a", 1)
    second, _ = make(tmp_path / "b", 2)
    options = ReshardOptions(mesh=Mesh.of(tp=2), average_with=(str(second),))
    done = reshard(first, tmp_path / "out", options, destination_options=DestinationOptions(prove=True))
    assert done.proof.status == "passed"
    assert "the sum 1/2 * a + 1/2 * b" in done.verdict


def test_other_tensors_and_shapes_are_named(tmp_path):
    first, _ = make(tmp_path / "a", 1)
    second, tensors = make(tmp_path / "b", 2)
    save_file({**tensors, "more": torch.ones(2)}, second / "model.safetensors", {"format": "pt"})
    with pytest.raises(SourceError, match="more"):
        reshard(first, tmp_path / "out", ReshardOptions(to="hf", average_with=(str(second),), extra_tensors="error"))
    (second / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 65}))
    tensors |= {name: torch.randn(65, 32) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    with pytest.raises(SourceError, match=r"\[64, 32\] in .*a, and \[65, 32\] in .*b"):
        reshard(first, tmp_path / "out", ReshardOptions(to="hf", average_with=(str(second),)))
    assert not (tmp_path / "out").exists()


def test_adapters_are_refused(tmp_path):
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(2, 4)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": []}))
    with pytest.raises(UnsupportedError, match="is an adapter, and the product of averaged factors"):
        reshard(tmp_path, tmp_path / "out", ReshardOptions(average_with=(str(tmp_path),)))


def test_integers_must_be_equal(tmp_path):
    for name, step in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(3), "steps": torch.tensor([step])}, tmp_path / name / "model.safetensors")
    reshard(tmp_path / "a", tmp_path / "same", ReshardOptions(average_with=(str(tmp_path / "b"),)))
    assert read(tmp_path / "same")["steps"].tolist() == [1]
    with pytest.raises(SourceError, match="steps is I64 and differs"):
        reshard(tmp_path / "a", tmp_path / "out", ReshardOptions(average_with=(str(tmp_path / "c"),)))


def test_quantized_weights_are_decoded_or_refused(tmp_path):
    first, one = make(tmp_path / "a", 1, "BF16")
    second, _ = make(tmp_path / "b", 2, "BF16")
    reshard(second, tmp_path / "fp8", ReshardOptions(to="hf", quantize="fp8-channel"))
    with pytest.raises(UnsupportedError, match="fp8 is quantized") as caught:
        reshard(first, tmp_path / "out", ReshardOptions(to="hf", average_with=(str(tmp_path / "fp8"),)))
    assert "--dtype" in caught.value.hint
    reshard(tmp_path / "fp8", tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    options = ReshardOptions(to="hf", dtype="bf16", average_with=(str(tmp_path / "fp8"),))
    reshard(first, tmp_path / "out", options)
    expected = expect([one, read(tmp_path / "plain")], WEIGHTS["halves"], "BF16")
    found = read(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_destination_that_is_or_holds_an_input_is_refused(tmp_path):
    """Results of shardctl, which --overwrite may replace."""
    for step in (1, 2):
        make(tmp_path / "made" / str(step), step)
        reshard(tmp_path / "made" / str(step), tmp_path / "run" / f"step-{step}", ReshardOptions(to="hf"))
    first, second = (tmp_path / "run" / f"step-{step}" for step in (1, 2))
    before = [read_bytes(each) for each in (first, second)]
    both = ReshardOptions(to="hf", average_with=(str(second),))
    difference = ReshardOptions(to="hf", add_difference=(str(second), str(second)))
    ema = ReshardOptions(to="hf", ema="0.9")
    inside, over = first / "sub", DestinationOptions(overwrite=True)
    cases = [(first, options, target) for options in (both, difference) for target in (first, second, inside)]
    run = tmp_path / "run"
    cases += [(run, ema, target) for target in (first, second, inside, run, run / "step-3")]
    for source, options, target in cases:
        with pytest.raises(DestinationError):
            reshard(source, target, options, destination_options=over)
    assert [read_bytes(each) for each in (first, second)] == before
    assert sorted(path.name for path in run.iterdir()) == ["step-1", "step-2"]


def read_bytes(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_damaged_archive_is_found_in_every_input(tmp_path):
    """The zip archives of torch.save state CRC-32s."""
    (first, one), (second, two) = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    for folder, tensors in ((first, one), (second, two)):
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    options = {"average_with": (str(second),)}
    reshard(first, tmp_path / "out", ReshardOptions(to="hf", **options))
    file = second / "pytorch_model.bin"
    data = bytearray(file.read_bytes())
    place = data.index(two["model.layers.1.mlp.up_proj.weight"].numpy().tobytes())
    data[place + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChangedError, match=r"pytorch_model.bin: .*model.layers.1.mlp.up_proj.weight"):
        reshard(first, tmp_path / "new", ReshardOptions(to="hf", **options))
    checked = verify(tmp_path / "out", VerifyOptions(level="full", against=first, **options))
    assert any(finding.check == "crc32" for finding in checked.findings)
    assert not checked.ok


def test_a_run_of_two_series_or_in_a_bucket_is_refused(tmp_path):
    for name in ("checkpoint-100", "checkpoint-200", "best-150"):
        make(tmp_path / "run" / name, 1)
    with pytest.raises(SourceError, match="more than one series of steps, such as best-150, checkpoint-100"):
        reshard(tmp_path / "run", tmp_path / "out", ReshardOptions(to="hf", ema="0.5"))
    with pytest.raises(UsageError, match="s3://bucket/run is not one"):
        reshard("s3://bucket/run", tmp_path / "out", ReshardOptions(to="hf", ema="0.5"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_weights": "1"}, "needs --average-with"),
        ({"scale": "2"}, "needs --add-difference"),
        ({"average_with": ("b",), "average_weights": "0.5"}, "1 weights for 2 checkpoints"),
        ({"average_with": ("b",), "average_weights": "0.5,0.6"}, "add up to 1.1"),
        ({"average_with": ("b",), "average_weights": "0.5,x"}, "x is not a number"),
        ({"average_with": ("b",), "ema": "0.5"}, "--average-with and --ema"),
        ({"ema": "1.5"}, "1.5 is not between 0 and 1"),
        ({"ema": "1e400"}, "1e400 is not a number"),
        ({"average_with": ("b",), "optimizer_states": "keep"}, "a sum has no optimizer states"),
        ({"add_difference": ("b", "c"), "scale": "1e999999999"}, "1e999999999 is not a number"),
    ],
)
def test_options_that_contradict_are_a_usage_error(tmp_path, options, message):
    first, _ = make(tmp_path / "a", 1)
    with pytest.raises(UsageError, match=message):
        reshard(first, tmp_path / "out", ReshardOptions(to="hf", **options))


def test_optimizer_states_are_dropped_and_listed(tmp_path):
    folders = []
    for number in (1, 2):
        torch.manual_seed(number)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / str(number), no_dist=True)
        folders.append(tmp_path / str(number))
    done = reshard(folders[0], tmp_path / "out", ReshardOptions(average_with=(str(folders[1]),)))
    assert any("optimizer states are dropped" in line for line in done.warnings)


KERNELS = {
    "Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "SkylakeX": {"OPENBLAS_CORETYPE": "SkylakeX"},
    "Prescott": {"OPENBLAS_CORETYPE": "Prescott"},
    "no AVX": {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX X86_V3 X86_V4"},
}


def test_every_kernel_gives_the_same_bits(tmp_path):
    first, _ = make(tmp_path / "a", 1, "BF16")
    second, _ = make(tmp_path / "b", 2)
    done = reshard(
        first, tmp_path / "out", ReshardOptions(to="hf", average_with=(str(second),), average_weights="1/3,2/3")
    )
    for name, environment in KERNELS.items():
        command = [sys.executable, "-m", "shardctl", "reshard", first, tmp_path / name, "--to", "hf", "--threads", "1"]
        command += ["--average-with", second, "--average-weights", "1/3,2/3"]
        said = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        assert done.record.digest in said.stdout
