"""Distributed checkpoints to Hugging Face, to ranks and back: the same bits, and torch trains on as if nothing was."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from stored_bits import bits
from tiny_models import CONFIGS, build, config_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardctl.base.errors import UsageError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

FIXTURES = dcp_ranks.FIXTURES / "dcp"
CONFIG = SourceOptions(config=FIXTURES / "config.json")
UNTRAINED = ("tp", "fsdp1", "alone", "hf", "hf-whole")
TRAINED = ("fsdp2", "fsdp-tp", "flat", "accelerate")


def whole(name: str) -> dict:
    return torch.load(FIXTURES / f"{name}.whole.pt", weights_only=True)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert bits(found[name]) == bits(value), name


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """The model that all were made from, as transformers saves it."""
    from fixtures.dcp import make as make_dcp

    place = tmp_path_factory.mktemp("original") / "llama"
    make_dcp.model().save_pretrained(place)
    return place


@pytest.mark.parametrize("name", UNTRAINED)
def test_its_digest_is_that_of_the_hugging_face_original(name, original):
    assert digest(FIXTURES / name, source_options=CONFIG).digest == digest(original).digest


@pytest.mark.parametrize("name", [*UNTRAINED, *TRAINED])
def test_to_hugging_face(name, tmp_path):
    reshard(FIXTURES / name, tmp_path / "out", source_options=CONFIG)
    same(load_file(tmp_path / "out" / "model.safetensors"), whole(name)["weights"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "shardctl.json"}


def test_tied_names_are_one_tensor(tmp_path):
    reshard(FIXTURES / "tied", tmp_path / "out", source_options=SourceOptions(config=FIXTURES / "tied.json"))
    once = {name: tensor for name, tensor in whole("tied")["weights"].items() if name != "lm_head.weight"}
    same(load_file(tmp_path / "out" / "model.safetensors"), once)  # as save_pretrained writes it
    copied = verify(
        tmp_path / "out",
        VerifyOptions(level="full", against=FIXTURES / "tied"),
        source_options=SourceOptions(config=FIXTURES / "tied.json"),
    )
    assert copied.ok, copied.findings


def test_what_no_model_is_known_for_keeps_its_names(tmp_path):
    reshard(FIXTURES / "kinds", tmp_path / "out")
    same(load_file(tmp_path / "out" / "model.safetensors"), whole("kinds")["weights"])


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(pp=2, fsdp=2)], ids=str)
def test_to_ranks_with_the_optimizer_and_back(name, mesh, tmp_path):
    reshard(
        FIXTURES / name, tmp_path / "ranks", ReshardOptions(mesh=mesh, optimizer_states="keep"), source_options=CONFIG
    )
    checked = verify(tmp_path / "ranks", VerifyOptions(level="full", against=FIXTURES / name), source_options=CONFIG)
    assert checked.ok, checked.findings
    assert (
        checked.digest == digest(FIXTURES / name, source_options=CONFIG).digest
    )  # of the weights, with or without states
    reshard(tmp_path / "ranks", tmp_path / "dcp", ReshardOptions(to="dcp"))
    check_with_torch(tmp_path / "dcp", name, tmp_path)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("mesh", [None, Mesh.of(fsdp=3), Mesh.of(fsdp=2, tp=2)], ids=str)
def test_to_dcp_with_the_optimizer(name, mesh, tmp_path):
    reshard(
        FIXTURES / name,
        tmp_path / "dcp",
        ReshardOptions(to="dcp", mesh=mesh, max_shard_size=20_000),
        source_options=CONFIG,
    )
    checked = verify(tmp_path / "dcp", VerifyOptions(level="full", against=FIXTURES / name), source_options=CONFIG)
    assert checked.ok, checked.findings
    check_with_torch(tmp_path / "dcp", name, tmp_path)


def check_with_torch(checkpoint: Path, name: str, folder: Path) -> None:
    """What torch itself makes of a checkpoint is what it made of the fixture."""
    compare_with_torch(checkpoint, whole(name), folder)


def compare_with_torch(checkpoint: Path, expected: dict, folder: Path) -> None:
    dcp_to_torch_save(checkpoint, folder / "whole.pt")
    found = torch.load(folder / "whole.pt", weights_only=True)
    same(found["model"], expected["weights"])
    optimizer = expected["optimizer"]
    assert found["optim"]["state"].keys() == optimizer["state"].keys()
    for parameter, states in optimizer["state"].items():
        same(found["optim"]["state"][parameter], states)
    groups = {group["params"][0]: group for group in found["optim"]["param_groups"]}
    for group in optimizer["param_groups"]:
        written = groups[group["params"][0]]
        assert written | {"params": ...} == group | {"params": ...}
        assert sorted(written["params"]) == sorted(group["params"])


def test_every_kind_of_tensor_to_dcp(tmp_path):
    reshard(FIXTURES / "kinds", tmp_path / "dcp", ReshardOptions(to="dcp"))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    same(torch.load(tmp_path / "whole.pt", weights_only=True)["model"], whole("kinds")["weights"])
    assert verify(tmp_path / "dcp", VerifyOptions(level="full", against=FIXTURES / "kinds")).ok


def test_training_goes_on_as_without_the_detour(tmp_path):
    reshard(FIXTURES / "fsdp-tp", tmp_path / "one", ReshardOptions(to="dcp"), source_options=CONFIG)
    reshard(tmp_path / "one", tmp_path / "many", ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=3)))
    direct, detour = str(FIXTURES / "fsdp-tp"), str(tmp_path / "many")
    found = dcp_ranks.losses(tmp_path / "ranks", {direct: "app", detour: ""})
    assert found[detour] == found[direct]
    assert 0 < found[direct][1] != found[direct][0]


def test_optimizer_states_need_a_place_and_a_source(tmp_path):
    with pytest.raises(UsageError, match="cannot store optimizer states"):
        reshard(FIXTURES / "fsdp2", tmp_path / "out", ReshardOptions(optimizer_states="keep"), source_options=CONFIG)
    with pytest.raises(UsageError, match="the source has no optimizer states"):
        reshard(
            FIXTURES / "tp", tmp_path / "out", ReshardOptions(to="dcp", optimizer_states="keep"), source_options=CONFIG
        )


@pytest.mark.parametrize("layout", ["ranks", "meta", "megatron", "torch_dist", "trtllm", "vllm"])
def test_what_a_trainer_saved_goes_into_what_runs_a_model_without_its_states(layout, tmp_path):
    reshard(FIXTURES / "fsdp2", tmp_path / "out", ReshardOptions(to=layout, mesh=Mesh.of(tp=2)), source_options=CONFIG)
    assert verify(tmp_path / "out", VerifyOptions(against=FIXTURES / "fsdp2"), source_options=CONFIG).ok
    if layout not in {"ranks", "torch_dist", "megatron"}:
        with pytest.raises(UsageError, match=f"layout {layout} cannot store optimizer states"):
            reshard(
                FIXTURES / "fsdp2",
                tmp_path / "no",
                ReshardOptions(to=layout, optimizer_states="keep"),
                source_options=CONFIG,
            )


def test_a_cast_leaves_the_optimizer_alone(tmp_path):
    reshard(FIXTURES / "fsdp2", tmp_path / "dcp", ReshardOptions(to="dcp", dtype="bf16"), source_options=CONFIG)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert {t.dtype for t in found["model"].values()} == {torch.bfloat16}
    assert {t.dtype for states in found["optim"]["state"].values() for t in states.values()} == {torch.float32}


def titan(name: str) -> str:
    """torchtitan's name for a parameter of transformers (torchtitan models/llama3/state_dict_adapter.py)."""
    table = {
        "model.embed_tokens": "tok_embeddings",
        "model.": "",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
    for ours, theirs in table.items():
        name = name.replace(ours, theirs)
    return name


def paired(name: str, value: torch.Tensor) -> torch.Tensor:
    """Rows of queries and keys as Meta has them: the inverse of `permute` in transformers' conversion script."""
    if value.ndim < 2 or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return value
    head = 4
    return value.view(len(value) // head, 2, head // 2, -1).transpose(1, 2).reshape(value.shape).contiguous()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchtitans_names_and_rows_become_those_of_transformers(tmp_path):
    expected = whole("fsdp2")
    weights, optimizer = expected["weights"], expected["optimizer"]
    state = {titan(name): paired(name, value) for name, value in weights.items()}
    state["optimizer"] = {
        f"state.{titan(name)}.{kind}": paired(name, value)
        for name, states in optimizer["state"].items()
        for kind, value in states.items()
    }
    state["optimizer"] |= {f"param_groups.{titan(name)}.lr": 0.5 for name in weights}
    state["train_state"] = {"step": torch.tensor(2)}
    dcp.save(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    reshard(tmp_path / "titan", tmp_path / "hf", source_options=CONFIG)
    same(load_file(tmp_path / "hf" / "model.safetensors"), weights)
    reshard(
        tmp_path / "titan",
        tmp_path / "dcp",
        ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=2, tp=2)),
        source_options=CONFIG,
    )
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    same(found["model"], weights)
    for parameter, states in optimizer["state"].items():
        same(found["optim"]["state"][parameter], states)
    (group,) = found["optim"]["param_groups"]
    assert group["lr"] == 0.5
    assert sorted(group["params"]) == sorted(weights)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A Qwen3-MoE, its experts fused as in transformers 5, after a step of AdamW; and what torch has in memory."""
    place = tmp_path_factory.mktemp("experts") / "dcp"
    model = build(config_of("qwen3_moe", divisible=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5 + number)
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optim": states}, checkpoint_id=place, no_dist=True)
    return place, {"weights": weights, "optimizer": states}


@pytest.mark.parametrize("mesh", [None, Mesh.of(ep=2, fsdp=2)], ids=str)
def test_experts_keep_their_arrays_and_states(mesh, experts, tmp_path):
    place, expected = experts
    source_options = SourceOptions(config=CONFIGS / "qwen3_moe.json")
    reshard(place, tmp_path / "dcp", ReshardOptions(to="dcp", mesh=mesh), source_options=source_options)
    checked = verify(tmp_path / "dcp", VerifyOptions(level="full", against=place), source_options=source_options)
    assert checked.ok, checked.findings
    compare_with_torch(tmp_path / "dcp", expected, tmp_path)


def test_experts_apart_have_states_apart_and_come_together_again(experts, tmp_path):
    place, expected = experts
    source_options = SourceOptions(config=CONFIGS / "qwen3_moe.json")
    reshard_options = ReshardOptions(mesh=Mesh.of(ep=2, fsdp=2), experts="split", optimizer_states="keep")
    reshard(place, tmp_path / "ranks", reshard_options, source_options=source_options)
    checked = verify(tmp_path / "ranks", VerifyOptions(level="full"))
    assert checked.ok, checked.findings
    reshard(tmp_path / "ranks", tmp_path / "dcp", ReshardOptions(to="dcp", experts="fused"))
    compare_with_torch(tmp_path / "dcp", expected, tmp_path)


def test_the_config_that_is_given_travels_along_and_says_the_type_of_the_weights(tmp_path):
    (tmp_path / "config.json").write_text((FIXTURES / "config.json").read_text().replace("float32", "bfloat16"))
    given = SourceOptions(config=tmp_path / "config.json")
    for dtype, expected in (("keep", "float32"), ("fp16", "float16")):
        reshard(FIXTURES / "tp", tmp_path / dtype, ReshardOptions(dtype=dtype), source_options=given)
        written = json.loads((tmp_path / dtype / "config.json").read_text())
        assert written == json.loads(given.config.read_text()) | {"dtype": expected}
