"""Golden outputs: what a model computed is written once, and checked later without the source."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from forward_models import config_of, cut, save, values
from transformers import AutoModelForCausalLM

from shardctl.cli.program import run
from shardctl.running.forward.inputs import decode_inputs
from shardctl.tensors.mesh import Mesh
from shardctl.verify.golden import read_golden, sketch_output


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("golden")
    save(base / "llama", config_of("llama"))
    assert run(["verify", str(base / "llama"), "--write-golden", str(base / "golden.json")]) == 0
    return base / "llama", base / "golden.json"


def check(path, golden, capsys, *options):
    code = run(["verify", str(path), "--golden", str(golden), "--json", *options])
    said = capsys.readouterr()
    return code, json.loads(said.out)


def test_the_file_has_what_transformers_computes(made):
    source, file = made
    golden = read_golden(file)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(**decode_inputs(golden.inputs, "cpu")).logits
    assert golden.sketch.norm == pytest.approx(float(logits.double().norm()), rel=1e-5)
    best = logits.log_softmax(-1).flatten(0, 1).topk(5)
    assert [list(row) for row in golden.sketch.tokens] == best.indices.tolist()
    np.testing.assert_allclose(golden.sketch.log_probabilities, best.values.numpy(), atol=1e-4)
    told = json.loads(file.read_text())
    assert told["bound"] == 1e-4
    assert told["versions"]["torch"] == torch.__version__


def test_a_sketch_tells_the_distance_of_outputs():
    generator = torch.Generator().manual_seed(3)
    output = torch.randn(2, 32, 1000, generator=generator)
    for change in (torch.randn(output.shape, generator=generator) * 1e-3, torch.zeros_like(output)):
        change[0, 3, 17] += 0.5
        other = output + change
        sums = [np.asarray(sketch_output("states", each.double().numpy()).sums) for each in (output, other)]
        assert np.linalg.norm(sums[1] - sums[0]) == pytest.approx(float(change.norm()), rel=0.1)


def test_a_distance_is_estimated_to_10_percent_even_if_all_positions_differ_alike():
    generator = torch.Generator().manual_seed(4)
    errors = []
    for _ in range(100):
        rows, directions = torch.randn(64, 1, generator=generator), torch.randn(1, 1000, generator=generator)
        change = (rows * directions).double()
        sums = np.asarray(sketch_output("states", change.numpy()).sums)
        errors.append(np.linalg.norm(sums) / float(change.norm()) - 1)
    assert np.sqrt(np.mean(np.square(errors))) < 0.1
    assert np.quantile(np.abs(errors), 0.95) < 0.2


def test_every_layout_agrees_without_the_source(made, tmp_path, capsys):
    source, golden = made
    for place in (source, cut(source, tmp_path / "ranks", Mesh.of(tp=2, pp=2))):
        code, told = check(place, golden, capsys)
        assert code == 0, told
        found = told["levels"][-1]["forward"]["golden"]
        assert found["error"] <= found["bound"] == 1e-4
        assert found["same_tokens"] == found["positions"] == 64


def test_a_changed_value_fails_by_output_and_digest(made, tmp_path, capsys):
    source, golden = made
    ranks = cut(source, tmp_path / "ranks", Mesh.of(tp=2))
    (ranks / "shardctl.json").unlink()
    values(ranks, "model.layers.1.mlp.up_proj.weight", 1)[3] = 0
    code, told = check(ranks, golden, capsys, "--mesh", "tp=2")
    assert code == 3
    messages = [each["message"] for each in told["levels"][-1]["findings"] if each["check"] == "golden"]
    assert any("from the golden output, at most 0.0001" in message for message in messages), told
    assert any("the digest is" in message for message in messages)


def test_a_config_that_changes_what_is_computed_fails(made, tmp_path, capsys):
    source, golden = made
    other = tmp_path / "other"
    other.mkdir()
    os.link(source / "model.safetensors", other / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (other / "config.json").write_text(json.dumps(config))
    code, told = check(other, golden, capsys)
    assert code == 3
    (message,) = [each["message"] for each in told["levels"][-1]["findings"] if each["check"] == "golden"]
    assert "from the golden output" in message


def test_another_digest_fails_where_the_outputs_agree(made, tmp_path, capsys):
    source, golden = made
    told = json.loads(golden.read_text())
    told["digest"] = told["digest"][:-1] + ("0" if told["digest"][-1] != "0" else "1")
    other = tmp_path / "golden.json"
    other.write_text(json.dumps(told))
    code, found = check(source, other, capsys)
    assert code == 3
    assert [each["check"] for each in found["levels"][-1]["findings"]] == ["golden"]


def test_a_file_is_never_replaced(made, capsys):
    source, golden = made
    before = golden.read_bytes()
    assert run(["verify", str(source), "--write-golden", str(golden)]) == 6
    assert "exists" in capsys.readouterr().err
    assert golden.read_bytes() == before


def test_nothing_is_written_of_a_model_that_fails(made, tmp_path, capsys):
    source, _ = made
    ranks = cut(source, tmp_path / "ranks", Mesh.of(tp=2))
    values(ranks, "model.layers.1.mlp.up_proj.weight", 1)[3] = 0
    assert run(["verify", str(ranks), "--write-golden", str(tmp_path / "new.json")]) == 3
    assert "no golden output was written" in capsys.readouterr().out
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: [], "schema"),
        (lambda told: told | {"schema": "shardctl.golden/9"}, "schema"),
        (lambda told: {key: value for key, value in told.items() if key != "bound"}, "it has no 'bound'"),
        (lambda told: told | {"bound": -1}, "negative bound"),
        (lambda told: told | {"bound": float("nan")}, "no finite number"),
        (lambda told: told | {"inputs": {}}, "no inputs"),
        (
            lambda told: told | {"sketch": told["sketch"] | {"sums": told["sketch"]["sums"][:-1]}},
            "each of 64 positions",
        ),
        (lambda told: told | {"sketch": told["sketch"] | {"shape": [1, -1]}}, "no shape"),
        (
            lambda told: told | {"sketch": told["sketch"] | {"tokens": [], "log_probabilities": []}},
            "tokens for each position of logits",
        ),
        (
            lambda told: told | {"sketch": told["sketch"] | {"output": "last_hidden_state"}},
            "tokens for each position of logits",
        ),
        (lambda told: told | {"inputs": {"input_ids": told["inputs"]["input_ids"] | {"shape": [3]}}}, "type and shape"),
        (lambda told: told | {"inputs": {"input_ids": told["inputs"]["input_ids"] | {"data": "?"}}}, "golden output"),
    ],
)
def test_a_malformed_file_exits_4(made, tmp_path, capsys, change, message):
    source, golden = made
    file = tmp_path / "golden.json"
    file.write_text(json.dumps(change(json.loads(golden.read_text()))))
    assert run(["verify", str(source), "--golden", str(file)]) == 4
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b'{"schema": "shardctl.golden/1"}'])
def test_what_is_no_golden_file_exits_4(made, tmp_path, capsys, data):
    file = tmp_path / "golden.json"
    file.write_bytes(data)
    assert run(["verify", str(made[0]), "--golden", str(file)]) == 4
    assert "is no golden output" in capsys.readouterr().err


def test_a_missing_file_exits_4_and_another_dtype_2(made, tmp_path, capsys):
    source, golden = made
    assert run(["verify", str(source), "--golden", str(tmp_path / "none.json")]) == 4
    assert run(["verify", str(source), "--golden", str(golden), "--dtype", "bf16"]) == 2
    assert "has fp32" in capsys.readouterr().err


def test_the_inputs_of_the_file_have_their_length(made, capsys):
    source, golden = made
    assert run(["verify", str(source), "--golden", str(golden), "--seq-len", "64"]) == 2
    assert "--seq-len has no effect with --golden" in capsys.readouterr().err
