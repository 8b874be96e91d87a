"""`--for CONSUMER`: one command from a run to a program that loads it, and what would not load is refused before."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from cli_checkpoints import llama, told
from safetensors.numpy import load_file, save_file

from shardctl.base.dtype import BY_NAME
from shardctl.libraries.consumers.profile import find_profile, list_consumers
from shardctl.tensors.mesh import Mesh
from shardctl.verify.consumer import StoredModel, check_consumer

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"


@pytest.mark.parametrize("name", list_consumers())
def test_every_profile_is_complete_and_names_what_was_read(name):
    profile = find_profile(name)
    assert profile.read
    assert len(profile.architectures) > 200 or profile.model_types
    assert "{path}" in profile.command
    assert profile.label == f"{profile.consumer} {name.partition('@')[2]}"


def test_a_name_alone_means_the_newest_profile():
    assert find_profile("transformers").version.startswith("5.")
    assert find_profile("transformers@4.57.6").version.startswith("4.57")


@pytest.mark.parametrize("verb", [("verify",), ("reshard", "--dry-run")])
def test_an_unknown_consumer_or_version_is_a_usage_error_that_lists_the_known_ones(say, source, tmp_path, verb):
    places = (source, tmp_path / "out") if verb[0] == "reshard" else (source,)
    for name in ("ollama", "vllm@0.1"):
        said = say(verb[0], *places, *verb[1:], "--for", name)
        assert said.code == 2
        assert "vllm@0.32" in said.err


def test_reshard_for_vllm_writes_whole_files_and_prints_the_command_of_the_mesh(say, source, tmp_path):
    said = say("reshard", source, tmp_path / "out", "--for", "vllm", "--tp", 2, "--json")
    assert said.code == 0
    found = json.loads(said.out.splitlines()[-1])
    assert found["layout"] == "hf"
    assert found["consumer"]["loads"] is True
    assert found["consumer"]["command"] == f"vllm serve {tmp_path / 'out'} --tensor-parallel-size 2"
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    again = say("verify", tmp_path / "out", "--for", "vllm@0.32", "--mesh", "tp=2")
    assert again.code == 0
    assert "should load in vllm 0.32 (headers only)" in again.out


def test_a_version_that_was_read_and_not_run_gets_the_arrays_of_a_compared_one_and_a_note(say, source, tmp_path):
    written = {}
    for version in ("0.32", "0.33"):
        said = say(
            *("reshard", source, tmp_path / version, "--for", f"vllm@{version}", "--to", "vllm", "--tp", 2, "--json")
        )
        assert said.code == 0, said.err
        verdict = json.loads(said.out.splitlines()[-1])["consumer"]
        note = "vllm 0.33 was read and not run: its arrays per rank are those of vllm 0.32"
        assert (note in verdict["notes"]) == (version == "0.33")
        written[version] = {path.name: path.read_bytes() for path in (tmp_path / version).glob("*.safetensors")}
    assert written["0.32"] == written["0.33"]
    assert say("reshard", source, tmp_path / "whole", "--for", "vllm@0.33").out.count("read and not run") == 0


def test_a_class_that_a_newer_vllm_has_is_new_in_its_profile():
    newer, older = find_profile("vllm@0.33"), find_profile("vllm@0.32")
    assert find_profile("vllm") is newer
    assert "DoryForCausalLM" in newer.architectures - older.architectures
    assert older.architectures - newer.architectures == {"MedusaModel"}
    assert newer.quantization == older.quantization


def test_for_vllm_to_vllm_writes_the_files_of_its_ranks(say, source, tmp_path):
    said = say("reshard", source, tmp_path / "out", "--for", "vllm@0.32", "--to", "vllm", "--tp", 2)
    assert said.code == 0
    assert "--tensor-parallel-size 2 --load-format sharded_state" in said.out
    assert (tmp_path / "out" / "model-rank-1-part-0.safetensors").exists()
    assert say("verify", tmp_path / "out", "--for", "vllm").code == 0
    assert say("verify", tmp_path / "out", "--for", "sglang").code == 3


@pytest.mark.parametrize(
    "options",
    [
        ("vllm", "--to", "dcp"),
        ("transformers", "--to", "vllm"),
        ("tgi", "--pp", 2),
        ("transformers", "--tp", 2),
        ("vllm", "--to", "vllm", "--vllm-profile", "0.25"),
    ],
)
def test_options_that_contradict_the_consumer_are_a_usage_error(say, source, tmp_path, options):
    assert say("reshard", source, tmp_path / "out", "--for", *options).code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}, "it has no class NobodysForCausalLM"),
        ({"quantization_config": {"quant_method": "exl2"}}, "exl2"),
    ],
)
def test_what_would_not_load_is_refused_before_anything_is_written(say, tmp_path, changes, reason):
    model = llama(tmp_path / "in")
    (model / "config.json").write_text(json.dumps(told(**changes)))
    said = say("reshard", model, tmp_path / "out", "--for", "vllm")
    assert said.code == 4
    assert reason in said.err
    assert not (tmp_path / "out").exists()
    assert say("verify", model, "--for", "vllm").code in {3, 4}


@pytest.mark.parametrize("consumer", ["tgi", "llama.cpp", "vllm", "transformers"])
def test_a_class_that_the_profile_does_not_know_is_refused_before_anything_is_written(say, tmp_path, consumer):
    model = llama(tmp_path / "in")
    changes = {"architectures": ["NobodysForCausalLM"], "auto_map": {"AutoModelForCausalLM": "code.NobodysForCausalLM"}}
    (model / "config.json").write_text(json.dumps(told(model_type="nobodys", **changes)))
    said = say("reshard", model, tmp_path / "out", "--for", consumer)
    assert said.code == 4
    assert "obodys" in said.err
    assert not (tmp_path / "out").exists()
    assert say("reshard", model, tmp_path / "out", "--to", "hf").code == 0


def test_layers_that_predict_further_tokens_are_named():
    arrays = dict.fromkeys(("model.norm.weight", "mtp.fc.weight"), BY_NAME["F32"])
    stored = StoredModel(told(), arrays, {"model.safetensors", "extra/extra_tensors.safetensors"})
    notes = " ".join(check_consumer(find_profile("vllm"), stored, Mesh.of(), "x", per_rank=False).notes)
    assert "1 tensor of multi-token prediction layers: mtp.fc.weight for speculative decoding at most" in notes
    assert "does not load the tensors in extra/extra_tensors.safetensors" in notes


def test_extra_tensors_are_named_in_text_and_json(say, tmp_path):
    model = llama(tmp_path / "in")
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "v_head.weight": np.ones(4, np.float32)}, model / "model.safetensors", {"format": "pt"})
    said = say("reshard", model, tmp_path / "out", "--for", "vllm")
    assert "does not load the tensors in extra/extra_tensors.safetensors" in said.out
    assert "v_head.weight" in said.out
    found = json.loads(say("reshard", model, tmp_path / "again", "--for", "vllm", "--json").out.splitlines()[-1])
    assert [each["name"] for each in found["extra_tensors"]] == ["v_head.weight"]
    assert any("extra/extra_tensors.safetensors" in note for note in found["consumer"]["notes"])


def make_adapter(place, base):
    """An adapter of two projections, as PEFT stores it."""
    place.mkdir()
    shape = load_file(base / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].shape
    generator = np.random.default_rng(3)
    module = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    matrices = {
        module.format(layer, part): generator.standard_normal(size, np.float32)
        for layer in range(told()["num_hidden_layers"])
        for part, size in (("A", (2, shape[1])), ("B", (shape[0], 2)))
    }
    save_file(matrices, place / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (place / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    return place


@pytest.mark.parametrize("named", [False, True])
def test_an_adapter_alone_is_merged_into_its_base(say, source, tmp_path, named):
    adapter = make_adapter(tmp_path / "lora", source)
    (adapter / "tokenizer.json").write_text("{}")
    if named:
        settings = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "org/base"}))
        said = say("reshard", adapter, tmp_path / "out", "--for", "vllm")
        assert said.code == 4
        assert "is an adapter of org/base, and the weights of its base are not here" in said.err
        assert "--complete-from BASE" in said.err
        assert not (tmp_path / "out").exists()
    said = say("reshard", adapter, tmp_path / "out", "--for", "vllm", *(("--complete-from", source) if named else ()))
    assert said.code == 0, said.err
    assert f"{adapter} is an adapter, and is merged into {source}" in said.err
    assert "its own tokenizer.json is left behind" in said.err
    assert "vllm serve" in said.out
    assert say("reshard", source, tmp_path / "merged", "--merge", adapter).code == 0
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "merged"))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], value) for name, value in expected.items())
    before = load_file(source / "model.safetensors")
    assert not np.array_equal(
        found["model.layers.0.self_attn.q_proj.weight"], before["model.layers.0.self_attn.q_proj.weight"]
    )


def test_files_of_ranks_of_an_older_vllm_are_written_and_not_checked(say, source, tmp_path):
    said = say("reshard", source, tmp_path / "out", "--for", "vllm@0.25", "--to", "vllm", "--tp", 2)
    assert said.code == 0, said.err
    assert "vllm@0.25 has no profile here: whether it loads the result was not checked" in said.err
    assert say("reshard", source, tmp_path / "old", "--to", "vllm", "--vllm-profile", "0.25", "--tp", 2).code == 0
    names = sorted(path.name for path in (tmp_path / "old").glob("*.safetensors"))
    assert all((tmp_path / "out" / name).read_bytes() == (tmp_path / "old" / name).read_bytes() for name in names)
    assert say("reshard", source, tmp_path / "no", "--for", "vllm@0.9", "--to", "vllm").code in {2, 4}
    assert "--vllm-profile" not in say("reshard", "--help-all").out


def test_a_degree_that_does_not_divide_the_heads_is_refused(say, source, tmp_path):
    said = say("reshard", source, tmp_path / "out", "--for", "vllm", "--tp", 3)
    assert said.code == 4
    assert "attention heads are not divisible by tp=3" in said.err
    said = say("verify", source, "--for", "vllm", "--mesh", "tp=3")
    assert said.code == 3
    assert "will not load: " in said.out


def test_the_weights_the_config_and_the_tokenizer_are_found_inside_a_run(say, tmp_path):
    run = tmp_path / "run"
    for step in (3, 12):
        weights = llama(run / f"step_{step}" / "policy" / "weights")
        shutil.move(weights / "config.json", run / f"step_{step}" / "policy" / "weights" / "c")
        (run / f"step_{step}" / "policy" / "tokenizer").mkdir()
        shutil.move(weights / "tokenizer.json", run / f"step_{step}" / "policy" / "tokenizer" / "tokenizer.json")
        (run / f"step_{step}" / "policy" / "huggingface").mkdir()
        shutil.move(weights / "c", run / f"step_{step}" / "policy" / "huggingface" / "config.json")
    newest = run / "step_12" / "policy" / "weights" / "model.safetensors"
    changed = {name: value + 1 for name, value in load_file(newest).items()}
    save_file(changed, newest, {"format": "pt"})
    said = say("reshard", run, tmp_path / "out", "--for", "transformers")
    assert said.code == 0, said.err
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(written[name], value) for name, value in changed.items())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert "tokenizer.json" in said.err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_olmo_saves_the_model_with_its_optimizer(say, source, tmp_path):
    weights = {name: torch.from_numpy(value) for name, value in load_file(source / "model.safetensors").items()}
    states = {name: {"exp_avg": value} for name, value in weights.items()}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    place = tmp_path / "run/step100/model_and_optim"
    dcp.save({"model": weights, "optim": optimizer}, checkpoint_id=place, no_dist=True)
    said = say("reshard", tmp_path / "run", tmp_path / "out", "--for", "vllm", "--config", source / "config.json")
    assert said.code == 0, said.err
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(np.array_equal(found[name], value.numpy()) for name, value in weights.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_older_model_beside_the_save_of_a_run_is_asked_about(say, tmp_path):
    step = llama(tmp_path / "run/checkpoint-9")
    weights = {name: torch.from_numpy(value + 1) for name, value in load_file(step / "model.safetensors").items()}
    dcp.save({"model": weights}, checkpoint_id=step / "pytorch_model_fsdp_0", no_dist=True)
    for given in (step.parent, step):
        said = say("reshard", given, tmp_path / "out", "--for", "vllm")
        assert said.code == 4
        assert "holds two models, which may differ: model.safetensors, and a distributed checkpoint" in said.err
        assert not (tmp_path / "out").exists()
    said = say("reshard", step.parent, tmp_path / "out", "--for", "vllm", "--from", "dcp")
    assert said.code == 0, said.err
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(np.array_equal(found[name], value.numpy()) for name, value in weights.items())


def test_two_models_of_a_run_are_named_and_neither_is_taken(say, tmp_path):
    for name in ("teacher", "student"):
        llama(tmp_path / "run" / name)
    said = say("reshard", tmp_path / "run", tmp_path / "out", "--for", "vllm")
    assert said.code == 4
    assert re.search(r"student.*teacher|teacher.*student", said.err)


def test_plan_for_a_server_counts_memory_as_it_does(say, source):
    said = [
        json.loads(say("plan", source, *words, "--gpu", "h100", "--json").out)
        for words in (("--for", "vllm"), ("--server", "vllm"), ("--for", "serve"))
    ]
    for each in said:
        del each["conversion"]  # which has the free space
    assert said[0] == said[1] != said[2]
    assert say("plan", source, "--for", "llama.cpp").code == 2
    assert say("plan", source, "--for", "vllm").code == 0


def test_names_that_are_not_those_of_the_class_are_refused(say, tmp_path):
    model = llama(tmp_path / "in")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.upward.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    said = say("reshard", model, tmp_path / "out", "--for", "sglang")
    assert said.code == 4
    assert "upward" in said.err or "up_proj" in said.err
    assert not (tmp_path / "out").exists()
    assert say("verify", model, "--for", "sglang").code in {3, 4}


def test_verify_for_names_missing_and_extra_tensors(say, tmp_path):
    model = llama(tmp_path / "in")
    tensors = load_file(model / "model.safetensors")
    short = {name: value for name, value in tensors.items() if not name.endswith("layers.0.mlp.up_proj.weight")}
    for change, consumer, code, words in (
        (short, "vllm", 3, "will not load: 1 of"),
        ({**tensors, "value_head.weight": np.ones((1, 2), np.float32)}, "vllm", 3, "it rejects 1 tensor"),
        ({**tensors, "value_head.weight": np.ones((1, 2), np.float32)}, "sglang", 3, "not known: "),
        ({**tensors, "value_head.weight": np.ones((1, 2), np.float32)}, "transformers", 0, "should load"),
        ({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}, "vllm", 0, "should load"),
    ):
        save_file(change, model / "model.safetensors", {"format": "pt"})
        said = say("verify", model, "--for", consumer)
        if code == 0 or change is not short:
            assert said.code == code, (consumer, said.out, said.err)
            assert words in said.out
        else:
            assert said.code in {3, 4}


def test_an_engine_gets_the_names_of_the_hub_where_transformers_5_saves_others(say, tmp_path):
    """A vision tower of CLIP has one more module there; transformers 5 writes it only for a model that it loaded."""
    source = tmp_path / "llava"
    config = json.loads((CONFIGS / "llava.json").read_text())
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig.from_dict(config))
    model.save_pretrained(source)
    saved = load_file(source / "model.safetensors")
    assert say("verify", source, "--for", "transformers").code == 0
    for consumer in ("vllm", "sglang", "transformers@4.57"):
        said = say("verify", source, "--for", consumer)
        assert said.code == 3
        assert "vision_tower.embeddings.class_embedding" in said.out
        assert say("reshard", source, tmp_path / consumer, "--for", consumer).code == 0
        found = load_file(tmp_path / consumer / "model.safetensors")
        assert {name.replace(".vision_model.", ".") for name in found} == saved.keys()
        assert "vision_tower.vision_model.embeddings.class_embedding" in found
        assert all((value == saved[name.replace(".vision_model.", ".")]).all() for name, value in found.items())
        assert say("verify", tmp_path / consumer, "--for", consumer).code == 0
    loaded = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "vllm")
    assert all(
        torch.equal(one, two)
        for one, two in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_an_engine_gets_the_experts_of_qwen3_vl_transposed_as_on_the_hub(say, tmp_path):
    source = tmp_path / "qwen"
    config = json.loads((CONFIGS / "qwen3_vl_moe.json").read_text())
    kind = transformers.Qwen3VLMoeForConditionalGeneration
    kind(kind.config_class.from_dict(config)).save_pretrained(source)
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    saved = load_file(source / "model.safetensors")[name]
    assert name in say("verify", source, "--for", "vllm").out
    assert say("reshard", source, tmp_path / "out", "--for", "vllm").code == 0
    assert (load_file(tmp_path / "out" / "model.safetensors")[name] == saved.transpose(0, 2, 1)).all()
    assert say("verify", tmp_path / "out", "--for", "vllm").code == 0


def test_transformers_4_gets_a_config_that_it_reads(say, source, tmp_path):
    """It takes the base of rotary embeddings from `rope_theta`, and assumes one where only `rope_parameters` has it."""
    source = shutil.copytree(source, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 123.0}
    (source / "config.json").write_text(json.dumps(config))
    assert say("verify", source, "--for", "vllm").code == 0
    for consumer in ("transformers@4.57", "tgi"):
        said = say("verify", source, "--for", consumer)
        assert said.code == 3
        assert "lacks settings of transformers 4, such as rope_theta" in said.out
        assert f"reshard --for {consumer}" in said.out
        assert say("reshard", source, tmp_path / consumer, "--for", consumer).code == 0
        assert json.loads((tmp_path / consumer / "config.json").read_text())["rope_theta"] == 123.0
        assert say("verify", tmp_path / consumer, "--for", consumer, "--against", source).code == 0


@pytest.mark.parametrize("saved", ["safetensors", "dcp"])
@pytest.mark.parametrize("consumer", ["vllm", "transformers@4.57"])
def test_a_head_that_was_trained_apart_is_untied(say, tmp_path, saved, consumer):
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "config", max_shard_size="1GB")
    (tmp_path / "config" / "model.safetensors").unlink()
    said = json.loads((tmp_path / "config" / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    source, state = tmp_path / "run", model.state_dict()
    if saved == "dcp":
        dcp.save(state, checkpoint_id=source, no_dist=True)
    else:
        source.mkdir()
        save_file(
            {name: tensor.numpy() for name, tensor in state.items()}, source / "model.safetensors", {"format": "pt"}
        )
    options = ("--config", tmp_path / "config" / "config.json")
    said = say("reshard", source, tmp_path / "out", "--for", consumer, *options)
    assert said.code == 0, said.err
    text = " ".join(said.err.split())
    assert "are two weights, although config.json ties them: 2,048 of 2,048 elements differ" in text
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    tokens = torch.arange(16)[None]
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    assert say("verify", tmp_path / "out", "--level", "full", "--against", source, *options).code == 0


def test_a_head_of_which_a_few_elements_differ_is_refused_as_damaged(say, tmp_path):
    broken = llama(tmp_path / "broken", tie_word_embeddings=True)
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"].view(np.uint8)[5, 6] ^= 1
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    said = say("reshard", broken, tmp_path / "out", "--for", "vllm")
    assert said.code == 4
    assert "are tied by config.json, but their stored values" in " ".join(said.err.split())
