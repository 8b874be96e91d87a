"""A process for each rank, each with a device: what runs on machines with several, here on devices that are none."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fake_cuda import GIB, install_fake_cuda
from forward_models import REPLICATE, cut, saved_and_cut, values

from shardctl.options import VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.verify import verify

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the devices of these tests are none")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return partial(saved_and_cut, tmp_path_factory.mktemp("devices"))


@pytest.fixture
def devices(monkeypatch):
    return partial(install_fake_cuda, monkeypatch)


def forward(paths, **options):
    source, ranks = paths
    found = verify(ranks, VerifyOptions(level="forward", against=source, **options), source_options=REPLICATE)
    assert [each.status for each in found.levels[:-1]] == ["passed"] * 4, found.findings
    return found.levels[-1]


def test_each_rank_has_its_device(made, devices):
    fake = devices(GIB, GIB)
    level = forward(made("llama", "tp=2"))
    assert level.status == "passed", level.findings
    assert level.forward.engine == "2 processes over gloo (tp2)"
    assert level.forward.device == "cuda:0, cuda:1"
    assert fake.contexts == {0, 1}, "of the load level; ranks have their own"


def test_more_ranks_than_devices_share_them(made, devices):
    devices(GIB, GIB)
    level = forward(made("llama", "pp=2,tp=2"), processes=4)
    assert level.status == "passed", level.findings
    assert level.forward.engine == "4 processes over gloo (pp2 x tp2)"
    assert level.forward.device == "cuda:0, cuda:1"
    assert not any("one process" in note for note in level.notes)


def test_what_is_wrong_on_one_device_is_found(made, devices, tmp_path):
    source, _ = made("llama", "tp=2")
    ranks = cut(source, tmp_path / "ranks", Mesh.of(tp=2))
    values(ranks, "model.layers.1.mlp.up_proj.weight", 1)[3] = 0
    devices(GIB, GIB)
    found = verify(ranks, VerifyOptions(level="forward", against=source)).levels[-1]
    assert found.status == "failed"
    assert [block.name for block in found.forward.blocks if block.error > 1e-4] == ["model.layers.1"]


def test_a_rank_whose_device_is_too_small_is_no_verdict(made, devices):
    devices(GIB, 100)
    source, ranks = made("llama", "tp=2")
    found = verify(ranks, VerifyOptions(level="forward", against=source))
    assert found.ok, found.findings
    assert found.levels[-1].forward.device == "cuda:0"
    assert any(
        "the model was run on cuda:0, in one process, because rank 1: cuda:1 has" in n for n in found.levels[-1].notes
    )
