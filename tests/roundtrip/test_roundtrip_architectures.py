"""1 -> a mesh -> 1 is the identity for every family, and transformers loads what lies in between."""

from __future__ import annotations

import pytest
from family_checks import FamilyChecks
from tiny_models import FIXTURES, assert_loaded, assert_same, config_of, loaded, save, side_files, stored

from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

MESHES = {
    "tp2": Mesh.of(tp=2),
    "tp4": Mesh.of(tp=4),
    "pp2": Mesh.of(pp=2),
    "fsdp3": Mesh.of(fsdp=3),  # divides none of the dims
    "tp2-pp2-fsdp2": Mesh.of(tp=2, pp=2, fsdp=2),
}
THOROUGH = ("bert", "roberta", "llama", "qwen", "mistral", "gemma", "gpt2", "t5")
"""Families that go through every mesh; for the others two meshes, which cut along every axis, must do."""
EACH = FamilyChecks()


def list_meshes(name):
    """The meshes that a family goes through."""
    return [{"mesh": m} for m in MESHES if m in {"tp2", "tp2-pp2-fsdp2"} or name.startswith(THOROUGH)]


@pytest.fixture(scope="module")
def cut(tiny, tmp_path_factory):
    """The rank files of a fixture on a mesh, each made once."""
    made = {}

    def give(name, mesh):
        if (name, mesh) not in made:
            made[name, mesh] = tmp_path_factory.mktemp(name) / "ranks"
            reshard(tiny(name).path, made[name, mesh], ReshardOptions(mesh=MESHES[mesh]))
        return made[name, mesh]

    return give


@EACH.add(list_meshes)
def check_there_and_back_is_the_identity(tiny, cut, tmp_path, name, mesh):
    source, there, back = tiny(name), cut(name, mesh), tmp_path / mesh
    reshard(there, back, ReshardOptions(to="hf"))
    assert_same(stored(back), stored(source.path))
    assert side_files(source.path) == side_files(there) == side_files(back)
    assert source.digest.digest == digest(back).digest


@EACH.add(list_meshes)
def check_verify_proves_it(tiny, cut, name, mesh):
    found = verify(cut(name, mesh), VerifyOptions(level="full", against=tiny(name).path))
    assert found.ok
    assert not [f for f in found.findings if f.severity == "error"]
    assert [level.status for level in found.levels] == ["passed", "passed", "passed"]
    assert found.digest == tiny(name).digest.digest


@EACH.add(list_meshes)
def check_transformers_loads_the_rank_files_as_they_are(tiny, cut, name, mesh):
    source = tiny(name)
    if name.startswith("marian"):
        pytest.skip("transformers asks rank files for the positions that it computes, and saves none of them")
    assert_loaded(loaded(cut(name, mesh), source.kind), source)


@EACH.add(list_meshes)
def check_every_rank_has_files_and_holds_less_than_the_whole(tiny, cut, name, mesh):
    files = sorted(cut(name, mesh).glob("*.safetensors"))
    ranks = {file.name.split("-")[1] for file in files}
    assert ranks == {f"{rank + 1:05d}" for rank in range(MESHES[mesh].world)}
    whole = sum(t.nbytes for t in stored(tiny(name).path).values())
    assert all(sum(f.stat().st_size for f in files if f"shard-{rank}" in f.name) < whole for rank in ranks)


@pytest.mark.parametrize("name", FIXTURES)
def test_each_config(tiny, cut, tmp_path, name, subtests):
    EACH.run(subtests, name, tiny=tiny, cut=cut, tmp_path=tmp_path)


@pytest.mark.parametrize(("name", "tp"), [("llama", 4), ("gemma", 2), ("gemma", 4), ("qwen3-tied", 4), ("mistral", 4)])
def test_replicated_key_value_heads_come_back_once(tiny, tmp_path, name, tp):
    source = tiny(name, divisible=False)
    assert config_of(name, divisible=False)["num_key_value_heads"] < tp
    source_options = SourceOptions(kv_heads="replicate")
    reshard(source.path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=tp)), source_options=source_options)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source.path))
    assert digest(tmp_path / "ranks").digest == digest(source.path).digest
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source.path)).ok
    assert_loaded(loaded(tmp_path / "ranks", source.kind), source)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "gpt2", "t5"])
