"""What lies in a file or beside it and is not read is named in one warning, as torch leaves it behind in silence."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_corpus import FOUR, LITTLE, VERSION, pickled, tensor
from zip_builder import Entry, build

from shardctl.errors import SourceError
from shardctl.libraries.registry import scan_checkpoint
from shardctl.storage.local import LocalSource
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
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
        f"m.bin: {len(second)} bytes behind the end of the pickle in data.pkl are left behind, as torch leaves them",
    )


def test_a_second_save_behind_the_first_in_a_legacy_file(tmp_path):
    buffer = io.BytesIO()
    torch.save(ONE, buffer, _use_new_zipfile_serialization=False)
    first = buffer.tell()
    torch.save(SECOND, buffer, _use_new_zipfile_serialization=False)
    size = (tmp_path / "m.bin").write_bytes(buffer.getvalue())
    assert torch.equal(torch.load(tmp_path / "m.bin")["a"], ONE["a"])
    assert warnings(tmp_path / "m.bin") == (
        f"m.bin: {size - first} bytes behind the first save, a second one, are left behind, as torch.load leaves them",
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


@pytest.mark.parametrize(
    ("case", "file"),
    [("deepspeed/z2", "*_model_states.pt"), ("megatron/llama-tp1", "model_optim_rng.pt")],
)
def test_records_of_trainers_files_that_nothing_refers_to_are_named(tmp_path, case, file):
    shutil.copytree(FIXTURES / case, tmp_path / "source")
    path = min((tmp_path / "source").rglob(file))
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{root}/data/99999", b"left behind")
    warnings = scan_checkpoint(LocalSource(tmp_path / "source")).warnings
    assert [w for w in warnings if "data/99999" in w and path.name in w], warnings
