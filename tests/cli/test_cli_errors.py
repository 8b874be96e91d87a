import json
import re
import signal
import time

import pytest
import torch
from cli_checkpoints import shardctl as shardctl_run
from cli_checkpoints import told

import shardctl.verbs.digest
import shardctl.verbs.inspect
import shardctl.verbs.reshard
from shardctl.base.errors import (
    AccessError,
    DestinationError,
    HostileError,
    Interrupted,
    MemoryBudgetError,
    PartitionError,
    TransientError,
)
from shardctl.cli import streams
from shardctl.cli.foreign_words import OPTIONS


def raising(error):
    def verb(*_args, **_kwargs):
        raise error

    return verb


@pytest.fixture
def broken(monkeypatch, say):
    """`inspect`, whose verb raises the given error."""

    def call(error, *args):
        monkeypatch.setattr(shardctl.verbs.inspect, "inspect", raising(error))
        return say("inspect", "x", *args)

    return call


DTYPE, DTYPES = "invalid value for '--dtype':", "is not one of 'keep', 'bf16', 'fp16', 'fp32'"


PLAN_HELP = "shardctl plan --help lists the arguments"
BOTH = [
    (("--users", "3", "--batch", "4"), "--users", "--batch"),
    (("--max-num-seqs=3", "--max-seqs=4"), "--max-num-seqs", "--max-seqs"),
    (("--seq-len", "9", "--max-model-len", "9"), "--seq-len", "--max-model-len"),
    (("--gpu-memory-utilization", "0.9", "--utilization", "0.9"), "--gpu-memory-utilization", "--utilization"),
    (("--tensor-parallel-size", "2", "--tp", "2"), "--tensor-parallel-size", "--tp"),
    (("--kv-cache-dtype", "fp8", "--kv-dtype", "fp8"), "--kv-cache-dtype", "--kv-dtype"),
    (("--gradient-checkpointing", "--recompute", "full"), "--gradient-checkpointing", "--recompute"),
]
"""An option by two of its names."""


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["plan"], "missing argument '{SRC}'", "shardctl plan --help lists the arguments"),
        (["plan", "x", "--tpp", "2"], "no such option: --tpp", "did you mean --tp or --pp?"),
        (["plan", "x", "-tp", "2"], "no such option: -tp", "did you mean --tp?"),
        (["plan", "x", "-tp=2"], "no such option: -tp", "did you mean --tp?"),
        (["plan", "x", "-t"], "no such option: -t", "shardctl plan --help lists the arguments"),
        (["plan", "x", "--training"], "no such option: --training", "did you mean --for train?"),
        (["plan", "x", "--world-size", "8"], "no such option: --world-size", "did you mean --gpus?"),
        (["plan", "--tp=3.5", "x"], "--tp: '3.5' is not a whole number", "shardctl plan --help lists the arguments"),
        (["plan", "x", "--tp", "two"], "--tp: 'two' is not a whole number", "shardctl plan --help lists the arguments"),
        (["reshard", "x", "y", "--dtype", "BFloat16"], f"{DTYPE} 'BFloat16' {DTYPES}", "did you mean bf16?"),
        (["reshard", "x", "y", "--dtype", "half"], f"{DTYPE} 'half' {DTYPES}", "did you mean fp16?"),
        (["plan", "x", "--batch", "8k"], "--batch: '8k' is not a whole number", "did you mean 8192 or 8000?"),
        (["plan", "x", "--users", "8k"], "--users: '8k' is not a whole number", "did you mean 8192 or 8000?"),
        (
            ["plan", "x", "--max-num-seqs=few"],
            "--max-num-seqs: 'few' is not a whole number",
            "shardctl plan --help lists the arguments",
        ),
        (["plan", "x", "--batch=32,768"], "--batch: '32,768' is not a whole number", "did you mean 32768?"),
        (["plan", "x", "--batch=0"], "invalid value for '--batch': must be at least 1", PLAN_HELP),
        (
            ["plan", "x", "--seq-len", "8p"],
            "'8p' is not a number of tokens",
            "write it such as 32768, 32k (32,000) or 32K (32,768)",
        ),
        *(
            (["plan", "x", *names], f"{first} and {second} are both given", "they are one option: leave one out")
            for names, first, second in BOTH
        ),
        (["plan", "x", "--frobs", "3"], "no such option: --frobs", PLAN_HELP),
        (["push", "x"], "no such command 'push'", "did you mean reshard SRC hf://owner/name --create?"),
        (
            ["plan", "x", "--gpu", "2xh100", "--gpus", "4"],
            "--gpu names 2 devices, and --gpus says 4",
            "leave one of them out",
        ),
        (
            ["plan", "x", "--for", "inference"],
            "invalid value for '--for': 'inference' is not serve, train or a server",
            "did you mean serve?",
        ),
        (
            ["plan", "x", "--recompute", "ful"],
            "invalid value for '--recompute': 'ful' is not one of 'none', 'selective', 'full'",
            "did you mean full?",
        ),
        (
            ["plan", "x", "--ep", "8"],
            "ep=8 x etp=1 does not divide the 1 ranks of a stage",
            (
                "ep and etp divide the ranks of dp, fsdp, cp and tp, and add none; "
                "a stage has 8 ranks with --dp 8, for example"
            ),
        ),
        (["reshard", "x", "y", "--dtype", "fp8"], f"{DTYPE} 'fp8' {DTYPES}", "did you mean --quantize fp8-channel?"),
        (["inspct", "x"], "no such command 'inspct'", "did you mean 'inspect'?"),
        (["convert", "x"], "no such command 'convert'", "did you mean reshard?"),
        (["merge", "x"], "no such command 'merge'", "did you mean reshard --to hf, or reshard --merge for an adapter?"),
        (["plan", "x", "--memory", "3"], "size '3' has no unit", "write 3GB, 3GiB, 3MB or 3MiB"),
        (
            ["plan", "x", "--memory", "1Eb"],
            "size '1Eb' has the unknown unit 'Eb'",
            "the units are kB, MB, GB, TB, KiB, MiB, GiB and TiB",
        ),
        (
            ["plan", "x", "--max-shard-size", "1e9"],
            "cannot read size '1e9'",
            "write a number and a unit, such as 5GB or 1GiB",
        ),
        (
            ["plan", "x", "--max-shard-size", "0.1B"],
            "size '0.1B' is less than a byte",
            "write a number and a unit, such as 5GB or 1GiB",
        ),
        (
            ["plan", "x", "--mesh", "tp=2", "--pp", "2"],
            "--mesh and --pp are both given",
            "write every axis in --mesh, or leave it out",
        ),
        (["inspect", ""], "a path is empty", "an unset shell variable gives an empty path"),
        (["reshard", "x", ""], "a path is empty", "an unset shell variable gives an empty path"),
    ],
)
def test_usage_errors_are_two_lines_and_exit_code_2(say, args, error, hint):
    code, out, err = say(*args)
    assert (code, out) == (2, "")
    assert err.replace("'SRC'", "'{SRC}'") == f"error: {error}\nhint:  {hint}\n"


