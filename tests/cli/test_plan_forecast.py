"""What `plan` forecasts: its JSON is what its schema says, its page stands alone, and its exit code is its answer."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.hardware.devices import get_device
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions
from shardctl.report.planning import render_plan
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.plan import plan

ROOT = Path(__file__).parents[2]
PUBLIC = ROOT / "fixtures" / "configs_public"
SCHEMA = json.loads((ROOT / "shardctl" / "report" / "plan_schema.json").read_text())
CONFIGS = sorted(PUBLIC.glob("*.json")) + sorted((ROOT / "fixtures" / "configs").glob("*.json"))
LLAMA = PUBLIC / "llama-3.1-8b.json"


def checked(text: str) -> dict:
    document = json.loads(text)
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)
    return document


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_architecture_gives_a_document_that_the_schema_describes(say, config):
    found = say("plan", config, "--json")
    document = checked(found.out)
    assert found.code == 0
    terms = document["needs"][document["ranks"][0]["needs"]]["terms"]
    assert sum(t["term_bytes"] for t in terms if t["category"] == "weights") == document["weight_bytes"]
    assert document["purpose"]["use"] == "serve"


@pytest.mark.parametrize(
    "options",
    [
        ("--tp", "8", "--gpu", "h100-80g"),
        ("--tp", "2", "--pp", "4", "--kv-dtype", "fp8", "--batch", "64", "--gpu", "24GiB"),
        ("--fsdp", "8", "--recompute", "full", "--gpu", "a100-80g"),
        ("--mesh", "pp=2,dp=2,tp=4", "--zero", "1", "--profile", "megatron", "--microbatches", "8"),
        ("--dp", "4", "--zero", "3", "--profile", "deepspeed", "--offload", "cpu"),
        ("--tp", "2", "--search", "--gpus", "8", "--gpu", "h100-80g"),
    ],
    ids=" ".join,
)
def test_every_kind_of_answer_is_what_the_schema_describes(say, options):
    found = say("plan", LLAMA, *options, "--json")
    document = checked(found.out)
    assert found.code == document["exit_code"]
    assert document["status"] == ("no" if found.code == 3 else "ok")


def test_failures_are_what_the_schema_describes(say):
    found = say("plan", LLAMA, "--tp", "5", "--json")
    assert checked(found.out)["exit_code"] == found.code == 2


def test_the_schema_refuses_what_it_does_not_describe(say):
    document = json.loads(say("plan", LLAMA, "--json").out)
    document["ranks"][0]["weight_bytes"] = -1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("degree", "options", "reason", "hint"),
    [
        (8, (), "28 attention heads", "use --tp 1, 2, 4 or 28"),
        (7, ("--kv-heads", "error"), "4 key/value heads", "use --tp 1, 2 or 4"),
        (
            28,
            ("--kv-heads", "error"),
            "4 key/value heads",
            "use --tp 1, 2 or 4, or --kv-heads replicate to keep each head on several ranks",
        ),
        (7, (), "4 key/value heads", "use --tp 1, 2, 4 or 28"),
    ],
)
def test_the_degrees_that_are_offered_work_for_every_tensor(say, tmp_path, degree, options, reason, hint):
    """Qwen2.5-7B has 28 heads, and 4 of keys and values: 7 and 14 ranks could share the first only."""
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "intermediate_size": 18944 * 7}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(LLAMA.read_text()) | heads))
    found = say("plan", tmp_path / "config.json", "--tp", str(degree), *options)
    assert found.code == 2
    assert f"over tp={degree}: {reason}\nhint:  {hint}\n" in found.err


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--for", "train"), 2), (("--kv-heads", "error"), 2)])
def test_serving_replicates_key_value_heads_as_engines_do_and_says_so(say, tmp_path, options, code):
    (tmp_path / "config.json").write_text((PUBLIC / "qwen3-30b-a3b.json").read_text())
    found = say("plan", tmp_path / "config.json", "--tp", "8", *options)
    assert found.code == code
    said = "4 key/value heads are fewer than 8 tp ranks, so 2 ranks hold each one, as in engines\n"
    assert (said in found.err) == (code == 0)
    if code == 0:
        ranks = json.loads(say("plan", tmp_path / "config.json", "--tp", "8", "--json").out)["ranks"]
        by_hand = json.loads(say("plan", tmp_path / "config.json", "--tp", 8, "--kv-heads=replicate", "--json").out)
        assert ranks == by_hand["ranks"]
        assert "as in engines" not in "".join(by_hand["warnings"])


def test_a_search_for_serving_ranks_meshes_with_replicated_heads(say):
    found = say("plan", PUBLIC / "qwen3-30b-a3b.json", "--search", "--gpus", "8", "--gpu", "h100-80g", "--json")
    assert any(one["mesh"]["axes"]["tp"] == 8 for one in checked(found.out)["search"]["ranked"])


def test_it_is_refused_when_it_does_not_fit(say):
    large = say("plan", PUBLIC / "llama-3.1-70b.json", "--gpu", "a10g", "--json")
    assert large.code == 3
    verdict = checked(large.out)["verdict"]
    assert verdict["fits"] is False
    assert verdict["total_bytes"] > verdict["budget_bytes"]
    assert say("plan", LLAMA, "--gpu", "h100-80g").code == 0


NEED = "needs 17.8 GiB (16.9 GiB to 20.1 GiB)"
"""What Llama-3.1-8B needs for 8,192 tokens; the interval decides which answer a limit gets."""


@pytest.mark.parametrize(
    ("options", "code", "answer"),
    [
        (("--gpu", "24GiB"), 0, f"FITS: {NEED} of 24.0 GiB on one device, for 1 sequence of 8,192 tokens"),
        (("--gpu", "19GiB"), 0, f"FITS, BUT TIGHT: {NEED} of 19.0 GiB on one device, for 1 sequence of 8,192 tokens"),
        (("--gpu", "19GiB", "--strict"), 3, f"FITS, BUT TIGHT: {NEED} of 19.0 GiB on one device"),
        (("--gpu", "17GiB"), 3, f"DOES NOT FIT, THOUGH CLOSE: {NEED} of 17.0 GiB on one device"),
        (("--gpu", "16GiB"), 3, f"DOES NOT FIT: {NEED} of 16.0 GiB on one device"),
        ((), 0, "NEEDS 17.8 GiB (16.9 GiB to 20.1 GiB) on one device, for 1 sequence of 8,192 tokens"),
        (("--tp", "2"), 0, "NEEDS 9.77 GiB"),
        (
            ("--search", "--gpus", "2", "--gpu", "1GiB"),
            3,
            "DOES NOT FIT: no mesh of 2 devices fits; tp2 needs 9.77",
        ),
        (("--for", "train", "--fsdp", "8", "--gpu", "h200"), 0, "FITS: needs "),
    ],
)
def test_the_first_line_is_the_answer_and_the_exit_code_repeats_it(say, options, code, answer):
    found = say("plan", LLAMA, *options)
    assert found.code == code
    first = found.out.splitlines()[0]
    assert first.startswith(answer)
    assert say("plan", LLAMA, *options, "--detail", "rank").out.splitlines()[0] == first
    document = checked(say("plan", LLAMA, *options, "--json").out)
    assert (document["exit_code"], document["verdict"]["text"]) == (code, first)
    assert first.startswith(document["verdict"]["answer"])


def test_the_first_line_names_the_devices_and_a_rank_of_training(say):
    lines = say("plan", LLAMA, "--for", "train", "--fsdp", "8", "--gpu", "h100-80g").out.splitlines()
    assert lines[0].endswith(" GiB on the fullest of 8 H100-80GB, for 1 sequence of 8,192 tokens a rank")
    assert not any("ZeRO-3" in line for line in lines)
    zero = say("plan", LLAMA, "--for", "train", "--fsdp", "8", "--gpu", "h100-80g", "--detail", "zero").out
    assert "  ZeRO-3 " in zero


@pytest.mark.parametrize(
    ("limit", "style", "look"), [("24GiB", 32, "yes"), ("19GiB", 33, "tight"), ("16GiB", 31, "no")]
)
def test_the_colour_is_that_of_the_answer(say, monkeypatch, tmp_path, limit, style, look):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert say("plan", LLAMA, "--gpu", limit).out.startswith(f"\x1b[1;{style}m")
    say("plan", LLAMA, "--gpu", limit, "--report", tmp_path / "plan.html")
    assert f'<p class="{look}">' in (tmp_path / "plan.html").read_text()


def test_a_search_prints_its_table_before_the_plan_of_the_best_mesh(say):
    lines = say("plan", LLAMA, "--search", "--gpus", "2", "--gpu", "h100-80g").out.splitlines()
    assert lines[0].startswith("FITS: ")
    assert lines[1].endswith("by device-seconds per token on H100-80GB (modelled)")
    assert next(n for n, line in enumerate(lines) if line.startswith("llama-3.1-8b.json ")) > lines.index(
        next(line for line in lines if line.startswith("  tp2 "))
    )


def test_a_conversion_that_host_memory_cannot_hold_is_the_answer(say, tmp_path):
    save_file({"w": np.zeros((1024, 1024), np.float32)}, tmp_path / "model.safetensors")
    found = say("plan", tmp_path, "--memory", "1MiB")
    assert found.code == 3
    assert found.out.startswith("NO ROOM TO CONVERT: reshard needs ")


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        # A window keeps no more however long a sequence is.
        ("configs/mistral", (), "room for 1,391,530 sequences of 64 tokens, or 1 sequence of any length\n"),
        ("configs/bert", (), None),
        ("configs_public/llama-3.1-8b", ("--seq-len", "200000"), "room for 1 sequence of 58,592 tokens\n"),
        ("configs_public/llama-3.1-8b", ("--batch", "1000000"), "room for 7 sequences of 8,192 tokens\n"),
        (
            "configs_public/gpt-3-175b",
            ("--tp", "32"),
            "room for 41 sequences of 2,048 tokens, or 1 sequence of 85,584 tokens (the model was made for 2,048)\n",
        ),
    ],
)
def test_what_there_is_room_for_is_said_whatever_limits_it(say, config, options, expected):
    out = say("plan", PUBLIC.parent / f"{config}.json", "--gpu", "24GiB", "--detail", "summary", *options).out
    assert (expected in out) if expected else ("room" not in out)
    assert ("serve: 1 sequence of 200,000 tokens (the model was made for 131,072)\n" in out) == ("200000" in options)


def test_a_server_starts_if_one_request_fits_and_holds_as_many_as_are_solved_for(say):
    options = ("plan", LLAMA, "--for", "vllm", "--gpu", "h100", "--seq-len", "32k")
    found = say(*options, "--users", "50")
    assert found.code == 3
    document = checked(say(*options, "--users", "50", "--json").out)
    most = document["purpose"]["largest_batch"]
    starts = "vllm starts: one request of 32,000 tokens fits, and it holds"
    assert f"{starts} {most} at once, fewer than the 50 of --users\n" in found.out
    assert f"--batch {most} " in found.out, "the advice is what was solved, and not a half"
    assert document["purpose"]["longest_context"] in {
        int(one["options"].split()[1]) for one in document["advice"] if one["options"].startswith("--seq-len")
    }
    assert say(*options, "--users", most).code == 0
    assert f"{starts} {most} at once\n" in say(*options).out
    small = say("plan", LLAMA, "--for", "vllm", "--gpu", "16GiB")
    assert small.code == 3
    assert "vllm does not start: one request of 8,192 tokens has no room\n" in small.out


def test_weights_that_are_too_many_by_themselves_do_not_fit(say, tmp_path):
    """Without a config nobody knows what else is needed, but that they are too much is known."""
    save_file({"w": np.zeros((1024, 1024), np.float32)}, tmp_path / "model.safetensors")
    found = say("plan", tmp_path, "--gpu", "3MiB")
    assert found.code == 3
    assert found.out.startswith(
        "DOES NOT FIT: needs at least 4.0 MiB (exact) of 3.0 MiB on one device for the weights\n"
    )
    unknown = say("plan", tmp_path, "--gpu", "5MiB")
    assert unknown.code == 3
    needs = "needs at least 4.0 MiB (exact) of 5.0 MiB on one device for the weights"
    why = "memory besides weights is not modelled: there is no config.json"
    assert unknown.out.splitlines()[0] == f"NOT KNOWN: {needs}, but {why}"
    verdict = checked(say("plan", tmp_path, "--gpu", "5MiB", "--json").out)["verdict"]
    assert (verdict["fits"], verdict["certain"], verdict["partial"]) == (None, False, True)


def test_the_fewest_devices_for_each_type_stand_with_their_mesh(say):
    found = say("plan", LLAMA, "--gpu", "24GiB", "--seq-len", "131072", "--batch", "16")
    assert "by type: bf16 needs 16 devices (pp2 x tp8); " in found.out
    types = checked(say("plan", LLAMA, "--gpu", "24GiB", "--seq-len", "131072", "--batch", "16", "--json").out)["types"]
    assert [one["mesh"]["ranks"] for one in types] == [one["devices"] for one in types]
    nothing = say("plan", LLAMA, "--gpu", "0.1GiB").out
    assert "in none of bf16, fp8, int4 is any number of devices enough that was tried\n" in nothing


@pytest.mark.parametrize(
    ("config", "options", "message", "hint"),
    [
        (
            "llama-3.1-8b",
            ("--gpus", "8"),
            "--gpus 8 applies to --search, but the mesh has 1 rank",
            "add --search, or divide",
        ),
        ("bert-base", ("--kv-dtype", "fp8"), "--kv-dtype needs a model that generates", "leave it out"),
        ("bert-base", ("--max-seqs", "64"), "--max-seqs needs a model that generates", "leave it out"),
        ("llama-3.1-8b", ("--encoder-len", "64"), "--encoder-len needs a model with an encoder", "leave it out"),
        ("llama-3.1-8b", ("--pp", "2", "--stages", "3,4"), "2 stages with 7 layers", "2 numbers that add up to 32"),
        ("llama-3.1-8b", ("--pp", "33"), "pp=33 needs at least 33 layers", "use --pp 32 or fewer"),
    ],
)
def test_options_that_would_change_nothing_are_refused(say, config, options, message, hint):
    found = say("plan", PUBLIC / f"{config}.json", *options)
    assert found.code == 2
    error, advice = found.err.splitlines()[-2:]
    assert message in error
    assert hint in advice


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "mesh", [Mesh.of(tp=12, pp=2), Mesh.of(tp=4), Mesh.of(pp=3, tp=4), Mesh.of(dp=16, tp=4)], ids=str
)
def test_bars_and_pictures_keep_to_a_narrow_terminal(columns, mesh):
    """The vocabulary of BERT leaves some ranks a row more, so that there is a picture."""
    planned = plan(
        PUBLIC / "bert-base.json", ReshardOptions(mesh=mesh), plan_options=PlanOptions(device=get_device("h100"))
    )
    console = Console(width=1000, file=StringIO())
    console.print(render_plan(planned, "stage", columns))
    lines = [text.rstrip() for text in console.file.getvalue().splitlines()]
    drawn = [text for text in lines if text.startswith("  ") and ("[" in text or "rank" in text)]
    assert max(map(len, drawn)) <= columns
    cells = [cell for text in drawn if "[" in text for cell in text.split("[")[1:]]
    assert [int(cell[:3]) for cell in cells] == list(range(mesh.world))


def test_a_device_may_have_a_number_for_a_name(say):
    assert " on one RTX 4090, for " in say("plan", LLAMA, "--gpu", "4090").out
    assert "device '80' has no unit" in say("plan", LLAMA, "--gpu", "80").err


def test_a_page_takes_no_file_of_another_kind(say, tmp_path):
    (tmp_path / "config.json").write_bytes(LLAMA.read_bytes())
    found = say("plan", tmp_path, "--report", tmp_path / "config.json")
    assert found.code == 2
    assert "--report writes HTML" in found.err
    assert (tmp_path / "config.json").read_bytes() == LLAMA.read_bytes()


def test_a_config_without_dtype_leaves_the_cache_in_the_type_of_the_weights(say, tmp_path):
    """gpt-oss names none, and its checkpoint has bf16."""
    config = {
        k: v for k, v in json.loads((ROOT / "fixtures/configs/llama.json").read_text()).items() if "dtype" not in k
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path, SourceOptions(described=True)) as described:
        tensors = {t.name: np.zeros(t.shape, ml_dtypes.bfloat16) for t in described.manifest.tensors.values()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = checked(say("plan", tmp_path, "--json").out)
    terms = {term["name"]: term for term in found["needs"][0]["terms"]}
    assert terms["keys and values"]["inputs"]["bytes"] == 2


def test_a_device_that_is_a_size_is_named_once(say):
    out = say("plan", LLAMA, "--gpu", "0.1GiB", "--detail", "summary").out
    assert " of 0.10 GiB on one device, for " in out.splitlines()[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--encoder-len", "64"], "--encoder-len needs a model with an encoder and a decoder"),
        (["--batch", "8", "--max-seqs", "4"], "--batch 8 is more than --max-seqs 4"),
        (["--for", "train", "--batched-tokens", "4"], "--batched-tokens applies to serving"),
        (["--mesh", ""], "--mesh has an empty value"),
        (["--mesh", "pp=2", "--stages", "0,2"], "--stages 0,2 leaves a stage without layers"),
    ],
)
def test_options_that_make_no_sense_are_refused(say, options, message):
    code, out, err = say("plan", LLAMA, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_what_an_engine_is_started_with_is_part_of_the_plan(say):
    t5 = ROOT / "fixtures" / "configs" / "t5.json"
    options = ("--encoder-len", "256", "--batched-tokens", "512", "--max-seqs", "32", "--batch", "2")
    work = checked(say("plan", t5, *options, "--json").out)["purpose"]["workload"]
    assert (work["source"], work["batched_tokens"], work["rows"], work["batch"]) == (256, 512, 32, 2)
    assert "2 sequences of 8,192 tokens and 256 of the encoder" in say("plan", t5, *options).out


def test_a_cast_is_advised_before_quantizing(say):
    """T5 is stored in fp32."""
    advised = checked(say("plan", PUBLIC / "t5-11b.json", "--gpu", "a100-40g", "--json").out)["advice"]
    assert "--dtype bf16" in [one["options"] for one in advised if one["fits"]]
    advised = checked(say("plan", PUBLIC / "llama-3.1-70b.json", "--gpu", "h100-80g", "--json").out)["advice"]
    assert "--dtype bf16" not in [one["options"] for one in advised]


class _Page(HTMLParser):
    """Collects what a page refers to, and whether its elements are closed."""

    VOID = frozenset({"meta", "br", "i"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.links += [value for name, value in attrs if name in {"src", "href", "data", "action"}]
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone(say, tmp_path):
    page = tmp_path / "plan.html"
    options = ("--mesh", "pp=2,fsdp=2,tp=2", "--gpu", "h100-80g", "--search", "--report", page)
    assert say("plan", LLAMA, *options).code == 0
    text = page.read_text()
    parser = _Page()
    parser.feed(text)
    assert parser.open == []
    assert parser.links == []
    assert "script" not in parser.seen
    assert "link" not in parser.seen
    assert "url(" not in text
    assert "@import" not in text
    assert "The mesh: pp2 x fsdp2 x tp2" in text
    for formula in ("stage 0", "stage 1", "weights"):
        assert formula in text


def test_a_path_cannot_inject_markup_into_the_page(say, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    (folder / "config.json").write_bytes(LLAMA.read_bytes())
    page = tmp_path / "plan.html"
    assert say("plan", folder, "--report", page).code == 0
    assert "<img" not in page.read_text()


def test_a_search_shows_what_is_impossible_and_what_comes_closest(say, monkeypatch):
    """There may be hundreds of either: a person reads a few of each."""
    monkeypatch.setenv("COLUMNS", "200")
    options = ("--for", "train", "--search", "--gpus", "32", "--gpu", "24GiB", "--detail", "summary")
    said = say("plan", PUBLIC / "mixtral-8x7b.json", *options).out
    lines = said[said.index("not possible, or too large") :].splitlines()[1:7]
    assert [("would leave the node" in line or "cannot split" in line) for line in lines] == [True] * 3 + [False] * 3
    assert "more than there are" in lines[3]  # all that the closest needs is known
    assert all("of 24.0 GiB on some rank" in line for line in lines[4:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "nosuch"), "unknown layout 'nosuch'"),
        (("--to", "hf", "--tp", "2"), "layout hf has no ranks"),
        (("--to", "meta", "--max-shard-size", "1GB"), "--to meta does not use --max-shard-size"),
    ],
)
def test_a_config_alone_takes_no_options_that_a_checkpoint_does_not(say, options, said):
    refused = say("plan", LLAMA, *options)
    assert refused.code == 2
    assert said in refused.err


def term_bytes(say, *options):
    """The bytes of the key/value cache that a plan of serving states, and the weights of its first rank."""
    found = say("plan", PUBLIC / "qwen3-30b-a3b.json", "--tp", "8", "--seq-len", "4096", *options, "--json")
    assert found.code == 0, found.err
    document = checked(found.out)
    terms = document["needs"][0]["terms"]
    return next(t["term_bytes"] for t in terms if t["name"] == "keys and values"), document["ranks"][0]["weight_bytes"]


def test_a_cache_in_nvfp4_has_half_a_byte_and_a_scale_for_each_sixteen(say):
    """`nvfp4_kv_cache_full_dim` of vLLM: a head of n elements has n // 2 + n // 16 bytes."""
    (wide, _), (narrow, _) = term_bytes(say), term_bytes(say, "--kv-dtype", "nvfp4")
    assert (wide, narrow) == (48 * 4096 * 2 * 128 * 2, 48 * 4096 * 2 * (128 // 2 + 128 // 16))
    refused = say("plan", PUBLIC / "deepseek-v3.json", "--tp", "8", "--kv-dtype", "nvfp4")
    assert refused.code == 2
    assert "caches latents" in refused.err


def test_decode_context_parallelism_divides_the_cache_and_not_the_weights(say):
    (whole, weights), (half, same) = term_bytes(say), term_bytes(say, "--dcp", "2")
    assert (half * 2, same) == (whole, weights)
    for more in (("--dcp", "4"), ("--tp", "4", "--dcp", "2")):
        assert say("plan", PUBLIC / "qwen3-30b-a3b.json", "--tp", "8", *more).code == 2


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088,
    "sliding_window": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "attention_bias": True,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("server", "device", "changed", "measured"),
    [
        # vllm-project/vllm issue 23278: "Model loading took 65.9651 GiB", with Marlin.
        pytest.param("vllm@0.10.1", "h100-80g", {}, 65.9651, id="Marlin"),
        # vllm-project/vllm issue 33155: 64.38 GiB with Triton, which keeps the scales that it loads.
        pytest.param("vllm@0.14.1", "h100-80g", {}, 64.38, id="Triton"),
        # myoceane.fr, ai-vllm-a100-gemma-4: 13.72 GiB.
        pytest.param(
            "vllm@0.19.0", "a100-80g",
            {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": GPT_OSS["layer_types"][:24]},
            13.72, id="20b on an A100",
        ),
    ],
)  # fmt: skip
def test_mxfp4_experts_take_what_vllm_logs(say, tmp_path, server, device, changed, measured):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS | changed))
    said = json.loads(say("plan", tmp_path / "config.json", "--for", server, "--gpu", device, "--json").out)
    weights = sum(t["term_bytes"] for t in said["needs"][0]["terms"] if t["category"] == "weights")
    assert weights / (1 << 30) == pytest.approx(measured, rel=0.002 if not changed else 0.01)


