"""What a trainer lost comes back from the original: layers that predict, a vision model, a head, side files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import add_predicting_layers, assert_same, config_of, save, stored

from shardctl.cli.program import run
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD, parse_record
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify


def train(source, path, *, lost=(), config=None, files=("tokenizer.json",)):
    """Write what a trainer makes of a checkpoint: other weights, and without tensors, keys or files that it lost."""
    shutil.copytree(source, path)
    weights = {n: t + 1 if t.is_floating_point() else t for n, t in stored(source).items() if not n.startswith(lost)}
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    for name in files:
        (path / name).unlink()
    values = json.loads((source / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


@pytest.fixture(scope="module", params=["qwen3_next", "deepseek_v3"])
def predicting(request, tmp_path_factory):
    """A model with layers that predict, and what a trainer without them left of it."""
    place = tmp_path_factory.mktemp(request.param)
    base = save(place / "base", config_of(request.param)).path
    add_predicting_layers(base)
    key = "mtp_num_hidden_layers" if request.param == "qwen3_next" else "num_nextn_predict_layers"
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    lost = "mtp." if request.param == "qwen3_next" else f"model.layers.{layers}."
    return base, train(base, place / "trained", lost=(lost,), config={key: 0}), lost, key


@pytest.mark.parametrize("options", [ReshardOptions(), ReshardOptions(mesh=Mesh.of(tp=2))], ids=["hf", "tp2"])
def test_layers_that_predict_come_back(predicting, tmp_path, options):
    base, trained, lost, key = predicting
    given = SourceOptions(complete_from=str(base))
    done = reshard(trained, tmp_path / "whole", options, source_options=given)
    reshard(tmp_path / "whole", tmp_path / "back", ReshardOptions(to="hf"))
    expected = {**{n: t for n, t in stored(base).items() if n.startswith(lost)}, **stored(trained)}
    assert len(expected) > len(stored(trained))
    assert_same(stored(tmp_path / "back"), expected)
    said = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert said.get(key) == json.loads((base / "config.json").read_text()).get(key)
    assert (tmp_path / "whole" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert done.record.options["complete_from"].startswith("base: ")
    assert any(line.startswith(f"taken from {base}: ") for line in done.warnings)
    assert verify(tmp_path / "whole", VerifyOptions(level="full", against=trained), source_options=given).ok


def test_a_comparison_says_how_it_is_replayed(predicting, tmp_path, capfd):
    base, trained, _, _ = predicting
    assert run(["reshard", str(trained), str(tmp_path / "whole"), "--complete-from", str(base)]) == 0
    assert run(["verify", str(tmp_path / "whole"), "--against", str(trained)]) == 2
    assert "--complete-from" in capfd.readouterr().err
    again = ["verify", str(tmp_path / "whole"), "--against", str(trained), "--complete-from", str(base)]
    assert run(again) == 0
    lost = {name: tensor for name, tensor in stored(tmp_path / "whole").items() if name not in stored(trained)}
    name = next(iter(lost))
    file = next(path for path in (tmp_path / "whole").glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    tensors[name] = tensors[name] + 1
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "whole" / RECORD).unlink()
    assert run(again) == 3


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava"])
def test_a_text_half_that_was_trained_alone_gets_its_eyes_back(tmp_path, name):
    base = save(tmp_path / "base", config_of(name))
    reshard(base.path, tmp_path / "text", ReshardOptions(only="text"))
    (tmp_path / "text" / RECORD).unlink()
    text = train(tmp_path / "text", tmp_path / "trained")
    given = SourceOptions(complete_from=str(base.path))
    reshard(text, tmp_path / "whole", source_options=given)
    model, told = base.kind.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(told.values())
    assert stored(tmp_path / "whole").keys() == stored(base.path).keys()
    alone = transformers.AutoModelForCausalLM.from_pretrained(text)
    tokens = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, alone(input_ids=tokens).logits)
    assert verify(tmp_path / "whole", VerifyOptions(level="full", against=text), source_options=given).ok
    record = parse_record((tmp_path / "whole" / RECORD).read_bytes())
    assert "only" not in record.options
    assert not record.filtered


def test_a_plan_file_knows_the_base(predicting, tmp_path):
    base, trained, _, _ = predicting
    own = shutil.copytree(base, tmp_path / "own")
    assert run(["plan", str(trained), "--complete-from", str(own), "--out", str(tmp_path / "plan.json")]) == 0
    assert run(["reshard", "--plan", str(tmp_path / "plan.json"), str(tmp_path / "planned")]) == 0
    reshard(trained, tmp_path / "whole", source_options=SourceOptions(complete_from=str(own)))
    assert_same(stored(tmp_path / "planned"), stored(tmp_path / "whole"))
    tensors = load_file(own / "model.safetensors")
    save_file(dict(reversed(tensors.items())), own / "model.safetensors", {"format": "pt", "changed": "yes"})
    assert run(["reshard", "--plan", str(tmp_path / "plan.json"), str(tmp_path / "again")]) == 4


def test_a_head_comes_back(tmp_path):
    base = save(tmp_path / "base", config_of("qwen3")).path
    trained = train(base, tmp_path / "trained", lost=("lm_head.",))
    assert run(["reshard", str(trained), str(tmp_path / "none")]) == 4
    assert run(["reshard", str(trained), str(tmp_path / "whole"), "--complete-from", str(base)]) == 0
    assert torch.equal(stored(tmp_path / "whole")["lm_head.weight"], stored(base)["lm_head.weight"])


def test_nothing_is_taken_where_nothing_lacks(tmp_path):
    base = save(tmp_path / "base", config_of("qwen3")).path
    done = reshard(base, tmp_path / "whole", source_options=SourceOptions(complete_from=str(base)))
    assert "complete_from" not in done.record.options


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps"),
        ({"intermediate_size": 56}, "not the same model"),
        ({"dtype": "float32"}, "--dtype"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_contradicts_is_refused(tmp_path, capfd, changes, word):
    config = config_of("qwen3")
    base = save(tmp_path / "base", config).path
    if "quantization_config" in changes:
        other = train(base, tmp_path / "other", config=changes)
    else:
        other = save(tmp_path / "other", {**config, **changes}).path
    trained = train(base, tmp_path / "trained", lost=("lm_head.",))
    assert run(["reshard", str(trained), str(tmp_path / "whole"), "--complete-from", str(other)]) == 4
    assert word in capfd.readouterr().err
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize(("theta", "code"), [(5e5, 4), (1e4, 0)])
def test_a_setting_is_compared_in_either_spelling(tmp_path, capfd, theta, code):
    base = save(tmp_path / "base", config_of("qwen3")).path
    trained = train(base, tmp_path / "trained", lost=("lm_head.",))
    for place, spelled in (
        (base, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        (trained, {"rope_theta": theta}),
    ):
        config = json.loads((place / "config.json").read_text())
        for key in ("rope_theta", "rope_parameters", "rope_scaling"):
            config.pop(key, None)
        (place / "config.json").write_text(json.dumps({**config, **spelled}))
    assert run(["reshard", str(trained), str(tmp_path / "whole"), "--complete-from", str(base)]) == code
    assert ("rope_parameters.rope_theta is 500000.0 and 10000.0" in capfd.readouterr().err) == (code != 0)


def test_another_model_is_refused(tmp_path, capfd):
    one, other = (save(tmp_path / name, config_of(name)).path for name in ("qwen3", "llama"))
    assert run(["reshard", str(one), str(tmp_path / "whole"), "--complete-from", str(other)]) == 4
    assert "one of the same class" in capfd.readouterr().err


def test_the_base_is_not_overwritten(tmp_path):
    base = save(tmp_path / "base", config_of("qwen3")).path
    trained = train(base, tmp_path / "trained", lost=("lm_head.",))
    assert run(["reshard", str(trained), str(base / "inside"), "--complete-from", str(base)]) == 6