def test_errors_are_coloured_only_where_that_is_wanted(say, monkeypatch):
    plain = say("plan", "x", "--frobs").err
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = say("plan", "x", "--frobs").err
    assert coloured.startswith("\x1b[31merror:\x1b[0m no such option: --frobs\n\x1b[36mhint:\x1b[0m ")
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert say("plan", "x", "--frobs").err == plain


def test_a_number_that_is_none_is_a_usage_error(say):
    code, out, err = say("plan", "x", "--tp", "two")
    assert (code, out) == (2, "")
    assert err.startswith("error: --tp: 'two' is not a whole number")
    assert err.count("\n") == 2
    assert say("plan", "x", "--tp", "0").code == 2


def test_a_choice_that_is_none_is_said_in_our_words(say):
    err = say("reshard", "x", "y", "--experts", "both").err
    assert err.splitlines()[0].lower().startswith("error: invalid value for '--experts': 'both' is not one of ")


def test_a_cut_that_does_not_work_says_which_would(say, source):
    code, out, err = say("plan", source, "--tp", 4, "--for", "train")
    assert (code, out) == (2, "")
    assert err == (
        "error: cannot split model.layers.0.self_attn.k_proj.weight [16, 32] over tp=4: 2 key/value heads\n"
        "hint:  use --tp 1 or 2, or --kv-heads replicate to keep each head on several ranks\n"
    )


def test_the_degrees_that_work_are_listed_at_once_however_many_columns_there_are(say, tmp_path):
    config = told("granitemoeshared", intermediate_size=2**31 - 1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    began = time.process_time()
    code, _, err = say("plan", tmp_path / "config.json", "--tp", 4, "--pp", 2)
    assert (code, time.process_time() - began < 5) == (2, True)
    assert "over etp=4: 2147483647 columns of each expert" in err


def test_a_source_that_is_not_there_is_exit_code_4(say, tmp_path):
    code, out, err = say("inspect", tmp_path / "none")
    assert (code, out) == (4, "")
    assert err == (
        f"error: {tmp_path / 'none'} does not exist\nhint:  check the path, and that the download or copy is complete\n"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PartitionError("no"), 2),
        (MemoryBudgetError("no"), 2),
        (HostileError("no"), 4),
        (AccessError("no"), 5),
        (PermissionError(13, "Permission denied", "x"), 5),
        (DestinationError("no"), 6),
        (OSError(28, "No space left on device", "x"), 6),
        (TransientError("no"), 7),
        (Interrupted("no", signal=2), 130),
        (Interrupted("no", signal=15), 143),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("no"), 1),
        (OSError(5, "Input/output error"), 7),
        (OSError(38, "Function not implemented"), 7),
        (OSError(24, "Too many open files"), 7),
        (FileNotFoundError(2, "No such file or directory", "x"), 1),
    ],
)
def test_every_error_has_its_code_and_two_lines_with_something_to_do(broken, error, code):
    found = broken(error)
    assert (found.code, found.out) == (code, "")
    first, second, rest = found.err.split("\n")
    assert first.startswith("error: ")
    assert not first.endswith(".")
    assert second.startswith("hint:  ")
    assert len(second) > len("hint:  ")
    assert not rest


