"""Derived tables are proved by running each rank by itself, and those that are wrong on purpose are not published."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

from shardctl.base.errors import Mismatch, UnsupportedError, UsageError
from shardctl.cli.program import run
from shardctl.options import DestinationOptions, InspectOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

TP2 = ReshardOptions(mesh=Mesh.of(tp=2))
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
WRONG = {
    "rows for columns": (
        (r'(up_proj|gate_proj)(.*) = \[\["tp", "fsdp"\]\]', r'\1\2 = ["fsdp", "tp"]'),
        (r'(down_proj.*) = \["fsdp", "tp"\]', r'\1 = [["tp", "fsdp"]]'),
    ),
    "one of a pair": ((r'(down_proj.*) = \["fsdp", "tp"\]', r'\1 = ["fsdp"]'),),
    "rows of inputs that are whole": ((r'(up_proj.*) = \[\["tp", "fsdp"\]\]', r'\1 = ["fsdp", "tp"]'),),
    "through the middle of heads": ((r'(k_proj.*) = \[\["tp of 2x8', r'\1 = [["tp of 2x4 + 2x4'),),
    "other heads than those of the keys": ((r'(q_proj.*) = \[\["tp of 4x8"', r'\1 = [["tp of 2x8 + 2x8"'),),
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A tiny saved model that no table knows."""
    path = tmp_path_factory.mktemp("foreign") / "source"
    torch.manual_seed(0)
    model = transformers.GraniteSWAForCausalLM(transformers.GraniteSWAConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rule_file(foreign):
    """The rule file that is printed for it."""
    from shardctl.models.derived import format_rule_file

    return format_rule_file(inspect(foreign, InspectOptions(show_rules=True)).derivation)


def test_what_is_right_is_published_and_said_to_be_proved(foreign, tmp_path, capfd):
    assert run(["reshard", str(foreign), str(tmp_path / "ranks"), "--tp", "2", "--prove", "--json"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told["rules"] == "derived"
    assert 0 < told["proof"]["output_error"] < 1e-5
    options = json.loads((tmp_path / "ranks" / "shardctl.json").read_bytes())["options"]
    assert options == {"rules": "derived", "rules_proof": "rules proved: the result"}
    result = verify(tmp_path / "ranks", VerifyOptions(against=foreign, forward=True))
    level = next(each for each in result.levels if each.name == "forward")
    assert level.status == "passed"
    assert level.forward.share.own == 1


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_not_published(foreign, rule_file, tmp_path, fault):
    text = rule_file
    for pattern, replacement in WRONG[fault]:
        text, count = re.subn(pattern, replacement, text)
        assert count, pattern
    (tmp_path / "rules.toml").write_text(text)
    given = SourceOptions(rules=tmp_path / "rules.toml")
    with pytest.raises(Mismatch, match=r"was not published.*model\.layers\.0"):
        reshard(
            foreign, tmp_path / "ranks", TP2, source_options=given, destination_options=DestinationOptions(prove=True)
        )
    assert not (tmp_path / "ranks").exists()
    reshard(foreign, tmp_path / "ranks", TP2, source_options=given)  # every element is there all the same
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=foreign)).ok


def test_the_printed_rules_are_those_that_pass(foreign, rule_file, tmp_path):
    (tmp_path / "rules.toml").write_text(rule_file)
    done = reshard(
        foreign,
        tmp_path / "ranks",
        TP2,
        source_options=SourceOptions(rules=tmp_path / "rules.toml"),
        destination_options=DestinationOptions(prove=True),
    )
    assert done.proof is not None
    assert done.proof.status == "passed"
    derived = reshard(foreign, tmp_path / "derived", TP2)
    assert derived.record.files == done.record.files


def test_a_model_that_cannot_be_run_is_not_published(foreign, tmp_path):
    config = json.loads((foreign / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"})
    )
    given = SourceOptions(config=tmp_path / "config.json")
    with pytest.raises(UnsupportedError, match=r"cannot run the result here: .* has no class Nobody"):
        reshard(
            foreign, tmp_path / "ranks", TP2, source_options=given, destination_options=DestinationOptions(prove=True)
        )
    assert not (tmp_path / "ranks").exists()


@pytest.mark.parametrize("way", [["--worker", "0/2"], ["--engine", "ray"]], ids=["worker", "ray"])
def test_one_process_alone_proves(foreign, tmp_path, way, capfd):
    assert run(["reshard", str(foreign), str(tmp_path / "ranks"), "--tp", "2", "--prove", *way]) == 2
    assert "--prove is for a result that one process writes" in capfd.readouterr().err


def test_a_bucket_has_no_place_for_what_is_not_proved(foreign):
    with pytest.raises(UsageError, match="a bucket has none"):
        reshard(foreign, "s3://nowhere/ranks", TP2, destination_options=DestinationOptions(prove=True))
