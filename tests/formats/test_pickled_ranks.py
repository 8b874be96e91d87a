"""Files in which ranks pickled their parts: all that torch makes of them is found; what is wrong has a verdict."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored_bytes import check, scan
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from shardctl.base.errors import CoverageError, HostileError, SourceError, UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries.files.rank_files import parse_rank_file_name
from shardctl.libraries.rank_pickles.parts import AxisPlacement, compute_local_shape, list_local_boxes
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures" / "pickled_ranks"
DCP = FIXTURES.parent / "dcp"
WHOLE = ("fsdp2", "tp", "fsdp-tp", "hsdp", "fsdp1", "odd")
TRAINED = ("fsdp2", "fsdp-tp", "hsdp", "fsdp1")


def whole(name: str) -> dict:
    """What torch made of the checkpoint when it was written."""
    own = FIXTURES / f"{name}.whole.pt"
    return torch.load(own if own.exists() else DCP / own.name, weights_only=True)


@pytest.mark.parametrize("name", WHOLE)
def test_every_weight_is_what_torch_makes_of_it(name):
    manifest = scan(FIXTURES / name)
    assert (manifest.format, manifest.warnings) == ("pickled-ranks", ())
    check(FIXTURES / name, manifest.tensors, whole(name)["weights"])


@pytest.mark.parametrize("name", TRAINED)
def test_every_optimizer_state_is_what_torch_makes_of_it(name):
    optimizer = whole(name)["optimizer"]
    training = scan(FIXTURES / name).training
    expected = {
        f"optimizer.{state}.{parameter}": value
        for parameter, states in optimizer["state"].items()
        for state, value in states.items()
    }
    check(FIXTURES / name, training.states, expected)
    assert training.step == 2
    groups = {tuple(sorted(group.parameters)): group for group in training.groups}
    for group in optimizer["param_groups"]:
        found = groups[tuple(sorted(group["params"]))]
        assert found.settings == {key: value for key, value in group.items() if key != "params"}


# Placements, with torch's own arithmetic as the oracle


def by_torch(shape, mesh, at, placements) -> torch.Tensor:
    """The numbers of the elements that a rank has, by `_split_tensor`, one axis after another."""
    local = torch.arange(int(np.prod(shape))).view(shape)
    for size, index, placement in zip(mesh, at, placements, strict=True):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(local, size, with_padding=False, contiguous=True)
            local = parts[index] if index < len(parts) else local.narrow(placement.dim, 0, 0)
    return local


@st.composite
def placed(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    at = tuple(draw(st.integers(0, size - 1)) for size in mesh)
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.tuples(dims, st.integers(1, 4)).map(lambda t: _StridedShard(t[0], split_factor=t[1])),
    )
    return shape, mesh, at, [draw(kinds) for _ in mesh]


@given(placed())
def test_boxes_are_those_of_torch(case):
    shape, mesh, at, placements = case
    ours = tuple(
        AxisPlacement(size, index, getattr(p, "dim", None), getattr(p, "split_factor", 1))
        for size, index, p in zip(mesh, at, placements, strict=True)
    )
    expected = by_torch(shape, mesh, at, placements)
    extents = compute_local_shape(shape, ours)
    if not expected.numel():
        assert 0 in extents
        return
    assert extents == tuple(expected.shape)
    found = np.full(extents, -1)
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    for box, start in list_local_boxes(shape, ours):
        found[tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))] = numbers[box.slices()]
    assert (found == expected.numpy()).all()


def test_placements_into_very_many_boxes_are_hostile():
    with pytest.raises(HostileError, match="more than 4,096 parts"):
        list_local_boxes((1 << 62,), (AxisPlacement(2, 1, 0, 1 << 62),))
    with pytest.raises(HostileError, match="more than 4,096 stretches"):
        list_local_boxes(
            (1 << 20,),
            (AxisPlacement(2, 0, 0, 1 << 12), AxisPlacement(2, 0, 0, 1 << 12), AxisPlacement(2, 0, 0, 3_000)),
        )
    with pytest.raises(HostileError, match="more than 4,096 boxes"):
        list_local_boxes((1 << 12, 1 << 12), (AxisPlacement(2, 0, 0, 1 << 10), AxisPlacement(2, 0, 1, 1 << 10)))


# What is wrong has a verdict


@pytest.fixture
def place(tmp_path):
    """A copy of a fixture."""
    return lambda name: Path(shutil.copytree(FIXTURES / name, tmp_path / name))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fsdp2", "pytorch_model_fsdp_0_rank0.bin"),
        ("fsdp2", "pytorch_model_fsdp_0_rank3.bin"),
        ("fsdp2", "optimizer_0_rank2.bin"),
        ("fsdp1", "pytorch_model_fsdp_0_rank1.bin"),
        ("fsdp-tp", "model_world_size_4_rank_2.pt"),
        ("tp", "model_rank1.pt"),
    ],
)
def test_a_missing_file_is_named_with_what_it_had(name, file, place):
    found = place(name)
    (found / file).unlink()
    with pytest.raises(CoverageError, match=rf"^{re.escape(file)} is missing: '.*' \[.*\] lacks \[") as caught:
        scan(found)
    assert caught.value.exit_code == 4


def test_a_replica_that_is_missing_is_a_warning(place):
    found = place("hsdp")
    (found / "checkpoint-rank3.pt").unlink()
    manifest = scan(found)
    assert manifest.warnings == ("checkpoint-rank3.pt: not here; other ranks have copies of all that was in it",)
    check(found, manifest.tensors, whole("hsdp")["weights"])


def test_a_file_twice_under_two_names_leaves_a_hole(place):
    found = place("tp")
    shutil.copy(found / "model_rank0.pt", found / "model_rank1.pt")
    with pytest.raises(CoverageError, match=r"no file has a part: .* lacks") as caught:
        scan(found)
    assert caught.value.hint == "a file is of another rank or another save"


def test_files_of_two_saves_are_refused(place):
    found = place("tp")
    shutil.copy(found / "model_rank0.pt", found / "older_rank0.pt")
    with pytest.raises(SourceError, match=r"several models' ranks, such as older_rank0\.pt and model_rank0\.pt"):
        scan(found)


def test_parts_of_another_model_are_refused(place):
    found = place("tp")
    state = torch.load(found / "model_rank1.pt", weights_only=False)
    state["model.norm.weight"] = torch.zeros(9)
    torch.save(state, found / "model_rank1.pt")
    with pytest.raises(SourceError, match=r"'model.norm.weight' is F32 \[16\] in model_rank0.pt, but F32 \[9\]"):
        scan(found)


def test_plain_tensors_of_ranks_say_nothing(tmp_path):
    for rank in range(2):
        torch.save({"a": torch.zeros(3)}, tmp_path / f"model_rank{rank}.pt")
    with pytest.raises(SourceError, match="do not say whose part") as caught:
        scan(tmp_path)
    assert caught.value.hint.endswith("model_rank0.pt")


def test_one_rank_has_it_all(tmp_path):
    torch.save({"a": torch.arange(3)}, tmp_path / "model_rank0.pt")
    check(tmp_path, scan(tmp_path).tensors, {"a": torch.arange(3)})


def test_a_whole_model_beside_files_of_ranks_wins(place):
    found = place("tp")
    torch.save({"a": torch.arange(3)}, found / "pytorch_model.bin")
    manifest = scan(found)
    assert manifest.format == "torch"
    assert manifest.warnings != ()


def test_one_file_given_alone_is_not_the_model():
    with pytest.raises(UnsupportedError, match=r"is a tensor subclass|is one rank's part"):
        scan(FIXTURES / "tp" / "model_rank0.pt")


@pytest.mark.parametrize("name", ["local", "local-padded"])
def test_flat_parameters_without_a_model_are_refused_with_a_reason(name):
    with (
        pytest.raises(UnsupportedError, match=r"'.*_flat_param' holds all parameters of a module of FSDP1") as caught,
        open_checkpoint(FIXTURES / name),
    ):
        pass
    assert caught.value.hint.startswith("say which model it is with --config")


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"intermediate_size": 8}, {"vocab_size": 14}])
def test_flat_parameters_of_another_model_are_refused(change, tmp_path):
    config = json.loads((FIXTURES / "flat.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(SourceError, match=r"_flat_param has [0-9,]+ elements, but the"),
        open_checkpoint(FIXTURES / "local", SourceOptions(config=tmp_path)),
    ):
        pass


def test_optimizer_states_by_number_are_left_behind(place):
    found = place("tp")
    for rank in range(2):
        state = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        torch.save(state, found / f"optim_rank{rank}.pt")
    manifest = scan(found)
    assert manifest.training.states == {}
    assert "their parameters are numbered, not named" in manifest.warnings[0]


def test_the_config_that_verl_keeps_is_found(place):
    found = place("fsdp-tp")
    (found / "huggingface").mkdir()
    shutil.copy(DCP / "config.json", found / "huggingface" / "config.json")
    assert scan(found).own_config.values == json.loads((DCP / "config.json").read_text())


def test_what_verl_keeps_beside_ranks_is_where_engines_look_for_it(place, tmp_path):
    """As verl 0.9.1 saves: the tokenizer in a folder, the model on request again, and what only its run needs."""
    found = place("fsdp-tp")
    (found / "huggingface").mkdir()
    shutil.copy(DCP / "config.json", found / "huggingface" / "config.json")
    for name, text in (("huggingface/tokenizer.json", "{}"), ("huggingface/model.safetensors", "the model again")):
        (found / name).write_text(text)
    (found / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    torch.save({"rng": torch.zeros(3)}, found / "extra_state_world_size_4_rank_0.pt")
    reshard(found, tmp_path / "hf", ReshardOptions(to="hf"))
    made = {str(path.relative_to(tmp_path / "hf")) for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    assert made == {"config.json", "model.safetensors", "shardctl.json", "tokenizer.json"}


def edited(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of the pickle in an archive; the rest stays."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            if name.endswith("data.pkl"):
                assert old in content, old
                content = content.replace(old, new)  # noqa: PLW2901
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (b"placement_types\nShard\n", b"placement_types\nPartial\n", UnsupportedError, "ranks have not added up yet"),
        (b"placement_types\nShard\n", b"placement_types\nOther\n", UnsupportedError, "which shardctl does not know"),
        (b"placement_types\nShard\n", b"placement_types\nReplicate\n", SourceError, "but its placements mean"),
        (b"_coordinate_on_dim", b"_coordinate_on_dom", CoverageError, "lacks"),
        (
            b"_dtensor_spec\nDTensorSpec\n",
            b"_dtensor_spec\nDTensorSpoc\n",
            SourceError,
            "no description of its placements",
        ),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(place, old, new, error, message):
    found = place("tp")
    for rank in range(2):
        edited(found / f"model_rank{rank}.pt", old, new)
    with pytest.raises(error, match=message):
        scan(found)


@pytest.mark.parametrize(
    ("path", "kind", "rank"),
    [
        ("pytorch_model_fsdp_rank1.bin", "model", 1),
        ("pytorch_model_fsdp_0_rank12.bin", "model", 12),
        ("model_world_size_8_rank_7.pt", "model", 7),
        ("rank0.pth", "model", 0),
        ("optimizer_0_rank2.bin", "optimizer", 2),
        ("extra_state_world_size_8_rank_7.pt", "other", 7),
    ],
)
def test_names_of_ranks_files(path, kind, rank):
    found = parse_rank_file_name(path)
    assert (found.kind, found.rank, found.of(rank)) == (kind, rank, path)


@pytest.mark.parametrize(
    "path",
    [
        *("pytorch_model.bin", "frank1.bin", "rank.bin", "model-rank-0.safetensors", "mp_rank_00/model_optim_rng.pt"),
        *("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
    ],
)
def test_other_names(path):
    assert parse_rank_file_name(path) is None
