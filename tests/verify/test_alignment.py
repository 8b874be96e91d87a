"""What ranks hold must belong together: found from the boxes in their files and the families' tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardctl.base.errors import PartitionError, UsageError
from shardctl.models import describe_model
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor, compute_dense_strides
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.pieces import PlacedCheckpoint, balance_stages
from shardctl.verify.alignment import check_alignment
from shardctl.verify.rank_parts import check_rank_parts

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
FIXTURES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
MESHES = (
    {"tp": 2},
    {"fsdp": 2},
    {"pp": 2, "tp": 2},
    {"fsdp": 2, "tp": 2},
    {"pp": 2, "fsdp": 2, "tp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "etp": 2},
    {"fsdp": 4, "ep": 2},
)


def config_of(name, **changes):
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}


def shard(rank):
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def cut(config, mesh, **options):
    """A model and the manifest of its ranks, as if they were written."""
    model = describe_model(config, **options)
    tensors = tuple(
        Tensor(t.name, t.dtype, t.shape, (), ties=t.ties) for t in model.own() if not t.free and not t.row.buffer
    )
    specs = {t.name: model.tensors[t.name].spec for t in tensors}
    placed = PlacedCheckpoint(tensors, specs, mesh, balance_stages([1] * model.layers, 0, 0, mesh.degree("pp")))
    chunks = {t.name: [] for t in tensors}
    for rank, held in placed.ranks():
        for one in held:
            for box in one.boxes:
                chunks[one.tensor.name].append(chunk(one.tensor, box, rank))
    found = {t.name: replace(t, chunks=tuple(chunks[t.name])) for t in tensors}
    return model, Manifest("ranks", found, {})


def chunk(tensor, box, rank):
    return Chunk(box, tensor.dtype, Region(shard(rank), 0, compute_dense_strides(tensor.dtype, box.shape)), tensor.name)


def stored(manifest, name, boxes):
    """The manifest with other boxes of one tensor: rank -> boxes."""
    tensor = manifest.tensors[name]
    chunks = tuple(chunk(tensor, box, rank) for rank, held in boxes.items() for box in held)
    return replace(manifest, tensors={**manifest.tensors, name: replace(tensor, chunks=chunks)})


def boxes_of(manifest, name):
    held = {}
    for each in manifest.tensors[name].chunks:
        held.setdefault(int(each.where.file[6:11]) - 1, []).append(each.box)
    return held


def both(model, manifest, mesh):
    """Findings with the mesh known, and without."""
    return [list(check_alignment(manifest, model, known)) for known in (mesh, None)]


def place(model, manifest, mesh):
    """What the mesh gives to each rank."""
    specs = {name: model.tensors[name].spec for name in manifest.tensors}
    stages = balance_stages([1] * model.layers, 0, 0, mesh.degree("pp"))
    return PlacedCheckpoint(tuple(manifest.tensors.values()), specs, mesh, stages)


def rows(*spans, columns):
    return [Box((a, 0), (b - a, columns)) for a, b in spans]


@pytest.mark.parametrize("name", FIXTURES)
def test_what_shardctl_cuts_is_aligned(name):
    tried = 0
    for degrees in MESHES:
        mesh = Mesh.of(**degrees)
        try:
            model, manifest = cut(config_of(name), mesh)
        except (PartitionError, UsageError):  # this model is too small
            continue
        tried += 1
        assert both(model, manifest, mesh) == [[], []], degrees
        assert list(check_rank_parts(manifest, place(model, manifest, mesh))) == [], degrees
    assert tried > 0


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
@pytest.mark.parametrize("tp", [4, 8])
def test_heads_kept_on_several_ranks_are_aligned(name, tp):
    changes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 32}
    mesh = Mesh.of(tp=tp)
    model, manifest = cut(config_of(name, **changes), mesh, kv_heads="replicate")
    assert both(model, manifest, mesh) == [[], []]


LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 48}
ATTENTION = "model.layers.1.self_attn."
MLP = "model.layers.1.mlp."


@pytest.fixture
def llama():
    return (*cut(config_of("llama", **LLAMA), Mesh.of(tp=2)), Mesh.of(tp=2))


def exchanged(manifest, name):
    held = boxes_of(manifest, name)
    return stored(manifest, name, {0: held[1], 1: held[0]})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{MLP}gate_proj.weight", f"{MLP}gate_proj.weight is not cut as {MLP}down_proj.weight"),
        (f"{MLP}up_proj.weight", "has 24:48 where 0:24 belong to it"),
        (f"{ATTENTION}q_proj.weight", "of 8 attention heads, rank 0"),
        (f"{ATTENTION}k_proj.weight", "has key/value heads 2:4, but its attention heads 0:4"),
        (f"{ATTENTION}v_proj.weight", f"of {ATTENTION}o_proj.weight, use 0:2"),
    ],
)
def test_ranks_that_hold_each_others_part_are_found(llama, name, said):
    model, manifest, mesh = llama
    for findings in both(model, exchanged(manifest, name), mesh):
        (found,) = findings
        assert said in found.message
        assert (found.severity, found.check, found.tensor) == ("error", "alignment", name)
        assert found.file == shard(0)
        assert found.box


def test_an_output_that_is_cut_in_another_way_than_its_input_is_found(llama):
    model, manifest, mesh = llama
    down = exchanged(manifest, f"{MLP}down_proj.weight")
    for findings in both(model, down, mesh):
        assert {found.tensor for found in findings} == {f"{MLP}gate_proj.weight", f"{MLP}up_proj.weight"}


def test_a_cut_inside_a_head_is_found(llama):
    model, manifest, mesh = llama
    name = f"{ATTENTION}v_proj.weight"
    off = stored(manifest, name, {0: rows((0, 7), columns=32), 1: rows((7, 16), columns=32)})
    for findings in both(model, off, mesh):
        (found,) = findings
        assert found.tensor == name
        assert "elements 0:7" in found.message or "elements 7:16" in found.message


PHI3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("name", "extent"),
    [("model.layers.0.mlp.gate_up_proj.weight", 96), ("model.layers.0.self_attn.qkv_proj.weight", 64)],
)
def test_a_contiguous_cut_of_a_fused_tensor_is_found_though_every_element_is_there(name, extent):
    mesh = Mesh.of(tp=2)
    model, manifest = cut(config_of("phi3", **PHI3), mesh)
    half = extent // 2
    halves = stored(manifest, name, {0: rows((0, half), columns=32), 1: rows((half, extent), columns=32)})
    for findings in both(model, halves, mesh):
        (found,) = findings
        assert found.tensor == name
        assert "down_proj" in found.message or "o_proj" in found.message


def test_a_contiguous_cut_of_a_fused_tensor_is_right_for_fsdp():
    mesh = Mesh.of(fsdp=2)
    model, manifest = cut(config_of("phi3", **PHI3), mesh)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert boxes_of(manifest, name)[0] == rows((0, 48), columns=32)
    assert both(model, manifest, mesh) == [[], []]


def test_gpt2_whose_weights_are_transposed():
    mesh = Mesh.of(tp=2)
    model, manifest = cut(config_of("gpt2"), mesh)
    name = "transformer.h.0.attn.c_attn.weight"
    whole = manifest.tensors[name].shape
    half = whole[1] // 2
    wrong = {0: [Box((0, 0), (whole[0], half))], 1: [Box((0, half), (whole[0], half))]}
    for findings in both(model, stored(manifest, name, wrong), mesh):
        assert name in {found.tensor for found in findings}


def test_a_tensor_that_a_rank_lacks_is_found_where_the_mesh_is_known(llama):
    model, manifest, mesh = llama
    name = "model.layers.1.input_layernorm.weight"
    lacking = stored(manifest, name, {0: boxes_of(manifest, name)[0]})
    (found,), nothing = both(model, lacking, mesh)
    assert found.message == (
        f"{name} is on no rank of pp0 dp0 cp0 tp1, which have model.layers.1.self_attn.q_proj.weight of the same layer"
    )
    assert nothing == []


def test_rows_with_other_columns_are_no_part_of_a_layer(llama):
    model, manifest, mesh = llama
    name = f"{MLP}gate_proj.weight"
    wrong = {
        0: [Box((0, 0), (24, 16)), Box((24, 16), (24, 16))],
        1: [Box((0, 16), (24, 16)), Box((24, 0), (24, 16))],
    }
    found, _ = both(model, stored(manifest, name, wrong), mesh)
    assert f"{name} on rank 0 (tp0) has other columns in some rows" in found[0].message


def test_an_expert_on_two_ranks_of_ep_is_found():
    mesh = Mesh.of(dp=2, ep=2)
    model, manifest = cut(config_of("mixtral"), mesh)
    name = next(n for n in manifest.tensors if ".experts.0." in n)
    (box,) = boxes_of(manifest, name)[0]
    found, _ = both(model, stored(manifest, name, {0: [box], 1: [box]}), mesh)
    assert [f.tensor for f in found] == [name]
    assert "but ep gives each expert to one" in found[0].message


def test_the_parts_of_an_expert_under_etp_belong_together():
    mesh = Mesh.of(dp=4, ep=2, etp=2)
    model, manifest = cut(config_of("mixtral"), mesh)
    name = next(n for n in manifest.tensors if n.endswith(".experts.0.w1.weight"))
    held = boxes_of(manifest, name)
    (one, other) = sorted(held)
    wrong = stored(manifest, name, {one: held[other], other: held[one]})
    for findings in both(model, wrong, mesh):
        assert [f.tensor for f in findings] == [name]


def test_the_tensors_of_an_expert_are_on_one_rank_whatever_the_mesh():
    mesh = Mesh.of(dp=2, ep=2)
    model, manifest = cut(config_of("mixtral"), mesh)
    name = next(n for n in manifest.tensors if n.endswith(".experts.0.w2.weight"))
    ((owner, boxes),) = boxes_of(manifest, name).items()
    for findings in both(model, stored(manifest, name, {1 - owner: boxes}), mesh):
        assert [finding.tensor for finding in findings] == [name]
        assert "of the same expert is on other ranks" in findings[0].message


@pytest.mark.parametrize(
    ("degrees", "config", "name"),
    [
        ({"tp": 2}, "llama", "model.layers.1.input_layernorm.weight"),
        ({"pp": 2, "tp": 2}, "llama", "model.layers.1.self_attn.q_proj.weight"),
        ({"fsdp": 2}, "llama", "model.norm.weight"),
        ({"dp": 2, "ep": 2}, "mixtral", "model.layers.0.block_sparse_moe.experts.1.w2.weight"),
        ({"dp": 2, "ep": 2}, "gpt_oss", "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_a_part_on_a_rank_that_the_mesh_does_not_give_it_to_is_found(degrees, config, name):
    mesh = Mesh.of(**degrees)
    model, manifest = cut(config_of(config), mesh)
    held, placed = boxes_of(manifest, name), place(model, manifest, mesh)
    moved = {(rank + 1) % mesh.world: boxes for rank, boxes in held.items()}
    lacking = dict(list(held.items())[1:])
    for wrong, said in ((moved, "which the mesh does not give to it"), (lacking, "lacks")):
        if moved == held and wrong is moved:  # every rank holds all of it
            continue
        (found,) = check_rank_parts(stored(manifest, name, wrong), placed)
        assert (found.severity, found.check, found.tensor) == ("error", "ranks", name)
        assert said in found.message


def test_files_of_more_ranks_than_the_mesh_has(llama):
    model, manifest, mesh = llama
    files = {shard(5): CheckpointFile(shard(5), 8)}
    (found,) = check_rank_parts(replace(manifest, files=files), place(model, manifest, mesh))
    assert "has 2 ranks, and there are files of rank 5" in found.message


def test_what_is_not_of_ranks_is_not_looked_at(llama):
    model, manifest, _ = llama
    whole = {
        name: replace(t, chunks=tuple(replace(c, where=replace(c.where, file="model.safetensors")) for c in t.chunks))
        for name, t in manifest.tensors.items()
    }
    assert both(model, replace(manifest, tensors=whole), None) == [[], []]


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 16]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "intermediate_size": 256}


@pytest.mark.parametrize(
    ("degrees", "config", "changes", "name"),
    [
        ({"fsdp": 2}, "llama", LLAMA, f"{MLP}up_proj.weight"),
        ({"fsdp": 2}, "llama", LLAMA, f"{ATTENTION}v_proj.weight"),
        ({"fsdp": 2}, "gpt_oss", {}, "model.layers.0.mlp.experts.gate_up_proj_bias"),
        ({"dp": 2, "ep": 2}, "gpt_oss", {}, "model.layers.0.mlp.experts.down_proj"),
        ({"dp": 2, "ep": 2}, "gpt_oss", {}, "model.layers.0.mlp.experts.gate_up_proj"),
        ({"tp": 2}, "gpt_oss", {}, "model.layers.0.mlp.experts.gate_up_proj"),
        ({"tp": 2}, "llama", {**WIDE, "quantization_config": FP8}, f"{MLP}up_proj.weight_scale_inv"),
        ({"tp": 2}, "llama", {**WIDE, "quantization_config": FP8}, f"{MLP}gate_proj.weight"),
        ({"tp": 2}, "llama", {**WIDE, "quantization_config": FP8}, f"{ATTENTION}q_proj.weight"),
        ({"tp": 2}, "llama", {**WIDE, "quantization_config": FP8}, f"{ATTENTION}k_proj.weight_scale_inv"),
        ({"tp": 2}, "llama", {**WIDE, "quantization_config": GPTQ}, f"{MLP}down_proj.qweight"),
        ({"tp": 2}, "llama", {**WIDE, "quantization_config": GPTQ}, f"{ATTENTION}o_proj.scales"),
    ],
)
def test_parts_that_are_traded_are_found_without_a_mesh(degrees, config, changes, name):
    mesh = Mesh.of(**degrees)
    model, manifest = cut(config_of(config, **changes), mesh)
    assert both(model, manifest, mesh) == [[], []]
    for findings in both(model, exchanged(manifest, name), mesh)[1:]:
        assert findings
        assert {found.severity for found in findings} == {"error"}
        assert any(name in found.message for found in findings)


def test_an_expert_some_of_whose_parts_are_on_another_rank():
    """Of gate a rank of ep and etp has its half still; of down it has that of an expert of another rank of ep."""
    mesh = Mesh.of(dp=4, ep=2, etp=2)
    model, manifest = cut(config_of("mixtral"), mesh)
    one, other = (f"model.layers.0.block_sparse_moe.experts.{n}.w2.weight" for n in (0, 3))
    ours, theirs = boxes_of(manifest, one), boxes_of(manifest, other)
    (mine, *rest), (far, *others) = sorted(ours), sorted(theirs)
    wrong = stored(manifest, one, {far: ours[mine], **{rank: ours[rank] for rank in rest}})
    wrong = stored(wrong, other, {mine: theirs[far], **{rank: theirs[rank] for rank in others}})
    findings = list(check_alignment(wrong, model, None))
    assert {found.tensor for found in findings} == {one, other}
    assert all("of the same expert" in found.message for found in findings)
