import json
import shutil
import signal
import time
from dataclasses import replace

import pytest
from cli_checkpoints import large, llama, shardctl, start

from shardctl.tensors.record import encode_record, parse_record


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    return large(tmp_path_factory.mktemp("heavy") / "source")


def test_the_result_is_told_and_its_digest_is_the_last_line(say, source, tmp_path):
    found = say("reshard", source, tmp_path / "out", "--tp", 2)
    assert (found.code, found.err) == (0, f"next: shardctl verify {tmp_path}/out --level full --against {source}\n")
    lines = found.out.splitlines()
    same = f"done: {tmp_path}/out holds the same 21 tensors as {source}, sharded for tp2 (95.9 kB, 5 files, "
    assert lines[0].startswith(same)
    assert lines[1] == "  layout   ranks for tp2 = 2 ranks"
    digest = say("digest", source).out.split()[0]
    assert lines[-1] == f"digest {digest}"
    assert not any(line.startswith("source digest") for line in lines)


def test_the_source_is_suggested_where_verify_reads_it_without_further_options(say, source, tmp_path):
    left_out = say("reshard", source, tmp_path / "out", "--exclude", "model.norm.weight|sum|merged").err
    assert left_out.endswith(f"--level full --against {source}\n")
    summed = say("reshard", source, tmp_path / "sum", "--average-with", source).err
    assert summed.endswith(f"next: shardctl verify {tmp_path}/sum --level full\n")


def test_a_cast_gives_both_digests(say, source, tmp_path):
    lines = say("reshard", source, tmp_path / "out", "--dtype", "bf16").out.splitlines()
    assert f"/out holds 21 tensors made from {source}, in layout hf, cast to bf16 (" in lines[0]
    assert lines[-2] == f"source digest {say('digest', source).out.split()[0]}"
    assert lines[-1] == f"digest {say('digest', tmp_path / 'out').out.split()[0]}"


def test_json_lines_end_with_the_result(say, source, tmp_path):
    found = say("reshard", source, tmp_path / "out", "--tp", 2, "--json", "--hash", "sha256")
    last = json.loads(found.out.splitlines()[-1])
    assert list(last) == [
        *(
            "schema",
            "status",
            "exit_code",
            "dry_run",
            "verdict",
            "destination",
            "layout",
            "architecture",
            "mesh",
            "stages",
        ),
        *("tensors", "files", "file_bytes", "read_bytes", "written_bytes", "shared_bytes", "kept_bytes"),
        *("done_before", "dropped", "extra_tensors", "projected_memory_bytes"),
        *("seconds", "digest", "source_digest", "source_hashes", "rules", "rules_proof", "fused_order_unknown"),
        *("names", "proof", "consumer"),
        *("notes", "warnings"),
    ]
    assert (last["schema"], last["status"], last["exit_code"]) == ("shardctl.reshard/1", "ok", 0)
    assert (tmp_path / "out" / "SHA256SUMS").exists()
    assert last["files"] == len(list((tmp_path / "out").iterdir()))


