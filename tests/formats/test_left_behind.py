"""What lies in a file or beside it and is not read is named in one warning, as torch leaves it behind in silence."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import string
import zipfile
from pathlib import Path

import pytest
import torch
from dcp_builder import changed
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint
from torch_corpus import FOUR, LITTLE, VERSION, pickled, tensor
from zip_builder import Entry, build

from shardctl.base.errors import ShardctlError, SourceError
from shardctl.cli.program import run
from shardctl.libraries.registry import scan_checkpoint
from shardctl.libraries.torch_save import leftovers
from shardctl.libraries.torch_save.leftovers import (
    SECOND_PICKLE,
    UNKNOWN_NAMES,
    UNUSED_BYTES,
    UNUSED_ITEMS,
    LeftoverNotes,
)
from shardctl.storage.local import LocalSource
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
KINDS = [value for name, value in vars(leftovers).items() if name.isupper() and isinstance(value, str)]
ONE = {"a": torch.arange(6.0)}
SECOND = {"a": torch.zeros(3), "b": torch.ones(2)}


def warnings(path):
    return scan_checkpoint(LocalSource(path)).warnings


def test_records_that_nothing_refers_to(tmp_path):
    more = Entry("m/data/7", bytes(8)), Entry("m/extra/notes", b"text"), Entry("m/.data/serialization_id", b"0" * 40)
    (tmp_path / "m.bin").write_bytes(build(Entry("m/data.pkl", pickled(("w", tensor()))), LITTLE, VERSION, FOUR, *more))
    assert torch.equal(torch.load(tmp_path / "m.bin", weights_only=True)["w"], torch.zeros(4))
    assert warnings(tmp_path / "m.bin") == (
        "m.bin: records that nothing in the pickle refers to are left behind: 'data/7', 'extra/notes'",
    )


def test_a_second_pickle_behind_the_first_in_data_pkl(tmp_path):
    second = pickle.dumps({"w": 1}, 2)
    data = Entry("m/data.pkl", pickled(("w", tensor())) + second)
    (tmp_path / "m.bin").write_bytes(build(data, LITTLE, VERSION, FOUR))
    assert torch.equal(torch.load(tmp_path / "m.bin", weights_only=True)["w"], torch.zeros(4))
    assert warnings(tmp_path / "m.bin") == (
        f"m.bin: what follows the pickle is left behind, as torch leaves it: {len(second)} bytes in data.pkl",
    )


def test_a_second_save_behind_the_first_in_a_legacy_file(tmp_path):
    buffer = io.BytesIO()
    torch.save(ONE, buffer, _use_new_zipfile_serialization=False)
    first = buffer.tell()
    torch.save(SECOND, buffer, _use_new_zipfile_serialization=False)
    size = (tmp_path / "m.bin").write_bytes(buffer.getvalue())
    assert torch.equal(torch.load(tmp_path / "m.bin")["a"], ONE["a"])
    assert warnings(tmp_path / "m.bin") == (
        f"m.bin: what follows the first save is left behind, as torch.load leaves it: {size - first} bytes",
    )
    assert scan_checkpoint(LocalSource(tmp_path / "m.bin")).tensors.keys() == {"a"}


def test_bytes_behind_a_legacy_file_that_are_no_pickle_are_damage(tmp_path):
    buffer = io.BytesIO()
    torch.save(ONE, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "m.bin").write_bytes(buffer.getvalue() + bytes(7))
    with pytest.raises(SourceError, match="7 bytes after its last storage"):
        warnings(tmp_path / "m.bin")


@pytest.mark.parametrize("other", ["model.fp16.safetensors", "pytorch_model.bin", "consolidated.safetensors"])
def test_a_variant_beside_the_one_that_is_read(tmp_path, other):
    save_file(ONE, tmp_path / "model.safetensors")
    (save_file if other.endswith(".safetensors") else torch.save)(SECOND, tmp_path / other)
    assert warnings(tmp_path) == (f"{other} holds weights that are not part of this checkpoint; it is left behind",)


def test_several_variants_are_one_warning_that_names_each_and_their_indexes_do_not_travel(tmp_path):
    save_file(ONE, tmp_path / "model.safetensors")
    save_file(SECOND, tmp_path / "model.fp16-00001-of-00001.safetensors")
    torch.save(SECOND, tmp_path / "pytorch_model.bin")
    variant = {"weight_map": dict.fromkeys(SECOND, "model.fp16-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.fp16.json").write_text(json.dumps(variant))
    manifest = scan_checkpoint(LocalSource(tmp_path))
    (warning,) = manifest.warnings
    assert warning.startswith("model.fp16-00001-of-00001.safetensors, pytorch_model.bin hold weights that are not part")
    assert [item.name for item in manifest.objects if item.policy == "carry"] == []


@pytest.mark.parametrize("name", ["./x.safetensors", "sub/x.safetensors"])
def test_a_shard_in_a_folder_is_read_and_does_not_travel_along(tmp_path, name):
    source = tmp_path / "source"
    (source / name).parent.mkdir(parents=True)
    save_file(ONE, source / name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    done = reshard(source, tmp_path / "out")
    assert done.warnings == ()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], ONE["a"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "shardctl.json"]


READERS = {
    "deepspeed, of modules": ("deepspeed/z2", "*_model_states.pt"),
    "deepspeed, of optimizers": ("deepspeed/z2", "*_optim_states.pt"),
    "deepspeed, of layers": ("deepspeed/pipeline", "layer_*.pt"),
    "deepspeed, universal": ("deepspeed/universal-z1", "exp_avg.pt"),
    "megatron, of ranks": ("megatron/llama-tp2-pp2", "model_optim_rng.pt"),
    "megatron, common": ("torch_dist/core_0_15/iter", "common.pt"),
    "pickled ranks": ("pickled_ranks/tp", "*.pt"),
    "meta": ("meta/llama2", "*.pth"),
    "torch": ("shards", "*.bin"),
}
"""For each reader of files of torch.save a checkpoint, and those of its files that hold more than they should."""


@pytest.fixture(params=READERS)
def trainer_files(request, tmp_path):
    """A copy of a checkpoint, and those of its files that a test changes."""
    case, pattern = READERS[request.param]
    source = tmp_path / "source"
    if case == "shards":
        source.mkdir()
        for number in (1, 2):
            torch.save({f"w{number}": torch.ones(2)}, source / f"pytorch_model-0000{number}-of-00002.bin")
    else:
        shutil.copytree(FIXTURES / case, source)
    return source, sorted(source.rglob(pattern))


def test_records_that_nothing_refers_to_are_named_once_for_all_files(trainer_files):
    source, paths = trainer_files
    for path in paths:
        with zipfile.ZipFile(path, "a") as archive:
            root = archive.namelist()[0].split("/")[0]
            archive.writestr(f"{root}/data/99999", b"left behind")
    said = "records that nothing in the pickle refers to are left behind: 'data/99999'"
    check_warnings(warnings(source), said, paths)


def test_names_that_are_not_known_to_be_harmless_are_named_once_for_all_files(trainer_files):
    source, paths = trainer_files
    for path in paths:
        mention(path, b"cmine.code\nThing\n0")
    said = "names that no tensor needs, and that are not known to be harmless, are left behind: mine.code.Thing"
    check_warnings(warnings(source), said, paths)


def check_warnings(found, said, paths):
    """One warning says `said` of as many files."""
    (warning,) = [each for each in found if said in each]
    assert any(path.name in warning for path in paths)
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    assert warning.partition(": ")[0].endswith(more), warning
    assert warning.endswith(said)


def mention(path: Path, opcodes: bytes) -> None:
    """Put opcodes in front of the pickle of a file of torch.save."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data[:2] + opcodes + data[2:] if name.endswith("/data.pkl") else data)


