import contextlib
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from cli_checkpoints import llama

from shardctl.conversion import conversion_plan
from shardctl.conversion.engine import budget
from shardctl.options.sizes import parse_size

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("tied") / "tied", "llama-tied-biased")


def integers(document, path=""):
    """Every integer of a document, with its key."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from integers(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from integers(value, path)
    elif isinstance(document, int) and not isinstance(document, bool):
        yield path, document


def test_inspect_tells_a_checkpoint_in_a_few_lines(say, source):
    assert say("inspect", source) == (
        0,
        (
            "Llama, 21.66 K parameters, fp32, safetensors in 1 file, complete\n"
            f"{source}\n"
            "  format   safetensors, 1 file, 88.8 kB\n"
            "  model    LlamaForCausalLM (llama)\n"
            "  weights  21.66 K parameters in 21 tensors, 86.7 kB (84.6 KiB)\n"
            "  dtypes   F32: 21 tensors, 21.66 K parameters, 86.7 kB\n"
            "  carried  config.json, tokenizer.json\n"
        ),
        "",
    )


def test_inspect_names_ties_and_lists_tensors_and_rules_on_request(say, tied):
    out = say("inspect", tied, "--tensors", "--show-rules").out
    assert "  ties     lm_head.weight = model.embed_tokens.weight\n" in out
    assert "F32    [96, 32]    12.3 kB  model.embed_tokens.weight = lm_head.weight\n" in out
    assert "\n      2  layer       model.layers.*.self_attn.o_proj.weight          hidden/fsdp q/tp\n" in out


def test_inspect_says_in_its_first_line_what_it_is_and_whether_it_is_complete(say, source, tmp_path):
    assert say("inspect", FIXTURES / "configs_public/llama-3.1-8b.json").out.splitlines()[0] == (
        "Llama, 8.03 B parameters, bf16, a config without weights"
    )
    assert say("inspect", FIXTURES / "peft/lora/adapter").out.startswith("LoRA adapter, 3.71 K parameters, fp32, ")
    part = tmp_path / "part"
    assert say("reshard", source, part, "--include", "model.layers", "--to", "hf").code == 0
    first = "Llama, 15.49 K parameters, fp32, safetensors in 1 file, NOT COMPLETE"
    assert say("inspect", part).out.splitlines()[0] == first
    assert json.loads(say("inspect", part, "--json").out)["verdict"] == first
    cut = tmp_path / "cut"
    assert say("reshard", source, cut, "--tp", 2, "--pp", 2).code == 0
    out = say("inspect", cut).out
    assert out.startswith("Llama, 21.66 K parameters, fp32, safetensors in 4 files, sharded for pp2 x tp2, complete\n")
    assert "  stages   2 stages: layers 0 | 1\n" in out


def test_inspect_says_when_the_model_is_not_known(say, source, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert say("inspect", tmp_path).out.splitlines()[0].endswith(", not known whether complete")
    assert "  model    unknown: there is no config.json\n" in say("inspect", tmp_path).out
    assert "LlamaForCausalLM" in say("inspect", tmp_path, "--config", source).out


def test_inspect_says_what_a_checkpoint_of_an_engine_lacks(say):
    megatron, deepseek = FIXTURES / "megatron" / "llama-tp2-pp2", FIXTURES / "deepseek_mp" / "bf16" / "mp2"
    assert "  model    unknown: no file says how many tokens the vocabulary has (--true" in say("inspect", megatron).out
    assert "  model    LlamaForCausalLM" in say("inspect", megatron, "--true-vocab", "101").out
    assert "  model    unknown: there is no config.json (--config PATH); counted are" in say("inspect", deepseek).out


def test_inspect_as_json(say, tied):
    document = json.loads(say("inspect", tied, "--json").out)
    assert list(document) == [
        *(
            "schema",
            "status",
            "exit_code",
            "path",
            "verdict",
            "format",
            "layout",
            "family",
            "architecture",
            "why_no_model",
        ),
        *("mesh", "stages", "parameters", "tensor_bytes", "file_bytes", "files", "dtypes", "ties", "carried"),
        *("dropped", "extra_tensors", "digest", "warnings"),
    ]
    assert document["schema"] == "shardctl.inspect/1"
    assert document["ties"] == {"model.embed_tokens.weight": ["lm_head.weight"]}
    longer = json.loads(say("inspect", tied, "--json", "--tensors", "--show-rules").out)
    assert set(longer) - set(document) == {"tensors", "rules", "derivation"}
    assert set(longer["tensors"][0]) == {
        *("name", "dtype", "shape", "tensor_bytes", "ties", "stored", "chunks", "files")
    }
    assert sum(tensor["tensor_bytes"] for tensor in longer["tensors"]) == document["tensor_bytes"]


def test_names_from_a_file_cannot_steer_the_terminal(say, tmp_path):
    header = json.dumps({"a\x1b[2Jb": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    found = say("inspect", tmp_path, "--tensors")
    assert found.code == 0
    assert "a\\x1b[2Jb" in found.out
    assert "\x1b" not in found.out


def test_plan_for_a_mesh(say, source):
    found = say("plan", source, "--tp", 2, "--pp", 2, "--dp", 2, "--detail", "rank")
    assert (found.code, found.err) == (0, "")
    lines = found.out.splitlines()
    cost = lines.pop()
    assert re.fullmatch(
        r"NEEDS \S+ GiB \(\S+ GiB to \S+ GiB\) on the fullest of 8 devices, for 1 sequence of 64 tokens", lines.pop(0)
    )
    assert lines[:7] == [
        "tiny-llama (LlamaForCausalLM)  21.66 K parameters  84.6 KiB | pp2 x dp2 x tp2 = 8 ranks | layout ranks",
        "serve: 1 sequence of 64 tokens",
        "  stage 0  layer 0  42.5 KiB on 2 ranks x 2 copies",
        "  stage 1  layer 1  42.8 KiB on 2 ranks x 2 copies",
        "  ranks  place                       copies  tensors   weights    files",
        "    0-1  pp0 dp0 tp0 .. pp0 dp0 tp1      x2       10  21.2 KiB  23.8 kB  ████████████████████████",
        "    4-5  pp1 dp0 tp0 .. pp1 dp0 tp1      x2       11  21.4 KiB  24.1 kB  ████████████████████████",
    ]
    assert [line.split("  ")[1] for line in lines[7:9]] == ["rank 0 (pp0 dp0 tp0)", "rank 4 (pp1 dp0 tp0)"]
    assert lines[9].startswith("  - runtime  (too small to draw: weights")
    assert lines[10] == "replication: 4 distinct ranks hold 1.007 times the weights, each 2 times (dp x cp)"
    assert cost.startswith("conversion: read 86.7 kB, write ")
    assert " kB in 7 files, peak host memory " in cost


def test_plan_shows_less_on_request(say, source):
    def shown(detail):
        return [line.split()[0] for line in say("plan", source, "--pp", 2, "--detail", detail).out.splitlines()]

    head, needs, costs = ["NEEDS", "tiny-llama", "serve:"], ["rank", "rank", "-"], ["replication:", "conversion:"]
    assert shown("summary") == [*head, *needs, *costs]
    assert shown("stage") == [*head, "stage", "stage", *needs, *costs]
    ranks = ["ranks", "0", "1"]
    assert shown("rank") == [*head, "stage", "stage", *ranks, *needs, *costs]
    tensors = shown("tensor")
    assert tensors[: len(ranks) + 5] == shown("rank")[: len(ranks) + 5]
    assert {"term", "tensors", "weights"} <= set(tensors)


def test_plan_says_how_long_the_conversion_takes_at_which_rate(say, source, monkeypatch):
    def conversion(*options):
        found = say("plan", source, "--tp", 2, *options, "--json")
        assert found.code == 0
        return json.loads(found.out)["conversion"]

    usual, given = conversion(), conversion("--disk-rate", "2GB/s")
    assert (usual["rate_bytes"], usual["rate_source"]) == (10**9, "default")
    assert usual["seconds"] == pytest.approx((usual["read_bytes"] + usual["write_bytes"]) / 10**9)
    assert (given["rate_bytes"], given["rate_source"]) == (2 * 10**9, "given")
    assert given["seconds"] == pytest.approx(usual["seconds"] / 2)
    assert " at 1.0 GB/s (the default of --disk-rate)" in say("plan", source, "--tp", 2).out
    read = []

    def read_bytes(_checkpoint, _path, _offset, size):
        read.append(size)
        return b"x" * size

    monkeypatch.setattr("shardctl.verbs.plan.read_bytes", read_bytes)
    conversion()
    assert read == [], "headers only, unless that is asked for"
    monkeypatch.setattr("shardctl.verbs.plan._MAX_PROBED_BYTES", 50_000)
    assert conversion("--probe")["rate_source"] == "measured"
    assert sum(read) == 50_000
    assert say("plan", source, "--probe", "--disk-rate", "1GB").code == 2


def test_plan_groups_equal_ranks(say, tmp_path):
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 256, "intermediate_size": 256}
    wide = llama(tmp_path / "wide", **heads)
    lines = say("plan", wide, "--tp", 64, "--pp", 2, "--detail", "rank").out.splitlines()
    runs = [line.split()[0] for line in lines if " .. " in line]
    assert 2 <= len(runs) < 10, "headers of tiny files differ in what is shown"
    ends = [[int(end) for end in run.split("-")] for run in runs]
    assert [number for first, last in ends for number in range(first, last + 1)] == list(range(128))
    large = FIXTURES / "configs_public/llama-3.1-70b.json"
    lines = say("plan", large, "--tp", 8, "--pp", 2, "--detail", "rank").out.splitlines()
    rows = [line.lstrip().split("  ")[:2] for line in lines if " .. " in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0-7", "pp0 tp0 .. pp0 tp7"],
        ["8-15", "pp1 tp0 .. pp1 tp7"],
    ]


def test_a_terminal_is_shown_lines_that_break_between_words(tmp_path):
    """Every verb, at 80 columns; a word that is broken would be at the end of one line and the start of the next."""
    source = llama(tmp_path / "a-model-with-a-name-of-some-length")
    model = {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
    out = tmp_path / "out"
    for arguments in (
        ["inspect", source],
        ["plan", source, "--tp", 2, "--pp", 2, "--gpu", "h100", "--for", "train"],
        ["plan", source, "--gpus", 4, "--search", "--gpu", "h100"],
        ["reshard", source, out, "--tp", 2],
        ["verify", out, "--level", "full", "--against", source],
        ["diff", source, out],
        ["digest", source],
        ["plan", source, "--tp", 3],
    ):
        shown = show_on_terminal([str(argument) for argument in arguments], model)
        long = [line for line in shown.splitlines() if len(line) > 80]
        assert all(max(map(len, line.split())) > 40 for line in long), (arguments, long)


def show_on_terminal(arguments, settings):
    """What a terminal of 80 columns is sent by the program."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    program = subprocess.Popen(
        [sys.executable, "-m", "shardctl", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **settings},
    )  # fmt: skip
    os.close(theirs)
    shown = bytearray()
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    program.wait()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n").replace("\r", "\n")