def test_an_unexpected_error_is_called_a_bug_and_shows_a_traceback_only_on_request(broken, monkeypatch):
    error = KeyError("weight")
    assert broken(error).err == (
        "error: this is a bug in shardctl: KeyError: 'weight'\n"
        "hint:  set SHARDCTL_DEBUG=1 for the traceback, and please report it\n"
    )
    monkeypatch.setenv("SHARDCTL_DEBUG", "1")
    err = broken(error).err
    assert err.startswith("Traceback")
    assert err.endswith("please report it\n")


def test_names_in_errors_cannot_steer_the_terminal_or_add_lines(broken):
    err = broken(HostileError("file \x1b[2J\nhint:  run rm\u202e", hint="a\rb")).err
    assert err == "error: file \\x1b[2J\\nhint:  run rm\\u202e\nhint:  a\\rb\n"


def test_json_has_a_last_record_also_on_failure(broken):
    found = broken(DestinationError("full", hint="free some space"), "--json")
    assert json.loads(found.out) == {
        "schema": "shardctl.inspect/1",
        "status": "error",
        "exit_code": 6,
        "error": "full",
        "hint": "free some space",
    }
    assert found.err == "error: full\nhint:  free some space\n"


def test_json_has_a_last_record_also_for_a_bad_command_line(say):
    found = say("reshard", "a", "b", "--json", "--memory", "lots")
    assert json.loads(found.out)["exit_code"] == found.code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_after_the_work_is_done_does_not_call_it_failed(monkeypatch, say, source, tmp_path, number):
    monkeypatch.setattr(streams, "print_view", lambda _: signal.raise_signal(number))
    assert say("reshard", source, tmp_path / "out").code == 0
    assert (tmp_path / "out" / "shardctl.json").exists()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_a_terminal_that_goes_away_stops_the_work_tidily(monkeypatch, say, source, tmp_path):
    inside = shardctl.verbs.reshard.assemble_result

    def gone(*args, **kwargs):
        signal.raise_signal(signal.SIGHUP)
        return inside(*args, **kwargs)

    monkeypatch.setattr(shardctl.verbs.reshard, "assemble_result", gone)
    assert say("reshard", source, tmp_path / "out").code == 143
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert say("reshard", source, tmp_path / "out").code == 0


def test_sigterm_before_the_work_begins_unwinds_too(monkeypatch, say):
    tidied = []

    def verb(*_args, **_kwargs):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            tidied.append(True)

    monkeypatch.setattr(shardctl.verbs.inspect, "inspect", verb)
    assert say("inspect", "x") == (143, "", "error: terminated\nhint:  run the same command again\n")
    assert tidied
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("threads", [1025, 2**64, 10**400])
@pytest.mark.parametrize("verb", ["plan", "reshard", "verify", "digest", "diff"])
def test_more_threads_than_any_machine_uses_are_refused_at_once(say, source, tmp_path, verb, threads):
    more = {"reshard": [tmp_path / "out"], "diff": [source]}.get(verb, [])
    found = say(verb, source, *more, "--threads", threads)
    assert found.code == 2
    assert "use 1 to 1,024" in found.err


@pytest.mark.parametrize("size", ["9" * 400 + "GB", "16000000TiB"])
@pytest.mark.parametrize("option", ["--memory", "--max-shard-size"])
def test_a_size_beyond_any_machine_is_refused(say, source, tmp_path, option, size):
    found = say("reshard", source, tmp_path / "out", option, size)
    assert found.code == 2
    assert "more than any file or memory has" in found.err


@pytest.mark.parametrize("option", ["--config", "--rules"])
def test_a_file_with_a_name_that_is_too_long_cannot_be_read(say, source, option):
    assert say("plan", source, option, "x" * 5000).code in {2, 4}
    assert say("plan", source, option, "x" * 5000 + "/config.json").code in {2, 4}


