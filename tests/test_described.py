"""A config alone gives a model's tensors: as many as its publisher counts, and as its checkpoint has them."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

PUBLIC = Path(__file__).parents[1] / "fixtures" / "configs_public"
DESCRIBED = SourceOptions(described=True)
PUBLISHED = {
    # What the Hub's page of the model says under "Safetensors", which is what `num_parameters()` gives.
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "bert-base": 109_482_240,
    # T5ForConditionalGeneration, which Raffel et al. 2020 (section 3.7) round to 60 M, 220 M, 770 M, 3 B and 11 B.
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
}
VOCABULARY, HIDDEN, LAYERS, POSITIONS = 50257, 12288, 96, 2048


def count(name):
    """The parameters that a public config describes."""
    with open_checkpoint(PUBLIC / f"{name}.json", DESCRIBED) as checkpoint:
        assert checkpoint.hypothetical
        return sum(tensor.size for tensor in checkpoint.manifest.tensors.values())


@pytest.fixture
def alone(tmp_path):
    """A directory with the config of Llama-3.1-8B and a tokenizer, as a download without weights leaves it."""
    place = tmp_path / "llama"
    place.mkdir()
    (place / "config.json").write_bytes((PUBLIC / "llama-3.1-8b.json").read_bytes())
    (place / "tokenizer.json").write_text("{}")
    return place


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name):
    assert count(name) == PUBLISHED[name]


def test_gpt3_has_the_175_billion_of_its_paper():
    """Brown et al. 2020, table 2.1; the layer of GPT-2: four matrices of 12 h^2 in all, their biases, two norms."""
    layer = 12 * HIDDEN**2 + 13 * HIDDEN
    assert count("gpt-3-175b") == LAYERS * layer + (VOCABULARY + POSITIONS + 2) * HIDDEN == 174_604_259_328


def test_deepseek_v3_has_the_671_billion_of_its_paper(tmp_path):
    """DeepSeek-V3 technical report, section 4.2: 671 B without the layer that predicts a second token."""
    config = json.loads((PUBLIC / "deepseek-v3.json").read_text())
    hidden, latent, rank, ffn, heads = 7168, 512 + 64, 1536, 2048, 128
    attention = hidden * (rank + latent) + rank * heads * 192 + 512 * heads * 256 + heads * 128 * hidden + rank + 512
    expert = 3 * hidden * ffn
    sparse = 257 * expert + 256 * hidden + 256  # with the shared one, the router, and its bias
    dense = 3 * hidden * 18432
    expected = 61 * (attention + 2 * hidden) + 58 * sparse + 3 * dense + 2 * 129280 * hidden + hidden
    assert expected == 671_026_419_200
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path, DESCRIBED) as checkpoint:
        assert sum(t.size for t in checkpoint.manifest.tensors.values()) == expected
        (warning,) = checkpoint.manifest.warnings
    assert "tensors that predict further tokens" in warning
    assert "not counted" in warning


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_what_balances_experts_is_in_fp32_as_in_their_checkpoints(family):
    with open_checkpoint(PUBLIC.parent / "configs" / f"{family}.json", DESCRIBED) as checkpoint:
        types = {t.dtype.name for n, t in checkpoint.manifest.tensors.items() if n.endswith("e_score_correction_bias")}
        assert types == {"F32"} != {checkpoint.manifest.tensors["lm_head.weight"].dtype.name}


def test_deepseek_v3_in_fp8_has_as_many_codes_and_a_scale_for_each_block():
    with open_checkpoint(PUBLIC / "deepseek-v3.json", DESCRIBED) as checkpoint:
        tensors = checkpoint.manifest.tensors
    scales = [t for t in tensors.values() if t.name.endswith("weight_scale_inv")]
    assert sum(t.size for t in tensors.values()) - sum(t.size for t in scales) == 671_026_419_200
    for scale in scales:
        codes = tensors[scale.name.removesuffix("_scale_inv")]
        assert codes.dtype.name == "F8_E4M3"
        assert scale.shape == tuple(-(-extent // 128) for extent in codes.shape)


def test_the_type_is_the_configs():
    with open_checkpoint(PUBLIC / "llama-3.1-405b.json", DESCRIBED) as checkpoint:
        assert checkpoint.manifest.nbytes == 2 * PUBLISHED["llama-3.1-405b"]
        assert {t.dtype.name for t in checkpoint.manifest.tensors.values()} == {"BF16"}


def test_ties_are_one_tensor():
    with open_checkpoint(PUBLIC / "gpt-3-175b.json", DESCRIBED) as checkpoint:
        assert checkpoint.manifest.tensors["transformer.wte.weight"].ties == ("lm_head.weight",)
        assert "lm_head.weight" not in checkpoint.manifest.tensors


def test_it_is_what_the_checkpoint_would_be(tmp_path):
    """The same tensors in the same order, of the same types and with the same ties."""
    import numpy as np
    from safetensors.numpy import save_file

    config = {**json.loads((PUBLIC / "llama-3.1-8b.json").read_text()), "num_hidden_layers": 2, "vocab_size": 100}
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "tie_word_embeddings": True}
    config["torch_dtype"] = "float16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path, DESCRIBED) as checkpoint:
        described, model = checkpoint.manifest.tensors, checkpoint.model
    save_file({n: np.zeros(t.shape, np.float16) for n, t in described.items()}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, DESCRIBED) as checkpoint:
        assert not checkpoint.hypothetical
        real = checkpoint.manifest.tensors
        assert checkpoint.model == model

    def facts(tensors):
        return [(t.name, t.dtype, t.shape, t.ties) for t in tensors.values()]

    assert facts(described) == facts(real)
    assert all(t.chunks for t in real.values())
    assert not any(t.chunks for t in described.values())


def test_inspect_says_what_would_be(alone):
    found = inspect(alone)
    assert found.hypothetical
    assert found.parameters == PUBLISHED["llama-3.1-8b"]
    assert found.files == ()
    assert found.architecture == "LlamaForCausalLM"
    assert inspect(alone / "config.json").tensors == found.tensors


@pytest.mark.parametrize(
    "verb",
    [
        lambda path: reshard(path, path.parent / "out", ReshardOptions()),
        digest,
        verify,
        lambda path: diff(path, path),
    ],
    ids=["reshard", "digest", "verify", "diff"],
)
@pytest.mark.parametrize("what", [".", "config.json"])
def test_verbs_that_need_bytes_say_that_there_are_none(alone, verb, what):
    with pytest.raises(SourceError, match="has no weights, only a config") as error:
        verb(alone / what)
    assert error.value.exit_code == 4
    assert not (alone.parent / "out").exists()


def test_an_index_without_its_files_is_warned_of(alone):
    (alone / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with open_checkpoint(alone, DESCRIBED) as checkpoint:
        assert checkpoint.hypothetical
        assert checkpoint.manifest.warnings == (
            "none of the files that model.safetensors.index.json names exists; only config.json describes the model",
        )
    with pytest.raises(SourceError, match=r"none of the files that model.safetensors.index.json names"):
        inspect(alone, source_options=SourceOptions(strict=True))


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.safetensors.incomplete", "model.gguf", "pytorch_model.bin", "shardctl.json"],
)
def test_weights_that_are_damaged_or_of_another_kind_are_not_passed_over(alone, name):
    (alone / name).write_bytes(b"")
    with pytest.raises(SourceError):
        inspect(alone)


NAMELESS = "model.json is not the config of a model: it names neither architectures nor model_type"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no JSON", "model.json is not JSON"),
        ('{"hidden_size":', "model.json is not JSON"),
        ("[]", "model.json is not a JSON object"),
        ('"text"', "model.json is not a JSON object"),
        ("{}", NAMELESS),
        ('{"hidden_size": 64}', NAMELESS),
    ],
)
def test_a_json_file_that_is_no_config_is_refused_for_what_it_is(tmp_path, content, reason):
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(SourceError) as caught:
        inspect(path)
    assert reason in caught.value.message


def test_a_quantization_config_is_a_table(alone):
    config = json.loads((alone / "config.json").read_text()) | {"quantization_config": "fp8"}
    (alone / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="quantization_config = 'fp8' where a table is expected"):
        inspect(alone)


def test_a_config_may_have_any_name(alone):
    (alone / "config.json").rename(alone / "llama.json")
    assert inspect(alone / "llama.json").parameters == PUBLISHED["llama-3.1-8b"]


@pytest.fixture
def in_process(monkeypatch):
    """What the child of a config without a table does, done here: it would import torch and transformers again."""
    from shardctl.base import limited_child
    from shardctl.running.meta_model import answer_request

    asked = []

    def run(module, request, **limits):
        asked.append((module, json.loads(request), limits))
        return answer_request(json.loads(request))

    monkeypatch.setattr(limited_child, "run_limited_child", run)
    return asked


def test_an_unknown_architecture_needs_weights(tmp_path, in_process, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["NewForCausalLM"]}')
    with pytest.raises(
        UnsupportedError, match=r"no table knows NewForCausalLM, .* has no class NewForCausalLM"
    ) as error:
        inspect(path)
    assert "--rules" not in error.value.hint
    quantized = {"quant_method": "awq", "bits": 4, "group_size": 32}
    path.write_text(json.dumps({"architectures": ["DoryForCausalLM"], "quantization_config": quantized}))
    with pytest.raises(UnsupportedError, match="its weights are quantized in a way that only files show"):
        inspect(path)
    path.write_text('{"architectures": [null], "num_hidden_layers": 2}')
    with pytest.raises(UnsupportedError, match=r"no table knows a model without a name, .* names no architecture"):
        inspect(path)
    path.write_text('{"architectures": ["DoryForCausalLM"], "model_type": "dory", "num_hidden_layers": "many"}')
    with pytest.raises(UnsupportedError, match="DoryForCausalLM cannot be built of this config"):
        inspect(path)
    assert len(in_process) == 3
    monkeypatch.setattr("shardctl.checkpoint.config_only.find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="torch is not installed") as error:
        inspect(path)
    assert "pip install" in error.value.hint


@pytest.mark.parametrize("name", ["DoryForCausalLM", "LagunaForCausalLM", "Inkling2ForConditionalGeneration"])
def test_a_class_of_transformers_describes_a_config_without_a_table(tmp_path, in_process, name):
    """The tensors, types and shapes that `save_pretrained` of transformers writes, from the config it writes."""
    import transformers

    from shardctl.running.small_model import build_small_model

    build_small_model(getattr(transformers, name)).save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text()) | {"attn_implementation": "hub/kernels"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path / "saved") as saved, open_checkpoint(tmp_path / "config.json", DESCRIBED) as found:
        wanted = {name: (t.shape, t.dtype) for name, t in saved.stored.tensors.items()}
        assert {name: (t.shape, t.dtype) for name, t in found.manifest.tensors.items()} == wanted
        ((warning,),) = [[w for w in found.manifest.warnings if "no table knows" in w]]
        assert f"transformers {transformers.__version__} makes" in warning
        assert "cannot tell" in warning
    assert in_process[0][2]["memory"] <= 4 << 30
    stored = plan(tmp_path / "saved", ReshardOptions(mesh=Mesh.of(pp=2)))
    described = plan(tmp_path / "config.json", ReshardOptions(mesh=Mesh.of(pp=2)))
    assert [rank.weight_bytes for rank in described.ranks] == [rank.weight_bytes for rank in stored.ranks]
    if name != "DoryForCausalLM":  # of which nothing is recognised as what tp can cut
        ranks = plan(tmp_path / "config.json", ReshardOptions(mesh=Mesh.of(tp=2))).ranks
        cut = plan(tmp_path / "saved", ReshardOptions(mesh=Mesh.of(tp=2)))
        assert [rank.weight_bytes for rank in ranks] == [rank.weight_bytes for rank in cut.ranks]
        assert cut.replication < 1.9  # which plans without a table once had as 2


@pytest.mark.usefixtures("in_process")
def test_the_note_names_the_class_that_stands_for_one_that_transformers_does_not_have(tmp_path):
    path = tmp_path / "config.json"
    small = {"model_type": "laguna", "hidden_size": 64, "num_hidden_layers": 1, "num_experts": 2}
    for architectures, stands in (
        (["LagunaForSequenceClassification"], True),
        ([], True),
        (["LagunaForCausalLM"], False),
    ):
        path.write_text(json.dumps(small | {"architectures": architectures}))
        with open_checkpoint(path, DESCRIBED) as found:
            (warning,) = [w for w in found.manifest.warnings if "no table knows" in w]
        assert ("with LagunaForCausalLM, the class for its model type" in warning) == stands


@pytest.mark.usefixtures("in_process")
def test_towers_around_a_known_text_model_are_counted(tmp_path, monkeypatch):
    """Where transformers has the class; without it, the text model alone."""
    import transformers

    from shardctl.running.small_model import build_small_model

    model = build_small_model(transformers.Exaone4_5_ForConditionalGeneration)
    model.save_pretrained(tmp_path / "saved")
    described = plan(tmp_path / "saved/config.json", ReshardOptions(mesh=Mesh.of(tp=2)))
    stored = plan(tmp_path / "saved", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert described.parameters == stored.parameters == model.num_parameters()
    assert [rank.weight_bytes for rank in described.ranks] == [rank.weight_bytes for rank in stored.ranks]
    assert sum("whole on every tp rank: model.visual.**" in warning for warning in described.warnings) == 1
    monkeypatch.setattr("shardctl.checkpoint.config_only.find_spec", lambda _: None)
    alone = plan(tmp_path / "saved/config.json")
    assert alone.parameters < described.parameters
    assert any("is counted, without its towers" in warning for warning in alone.warnings)


def test_options_that_need_stored_tensors_are_refused(alone):
    with pytest.raises(UsageError, match="--config names another"):
        inspect(alone / "config.json", source_options=SourceOptions(config=PUBLIC / "bert-base.json"))
    with pytest.raises(UsageError, match="--rules-from needs the names of stored tensors"):
        inspect(alone, source_options=SourceOptions(rules_from="transformers"))
    with pytest.raises(SourceError):
        inspect(alone, source_options=SourceOptions(container="safetensors"))


def test_another_config_can_describe_a_directory(alone):
    assert (
        inspect(alone, source_options=SourceOptions(config=PUBLIC / "bert-base.json")).parameters
        == PUBLISHED["bert-base"]
    )


def test_rules_say_how_it_would_be_cut(alone, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[rules]\n"**.mlp.down_proj.weight" = ["tp"]\n')
    with open_checkpoint(alone, SourceOptions(described=True, rules=rules)) as checkpoint:
        assert checkpoint.model is not None
        spec = checkpoint.model.tensors["model.layers.0.mlp.down_proj.weight"].spec
        assert [[cut.axis for cut in cuts] for cuts in spec.cuts] == [["tp"], []]
        assert prod(checkpoint.manifest.tensors["model.layers.0.mlp.down_proj.weight"].shape) == 4096 * 14336


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({}, "F32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "BF16"),
        ({"text_config": {"dtype": "float16"}}, "F16"),
        ({"torch_dtype": "auto", "text_config": {"torch_dtype": "float16"}}, "F16"),
    ],
)
def test_of_a_config_without_dtype_it_is_said_which_is_assumed(alone, declared, expected):
    config = json.loads((alone / "config.json").read_text())
    del config["torch_dtype"]
    (alone / "config.json").write_text(json.dumps(config | declared))
    with open_checkpoint(alone, DESCRIBED) as checkpoint:
        assert checkpoint.manifest.tensors["model.norm.weight"].dtype.name == expected
        said = f"config.json names no dtype; {expected} is assumed unless --dtype gives another"
        assert checkpoint.manifest.warnings == (() if "text_config" in declared else (said,))


def test_experts_in_stacks_are_said_to_be_counted_as_they_are(tmp_path):
    """A `quantization_config` speaks of linear layers; what it means for one array of all experts nobody knows."""
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    for family, stacked in (("llama4_text", True), ("mixtral", False)):
        config = json.loads((PUBLIC.parent / "configs" / f"{family}.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | quantised))
        with open_checkpoint(tmp_path, DESCRIBED) as checkpoint:
            said = [text for text in checkpoint.manifest.warnings if "counted as if they were not quantized" in text]
        assert bool(said) == stacked
