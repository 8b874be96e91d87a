"""A wrong byte in one layer is found by running the model, and the layer is named."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from forward_models import REPLICATE, config_of, cut, place, run, save, values
from safetensors import safe_open
from safetensors.torch import save_file

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.tensors.mesh import Mesh

LAYER = "model.layers.1"
NAMES = {
    "llama": config_of("llama", num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2),
    "mixtral": config_of("mixtral"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Gives a model, and its shards on a mesh, without a fault; nobody may change them."""
    base = tmp_path_factory.mktemp("faults")

    def give(name, mesh):
        whole, shards = base / name, base / f"{name}-{mesh}"
        if not whole.exists():
            save(whole, NAMES[name])
        if not shards.exists():
            cut(whole, shards, Mesh.parse(mesh))
        return whole, shards

    return give


@pytest.fixture
def broken(sound, tmp_path):
    """Gives a model and shards of it that may be changed."""

    def give(name, mesh):
        whole, shards = sound(name, mesh)
        shutil.copytree(shards, tmp_path / "broken")
        return whole, tmp_path / "broken"

    return give


def exchange(path, one, other):
    """Exchange the bytes of two `(tensor, rank)` parts."""
    a, b = values(path, *one), values(path, *other)
    assert not np.array_equal(a, b), "nothing would change"
    a[...], b[...] = b.copy(), a.copy()


def test_a_sound_checkpoint_passes(sound):
    for name, mesh in [
        ("llama", "tp=2"),
        ("llama", "tp=4"),
        ("llama", "pp=3,fsdp=2,tp=2"),
        ("mixtral", "tp=4,ep=2,etp=2"),
    ]:
        assert run(*sound(name, mesh)).status == "passed"


def ranks_exchanged(projection):
    def fault(path):
        name = f"{LAYER}.{projection}.weight"
        exchange(path, (name, 0), (name, 1))

    return fault


def layers_exchanged(path):
    with open_checkpoint(path, REPLICATE) as checkpoint:
        names = [name for name in checkpoint.manifest.tensors if name.startswith(f"{LAYER}.")]
    for name in names:
        for rank in (0, 1):
            exchange(path, (name, rank), (name.replace(LAYER, "model.layers.2"), rank))


def row_of_zeros(path):
    values(path, f"{LAYER}.mlp.up_proj.weight", 1)[5] = 0


def not_a_number(path):
    values(path, f"{LAYER}.self_attn.k_proj.weight", 1)[2, 3] = np.nan


def exponent_bit(path):
    part = values(path, f"{LAYER}.self_attn.v_proj.weight", 0)
    bits = part.view(np.uint32)
    bits[1, 2] ^= 1 << 30


def off_by_a_row(path):
    part = values(path, f"{LAYER}.self_attn.v_proj.weight", 1)
    part[...] = np.roll(part, 1, 0)


def norm_of_another_layer(path):
    for rank in (0, 1):
        norm = values(path, f"{LAYER}.input_layernorm.weight", rank)
        norm[...] = values(path, "model.layers.2.input_layernorm.weight", rank)


