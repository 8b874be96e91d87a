"""Rules derived for quantized weights: scales and codes are cut where their weight is, and not through a block."""

from __future__ import annotations

import pytest
import torch
from codes import CODECS, LLAMA, encoded, plain_state, write
from test_quantized import MIXTRAL, local, manifest

from shardctl.base.errors import PartitionError, UnsupportedError
from shardctl.models import describe_model, load_rules
from shardctl.models.derived import derive_model, format_rule_file
from shardctl.models.rules.untabled import build_untabled_model
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import check_cuts
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard

METHODS = ("fp8-blocks", "gptq-4", "gptq-3", "awq", "fbgemm-fp8")
NOBODY = {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}


def make(name, config):
    """The config of a quantized model that no table knows, and what is stored of it."""
    codec, plain = CODECS[name], describe_model(config)
    state = plain_state(config)
    if plain.fusions:  # experts, by names of their own
        state = {t.name: torch.randn(t.shape).bfloat16() for t in plain.own()}
    routers = tuple(n.removesuffix(".weight") for n in state if n.endswith("block_sparse_moe.gate.weight"))
    stored = encoded(codec.__class__(codec.settings, codec.encode, codec.decode, (*codec.skipped, *routers)), state)
    return {**config, **NOBODY, "quantization_config": codec.settings}, stored, state


def derive(config, stored):
    found = manifest(stored)
    return derive_model(config, build_untabled_model(config, found).model, share_kv=True, library=False)


def list_sections(tensor):
    return [[(cut.axis, [(s.size, s.unit) for s in cut.sections]) for cut in dim] for dim in tensor.spec.cuts]


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("name", METHODS)
def test_a_ranks_part_of_the_arrays_is_its_part_of_the_weight(name, config):
    """What a rank's arrays are decoded to is its part of what the whole arrays are decoded to."""
    settings, stored, state = make(name, config)
    unquantized = {key: value for key, value in settings.items() if key != "quantization_config"}
    model, plain, mesh = derive(settings, stored), derive(unquantized, state), Mesh.of(tp=2)
    compared = 0
    for weight, tensor in plain.tensors.items():
        module = weight.removesuffix(".weight")
        arrays = {n.removeprefix(f"{module}."): n for n in stored if n.startswith(f"{module}.") and n not in state}
        if not arrays:
            continue
        if weight in stored:
            arrays["weight"] = weight
        whole = CODECS[name].decode({short: stored[full] for short, full in arrays.items()})
        assert tensor.spec.axes, weight
        for rank in range(2):
            at, mine = mesh.coordinate(rank), {}
            for short, full in arrays.items():
                check_cuts(full, model.tensors[full].shape, model.tensors[full].spec, mesh)
                assert model.tensors[full].spec.member == tensor.spec.member
                mine[short] = local(stored[full], model.tensors[full].spec, mesh, at)
            assert torch.equal(CODECS[name].decode(mine), local(whole, tensor.spec, mesh, at)), (module, rank)
            compared += 1
    assert compared >= 2 * 7 * 2


@pytest.mark.parametrize("name", METHODS)
def test_it_comes_back_bit_for_bit_and_its_rules_are_printed(name, tmp_path):
    config, stored, _ = make(name, MIXTRAL)
    source = write(tmp_path / "source", config, stored)
    for mesh in (Mesh.of(tp=2), Mesh.of(dp=2, ep=2)):
        to = tmp_path / str(mesh).replace(" ", "")
        reshard(source, to, ReshardOptions(mesh=mesh))
        reshard(to, tmp_path / f"{to.name}-back", ReshardOptions(to="hf"))
        assert digest(tmp_path / f"{to.name}-back").digest == digest(source).digest
    model = derive(config, stored)
    (tmp_path / "rules.toml").write_text(format_rule_file(model.derivation))
    read = load_rules(tmp_path / "rules.toml").model(manifest(stored))
    for each, tensor in model.tensors.items():
        assert list_sections(read.tensors[each]) == list_sections(tensor), each
        assert read.tensors[each].spec.member == tensor.spec.member, each


def test_a_cut_through_a_block_is_refused_as_with_a_table():
    config, stored, _ = make("fp8-blocks", {**LLAMA, "num_hidden_layers": 1})
    model = derive(config, stored)
    output = model.tensors["model.layers.0.self_attn.o_proj.weight"]
    with pytest.raises(PartitionError, match="blocks of"):
        check_cuts(output.name, output.shape, output.spec, Mesh.of(tp=8))


@pytest.mark.parametrize("name", ["modelopt-nvfp4"])
def test_what_the_arrays_do_not_tell_is_refused(name):
    config, stored, _ = make(name, LLAMA)
    with pytest.raises(UnsupportedError, match="how quantized weights of NobodyForCausalLM are cut is not known"):
        derive(config, stored)