def test_plan_as_json(say, source):
    document = json.loads(say("plan", source, "--mesh", "pp=2,tp=2", "--stages", "1,1", "--json").out)
    assert list(document) == [
        *("schema", "status", "exit_code", "path", "layout", "architecture", "parameters", "weight_bytes"),
        "weight_types",
        "quantised_degrees",
        *(
            "mesh",
            "stages",
            "ranks",
            "needs",
            "timeline",
            "replication",
            "purpose",
            "device",
            "verdict",
            "cost",
            "run",
            "offload",
            "strategies",
        ),
        *("calibration", "search", "advice", "types", "conversion", "adapter", "warnings"),
    ]
    assert document["mesh"] == {
        "axes": {"dp": 1, "fsdp": 1, "cp": 1, "pp": 2, "tp": 2, "ep": 1, "etp": 2},
        "ranks": 4,
    }
    assert set(document["conversion"]) == {
        *("read_bytes", "write_bytes", "files", "peak_memory_bytes", "threads", "block_bytes", "free_bytes"),
        *("possible", "rate_bytes", "rate_source", "seconds"),
    }
    assert set(document["ranks"][0]) == {
        *("rank", "label", "coordinate", "replicas", "tensors", "weight_bytes", "file_bytes", "files"),
        "needs",
    }
    del document["needs"], document["purpose"]  # the inputs of formulas, and tokens
    large = {key for key, value in integers(document) if value > 1000}
    assert large == {"parameters"} | {key for key in large if key.endswith("_bytes")}


