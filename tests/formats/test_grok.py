"""Grok-2's files: what all ranks share, and parts of the experts for each rank."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.options import ReshardOptions
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

WIDTH = 32
CONFIG = {
    "architectures": ["Grok1ForCausalLM"],
    "model_type": "git",
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "residual_moe": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
MODULES = {
    "mlp.gate_proj": (48, WIDTH),
    "mlp.down_proj": (WIDTH, 48),
    "mlp.up_proj": (48, WIDTH),
    **{f"block_sparse_moe.experts.{n}.w1": (24, WIDTH) for n in range(2)},
    **{f"block_sparse_moe.experts.{n}.w2": (WIDTH, 24) for n in range(2)},
    **{f"block_sparse_moe.experts.{n}.w3": (24, WIDTH) for n in range(2)},
    "self_attn.k_proj": (16, WIDTH),
    "self_attn.o_proj": (WIDTH, 32),
    "self_attn.q_proj": (32, WIDTH),
    "self_attn.v_proj": (16, WIDTH),
    **{f"{name}_norm": (WIDTH,) for name in ("pre_attn", "post_attn", "pre_moe", "post_moe")},
    "block_sparse_moe.gate": (2, WIDTH),
}
"""Of a layer, in the order of the published files."""
RANKS = 4


def make_tensors() -> dict[str, torch.Tensor]:
    """The tensors of a tiny Grok-2."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"model.embed_tokens.weight": (64, WIDTH), "lm_head.weight": (64, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in MODULES.items() for n in range(2)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def published(tmp_path):
    """A tiny Grok-2 in files like the published ones, and its tensors; gates of experts are in the fourth file."""
    tensors, folder = make_tensors(), tmp_path / "grok"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    kinds = {name: f"w{name[-8]}" if ".experts." in name else "" for name in tensors}
    for number, kind in enumerate(("", "w1", "w2", "w3")):
        some = {name: tensor for name, tensor in tensors.items() if kinds[name] == kind}
        if not kind:
            save_file(some, folder / "pytorch_model-00000-TP-common.safetensors")
            continue
        parts = {name: tensor.chunk(RANKS, 1 if kind == "w2" else 0) for name, tensor in some.items()}
        for rank in range(RANKS):
            path = folder / f"pytorch_model-{number:05d}-TP-{rank:03d}.safetensors"
            save_file({name: part[rank].clone() for name, part in parts.items()}, path)
    return folder, tensors


def test_parts_of_experts_join(published, tmp_path):
    folder, tensors = published
    assert inspect(folder).format == "grok"
    done = reshard(folder, tmp_path / "hf", ReshardOptions(to="hf"))
    made = load_file(tmp_path / "hf/model.safetensors")
    assert made.keys() == tensors.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
    assert any('"load_presharded_moe": false' in warning for warning in done.warnings)


def test_ranks_that_are_missing_are_known_by_the_config(published):
    folder, _ = published
    for path in folder.glob("*-TP-003.safetensors"):
        path.unlink()
    with pytest.raises(SourceError, match=r"3 parts of .* make 18 of 24, which config.json says"):
        inspect(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model-00002-TP-001.safetensors", "pytorch_model-00002-TP-001.safetensors is missing"),
        ("pytorch_model-00000-TP-common.safetensors", "a file numbered 00000 is missing"),
    ],
)
def test_a_missing_file_is_named(published, name, message):
    folder, _ = published
    (folder / name).unlink()
    with pytest.raises(SourceError, match=message):
        inspect(folder)


def change(path, **arrays):
    """Give a file other arrays, by the last parts of their names; None for none."""
    have = load_file(path)
    for name, tensor in arrays.items():
        full = next((each for each in have if each.endswith(f".{name}.weight")), f"model.layers.0.{name}.weight")
        have.pop(full, None)
        if tensor is not None:
            have[full] = tensor
    save_file(have, path)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"w2": None}, SourceError, "3 of 4 ranks have .*w2.weight"),
        ({"w2": torch.ones(WIDTH, 5).bfloat16()}, SourceError, r"is BF16 \[32, 5\] in .*TP-002.* but BF16 \[32, 6\]"),
        ({"w2": torch.ones(WIDTH, 6)}, SourceError, "is F32 .*, but BF16"),
    ],
)
def test_parts_that_do_not_fit_each_other(published, arrays, error, message):
    folder, _ = published
    change(folder / "pytorch_model-00002-TP-002.safetensors", **arrays)
    with pytest.raises(error, match=message):
        inspect(folder)


def test_parts_whose_cut_is_not_known(published):
    folder, _ = published
    for path in folder.glob("pytorch_model-00002-TP-*"):
        change(path, k_proj=torch.ones(4, WIDTH).bfloat16())
    with pytest.raises(UnsupportedError, match=r"k_proj.weight is divided over 4 files, and how is not known"):
        inspect(folder)


def test_a_tensor_that_sglang_demands(published):
    folder, _ = published
    change(folder / "pytorch_model-00000-TP-common.safetensors", gate=None)
    with pytest.raises(SourceError, match=r"the files lack model.layers.0.block_sparse_moe.gate.weight"):
        inspect(folder)
