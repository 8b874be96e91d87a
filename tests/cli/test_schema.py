"""What `shardctl schema` prints is what the documents are, key by key."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

from shardctl.base.errors import UsageError
from shardctl.cli.app import VERBS
from shardctl.cli.program import run
from shardctl.report.schemas import build_schema, list_schema_names

FIXTURES = Path(__file__).parents[2] / "fixtures"
CHECKPOINTS = {
    "llama": "llmcompressor/llama",
    "fp8": "llmcompressor/fp8-block",
    "zero": "deepspeed/bf16",
    "fsdp": "dcp/fsdp2",
    "megatron": "megatron/llama-tp2-pp2",
    "lora": "peft/lora/adapter",
    "config.json": "configs/llama.json",
}


@pytest.fixture(autouse=True)
def _checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, fixture in CHECKPOINTS.items():
        (tmp_path / name).symlink_to(FIXTURES / fixture)
    shutil.copytree("llama", "run/step-1")
    assert run(["reshard", "llama", "cut", "--tp", "2", "--dtype", "fp16", "--quiet"]) == 0


def print_documents(command, capfd):
    capfd.readouterr()
    run([*command.split(), "--json"])
    printed = capfd.readouterr().out
    if command.startswith("reshard"):
        return [json.loads(line) for line in printed.splitlines()]
    return [json.loads(printed)]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("inspect llama --tensors --show-rules", "InspectDocument"),
        ("inspect fp8", "InspectDocument"),
        ("inspect zero", "InspectDocument"),
        ("inspect fsdp", "InspectDocument"),
        ("inspect megatron --tensors", "InspectDocument"),
        ("inspect lora", "InspectDocument"),
        ("inspect config.json", "InspectDocument"),
        ("inspect missing", "FailureDocument"),
        ("reshard llama out --tp 2", "ReshardDocument"),
        ("reshard llama out --for vllm", "ReshardDocument"),
        ("reshard llama out --dry-run", "RehearsalDocument"),
        ("reshard llama out --worker 0/2", "ContributionDocument"),
        ("reshard run/step-* out --each", "EachDocument"),
        ("reshard missing out", "FailureDocument"),
        ("finish cut", "FinishDocument"),
        ("verify cut --level full --against llama", "VerifyDocument"),
        ("verify llama --for vllm", "VerifyDocument"),
        ("verify llama --load cpu", "VerifyDocument"),
        ("verify run --newest-good", "NewestDocument"),
        ("verify fp8 --level full", "VerifyDocument"),
        ("verify missing", "FailureDocument"),
        ("diff llama cut", "DiffDocument"),
        ("diff llama fp8", "DiffDocument"),
        ("diff llama missing", "FailureDocument"),
        ("digest llama --tensors", "DigestDocument"),
        ("digest llama --as vllm", "EngineSumsDocument"),
        ("plan llama --gpu h100", "plan"),
        ("plan llama --tp 3", "failure"),
        ("settings", "SettingsDocument"),
    ],
)
def test_documents_are_what_the_schema_says(command, kind, capfd):
    schema = build_schema(command.split()[0])
    jsonschema.Draft202012Validator.check_schema(schema)
    documents = print_documents(command, capfd)
    for document in documents:
        jsonschema.validate(document, schema)
    jsonschema.validate(documents[-1], {"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]})


def test_a_key_more_or_less_is_found(capfd):
    (document,) = print_documents("digest llama", capfd)
    for wrong in (document | {"more": 1}, {key: value for key, value in document.items() if key != "path"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, build_schema("digest"))


def test_a_forward_pass_is_in_the_schema(capfd):
    pytest.importorskip("transformers")
    (document,) = print_documents("verify llama --forward --prompt hello --tokens 2", capfd)
    jsonschema.validate(document, build_schema("verify"))


def test_every_verb_has_a_schema(capfd):
    assert set(list_schema_names()) == {*VERBS, "settings"}
    for verb in list_schema_names():
        assert run(["schema", verb]) == 0
        assert json.loads(capfd.readouterr().out)["$id"] == f"shardctl.{verb}/1"


def test_an_unknown_verb_is_a_usage_error(capfd):
    assert run(["schema", "convert"]) == 2
    assert "'inspect'" in capfd.readouterr().err
    assert run(["schema"]) == 2
    assert "hint:  use plan, reshard, finish," in capfd.readouterr().err
    with pytest.raises(UsageError, match="convert has no JSON schema"):
        build_schema("convert")