def test_json_lines_end_with_the_error(say, source, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    found = say("reshard", source, tmp_path / "mine", "--json")
    last = json.loads(found.out.splitlines()[-1])
    assert (found.code, last["exit_code"], last["status"]) == (6, 6, "error")
    assert found.err.startswith("error: ")


def test_a_finished_result_is_replaced_only_on_request(say, source, tmp_path):
    assert say("reshard", source, tmp_path / "out").code == 0
    assert say("reshard", source, tmp_path / "out", "--tp", 2).code == 6
    assert say("reshard", source, tmp_path / "out", "--tp", 2, "--overwrite").code == 0


def test_a_cast_that_overflows_is_refused_and_a_warning_if_it_is_allowed(say, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    source = tmp_path / "in" / "model.safetensors"
    source.parent.mkdir()
    source.write_bytes(len(header).to_bytes(8, "little") + header + b"\xff\xff\x7f\x7f")
    found = say("reshard", source, tmp_path / "out", "--dtype", "fp16")
    assert (found.code, (tmp_path / "out").exists()) == (4, False)
    assert found.err.startswith("error: w: 1 finite value becomes infinite in F16\nhint:  use --dtype bf16")
    found = say("reshard", source, tmp_path / "out", "--dtype", "fp16", "--allow-overflow")
    assert found.code == 0
    assert found.err.startswith("warning: w: 1 finite values became infinite in F16\n")


def test_a_dry_run_plans_and_checks_and_writes_nothing(say, source, tmp_path):
    found = say("reshard", source, tmp_path / "out", "--tp", 2, "--dry-run")
    assert (found.code, found.err) == (0, "dry run: nothing was written\n")
    assert "conversion: read 86.7 kB" in found.out
    assert list(tmp_path.iterdir()) == []
    document = json.loads(say("reshard", source, tmp_path / "out", "--dry-run", "--json").out)
    assert (document["schema"], document["dry_run"]) == ("shardctl.reshard/1", True)
    assert document["plan"]["conversion"]["peak_memory_bytes"] > 0


def test_a_dry_run_refuses_what_the_run_would_refuse(say, source, tmp_path):
    (tmp_path / "file").write_text("")
    assert say("reshard", source, tmp_path / "file", "--dry-run").code == 6
    assert say("reshard", source, source / "inside", "--dry-run").code == 6
    assert say("reshard", source, tmp_path / "out", "--tp", 4, "--dry-run").code == 2
    assert say("reshard", source, tmp_path / "out").code == 0
    assert say("reshard", source, tmp_path / "out", "--dry-run").code == 6
    assert say("reshard", source, tmp_path / "out", "--dry-run", "--overwrite").code == 0


def interrupted_and_run_again(heavy, place, number, code, wait):
    """A run that gets a signal `wait` seconds after its files are there; the last record of the same command again."""
    place.mkdir()
    args = ["reshard", heavy, place / "out", "--tp", 2, "--threads", 1, "--json"]
    staged = place / ".out.shardctl"
    with start(*args) as process:
        while not list(staged.glob("*/shard-*")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        time.sleep(wait)
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    last = json.loads(out.splitlines()[-1])
    assert (last["status"], last["exit_code"]) == ("error", code)
    assert err == f"error: {last['error']}\nhint:  {last['hint']}\n"
    assert not (place / "out").exists()
    assert staged.exists()
    done = shardctl(*args)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in place.iterdir()] == ["out"]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_its_state_and_the_same_command_finishes(heavy, tmp_path, number, code):
    for wait in (0.05, 0.2, 0.8):  # until the first band is done, however busy the machine is
        last = interrupted_and_run_again(heavy, tmp_path / str(wait), number, code, wait)
        if last["kept_bytes"]:
            break
    assert last["kept_bytes"] > 0
    assert last["written_bytes"] > 0
    weights = json.loads(shardctl("plan", heavy, "--tp", 2, "--json").stdout)["ranks"]
    assert last["kept_bytes"] + last["written_bytes"] == sum(rank["weight_bytes"] for rank in weights)
    assert shardctl("verify", tmp_path / str(wait) / "out").returncode == 0


@pytest.mark.parametrize("names", [["model.embed_tokens.weight"], ["x"]])
def test_a_record_whose_spellings_would_give_two_tensors_one_name_is_the_sources_fault(say, source, tmp_path, names):
    made = tmp_path / "made"
    assert say("reshard", source, made, "--tp", 2).code == 0
    record = parse_record((made / "shardctl.json").read_bytes())
    tensors = dict(record.tensors)
    for name in ("model.norm.weight", "lm_head.weight"):
        tensors[name] = replace(tensors[name], spelling=tuple(names))
    (made / "shardctl.json").write_bytes(encode_record(replace(record, tensors=tensors)))
    for verb in (["plan", made], ["reshard", made, tmp_path / "out", "--to", "hf"]):
        found = say(*verb)
        assert found.code == 4
        assert f"would both be written as {names[0]}" in found.err


def test_a_record_that_calls_a_tensor_by_a_name_that_the_model_has_not_is_the_sources_fault(say, source, tmp_path):
    made = tmp_path / "made"
    assert say("reshard", source, made).code == 0
    record = parse_record((made / "shardctl.json").read_bytes())
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = {known.upper() if known == name else known: tensor for known, tensor in record.tensors.items()}
    (made / "shardctl.json").write_bytes(encode_record(replace(record, tensors=tensors)))
    for verb in (["inspect", made], ["plan", made, "--tp", 2], ["plan", made, "--for", "serve"]):
        found = say(*verb)
        assert found.code == 4
        assert f"shardctl.json calls {name} '{name.upper()}'" in found.err


def test_what_is_left_behind_is_named(say, tmp_path):
    source = llama(tmp_path / "llama")
    (source / "original").mkdir()
    (source / "original/consolidated.00.pth").write_bytes(b"PK\x03\x04 weights in another format")
    said = say("reshard", source, tmp_path / "out", "--tp", 2)
    assert "  dropped  original/consolidated.00.pth\n" in said.out
    document = json.loads(say("reshard", source, tmp_path / "again", "--json").out.splitlines()[-1])
    assert document["dropped"] == ["original/consolidated.00.pth"]


def test_overwrite_removes_no_file_that_shardctl_did_not_write(say, source, tmp_path):
    """Notes that somebody had put beside the weights were gone without a word."""
    out = tmp_path / "out"
    assert say("reshard", source, out, "--tp", 2).code == 0
    (out / "runs").mkdir()
    (out / "runs" / "notes.txt").write_text("mine")
    for more in ([], ["--dry-run"], ["--worker", "0/2"]):
        code, _, err = say("reshard", source, out, "--fsdp", 2, "--overwrite", *more)
        assert code == 6
        assert "it also holds runs/notes.txt, which shardctl.json does not list" in err
    assert (out / "runs" / "notes.txt").read_text() == "mine"
    (out / "runs" / "notes.txt").unlink()
    assert say("reshard", source, out, "--fsdp", 2, "--overwrite").code == 0


def test_a_given_config_takes_the_place_of_the_sources_own(say, source, tmp_path):
    """It says what the tensors are, so the result must not keep another one."""
    source = shutil.copytree(source, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    given = tmp_path / "given.json"
    given.write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert say("reshard", source, tmp_path / "out", "--to", "hf", "--config", given).code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 0.5
    (source / "config.json").write_text("{")
    assert say("reshard", source, tmp_path / "mended", "--to", "hf", "--config", given).code == 0
    assert json.loads((tmp_path / "mended" / "config.json").read_text())["rms_norm_eps"] == 0.5


def test_a_destination_that_looks_like_a_model_of_the_hub_is_noted(say, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    note = "note: me/model is a local folder; hf://me/model writes to the Hub\n"
    assert say("reshard", source, "me/model", "--tp", 2).err.startswith(note)
    assert "note: " not in say("reshard", source, "me/other", "--tp", 2).err, "me is a folder here"


def test_a_result_that_lacks_what_engines_need_is_warned_of(say, source, tmp_path):
    assert "engines need" not in say("reshard", source, tmp_path / "whole", "--to", "hf").err
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    lacking = "has no config.json (--config PATH adds it) and no tokenizer: engines need them"
    assert lacking in say("reshard", tmp_path / "bare", tmp_path / "out", "--to", "hf").err