def test_plan_takes_sizes_and_casts(say, source):
    document = json.loads(say("plan", source, "--dtype", "bf16", "--max-shard-size", "20kB", "--json").out)
    assert document["weight_bytes"] == 86656 // 2
    assert len(document["ranks"][0]["files"]) > 1
    small = say("plan", source, "--memory", "10MiB")
    assert small.code == 3
    assert small.err.startswith("warning: --memory 10MiB cannot hold this conversion: it needs at least ")


def test_a_conversion_into_too_many_pieces_is_refused_before_they_are_listed(say, source, tmp_path, monkeypatch):
    """Each of 21 tensors is one piece on each of two ranks: only with them does the list exceed the limit."""
    monkeypatch.setattr(budget, "_CHEAP_LISTS", 0)
    least = budget.INTERPRETER + budget.PER_THREAD + 21 * budget.PER_TENSOR + 21 * budget.PER_CHUNK
    for pieces, said in ((42, "42"), (21, "at least 21")):
        limit = least + pieces * budget.PER_CHUNK - 1
        refused = say("reshard", source, tmp_path / "out", "--tp", 2, "--memory", f"{limit / 2**20:.6f}MiB")
        assert refused.code == 2
        assert "it needs more than 49 MiB\nhint:  the source has 21 tensors in 21 chunks, the result" in refused.err
        assert f"the result {said}; allow more memory" in refused.err
    monkeypatch.setattr(conversion_plan, "_PLANNING_MEMORY", 0)
    planned = say("plan", source, "--tp", 2, "--memory", "48.1MiB", "--json")
    document = json.loads(planned.out)
    assert planned.code == 0
    assert document["conversion"] is None
    assert len(document["ranks"]) == 2
    assert document["warnings"][-1].startswith("the conversion is not worked out: --memory 48MiB cannot hold")
    assert say("plan", source, "--tp", 2, "--memory", "48.1MiB", "--out", tmp_path / "plan.json").code == 2


