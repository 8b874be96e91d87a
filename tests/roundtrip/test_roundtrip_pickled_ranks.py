"""Files of ranks to Hugging Face, to ranks and to distributed checkpoints: the same bits, optimizer included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_roundtrip_dcp import compare_with_torch, same

from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "pickled_ranks"
DCP = FIXTURES.parent / "dcp"
MODELS = ("fsdp2", "tp", "fsdp-tp", "hsdp", "fsdp1", "local", "local-padded")


def source_options(name: str) -> SourceOptions:
    flat = FIXTURES / "flat.json"
    of = {"hsdp": DCP / "tied.json", "local": flat, "local-padded": flat}
    return SourceOptions(config=of.get(name, DCP / "config.json"))


def whole(name: str) -> dict:
    own = FIXTURES / f"{name}.whole.pt"
    return torch.load(own if own.exists() else DCP / own.name, weights_only=True)


@pytest.mark.parametrize("name", MODELS)
def test_to_hugging_face(name, tmp_path):
    reshard(FIXTURES / name, tmp_path / "out", source_options=source_options(name))
    saved, weights = load_file(tmp_path / "out" / "model.safetensors"), whole(name)["weights"]
    if "lm_head.weight" not in saved:  # a tied head, which `save_pretrained` writes once
        assert torch.equal(weights.pop("lm_head.weight"), weights["model.embed_tokens.weight"])
    same(saved, weights)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "shardctl.json"}


def test_what_no_model_is_known_for_keeps_its_names(tmp_path):
    reshard(FIXTURES / "odd", tmp_path / "out")
    same(load_file(tmp_path / "out" / "model.safetensors"), whole("odd")["weights"])


def test_the_digest_is_that_of_other_formats():
    assert (
        digest(FIXTURES / "tp", source_options=source_options("tp")).digest
        == digest(DCP / "tp", source_options=source_options("tp")).digest
    )
    assert (
        digest(FIXTURES / "fsdp2", source_options=source_options("tp")).digest
        == digest(DCP / "fsdp2", source_options=source_options("tp")).digest
    )


@pytest.mark.parametrize("name", ["fsdp-tp", "fsdp2"])
def test_to_ranks_and_to_dcp_with_the_optimizer(name, tmp_path):
    reshard_options = ReshardOptions(mesh=Mesh.of(fsdp=2, tp=2), optimizer_states="keep")
    reshard(FIXTURES / name, tmp_path / "ranks", reshard_options, source_options=source_options(name))
    checked = verify(
        tmp_path / "ranks", VerifyOptions(level="full", against=FIXTURES / name), source_options=source_options(name)
    )
    assert checked.ok, checked.findings
    reshard(tmp_path / "ranks", tmp_path / "dcp", ReshardOptions(to="dcp"))
    compare_with_torch(tmp_path / "dcp", whole(name), tmp_path)