FAULTS = {
    "gate shards exchanged": ranks_exchanged("mlp.gate_proj"),
    "k shards exchanged": ranks_exchanged("self_attn.k_proj"),
    "q shards exchanged": ranks_exchanged("self_attn.q_proj"),
    "o shards exchanged": ranks_exchanged("self_attn.o_proj"),
    "down shards exchanged": ranks_exchanged("mlp.down_proj"),
    "layers exchanged": layers_exchanged,
    "a row of zeros": row_of_zeros,
    "an exponent bit": exponent_bit,
    "a value that is none": not_a_number,
    "v off by a row": off_by_a_row,
    "a norm of another layer": norm_of_another_layer,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_layer_is_found_and_named(broken, fault):
    whole, shards = broken("llama", "tp=2")
    FAULTS[fault](shards)
    result = run(whole, shards)
    assert result.status == "failed"
    wrong = {block.name for block in result.blocks if block.error > result.tolerance.warn}
    assert wrong == ({LAYER, "model.layers.2"} if fault == "layers exchanged" else {LAYER})
    assert max(block.error for block in result.blocks) > 1e-3
    assert result.output_error > 1e-4
    assert not result.notes
    assert any(finding.tensor == LAYER and finding.severity == "error" for finding in result.findings)


@pytest.mark.parametrize("mesh", ["pp=3,fsdp=2,tp=2", "fsdp=2"])
def test_a_fault_is_found_whatever_other_axes_there_are(broken, mesh):
    whole, shards = broken("llama", mesh)
    rank = 4 if "pp" in mesh else 0
    values(shards, f"{LAYER}.mlp.up_proj.weight", rank).flat[7] += 1
    result = run(whole, shards)
    assert result.status == "failed"
    assert [block.name for block in result.blocks if block.error > result.tolerance.warn] == [LAYER]


def test_a_single_last_bit_is_found_where_bits_must_be_equal(broken):
    whole, shards = broken("llama", "fsdp=2")
    bits = values(shards, f"{LAYER}.mlp.up_proj.weight", 0).view(np.uint32)
    bits[0] ^= 1
    result = run(whole, shards)
    assert result.status == "failed"
    assert "bits must be equal" in result.findings[0].message


def test_a_wrong_copy_of_key_value_heads_is_found(broken):
    """Two key/value heads on four ranks: rank 1 has the head of rank 0 again, and here another one."""
    whole, shards = broken("llama", "tp=4")
    name = f"{LAYER}.self_attn.k_proj.weight"
    values(shards, name, 1)[...] = values(shards, name, 2)
    result = run(whole, shards)
    assert result.status == "failed"
    assert [block.name for block in result.blocks if block.error > result.tolerance.warn] == [LAYER]


def test_a_norm_that_only_one_rank_has_wrong_is_found_and_the_rank_is_named(broken):
    whole, shards = broken("llama", "tp=2")
    values(shards, f"{LAYER}.input_layernorm.weight", 1)[3] += 1
    result = run(whole, shards)
    assert result.status == "failed"
    found = [finding.message for finding in result.findings]
    assert any(f"rank 1 (tp1) has another copy of {LAYER}.input_layernorm.weight" in each for each in found), found
    assert any(f"{LAYER} computes something else on rank 1 (tp1)" in each for each in found), found


def expert_part(shards, rank):
    """The file and name of a rank's stack of experts."""
    file, *_ = place(shards, f"{LAYER}.block_sparse_moe.experts.2.w1.weight", rank)
    return file, f"{LAYER}.mlp.experts.gate_up_proj"


def test_an_expert_that_is_zero_is_found(broken):
    whole, shards = broken("mixtral", "fsdp=2,ep=2")
    values(shards, f"{LAYER}.block_sparse_moe.experts.2.w1.weight", 1)[...] = 0
    result = run(whole, shards)
    assert result.status == "failed"
    assert [block.name for block in result.blocks if block.error > result.tolerance.warn] == [LAYER]


def test_experts_that_are_missing_are_found_and_the_rank_is_named(broken):
    whole, shards = broken("mixtral", "fsdp=2,ep=2")
    file, name = expert_part(shards, 1)
    with safe_open(file, "pt") as opened_file:
        told = opened_file.metadata()
        kept = {key: opened_file.get_tensor(key) for key in opened_file.keys() if key != name}  # noqa: SIM118
    assert len(kept) > 5
    save_file(kept, file, told)
    result = run(whole, shards)
    assert result.status == "failed"
    assert any("rank 1 (fsdp1) is to hold" in finding.message for finding in result.findings)


def test_files_of_two_ranks_exchanged_are_found(broken):
    """Their headers still say what they hold; each rank has the other's part."""
    whole, shards = broken("llama", "tp=2")
    one, two = sorted(shards.glob("shard-*.safetensors"))
    one.rename(shards / "aside")
    two.rename(one)
    (shards / "aside").rename(two)
    result = run(whole, shards)
    assert result.status == "failed"
    assert any("rank 0 (tp0) is to hold" in f.message and "its files do not" in f.message for f in result.findings)
