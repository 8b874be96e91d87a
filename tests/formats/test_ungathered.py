"""ZeRO-3 and FSDP leave tensors of shape [0] where a model is saved without gathering its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardctl.base.errors import SourceError
from shardctl.cli.program import run
from shardctl.options import ReshardOptions
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NORM = "layers.0.norm.weight"
SAVES: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "safetensors": lambda tensors, place: save_file(tensors, place / "model.safetensors"),
    "torch": lambda tensors, place: torch.save(tensors, place / "pytorch_model.bin"),
    "dcp": lambda tensors, place: dcp.save({"model": tensors}, checkpoint_id=place, no_dist=True),
}


@pytest.fixture(params=SAVES)
def save(request, tmp_path):
    def save_tensors(tensors: dict[str, torch.Tensor]) -> Path:
        place = tmp_path / "src"
        place.mkdir()
        SAVES[request.param](tensors, place)
        return place

    return save_tensors


def ungathered(*filled: str) -> dict[str, torch.Tensor]:
    """Matrices without elements, and `filled` ones, as norms are that are below ZeRO-3's threshold of persistence."""
    names = ("embed.weight", "layers.0.proj.weight", "layers.0.proj.bias", "head.weight")
    return {**{name: torch.empty(0) for name in names}, **{name: torch.ones(4) for name in filled}}


@pytest.mark.parametrize("filled", [(), (NORM,)], ids=["all", "all but norms"])
def test_weights_without_elements_are_an_error(save, filled, tmp_path):
    source = save(ungathered(*filled))
    found = [each for level in verify(source).levels for each in level.findings if each.check == "empty"]
    assert [each.severity for each in found] == ["error"]
    assert f"4 of {4 + len(filled)} tensors have no elements" in found[0].message
    for verb in (plan, lambda path: reshard(path, tmp_path / "out", ReshardOptions(to="hf"))):
        with pytest.raises(SourceError, match=r"4 of \d tensors have no elements: ") as error:
            verb(source)
        assert "stage3_gather_16bit_weights_on_model_save" in (error.value.hint or "")
    assert any("4 tensors without elements" in warning for warning in inspect(source).warnings)
    assert not (tmp_path / "out").exists()


def test_verify_exits_3(tmp_path):
    SAVES["safetensors"](ungathered(), tmp_path)
    assert run(["verify", str(tmp_path)]) == 3


def test_a_buffer_may_be_empty(save):
    tensors = {NORM: torch.ones(4), "layers.0.g_idx": torch.empty(0, dtype=torch.int32), "rest": torch.empty(3, 0)}
    assert verify(save(tensors)).ok
