"""A fused q|k|v with one key/value head, which all ranks hold: the last has its queries and the head in one chunk."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file
from stored_bits import bits
from tiny_models import CONFIGS, save

from shardctl.base.errors import SourceError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FALCON = {"num_attention_heads": 4, "num_kv_heads": 1, "multi_query": True, "new_decoder_architecture": False}
MODELS = {
    "falcon": FALCON,
    "gpt_bigcode": {"multi_query": True},
    "phi3": {"num_key_value_heads": 1},
}
REPLICATE = SourceOptions(kv_heads="replicate")


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    config = json.loads((CONFIGS / f"{request.param}.json").read_text()) | MODELS[request.param]
    place = tmp_path_factory.mktemp("one_head") / request.param
    save(place, config)
    return place


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_verify_and_convert_back(source, tmp_path, tp):
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=tp)), source_options=REPLICATE)
    found = verify(tmp_path / "ranks", VerifyOptions(level="full", against=source))
    assert found.ok, [each.message for level in found.levels for each in level.findings]
    assert digest(tmp_path / "ranks").digest == digest(source).digest
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    ours, theirs = (load_file(place / "model.safetensors") for place in (tmp_path / "back", source))
    assert {name: bits(value) for name, value in ours.items()} == {name: bits(value) for name, value in theirs.items()}


def test_a_file_of_another_mesh_is_still_found(source, tmp_path):
    """Half of a rank's queries end in the middle of a section, so they are no copy of what that rank has."""
    for tp in (2, 4):
        reshard(source, tmp_path / f"tp{tp}", ReshardOptions(mesh=Mesh.of(tp=tp)), source_options=REPLICATE)
    (tmp_path / "tp2" / "shardctl.json").unlink()
    shutil.copy(
        tmp_path / "tp4" / "shard-00002-model-00001-of-00002.safetensors",
        tmp_path / "tp2" / "shard-00003-model-00001-of-00002.safetensors",
    )
    found = [each for level in verify(tmp_path / "tp2").levels for each in level.findings if each.severity == "error"]
    assert "overlap" in {each.check for each in found}
    with pytest.raises(SourceError, match="overlap in"):
        reshard(tmp_path / "tp2", tmp_path / "back", ReshardOptions(to="hf"))


def test_the_shared_head_is_the_same_everywhere(source, tmp_path):
    """If one rank's copy of the head differs, the error names it, as it does for every replica."""
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=REPLICATE)
    path = tmp_path / "ranks" / "shard-00001-model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    found = verify(tmp_path / "ranks", VerifyOptions(level="full"))
    assert "replicas" in {each.check for level in found.levels for each in level.findings}