def test_a_plan_cannot_be_written_under_a_name_that_is_too_long(say, source):
    assert say("plan", source, "--out", "x" * 5000).code == 6
    assert say("plan", source, "--report", "x" * 5000 + ".html").code == 6


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_tensor_whose_name_is_not_text_is_the_sources_fault(say, tmp_path, protocol):
    torch.save({"a\ud800": torch.zeros(2)}, tmp_path / "model.bin", pickle_protocol=protocol)
    for verb in ("inspect", "plan", "verify", "digest"):
        assert say(verb, tmp_path / "model.bin").code == 4


@pytest.mark.parametrize("verb", [["inspect", "hf://me/model"], ["verify", "{source}", "--forward"]], ids=" ".join)
def test_a_setting_that_a_library_cannot_be_imported_with_is_a_usage_error(source, verb):
    found = shardctl_run(*(part.format(source=source) for part in verb), HF_HUB_ETAG_TIMEOUT="abc")
    assert found.returncode == 2
    said = [line for line in found.stderr.splitlines() if not line.startswith("verify: ")]  # how far it is
    assert said[0] == "error: HF_HUB_ETAG_TIMEOUT is 'abc', which is not a number of seconds"


@pytest.mark.parametrize("given", [["--to", ""], ["--to="], ["--include", ""], ["--rules="]], ids="".join)
def test_an_option_with_an_empty_value_is_a_usage_error(say, source, tmp_path, given):
    """Scripts write this whose variable is not set; it was taken for the default."""
    found = say("reshard", source, tmp_path / "out", *given)
    assert found.code == 2
    assert f"{given[0].rstrip('=')} has an empty value" in found.err
    assert not (tmp_path / "out").exists()


def test_a_destination_in_a_circle_of_links_cannot_be_written(say, source, tmp_path):
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    (tmp_path / "one.html").symlink_to(tmp_path / "one.html")
    assert say("plan", source, "--report", tmp_path / "one.html").code == 6
    assert say("reshard", source, tmp_path / "one", "--tp", "2").code == 6
    assert say("reshard", source, tmp_path / "one" / "out", "--tp", "2").code == 6
    assert say("plan", source, "--out", tmp_path / "one").code == 6
    assert say("inspect", tmp_path / "one").code == 4


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["below a file", "not text"])
def test_a_token_that_cannot_be_read_is_exit_code_5(tmp_path, content):
    place = tmp_path / "token"
    place.write_bytes(content or b"")
    found = shardctl_run("inspect", "hf://me/model", HF_TOKEN_PATH=str(place if content else place / "token"))
    assert found.returncode == 5, found.stderr
    assert "the token in " in found.stderr


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ("deepspeed", "write --to universal, which DeepSpeed resumes from at any size"),
        ("maxtext", "write --to orbax, which Orbax restores; its names are those of the source"),
        ("FSDP", "write --to dcp, which this resumes from"),
        ("gguf", "shardctl writes no GGUF: write --to hf, which convert_hf_to_gguf.py of llama.cpp reads"),
        ("fp8", "a layout is no quantization: see --quantize"),
    ],
)
def test_words_that_people_take_for_a_layout_get_the_option_that_does_it(say, source, tmp_path, layout, hint):
    code, _, err = say("reshard", source, tmp_path / "out", "--to", layout)
    assert code == 2
    assert err == f"error: unknown layout {layout!r}\nhint:  {hint}\n"


@pytest.mark.parametrize("verb", ["inspect", "verify", "digest"])
def test_the_record_of_a_checkpoint_is_not_the_checkpoint(say, source, tmp_path, verb):
    assert say("reshard", source, tmp_path / "out").code == 0
    record = tmp_path / "out" / "shardctl.json"
    code, _, err = say(verb, record)
    assert code == 4
    assert err == f"error: {record} is the record of a checkpoint\nhint:  give the directory that it lies in\n"


def test_what_other_tools_call_an_option_names_one_that_some_verb_has(say):
    listed = "".join(say(verb, "--help-all")[1] for verb in ("plan", "reshard", "verify"))
    assert [meant for meant in OPTIONS.values() if not re.search(rf"{meant.partition(' ')[0]}\b", listed)] == []


def test_a_folder_of_checkpoints_names_them(say, tmp_path):
    for name, hint in (("b", "the weights are in {0}/b: give that"), ("a", "give one of them, such as {0}/b")):
        (tmp_path / "big" / name).mkdir(parents=True)
        (tmp_path / "big" / name / "model.safetensors").write_bytes(b"")
        said = say("inspect", tmp_path / "big")
        assert said.code == 4
        assert hint.format(tmp_path / "big") in said.err
    assert "but 2 folders in it do: a, b" in said.err