@pytest.mark.parametrize("folder", ["dcp", "deepspeed", "megatron", "meta", "pickled_ranks", "torch_dist"])
def test_files_that_libraries_wrote_give_no_such_warning(folder):
    """No name, record or entry of them is unknown: a warning that honest files give is one that nobody reads."""
    read = 0
    for case in sorted(path for path in (FIXTURES / folder).rglob("*") if path.is_dir()):
        with contextlib.suppress(ShardctlError):  # cases that are refused, and folders of folders
            found = " ".join(warnings(case))
            assert not any(kind in found for kind in KINDS), (case, found)
            read += 1
    assert read


def test_many_names_of_a_hostile_file_take_bounded_memory():
    notes = LeftoverNotes()
    for file in range(1_000):
        notes.note(f"{file}.pt", UNKNOWN_NAMES, (f"{file}.Thing{n}" for n in range(1_000)))
    (warning,) = notes.list_warnings()
    assert warning == (
        f"0.pt and 999 more: {UNKNOWN_NAMES}: 0.Thing0, 0.Thing1, 0.Thing2, 0.Thing3, 0.Thing4 and many more"
    )


# Distributed checkpoints


def test_entries_of_a_distributed_checkpoint_that_nothing_uses_are_named(tmp_path):
    def forget(metadata):
        for key in list(metadata.state_dict_metadata)[:2]:
            del metadata.state_dict_metadata[key]

    place = changed(FIXTURES / "dcp/kinds", tmp_path / "dcp", forget)
    gone = json.dumps(sorted(scan_checkpoint(LocalSource(FIXTURES / "dcp/kinds")).tensors)).replace('"', "'")
    (warning,) = warnings(place)
    assert warning.startswith(f".metadata: {UNUSED_ITEMS}: '")
    assert warning.rpartition(": ")[2].partition(", ")[0] in gone


