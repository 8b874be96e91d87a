"""A model on the Hub is read as the same files here would be: one commit, few requests, right bytes."""

import json

import pytest
from hub_models import content, model, write

from shardctl.base.errors import UsageError
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

NAME = "someone/llama"


@pytest.fixture
def files(hub):
    files = model()
    hub.add(NAME, files)
    return files


def test_a_model_is_described_as_the_same_files_are(files, tmp_path):
    there, here = inspect(NAME), inspect(write(files, tmp_path / "here"))
    assert there.address.startswith(f"hf://{NAME}@")
    assert here.address == ""
    assert (there.tensors, there.dtypes, there.carried, there.dropped) == (
        here.tensors, here.dtypes, here.carried, here.dropped,
    )  # fmt: skip
    assert digest(NAME).digest == digest(tmp_path / "here").digest


def test_a_policy_judges_every_file_there_and_a_signature_none(hub, tmp_path):
    (tmp_path / "policy.toml").write_text('code_files = "forbid"\npickles = "forbid"\nlicenses = ["mit"]\n')
    hub.add(NAME, model() | {"modeling_x.py": b"", "notes": b"\x80\x04N.", "README.md": b"---\nlicense: mit\n---\n"})
    found = verify(NAME, VerifyOptions(policy=tmp_path / "policy.toml"))
    assert [(each.check, each.file) for each in found.findings] == [
        ("code_files", "modeling_x.py"),
        ("pickles", "notes"),
    ]
    with pytest.raises(UsageError, match="is not a local directory, and signatures are of those"):
        verify(NAME, VerifyOptions(attestation=True, public_key=tmp_path / "key.pub"))


def test_how_weights_are_quantized_is_read_from_a_sidecar(hub):
    sidecar = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    files = {name: data for name, data in model().items() if name == "config.json"}
    hub.add("someone/llama-fp8", {**files, "hf_quant_config.json": json.dumps(sidecar).encode()})
    for address in ("someone/llama-fp8", "hf://someone/llama-fp8/config.json"):
        assert "F8_E4M3" in {share.dtype for share in inspect(address).dtypes}


@pytest.mark.parametrize(
    "reshard_options",
    [ReshardOptions(mesh=Mesh.of(tp=2, pp=2)), ReshardOptions(max_shard_size=100_000), ReshardOptions(dtype="bf16")],
)
def test_it_is_converted_to_the_same_bytes(files, tmp_path, reshard_options):
    here = reshard(write(files, tmp_path / "here"), tmp_path / "from-here", reshard_options)
    there = reshard(NAME, tmp_path / "from-there", reshard_options)
    assert content(tmp_path / "from-there") == content(tmp_path / "from-here")
    assert there.record.digest == here.record.digest


def test_the_result_says_where_it_came_from_and_what_was_proved(hub, files, tmp_path):
    done = reshard(NAME, tmp_path / "out")
    commit = hub.repositories[NAME].references["main"]
    assert done.record.source["address"] == f"hf://{NAME}@{commit}"
    assert done.notes == (f"{len(files)} files from the Hub, all with the expected hashes",)
