"""What `plan` says of training: what can be trained, what is offloaded, and what nobody has modelled."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
PUBLIC = ROOT / "fixtures" / "configs_public"
CONFIGS = ROOT / "fixtures" / "configs"
SCHEMA = json.loads((ROOT / "shardctl" / "report" / "plan_schema.json").read_text())
LLAMA = PUBLIC / "llama-3.1-8b.json"
DEEPSEEK = PUBLIC / "deepseek-v3.json"
GIB = 1 << 30


@pytest.fixture
def document(say):
    def call(*args):
        found = json.loads(say("plan", *args, "--json").out)
        jsonschema.validate(found, SCHEMA, jsonschema.Draft202012Validator)
        return found

    return call


def states(document, category):
    terms = document["needs"][document["ranks"][0]["needs"]]["terms"]
    return sum(t["term_bytes"] for t in terms if t["category"] == category and t["exact"])


def test_codes_are_not_trained_but_the_weights_that_they_stand_for(document):
    """AdamW has 12 bytes for each of the 671 G parameters of DeepSeek-V3, which are stored in fp8, and gradients."""
    options = ("--mesh", "pp=8,fsdp=32", "--recompute", "full")
    found = document(DEEPSEEK, *options)
    assert found["purpose"]["dequantised"]
    whole = sum(
        term["term_bytes"]
        for rank in found["ranks"]
        for term in found["needs"][rank["needs"]]["terms"]
        if term["exact"] and term["category"] in {"weights", "optimizer"}
    )
    assert whole == pytest.approx(12 * 671_026_419_200, rel=1e-3)
    balances = 58 * 256  # in fp32
    assert found["weight_bytes"] == 2 * 671_026_419_200 + 2 * balances


def test_serving_keeps_the_codes(document, fp8):
    assert not document(fp8, "--tp", "8")["purpose"]["dequantised"]


@pytest.fixture
def fp8(tmp_path):
    """A Llama in DeepSeek's kind of fp8."""
    config = json.loads(LLAMA.read_text())
    config["quantization_config"] = json.loads(DEEPSEEK.read_text())["quantization_config"]
    (tmp_path / "fp8.json").write_text(json.dumps(config))
    return tmp_path / "fp8.json"


def test_a_quantized_model_is_not_said_to_train_on_fewer_devices_than_its_states_need(document, fp8):
    """128 GB of states are on no two devices of 40 GB."""
    found = document(fp8, "--search", "--gpus", "2", "--gpu", "a100-40g", "--for", "train")
    assert found["exit_code"] == 3
    assert found["search"]["fewest"]["mesh"]["ranks"] >= 16 * 8.03 / 40
    unquantized = document(LLAMA, "--search", "--gpus", "2", "--gpu", "a100-40g", "--for", "train")
    assert found["search"] == unquantized["search"]


def test_a_plan_of_training_is_none_of_converting_codes(say, tmp_path, fp8):
    found = say("plan", fp8, "--for", "train", "--out", tmp_path / "plan.json")
    assert found.code == 2
    assert "nothing to convert" in found.err


RECURRENT = ("mamba2", "falcon_mamba", "jamba", "qwen3_next")


@pytest.mark.parametrize("config", RECURRENT)
def test_what_transformers_recurrent_layers_keep_is_known(document, config):
    found = document(CONFIGS / f"{config}.json", "--fsdp", "2", "--gpu", "t4")
    assert not found["verdict"]["partial"]
    assert found["verdict"]["fits"] is True
    assert found["purpose"]["why_not"] == ""
    terms = found["needs"][found["ranks"][0]["needs"]]["terms"]
    assert "kept by recurrent layers and their kernels" in {term["name"] for term in terms}


@pytest.mark.parametrize("config", RECURRENT)
def test_what_is_known_of_recurrent_layers_that_tp_divides_is_shown(document, config):
    found = document(CONFIGS / f"{config}.json", "--tp", "2", "--for", "train", "--gpu", "t4")
    elements = states(found, "gradients") // 4
    assert states(found, "optimizer") == 8 * elements
    assert elements >= found["parameters"] / 2
    assert found["verdict"]["partial"]
    assert found["verdict"]["fits"] is None
    assert found["verdict"]["certain"] is False
    assert "layer 0 is not known with tp" in found["purpose"]["why_not"]
    assert (found["exit_code"], found["verdict"]["answer"]) == (3, "NOT KNOWN")


