"""Adapters of Megatron-Bridge become what its export makes of them.

Megatron-Bridge does not run without a GPU: torch's DCP writes the files here, with the names and global shapes that its
source gives, and the expected matrices follow its export (models/conversion/peft_bridge.py), written out once more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

HF = Path(__file__).parents[2] / "fixtures/torch_dist/hf"
RANK, ALPHA = 2, 16
LORA = "megatron.bridge.peft.lora.LoRA"
CANONICAL = "megatron.bridge.peft.canonical_lora.CanonicalLoRA"
PREFIX = "base_model.model.model.layers"


class Sizes:
    """What the config of a base says."""

    def __init__(self, base):
        config = json.loads((HF / base / "config.json").read_text())
        self.layers, self.hidden = config["num_hidden_layers"], config["hidden_size"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.head = config.get("head_dim") or self.hidden // self.heads
        self.inner = config["intermediate_size"]
        self.linears = {
            "self_attention.linear_qkv": ((self.heads + 2 * self.groups) * self.head, self.hidden),
            "self_attention.linear_proj": (self.hidden, self.heads * self.head),
            "mlp.linear_fc1": (2 * self.inner, self.hidden),
            "mlp.linear_fc2": (self.hidden, self.inner),
        }


def build_fused(sizes):
    """Build the arrays of LoRA, of one layer after the other."""
    torch.manual_seed(1)
    return [
        {
            f"{name}.adapter.linear_{side}.weight": torch.randn((RANK, columns) if side == "in" else (rows, RANK))
            for name, (rows, columns) in sizes.linears.items()
            for side in ("in", "out")
        }
        for _ in range(sizes.layers)
    ]


def write(path, layers, *, stacked=True, kind=LORA, dim=RANK, **other):
    """Write the arrays as DCP does, with what makes them a checkpoint of Megatron-LM."""
    path.mkdir()
    state = dict(other)
    for name in layers[0]:
        if stacked:
            state[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            state |= {f"decoder.layers.{number}.{name}": layer[name] for number, layer in enumerate(layers)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (path / "run_config.yaml").write_text(
        f"model:\n  alpha: 1\npeft:\n  _target_: {kind}\n  alpha: {ALPHA}\n  dim: {dim}\n  dropout: 0.0\n"
        "  target_modules:\n  - linear_qkv\n  - linear_proj\ntrain:\n  dim: 3\n"
    )
    return path


def export_fused(sizes, layers):
    """Export LoRA: the first matrix is each projection's, the second is split as the fused weight is."""
    expected = {}
    per_group = sizes.heads // sizes.groups
    whole = per_group + 2
    for number, layer in enumerate(layers):
        ends = {name: (layer[f"{name}.adapter.linear_in.weight"], layer[f"{name}.adapter.linear_out.weight"])
                for name in sizes.linears}  # fmt: skip
        first, second = ends["self_attention.linear_qkv"]
        heads = second.reshape(-1, sizes.head, RANK)
        q = torch.cat([heads[whole * group : whole * group + per_group] for group in range(sizes.groups)])
        found = {
            "self_attn.q_proj": (first, q.reshape(-1, RANK)),
            "self_attn.k_proj": (first, heads[per_group::whole].reshape(-1, RANK)),
            "self_attn.v_proj": (first, heads[per_group + 1 :: whole].reshape(-1, RANK)),
            "self_attn.o_proj": ends["self_attention.linear_proj"],
            "mlp.down_proj": ends["mlp.linear_fc2"],
        }
        first, second = ends["mlp.linear_fc1"]
        found["mlp.gate_proj"], found["mlp.up_proj"] = ((first, half) for half in torch.chunk(second, 2))
        for name, (a, b) in found.items():
            expected |= {
                f"{PREFIX}.{number}.{name}.lora_A.weight": a,
                f"{PREFIX}.{number}.{name}.lora_B.weight": b,
            }
    return expected


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("base", ["llama", "qwen2-tied", "qwen3-bf16"])
@pytest.mark.parametrize("stacked", [True, False])
def test_lora_of_fused_layers_is_split_as_the_export_splits_it(tmp_path, base, stacked):
    sizes = Sizes(base)
    layers = build_fused(sizes)
    source = write(tmp_path / "bridge", layers, stacked=stacked)
    given = SourceOptions(config=HF / base)
    reshard(source, tmp_path / "out", source_options=given)
    assert_same(load_file(tmp_path / "out/adapter_model.safetensors"), export_fused(sizes, layers))
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_dora"]) == ("LORA", RANK, ALPHA, False)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source), source_options=given).ok
    found = inspect(source, source_options=given)
    assert (found.adapter.kind, found.adapter.modules, found.adapter.ranks) == ("LoRA", 7 * sizes.layers, (RANK,))


