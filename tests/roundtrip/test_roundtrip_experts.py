"""Mixtures of experts: over every mesh that divides or cuts them, and in both of their forms, the same elements."""

from __future__ import annotations

import json
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FIXTURES, assert_loaded, assert_same, config_of, loaded, save, stored

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError, UsageError
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

MODELS = {name: describe_model(config_of(name)) for name in FIXTURES}
MOE = [name for name, model in MODELS.items() if any(t.spec.of_expert for t in model.own())]
FUSED = [
    name
    for name in MOE
    if any(len(f.tensors) > 1 for f in MODELS[name].fusions.values())
    and not name.startswith(("gemma4", "hy_v4", "minimax_m3_vl_text", "mistral4"))
]
"""Those whose experts transformers holds in another form than it saves."""
OTHERWISE_SPELLED = {
    "bailing_hybrid",
    "deepseek_v4",
    "exaone_moe",
    "glm5_next",
    "hy_v3",
    "kimi_linear",
    "kimi_linear-lora",
    "mimo_v2_flash",
    "minimax_m3_vl",
    "qwen4_exp",
    "qwen4_exp_text",
}
"""Those of which the Hub spells other tensors otherwise, too: names of experts in one form do not say the other's."""
SPELLED = [name for name in FUSED if name not in OTHERWISE_SPELLED]
MESHES = {
    "ep2": Mesh.of(dp=2, ep=2),
    "tp2-ep2": Mesh.of(tp=2, ep=2),
    "tp2-etp1": Mesh.of(tp=2, etp=1),
    "tp4-ep2-etp2": Mesh.of(tp=4, ep=2, etp=2),
    "pp2-dp2-ep2": Mesh.of(pp=2, dp=2, ep=2),
    "fsdp2-ep2": Mesh.of(fsdp=2, ep=2),
    "fsdp4-ep2": Mesh.of(fsdp=4, ep=2),
    "fsdp2-tp2-ep4": Mesh.of(fsdp=2, tp=2, ep=4),
    "tp2-fsdp3": Mesh.parse("tp=2,fsdp=3"),
}
THOROUGH = ("mixtral", "deepseek_v3", "gpt_oss")
"""Per-expert, with shared experts, and stacked on the Hub: these go through every mesh, the others through two."""
CASES = [
    pytest.param(name, mesh, id=f"{name}-{mesh}")
    for name in MOE
    for mesh in MESHES
    if name in THOROUGH or mesh in {"tp4-ep2-etp2", "pp2-dp2-ep2"}
]


def shapes(path):
    return {name: tuple(tensor.shape) for name, tensor in stored(path).items()}


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_there_and_back_is_the_identity_and_transformers_loads_what_lies_between(tiny, tmp_path, name, mesh):
    source, there, back = tiny(name), tmp_path / "ranks", tmp_path / "back"
    reshard(source.path, there, ReshardOptions(mesh=MESHES[mesh]))
    reshard(there, back, ReshardOptions(to="hf"))
    assert_same(stored(back), stored(source.path))
    assert digest(there).digest == digest(source.path).digest
    assert verify(there, VerifyOptions(level="full", against=source.path)).ok
    assert_loaded(loaded(there, source.kind), source)


@pytest.mark.parametrize("name", MOE)
def test_from_one_mesh_to_another(tiny, tmp_path, name):
    source = tiny(name)
    reshard(source.path, tmp_path / "one", ReshardOptions(mesh=MESHES["tp4-ep2-etp2"]))
    reshard(tmp_path / "one", tmp_path / "two", ReshardOptions(mesh=MESHES["fsdp4-ep2"], experts="keep"))
    assert_loaded(loaded(tmp_path / "two", source.kind), source)
    assert digest(tmp_path / "two").digest == digest(source.path).digest


def spell(name, source):
    """The name of a tensor, with the prefix that files have where the class has another."""
    return name.replace("model.", "backbone.", 1) if any(n.startswith("backbone.") for n in stored(source)) else name


@pytest.mark.parametrize("name", FUSED)
def test_keep_gives_back_the_form_of_the_source(tiny, tmp_path, name):
    fused = tmp_path / "fused"
    reshard(tiny(name).path, fused, ReshardOptions(experts="fused"))
    (fused / "shardctl.json").unlink()
    for form in ("keep", "split", "fused"):
        there, back = tmp_path / f"{form}-ranks", tmp_path / f"{form}-back"
        reshard(fused, there, ReshardOptions(mesh=Mesh.of(tp=2, ep=2), experts=form))
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(stored(back), stored(fused))