def test_a_search_leaves_out_meshes_of_which_nothing_is_known(document, say):
    """Of recurrent layers, those with tp or cp; where none is known, there is nothing to rank."""
    options = (CONFIGS / "mamba2.json", "--search", "--gpus", "2", "--gpu", "t4", "--for", "train", "--seq-len", "4096")
    found = document(*options)["search"]
    divided = [{axis for axis, degree in one["mesh"]["axes"].items() if degree > 1} for one in found["ranked"]]
    assert sorted(divided, key=str) == [{"dp"}, {"fsdp"}, {"pp"}]
    assert any("not known with tp" in one["reason"] for one in found["rejected"])
    refused = say("plan", CONFIGS / "jamba.json", *options[1:], "--profile", "megatron")
    assert refused.code == 4
    assert "with the profiles hf, fsdp2 and deepspeed" in refused.err


def test_of_a_model_that_nobody_describes_the_states_are_shown(document, tmp_path):
    save_file({"a.weight": np.zeros((8, 4), "float32"), "steps": np.zeros(3, "int64")}, tmp_path / "model.safetensors")
    found = document(tmp_path, "--for", "train", "--gpu", "t4")
    assert (states(found, "weights"), states(found, "optimizer")) == (
        4 * 32 + 3 * 8,
        8 * 32,
    )  # the steps are not trained
    assert found["verdict"]["fits"] is None
    assert found["purpose"]["why_not"] == "there is no config.json"


def test_codes_that_nobody_describes_are_not_passed_over(say, tmp_path):
    codes = np.zeros((8, 4), ml_dtypes.float8_e4m3fn)
    save_file({"a.weight": codes, "b.weight": np.zeros((8, 4), "float32")}, tmp_path / "model.safetensors")
    found = say("plan", tmp_path, "--for", "train")
    assert found.code == 2
    assert "a.weight is F8_E4M3, and codes cannot be trained" in found.err


def test_states_alone_may_be_too_much(say):
    found = say("plan", CONFIGS / "jamba.json", "--profile", "megatron", "--gpu", "400MiB", "--detail", "summary")
    assert found.code == 3
    assert found.out.startswith("DOES NOT FIT: needs at least")
    assert "activations are not modelled" in found.out


def test_where_states_alone_are_too_much_changes_are_tried_and_may_be_enough(document, say, tmp_path):
    """A Mamba of 7 B parameters, of which Megatron-LM has no layers: no change of activations is advised."""
    config = json.loads((CONFIGS / "mamba.json").read_text())
    config |= {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64, "vocab_size": 65024}
    large = tmp_path / "config.json"
    large.write_text(json.dumps(config))
    options = (large, "--profile", "megatron", "--gpu", "a100-80g")
    found = document(*options)
    assert (found["verdict"]["fits"], found["verdict"]["partial"]) == (False, True)
    budget = found["verdict"]["budget_bytes"]
    assert {one["fits"] for one in found["advice"]} <= {None, False}
    assert all((one["total_bytes"] <= budget) == (one["fits"] is None) for one in found["advice"])
    assert "--offload cpu" in [one["options"] for one in found["advice"]]
    assert not any("recompute" in one["options"] or "seq-len" in one["options"] for one in found["advice"])
    out = say("plan", *options).out
    assert "may fit" in out
    assert "  fits" not in out


def test_what_fits_without_its_activations_is_not_said_to_fit(say):
    found = say("plan", CONFIGS / "jamba.json", "--profile", "megatron", "--gpu", "t4", "--detail", "summary")
    assert found.code == 3
    assert found.out.startswith("NOT KNOWN: needs at least")


def test_offloading_says_how_fast_links_must_be(document):
    """ZeRO-Infinity, sec. 4.1: an efficiency of e takes `peak e / (1 - e) / ait` bytes a second."""
    options = ("--dp", "16", "--zero", "3", "--profile", "deepspeed", "--offload", "cpu", "--gpu", "a100-80g")
    found = document(LLAMA, *options)
    (link,) = found["offload"]["links"]
    assert link["what"] == "optimizer states"
    assert link["operations_per_byte"] == 8192 / 4
    assert link["device_bytes_per_second"] == pytest.approx(312e12 * 9 / (8192 / 4))
    assert link["link_bytes_per_second"] == pytest.approx(link["device_bytes_per_second"] / 16)
    host = found["needs"][0]["totals"]["host"]["total_bytes"]
    assert found["offload"]["node_bytes"] == {"host": 8 * host}


def test_offloading_is_shown_to_people(say, tmp_path):
    options = ("--fsdp", "8", "--offload", "cpu", "--gpu", "h100-80g", "--report", tmp_path / "plan.html")
    text = say("plan", LLAMA, *options).out
    page = (tmp_path / "plan.html").read_text()
    for said in ("offloaded to host: 119.7 GiB", "optimizer states move to and from host"):
        assert said in text
        assert said in page