def test_bytes_of_distributed_files_that_no_entry_has_are_counted(tmp_path):
    shutil.copytree(FIXTURES / "dcp/fsdp2", tmp_path / "dcp")
    paths = sorted((tmp_path / "dcp").glob("*.distcp"))
    for path in paths:
        path.write_bytes(path.read_bytes() + bytes(35))
    (warning,) = warnings(tmp_path / "dcp")
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    assert warning == f"{paths[0].name}{more}: {UNUSED_BYTES}: 35 bytes"


def test_what_follows_the_pickle_of_a_metadata_is_said(tmp_path):
    shutil.copytree(FIXTURES / "dcp/fsdp2", tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    path.write_bytes(path.read_bytes() + pickle.dumps(7))
    (warning,) = warnings(tmp_path / "dcp")
    assert warning.startswith(f".metadata: {SECOND_PICKLE}: ")


def test_unknown_names_in_an_object_of_a_distributed_checkpoint_are_named(tmp_path):
    optimizer = {"state": {"a": {"step": 1.0}}, "param_groups": [{"params": ["a"], "odd": string.Template("x")}]}
    checkpoint.save({"model": {"a": torch.zeros(2)}, "optim": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    (warning,) = [each for each in warnings(tmp_path) if UNKNOWN_NAMES in each]
    assert warning.endswith(": string.Template")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "hf"], "use --to dcp or --to universal to take them along"),
        (["--tp", "2"], "add --optimizer-states keep to take them along"),
        (["--tp", "2", "--optimizer-states", "keep"], ""),
        (["--to", "hf", "--optimizer-states", "drop"], ""),
        (["--to", "dcp"], ""),
    ],
    ids=" ".join,
)
def test_optimizer_states_that_are_left_behind_are_named_with_their_size(tmp_path, capfd, options, said):
    place = Path(__file__).parents[2] / "fixtures" / "dcp" / "fsdp2"
    line = ["reshard", str(place), str(tmp_path / "out"), "--config", str(place.with_name("config.json")), *options]
    assert run([*line, "--json"]) == 0
    warnings = json.loads(capfd.readouterr().out.splitlines()[-1])["warnings"]
    expected = [f"left behind: the optimizer states (63 tensors, 43.7 kB); {said}"] if said else []
    assert warnings == expected