@pytest.mark.parametrize("name", SPELLED)
class TestForms:
    def test_fused_files_hold_the_state_dict_and_transformers_loads_them(self, tiny, tmp_path, name):
        source, fused = tiny(name), tmp_path / "fused"
        reshard(source.path, fused, ReshardOptions(experts="fused"))
        assert_same(stored(fused), {spell(n, source.path): t for n, t in source.model.state_dict().items()})
        assert_loaded(loaded(fused, source.kind), source)

    def test_fused_and_split_again_is_the_identity_with_one_digest(self, tiny, tmp_path, name):
        source, fused, split = tiny(name).path, tmp_path / "fused", tmp_path / "split"
        reshard(source, fused, ReshardOptions(experts="fused"))
        (fused / "shardctl.json").unlink()  # nothing but the arrays themselves says what they are
        reshard(fused, split, ReshardOptions(experts="split"))
        assert_same(stored(split), stored(source))
        assert digest(fused).digest == digest(split).digest == digest(source).digest
        assert digest(fused).tensors == digest(source).tensors
        assert verify(fused, VerifyOptions(level="full", against=source)).ok

    def test_one_repository_may_have_both(self, tiny, tmp_path, name):
        source, fused, mixed = tiny(name), tmp_path / "fused", tmp_path / "mixed"
        reshard(source.path, fused, ReshardOptions(experts="fused"))
        apart, together = stored(source.path), stored(fused)
        first = next(fusion for fusion in MODELS[name].fusions.values() if len(fusion.tensors) > 1)
        array, parts = spell(first.name, source.path), {spell(part, source.path) for part in first.tensors}
        tensors = {n: t for n, t in apart.items() if n not in parts} | {array: together[array]}
        mixed.mkdir()
        (mixed / "config.json").write_bytes((source.path / "config.json").read_bytes())
        save_file(tensors, mixed / "model.safetensors", {"format": "pt"})
        assert digest(mixed).digest == digest(source.path).digest
        reshard(mixed, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2, ep=2)))
        reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
        assert_same(stored(tmp_path / "back"), tensors)
        save_file({**apart, array: together[array]}, mixed / "model.safetensors", {"format": "pt"})
        with pytest.raises(SourceError, match="are both"):
            digest(mixed)

    def test_split_rank_files_have_the_names_of_the_hub(self, tiny, tmp_path, name):
        source = tiny(name).path
        reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(dp=4, ep=4), experts="split"))
        whole = shapes(source)
        found = {}
        for file in sorted((tmp_path / "ranks").glob("*.safetensors")):
            found |= shapes(file)
        assert {spell(n, source): shape for n, shape in found.items()} == whole

    def test_an_array_of_another_shape_is_refused(self, tiny, tmp_path, name):
        fused = tmp_path / "fused"
        reshard(tiny(name).path, fused, ReshardOptions(experts="fused"))
        (fused / "shardctl.json").unlink()
        file = fused / "model.safetensors"
        tensors = load_file(file)
        array = next(n for n in tensors if n.endswith(("gate_up_proj", "experts.up_proj")))
        save_file({**tensors, array: tensors[array][:, :-2].clone()}, file, {"format": "pt"})
        with pytest.raises(SourceError, match="up_proj has shape"):
            digest(fused)


def test_a_rank_of_ep_holds_its_experts_in_one_array(tiny, tmp_path):
    reshard(tiny("mixtral").path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(dp=2, ep=2)))
    files = sorted((tmp_path / "ranks").glob("*.safetensors"))
    assert [f.name for f in files] == [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]
    second = shapes(files[1])
    assert second["model.layers.0.mlp.experts.gate_up_proj"] == (2, 96, 32)
    assert not [n for n in second if "experts" not in n]  # the first rank has all that is not an expert's


def test_a_filter_leaves_parts_under_their_own_names(tiny, tmp_path):
    source = tiny("mixtral").path
    reshard(source, tmp_path / "some", ReshardOptions(experts="fused", include=r"experts\.1\."))
    expected = {n: t for n, t in stored(source).items() if ".experts.1." in n}
    assert len(expected) == 6
    assert_same(stored(tmp_path / "some"), expected)
    reshard(source, tmp_path / "layer", ReshardOptions(mesh=Mesh.of(tp=2), include=r"layers\.1\."))
    reshard(tmp_path / "layer", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), {n: t for n, t in stored(source).items() if ".layers.1." in n})


def test_experts_1_and_10_are_two_experts(tmp_path):
    source = save(tmp_path / "source", {**config_of("mixtral"), "num_local_experts": 12})
    reshard(source.path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(dp=12, ep=12), experts="split"))
    for rank in range(12):
        (file,) = (tmp_path / "ranks").glob(f"shard-{rank + 1:05d}-*.safetensors")
        held = {name.split(".experts.")[1].split(".")[0] for name in stored(file) if ".experts." in name}
        assert held == {str(rank)}
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source.path))