def total(found):
    return found["verdict"]["total_bytes"]


def test_attention_that_is_not_fused_keeps_its_scores(document):
    fused, eager = (document(LLAMA, "--fsdp", "8", "--attention", how) for how in ("flash", "eager"))
    scores = 32 * 32 * 8192**2  # layers, heads, tokens by tokens
    assert total(eager) - total(fused) > 2 * scores


def test_adapters_without_dropout_may_be_said(document, say):
    adapter = (LLAMA, "--fsdp", "8", "--lora-rank", "8")
    plain, none, some = (document(*adapter, *more) for more in ((), ("--lora-dropout", "0"), ("--lora-dropout", "0.1")))
    assert total(plain) == total(none) < total(some)
    assert "'1' is no probability of dropout" in say("plan", *adapter, "--lora-dropout", "1").err


def test_wider_gradients_are_compared_as_such(document):
    usual, wide = (
        document(LLAMA, "--fsdp", "8", *given)["strategies"][0] for given in ((), ("--gradient-dtype", "fp32"))
    )
    assert wide["state_bytes"] * 16 == usual["state_bytes"] * 18


def test_sequence_parallelism_can_be_left_out(document):
    options = (LLAMA, "--tp", "8", "--profile", "megatron")
    assert total(document(*options, "--no-sequence-parallel")) > total(document(*options))


def test_chunks_of_a_stage_are_interleaved(say, document):
    options = (LLAMA, "--pp", "4", "--vp", "2", "--microbatches", "8")
    assert document(*options)["purpose"]["workload"]["schedule"] == "interleaved"
    refused = say("plan", *options, "--schedule", "1f1b")
    assert refused.code == 2
    assert "--vp 2 applies to the interleaved schedule, not to" in refused.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--vp", "2"), "--vp applies to training"),
        (("--attention", "eager"), "--attention applies to training"),
        (("--no-sequence-parallel",), "--no-sequence-parallel applies to training"),
        (("--gradient-dtype", "bf16"), "--gradient-dtype applies to training"),
    ],
)
def test_options_of_training_are_refused_by_their_own_names(say, options, said):
    found = say("plan", LLAMA, "--for", "serve", *options)
    assert found.code == 2
    assert said in found.err


def test_nothing_is_trained_in_codes(say):
    found = say("plan", LLAMA, "--for", "train", "--dtype", "fp8")
    assert found.code == 2
    assert "--dtype fp8 applies to serving" in found.err


def test_a_schedule_is_that_of_a_pipeline(say):
    options = ("--for", "train", "--microbatches", "4", "--detail", "summary")
    assert "tokens a rank, 4 microbatches, adamw" in say("plan", LLAMA, "--fsdp", "2", *options).out
    assert "tokens a rank, 4 microbatches, 1f1b, adamw" in say("plan", LLAMA, "--pp", "2", *options).out