def test_strict_makes_a_warning_an_error(say, source, tmp_path):
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    found = say("inspect", tmp_path)
    assert found.code == 0
    assert found.err.startswith("warning: ")
    assert found.err.count("\n") == 1
    assert say("inspect", tmp_path, "--strict").code == 4


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("5GB", 5 * 10**9), ("256 MiB", 256 << 20), ("0.5TiB", 1 << 39), ("1.5kB", 1500), ("7B", 7)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_a_plan_of_a_config_says_in_which_types_it_counts(say, tmp_path):
    path = Path(__file__).parents[2] / "fixtures" / "configs" / "llama.json"
    config = {**json.loads(path.read_text()), "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "| a config, which says BF16\n" in say("plan", tmp_path).out
    sidecar = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar))
    assert "| a config, which says BF16, U8, F8_E4M3\n" in say("plan", tmp_path).out


def test_inspect_says_that_the_file_of_a_rank_is_missing(say, source, tmp_path):
    """It counted the parameters of the whole model, though half of them were in no file."""
    assert say("reshard", source, tmp_path / "out", "--tp", 2).code == 0
    assert say("inspect", tmp_path / "out").err == ""
    (tmp_path / "out" / "shardctl.json").unlink()
    assert say("inspect", tmp_path / "out").err == ""
    next((tmp_path / "out").glob("shard-00002-*")).unlink()
    found = say("inspect", tmp_path / "out")
    assert found.code == 0
    assert "are stored in no file; shardctl verify says which" in found.err