def test_without_a_mesh_rank_files_are_one_file_a_loader_takes(tiny, tmp_path, name):
    source = tiny(name)
    reshard(source.path, tmp_path / "ranks", ReshardOptions(to="ranks"))
    assert [f.name for f in tmp_path.glob("ranks/*.safetensors")] == ["shard-00001-model-00001-of-00001.safetensors"]
    assert_loaded(loaded(tmp_path / "ranks", source.kind), source)


@pytest.mark.parametrize("architecture", ["GPT2Model", "GPT2LMHeadModel"])
@pytest.mark.parametrize("mesh", ["tp2", "tp2-pp2-fsdp2"])
def test_gpt2_with_and_without_its_prefix(tmp_path, architecture, mesh):
    """The Hub's `gpt2` has the bare names of GPT2Model under a config that names GPT2LMHeadModel."""
    config = {**config_of("gpt2"), "architectures": ["GPT2Model"]}
    source = save(tmp_path / "source", config)
    told = (source.path / "config.json").read_text().replace("GPT2Model", architecture)
    (source.path / "config.json").write_text(told)
    assert "wte.weight" in stored(source.path)
    reshard(source.path, tmp_path / "ranks", ReshardOptions(mesh=MESHES[mesh]))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source.path))
    assert digest(tmp_path / "ranks").digest == digest(source.path).digest
    kind = getattr(__import__("transformers"), architecture)
    from_ranks, from_source = loaded(tmp_path / "ranks", kind), kind.from_pretrained(source.path)
    assert_same(from_ranks.state_dict(), from_source.state_dict())


@pytest.mark.parametrize("mesh", ["tp2", "fsdp3"])
def test_keep_writes_the_names_of_the_source(tmp_path, mesh):
    source = save(tmp_path / "source", {**config_of("gpt2"), "architectures": ["GPT2Model"]})
    told = (source.path / "config.json").read_text().replace("GPT2Model", "GPT2LMHeadModel")
    (source.path / "config.json").write_text(told)
    reshard(source.path, tmp_path / "kept", ReshardOptions(mesh=MESHES[mesh], names="keep"))
    reshard(source.path, tmp_path / "canonical", ReshardOptions(mesh=MESHES[mesh]))
    names = {file.name: set(stored(file)) for file in sorted((tmp_path / "kept").glob("*.safetensors"))}
    assert set().union(*names.values()) == set(stored(source.path))
    assert digest(tmp_path / "kept").digest == digest(tmp_path / "canonical").digest == digest(source.path).digest
    reshard(tmp_path / "kept", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source.path))
    assert verify(tmp_path / "kept", VerifyOptions(level="full", against=source.path)).ok


@pytest.mark.parametrize("name", ["bert", "gpt2", "qwen2-tied", "t5"])
def test_tied_weights_are_stored_once_in_hf_form_and_under_both_names_in_rank_files(tiny, cut, name):
    """transformers demands both names of a tie in rank files, and writes only the first itself."""
    source = tiny(name)
    both = set(source.model.state_dict())
    in_ranks = set()
    for file in cut(name, "tp2-pp2-fsdp2").glob("*.safetensors"):
        in_ranks |= set(stored(file))
    assert in_ranks == both
    assert len(both) > len(stored(source.path))


def test_a_source_that_stores_both_names_of_a_tie_keeps_both(tmp_path):
    from safetensors.torch import load_file, save_file

    source = save(tmp_path / "source", config_of("gpt2"))
    tensors = load_file(source.path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, source.path / "model.safetensors", {"format": "pt"})
    reshard(source.path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), tensors)
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source.path)).ok