def test_microbatches_are_the_passes_of_a_rank_in_a_plan_a_search_and_a_log(document, say, tmp_path):
    """Of one rank of data parallelism in one step, wherever they are said or left out."""

    def ask(*options):
        return document(LLAMA, "--for", "train", "--gpu", "b200", *options)

    assert ask("--pp", "4")["purpose"]["workload"]["microbatches"] == 4
    assert ask("--pp", "4", "--microbatches", "6")["purpose"]["workload"]["microbatches"] == 6
    assert "a rank, 4 microbatches, 1f1b" in say("plan", LLAMA, "--for", "train", "--pp", "4").out
    for given, passes in (((), None), (("--microbatches", "6"), 6)):
        search = ask("--search", "--gpus", "8", *given)["search"]
        assert search["sequences"] == (None if passes else 8)
        for one in search["ranked"]:
            axes = one["mesh"]["axes"]
            replicas = axes["dp"] * axes["fsdp"]
            assert one["cost"]["microbatches"] == (passes or 8 // replicas)
            assert one["cost"]["tokens"] == one["cost"]["microbatches"] * replicas * 8192
    lines = [
        {"mesh": "pp=4", "peak": 90 << 30},
        {"mesh": "fsdp=8", "peak": 140 << 30, "sequence": 16384, "microbatches": 2},
    ]
    log = tmp_path / "peaks.log"
    log.write_text("\n".join(map(json.dumps, [*lines, {"mesh": "fsdp=8", "sequence": 4096, "peak": 38 << 30}])))
    for given, passes in (((), [4, 2, 1]), (("--microbatches", "6"), [6, 2, 6])):
        found = ask("--pp", "4", "--calibrate", log, *given)["calibration"]["lines"]
        assert [one["microbatches"] for one in found] == passes


def test_a_global_batch_is_the_step_of_every_mesh_on_any_number_of_devices(document, say):
    """Sequences of one optimizer step, which the data-parallel ranks of each mesh share evenly."""

    def ask(*options):
        return document(PUBLIC / "llama-3.1-8b.json", "--for", "train", "--gpu", "b200", *options)

    planned = ask("--pp", "2", "--dp", "4", "--batch", "2", "--global-batch-size", "64")
    assert planned["purpose"]["workload"]["microbatches"] == 64 // 4 // 2
    assert planned["cost"]["tokens"] == 64 * 8192
    for devices in (8, 16):
        found = ask("--search", "--gpus", devices, "--global-batch", 40)
        assert found["search"]["sequences"] == 40
        assert {one["cost"]["tokens"] for one in found["search"]["ranked"]} == {40 * 8192}
        assert found["cost"]["tokens"] == 40 * 8192, "the plan of the best mesh takes the same step"
    assert any("40 sequences cannot be divided" in one["reason"] for one in found["search"]["rejected"])
    for options, reason in (
        (("--global-batch", 8, "--microbatches", 2), "--global-batch and --microbatches both say how long a step is"),
        (("--mesh", "fsdp=8", "--global-batch", 12), "12 sequences cannot be divided into microbatches of 1 for each"),
    ):
        told = say("plan", LLAMA, "--for", "train", *options)
        assert told.code == 2
        assert reason in told.err


def test_what_is_known_of_fewer_devices_is_said(document, say):
    """Where not every number was tried, planning with the most that was refused fits no mesh."""
    options = (PUBLIC / "llama-3.1-405b.json", "--for", "train", "--recompute", "full", "--search", "--gpu", "h100-80g")
    search = document(*options)["search"]
    assert search["devices"] == search["fewest"]["mesh"]["ranks"] > 8
    fewer = search["fewer"]
    assert fewer["least"] <= fewer["refused"] == search["devices"] - 8
    assert not fewer["all_tried"]
    found = document(*options, "--gpus", fewer["refused"])
    assert not found["search"]["ranked"]
    shown = say("plan", *options, "--gpus", fewer["refused"]).out
    assert f"; on {fewer['refused']:,} no mesh does, on fewer than {fewer['least']:,} none can" in shown


def test_the_moments_of_a_step_are_shown(document, say, tmp_path):
    options = (LLAMA, "--for", "train", "--mesh", "fsdp=8", "--microbatches", "1")
    found = document(*options)
    line = found["timeline"]
    assert line["rank"] == found["verdict"]["binding_rank"]
    sizes = {moment["name"]: moment["allocated_bytes"] for moment in line["moments"]}
    assert all(m["allocated_bytes"] == sum(p["part_bytes"] for p in m["parts"]) for m in line["moments"])
    terms = found["needs"][found["ranks"][line["rank"]]["needs"]]["terms"]
    whole = sum(t["term_bytes"] for t in terms if t["category"] != "runtime")
    assert sizes[line["largest"]] == max(sizes.values()) == pytest.approx(whole, abs=len(terms))
    first, *_, last = sizes
    assert (first, last) == ("backward pass of the loss", "optimizer's step")
    shown = say("plan", *options, "--detail", "time", "--report", tmp_path / "plan.html")
    assert all(name in shown.out for name in sizes)
    drawn = {part["category"] for moment in line["moments"] for part in moment["parts"]}
    assert (tmp_path / "plan.html").read_text().count("<polygon") == len({*drawn, "runtime"})
    assert document(LLAMA, "--tp", "2")["timeline"] is None


def test_moments_of_a_first_and_of_a_later_microbatch_have_names_of_their_own(document):
    found = document(LLAMA, "--for", "train", "--mesh", "pp=2", "--microbatches", "2")
    names = [moment["name"] for moment in found["timeline"]["moments"]]
    assert len(names) == len(set(names))


def test_expandable_segments_leave_less_slack(say):
    """torchtitan's scripts set them, transformers' Trainer does not."""
    ask = ("plan", PUBLIC / "llama-3.1-8b.json", "--for", "train", "--fsdp", 8, "--json")
    slack = {}
    for options in ((), ("--allocator", "native"), ("--allocator", "expandable"), ("--profile", "hf")):
        terms = json.loads(say(*ask, *options).out)["needs"][0]["terms"]
        slack[options] = next(t["inputs"]["slack"] for t in terms if t["name"] == "allocator slack")
    assert list(slack.values()) == [1, 5, 1, 5]


def test_devices_without_a_mesh_get_the_best_mesh(say, document):
    """`--gpus 8` answered for one device, which those who have eight would not guess; serving was an error."""
    for use in ("train", "serve"):
        options = (LLAMA, "--for", use, "--gpu", "h100-80g")
        chosen = document(*options, "--gpus", "8")
        assert chosen["mesh"]["ranks"] == 8
        assert chosen == document(*options, "--gpus", "8", "--search") == document(*options[:-1], "8xh100-80g")
        assert chosen["search"]["ranked"][0]["mesh"] == chosen["mesh"]
        assert document(*options, "--gpus", "8", "--tp", "8")["search"] is None
    lines = say("plan", LLAMA, "--gpu", "2xh100").out.splitlines()
    assert " on the fullest of 2 H100-80GB, " in lines[0]
    assert lines[1].startswith("3 meshes of 2 devices, by device-seconds per token")


def test_meshes_whose_upper_bound_fits_are_ranked_first(document):
    fixed = ("--recompute", "none", "--zero", "0", "--vp", "1")
    found = document(LLAMA, "--for", "train", "--gpu", "8xh100-80g", "--seq-len", "8k", *fixed)
    assert not any(one["settings"] for one in found["search"]["ranked"])
    assert found["verdict"]["certain"]
    costs = [one["cost"]["device_seconds_per_token"] for one in found["search"]["ranked"]]
    assert costs != sorted(costs), "a cheaper mesh may not fit at its upper bound, and comes later"


@pytest.mark.parametrize(
    ("alias", "option"),
    [
        (("--users", "3"), ("--batch", "3")),
        (("--max-num-seqs", "64"), ("--max-seqs", "64")),
        (("--max-model-len", "32k"), ("--seq-len", "32000")),
        (("--max_model_len=32K",), ("--seq-len", "32768")),
        (("--gpu-memory-utilization", "0.8"), ("--utilization", "0.8")),
        (("--tensor-parallel-size", "2"), ("--tp", "2")),
        (("--kv-cache-dtype", "fp8"), ("--kv-dtype", "fp8")),
        (("--for", "train", "--gradient-checkpointing"), ("--for", "train", "--recompute", "full")),
        (("--tp", "2", "--towers", "whole"), ("--tp", "2", "--encoder-tp", "replicate")),
        (("--tp", "4", "--dcp", "1"), ("--tp", "4", "--decode-cp", "1")),
        (("--gpu", "80gb"), ("--gpu", "80GB")),
        (("--memory", "2gib"), ("--memory", "2GiB")),
    ],
)
def test_words_of_engines_and_former_names_mean_the_same(document, alias, option):
    assert document(LLAMA, *alias) == document(LLAMA, *option)


def test_mtp_layers_are_counted_where_they_are_trained(say, tmp_path):
    """Megatron-LM's MultiTokenPredictionLayer: a layer, eh_proj of 2 h by h, three norms; one more head and loss."""
    config = json.loads((PUBLIC / "deepseek-v3.json").read_text())
    config |= {"num_hidden_layers": 4, "first_k_dense_replace": 1, "quantization_config": None, "n_routed_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def plan(*options):
        said = say("plan", tmp_path / "config.json", "--for", "train", "--seq-len", 4096, *options, "--json")
        return json.loads(said.out)

    megatron = ("--profile", "megatron")
    found = {n: plan(*megatron, "--mtp-layers", n) for n in (0, 1, 2)}
    hidden = config["hidden_size"]
    with_one_more = config | {"num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(with_one_more))
    layer = plan(*megatron, "--mtp-layers", 0)["parameters"] - found[0]["parameters"]
    added = found[1]["parameters"] - found[0]["parameters"]
    assert added == layer + 2 * hidden * hidden + 3 * hidden
    assert found[2]["parameters"] - found[1]["parameters"] == added
    kept = [
        sum(t["term_bytes"] for t in found[n]["needs"][0]["terms"] if "multi-token" in t["name"]) for n in (0, 1, 2)
    ]
    assert kept[0] == 0 < kept[1] == kept[2] // 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(*megatron)["parameters"] == found[1]["parameters"]  # Megatron-LM trains those of the config
    assert plan("--profile", "hf")["parameters"] == found[0]["parameters"]  # transformers has no such layers
    refused = say("plan", PUBLIC / "llama-3.1-8b.json", "--for", "train", "--mtp-layers", 1)
    assert refused.code == 2
    assert "--mtp-layers 1" in refused.err
