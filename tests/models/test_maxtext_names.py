"""What MaxText's own functions make of models is read by the config alone, and written again for Orbax."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.models import describe_model
from shardctl.models.names.maxtext_names import build_maxtext_arrays
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
MADE = FIXTURES / "maxtext"
SOURCES = {
    "qwen2": FIXTURES / "trtllm" / "qwen2_tp4" / "source",
    "qwen3_moe": FIXTURES / "torchtitan" / "qwen3_moe" / "source",
    "deepseek_v3": FIXTURES / "torchtitan" / "deepseek_v3" / "source",
    "olmo3": MADE / "olmo3",
    "qwen3_next": MADE / "qwen3_next",
    "gpt_oss": MADE / "gpt_oss",
}
LLAMA = FIXTURES / "meta" / "llama31"
needs_tensorstore = pytest.mark.skipif(find_spec("tensorstore") is None, reason="needs tensorstore")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if one[key].dtype != other[key].dtype or not torch.equal(one[key], other[key])] == []


def give(tmp_path: Path, case: str, form: str, **more: torch.Tensor) -> Path:
    """The arrays in a directory with the model's config."""
    place = tmp_path / "given"
    place.mkdir()
    shutil.copy(SOURCES[case] / "config.json", place)
    save_file({**load_file(MADE / f"{case}_{form}.safetensors"), **more}, place / "model.safetensors")
    return place


@pytest.mark.parametrize("form", ["scanned", "unscanned"])
@pytest.mark.parametrize("case", SOURCES)
def test_arrays_are_the_model_bit_for_bit(case, form, tmp_path):
    """In any layout, with a part of the heads and experts on each rank."""
    given = give(tmp_path, case, form)
    reshard(given, tmp_path / "hf", ReshardOptions(to="hf"))
    same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(SOURCES[case] / "model.safetensors"))
    reshard(given, tmp_path / "cut", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert digest(tmp_path / "cut").digest == digest(SOURCES[case]).digest


@pytest.mark.parametrize("case", SOURCES)
def test_what_is_written_is_what_maxtext_makes(case, tmp_path):
    reshard(SOURCES[case], tmp_path / "items", ReshardOptions(to="orbax", names="maxtext"))
    (tmp_path / "items" / "config.json").unlink()
    (tmp_path / "items" / "shardctl.json").unlink()
    reshard(tmp_path / "items", tmp_path / "arrays", ReshardOptions(to="hf"))
    same(load_file(tmp_path / "arrays" / "model.safetensors"), load_file(MADE / f"{case}_scanned.safetensors"))


@needs_tensorstore
def test_a_checkpoint_of_orbax_needs_its_config_alone(tmp_path):
    given = FIXTURES / "torchtitan" / "qwen3" / "source"
    read = SourceOptions(config=given / "config.json")
    done = reshard(MADE / "qwen3", tmp_path / "hf", ReshardOptions(to="hf"), source_options=read)
    assert [each for each in done.warnings if "step" in each] == ["left behind: what MaxText's optimizer keeps (step)"]
    same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(given / "model.safetensors"))


def test_the_optimizer_is_left_behind_with_a_word(tmp_path):
    name = "opt_state.mu.params.decoder.decoder_norm.scale"
    done = reshard(
        give(tmp_path, "qwen2", "scanned", **{name: torch.ones(4)}), tmp_path / "hf", ReshardOptions(to="hf")
    )
    assert any("MaxText's optimizer" in each and name in each for each in done.warnings)


def test_what_is_not_the_same_elements_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="it scales some weights, or adds to them, and rounds them"):
        reshard(LLAMA, tmp_path / "no", ReshardOptions(to="orbax", names="maxtext"))
    for options in ({"to": "hf"}, {"to": "dcp"}, {"to": "orbax", "experts": "split"}):
        with pytest.raises(UsageError):
            reshard(SOURCES["qwen3_moe"], tmp_path / "no", ReshardOptions(names="maxtext", **options))


@pytest.mark.parametrize(("case", "layers"), [("olmo3", 2), ("qwen3_next", 3), ("gpt_oss", 1)])
def test_layers_that_are_no_whole_cycles_of_maxtext_are_refused(case, layers, tmp_path):
    with pytest.raises(UnsupportedError, match=f"in cycles of [24], but there are {layers}"):
        reshard(FIXTURES / "vllm" / case / "hf", tmp_path / "no", ReshardOptions(to="orbax", names="maxtext"))


def test_cycles_in_another_order_than_maxtexts_are_refused(tmp_path):
    """The layers of the first cycle in turn, so that its first has full attention."""

    def take_turn(at: re.Match[str]) -> str:
        return str((int(at[0]) + 1) % 4)

    given = tmp_path / "hf"
    given.mkdir()
    config = json.loads((SOURCES["qwen3_next"] / "config.json").read_text())
    config["layer_types"] = [config["layer_types"][place] for place in (3, 0, 1, 2, 4, 5, 6, 7)]
    (given / "config.json").write_text(json.dumps(config))
    tensors = load_file(SOURCES["qwen3_next"] / "model.safetensors")
    save_file(
        {re.sub(r"(?<=layers\.)[0-3]\b", take_turn, name): tensors[name] for name in tensors},
        given / "model.safetensors",
    )
    with pytest.raises(UnsupportedError, match="the last with full attention, but layers 0, 7 have it"):
        reshard(given, tmp_path / "no", ReshardOptions(to="orbax", names="maxtext"))


def test_an_array_of_another_shape_is_not_taken_for_one(tmp_path):
    name = "params.params.decoder.layers.self_attention.query.kernel"
    whole = load_file(MADE / "qwen2_scanned.safetensors")[name]
    with pytest.raises(UnsupportedError, match="has no tensor"):
        reshard(
            give(tmp_path, "qwen2", "scanned", **{name: whole.transpose(0, 1).contiguous()}),
            tmp_path / "cut",
            ReshardOptions(mesh=Mesh.of(tp=2)),
        )


def test_blocks_of_mxfp4_are_answered_with_how_to_decode_them():
    config = json.loads((SOURCES["gpt_oss"] / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedError, match="gate_up_proj_blocks") as raised:
        build_maxtext_arrays(describe_model(config))
    assert raised.value.hint == "add --dtype bf16, which decodes them"