def test_the_result_is_merged_as_the_products_of_megatron_are_added(tmp_path):
    sizes = Sizes("llama")
    layers = build_fused(sizes)
    source = write(tmp_path / "bridge", layers)
    reshard(source, tmp_path / "out", source_options=SourceOptions(config=HF / "llama"))
    reshard(HF / "llama", tmp_path / "merged", ReshardOptions(merge=(tmp_path / "out",)))
    before, after = load_file(HF / "llama/model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    for number, layer in enumerate(layers):
        a, b = (layer[f"mlp.linear_fc1.adapter.linear_{side}.weight"] for side in ("in", "out"))
        names = [f"model.layers.{number}.mlp.{kind}_proj.weight" for kind in ("gate", "up")]
        fused = torch.cat([before[name] for name in names]) + ALPHA / RANK * (b @ a)
        torch.testing.assert_close(torch.cat([after[name] for name in names]), fused)


def test_an_adapter_is_cut_for_a_mesh_and_joined_again(tmp_path):
    sizes = Sizes("llama")
    layers = build_fused(sizes)
    source = write(tmp_path / "bridge", layers)
    given = SourceOptions(config=HF / "llama")
    reshard(source, tmp_path / "tp2", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=given)
    reshard(tmp_path / "tp2", tmp_path / "out", ReshardOptions(to="hf"), source_options=given)
    assert_same(load_file(tmp_path / "out/adapter_model.safetensors"), export_fused(sizes, layers))


def test_projections_with_matrices_of_their_own_keep_them(tmp_path):
    sizes = Sizes("llama")
    rows = {"q": sizes.heads * sizes.head, "v": sizes.groups * sizes.head, "up": sizes.inner}
    modules = {"q": "self_attention.linear_qkv", "v": "self_attention.linear_qkv", "up": "mlp.linear_fc1"}
    named = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "up": "mlp.up_proj"}
    layers, expected = [], {}
    for number in range(sizes.layers):
        layer = {}
        for part, count in rows.items():
            for side, letter, shape in (("in", "A", (RANK, sizes.hidden)), ("out", "B", (count, RANK))):
                layer[f"{modules[part]}.adapter.adapter_{part}.linear_{side}.weight"] = torch.randn(shape)
                name = f"{PREFIX}.{number}.{named[part]}.lora_{letter}.weight"
                expected[name] = layer[f"{modules[part]}.adapter.adapter_{part}.linear_{side}.weight"]
        layers.append(layer)
    source = write(tmp_path / "bridge", layers, kind=CANONICAL)
    reshard(source, tmp_path / "out", source_options=SourceOptions(config=HF / "llama"))
    assert_same(load_file(tmp_path / "out/adapter_model.safetensors"), expected)


def test_what_the_export_does_not_tell_is_refused(tmp_path):
    layers, given = build_fused(Sizes("llama")), SourceOptions(config=HF / "llama")
    dora = write(tmp_path / "dora", layers, kind="megatron.bridge.peft.dora.DoRA")
    vector = {"decoder.layers.mlp.linear_fc2.adapter.weight_magnitude": torch.ones(2, 16)}
    magnitude = write(tmp_path / "magnitude", layers, **vector)
    other = write(tmp_path / "rank", layers, dim=4)
    for source, said in ((dora, "DoRA"), (magnitude, "weight_magnitude"), (other, "dim 4, but matrices have rank 2")):
        with pytest.raises(UnsupportedError, match=said) as caught:
            reshard(source, tmp_path / "out", source_options=given)
        assert "export_adapter_ckpt" in caught.value.hint
    source = write(tmp_path / "bridge", layers)
    with pytest.raises(SourceError, match="nothing says of which model"):
        reshard(source, tmp_path / "out")
    assert inspect(source).adapter is None  # arrays, of which nothing more is known
    with pytest.raises(SourceError, match=r"has shape \[2, 2, 16\], but the model gives it \[4, 2, 16\]"):
        reshard(source, tmp_path / "out", source_options=SourceOptions(config=HF / "llama-4-layers"))
    (source / "run_config.yaml").unlink()
    with pytest.raises(SourceError, match=r"has no run_config\.yaml"):
        reshard(source, tmp_path / "out", source_options=given)