def test_gpt_oss_120b_does_not_fit_where_vllm_refused_to_start(say, tmp_path):
    """vllm-project/vllm issues 23278 and 27508: -2.14 GiB for the cache, and 1.71 where one request needs more."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    start = ("plan", tmp_path / "config.json", "--gpu", "h100-80g", "--seq-len", 131072, "--detail", "summary")
    for server, options in (
        ("vllm@0.10.1", ("--utilization", "0.9")),
        ("vllm@0.11.0", ("--utilization", "0.95", "--batched-tokens", 1024)),
    ):
        said = say(*start, "--for", server, *options)
        assert "DOES NOT FIT" in said.out
        assert said.code == 3
    assert say(*start, "--for", "vllm@0.32", "--utilization", "0.95", "--batched-tokens", 1024).code == 0


def test_a_kernel_that_is_not_known_widens_the_interval(say, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    found = {}
    for server, device in (("vllm@0.32", "h100-80g"), ("vllm", "h100-80g"), ("vllm@0.32", "80GB")):
        said = json.loads(say("plan", tmp_path / "config.json", "--for", server, "--gpu", device, "--json").out)
        found[server, device] = next(t for t in said["needs"][0]["terms"] if t["name"] == "padding of MXFP4 kernels")
    assert found["vllm@0.32", "h100-80g"]["exact"]
    for key in (("vllm", "h100-80g"), ("vllm@0.32", "80GB")):
        assert found[key]["low_bytes"] < found[key]["term_bytes"] <= found[key]["high_bytes"], key


@pytest.mark.parametrize(
    ("server", "device", "rows", "batched", "utilization"),
    [
        ("vllm@0.8", "a100-80g", 1024, 8192, 0.9),
        ("vllm@0.10", "a100-80g", 256, 2048, 0.9),
        ("vllm@0.19", "h100-80g", 1024, 8192, 0.9),
        ("vllm@0.32", "l40s", 256, 2048, 0.92),
        ("vllm@0.32", "b200", 1024, 16384, 0.92),
        ("vllm@0.33", "h200", 1024, 8192, 0.92),
        ("vllm", "h200", 1024, 8192, 0.92),
    ],
)
def test_defaults_are_those_of_the_version_and_the_device(say, server, device, rows, batched, utilization):
    """vLLM's get_batch_defaults, and `gpu_memory_utilization` of its CacheConfig."""
    config = PUBLIC / "llama-3.1-8b.json"
    work = json.loads(say("plan", config, "--for", server, "--gpu", device, "--json").out)["purpose"]["workload"]
    assert (work["rows"], work["batched_tokens"]) == (rows, batched)
    assert work["budget"]["utilization"] == utilization


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ("", "vllm starts by the estimate, though not for certain: one request of 131,072 tokens fits"),
        ("@0.10.1", "vllm does not start by the estimate, though it may: one request of 131,072 tokens has no room"),
        ("@0.32", "vllm starts: one request of 131,072 tokens fits"),
    ],
)
def test_whether_a_server_starts_is_certain_only_where_the_interval_is(say, version, answer):
    """The weights of gpt-oss depend on the kernel that a version chooses for MXFP4, and no version names none."""
    config = PUBLIC.parent / "configs_quantized/gpt-oss-120b_config.json"
    options = ("--utilization", "0.95", "--batched-tokens", "1024", "--max-seqs", "1024", "--seq-len", "131072")
    found = say("plan", config, "--for", f"vllm{version}", "--gpu", "h100-80g", *options)
    assert answer in found.out
    assert found.code == (3 if "not start" in answer else 0)


def test_a_config_cannot_be_quantized_and_says_how_it_is_planned(say):
    """The option was ignored: fp8 needed as much as bf16."""
    config = Path(__file__).parents[2] / "fixtures/configs_public/llama-3.1-8b.json"
    for asked, dtype in (("fp8-channel", "fp8"), ("int4", "int4")):
        found = say("plan", config, "--quantize", asked)
        assert found.code == 2
        assert found.err == (
            f"error: --quantize converts weights, and {config} is a config without weights\n"
            f"hint:  --dtype {dtype} plans the model as if it were quantized\n"
        )


@pytest.mark.parametrize(("version", "rules"), [("0.34", "0.33"), ("0.7", "0.8"), ("0.32", ""), ("", "")])
def test_a_version_that_was_not_read_is_counted_as_its_neighbour_and_said(say, version, rules):
    server = f"vllm@{version}" if version else "vllm"
    found = json.loads(say("plan", PUBLIC / "llama-3.1-8b.json", "--for", server, "--gpu", "h100-80g", "--json").out)
    note = f"vllm {version} was not read: its memory is counted by the rules of {rules}"
    assert (note in found["warnings"]) is bool(rules)