@pytest.mark.parametrize(
    ("mesh", "message", "hint"),
    [
        (Mesh.of(dp=3, ep=3), r"experts\.0\.w1\.weight \[48, 32\] over ep=3: 4 experts", "use --ep 1, 2 or 4"),
        (
            Mesh.of(dp=5, etp=5),
            r"experts\.0\.w1\.weight \[48, 32\] over etp=5: 48 columns of each",
            "use --etp 1",  # etp divides the ranks of a stage, which are five
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_with_what_can(tiny, tmp_path, mesh, message, hint):
    with pytest.raises(PartitionError, match=message) as caught:
        reshard(tiny("mixtral").path, tmp_path / "out", ReshardOptions(mesh=mesh))
    assert caught.value.hint.startswith(hint)


def test_a_model_whose_experts_have_one_form_is_said_to(tiny, tmp_path):
    with pytest.raises(UsageError, match="LlamaForCausalLM has one"):
        reshard(tiny("llama").path, tmp_path / "out", ReshardOptions(experts="split"))


def test_experts_of_several_types_are_not_fused(tiny, tmp_path):
    source = tmp_path / "source"
    reshard(tiny("mixtral").path, source, ReshardOptions(to="hf"))
    (source / "shardctl.json").unlink()
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    save_file({**tensors, name: tensors[name].to(torch.float32)}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"cannot hold both .*, which is BF16, and .*, which is F32") as caught:
        reshard(source, tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert caught.value.hint == "use --experts split"
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2), experts="split"))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source))


def stored_with(source, folder, more):
    """A copy of a checkpoint that also stores `more`."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({**stored(source), **more}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_layers_that_predict_further_tokens_travel_along_and_transformers_passes_them_by(tiny, tmp_path, name):
    further = {t.name: torch.randn(t.shape).bfloat16() for t in MODELS[name].tensors.values() if t.row.optional}
    assert any(".experts.3." in n for n in further)
    source = stored_with(tiny(name).path, tmp_path / "source", further)
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=2, tp=2, ep=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source))
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source)).ok
    assert_loaded(loaded(tmp_path / "ranks", tiny(name).kind), tiny(name))


@pytest.mark.parametrize("mesh", ["ep2", "tp2-ep2", "fsdp2-tp2-ep4", "tp2-fsdp3"])
def test_mxfp4_blocks_keep_their_bits(tiny, tmp_path, mesh):
    config = {**config_of("gpt_oss"), "quantization_config": {"quant_method": "mxfp4"}}
    made = {
        t.name: torch.randint(0, 256, t.shape, dtype=torch.uint8)
        for t in describe_model(config).own()
        if t.name.endswith(("_blocks", "_scales"))
    }
    others = {n: t for n, t in stored(tiny("gpt_oss").path).items() if not n.endswith(("gate_up_proj", "down_proj"))}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file({**others, **made}, source / "model.safetensors", {"format": "pt"})
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=MESHES[mesh]))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source))
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source)).ok


def test_mxfp4_blocks_that_ranks_do_not_divide_come_back(tmp_path):
    config = {**config_of("gpt_oss"), "intermediate_size": 96, "quantization_config": {"quant_method": "mxfp4"}}
    made = {t.name: torch.arange(prod(t.shape)).to(torch.uint8).reshape(t.shape) for t in describe_model(config).own()}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(made, source / "model.safetensors", {"format": "pt"})
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source))
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source)).ok


def test_a_cut_through_an_mxfp4_block_is_refused_with_the_degrees_that_work(tmp_path):
    config = {**config_of("gpt_oss"), "quantization_config": {"quant_method": "mxfp4"}}
    tensors = {t.name: torch.zeros(t.shape, dtype=torch.uint8) for t in describe_model(config).own()}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(PartitionError, match="over etp=4: 2 MXFP4 blocks of 32 columns") as caught:
        reshard(source, tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=4)))
    assert caught.value.hint == "use --ep 4, which leaves each expert whole, or --etp 1 or 2"


def test_stacks_of_experts_may_lie_either_way_and_come_back_as_they_were(tiny, tmp_path):
    """transformers 5 saves Qwen3-VL's transposed against the Hub's, and reads both (`Transpose(check_dims=True)`)."""
    ours, hub = tiny("qwen3_vl_moe"), tmp_path / "hub"
    swapped = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in stored(ours.path).items()}
    assert swapped["model.language_model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 32, 48)
    hub.mkdir()
    (hub / "config.json").write_bytes((ours.path / "config.json").read_bytes())
    save_file(swapped, hub / "model.safetensors", {"format": "pt"})
    assert digest(hub).digest == digest(ours.path).digest
    for source, held in ((hub, swapped), (ours.path, stored(ours.path))):
        there, back = tmp_path / f"{source.name}-ranks", tmp_path / f"{source.name}-back"
        reshard(source, there, ReshardOptions(mesh=Mesh.of(tp=2, ep=2)))
        assert_loaded(loaded(there, ours.kind), ours)
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(stored(back), held)
        reshard(source, tmp_path / f"{source.name}-dcp", ReshardOptions(to="dcp"))
        reshard(tmp_path / f"{source.name}-dcp", tmp_path / f"{source.name}-again", ReshardOptions(to="hf"))
        assert digest(tmp_path / f"{source.name}-again").digest == digest(hub).digest
