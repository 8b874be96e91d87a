"""`verify --level full` has the library of safetensors read each header, too, and says what it did not read."""

from __future__ import annotations

import json
import os
from contextlib import closing

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from shardctl.base.dtype import DTYPES
from shardctl.cli.program import run
from shardctl.libraries.registry import scan_checkpoint
from shardctl.libraries.safetensors.header import encode_header
from shardctl.storage.local import LocalSource
from shardctl.verify.library_headers import compare_headers

FILE = "model.safetensors"


def write_all_types(folder):
    encoded = encode_header([(f"a{d}", d, (3, 2 * d.unit_elements)) for d in DTYPES], {"format": "pt"})
    (folder / FILE).write_bytes(encoded.header + bytes(encoded.size - len(encoded.header)))
    return folder


@pytest.fixture
def compared():
    def compare(path):
        with closing(LocalSource(path)) as source:
            return compare_headers(source, scan_checkpoint(source))

    return compare


@pytest.fixture
def document(capfd):
    def verify(*args):
        code = run(["verify", "--level", "full", "--json", *map(str, args)])
        return code, json.loads(capfd.readouterr().out)["levels"][1]

    return verify


class Changed:
    """The library's view of a file, with one thing changed."""

    def __init__(self, real, change):
        self.real, self.change = real, change

    def __call__(self, *args):
        self.opened = self.real(*args)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def offset_keys(self):
        names = self.opened.offset_keys()
        return {"less": names[1:], "order": names[::-1], "more": [*names, "new"]}.get(self.change, names)

    def get_slice(self, name):
        self.part = self.opened.get_slice("a" if name == "new" else name)
        return self

    def get_dtype(self):
        return "I32" if self.change == "dtype" else self.part.get_dtype()

    def get_shape(self):
        return [6, 1] if self.change == "shape" else self.part.get_shape()


def test_it_agrees_on_every_type_and_reads_no_tensor(tmp_path, compared):
    asked, findings = compared(write_all_types(tmp_path))
    assert findings == []
    assert (asked.files, asked.arrays) == (1, len(DTYPES))
    assert asked.version == safetensors.__version__


def test_the_result_says_who_read_it_in_text_and_json(tmp_path, document, capfd):
    save_file({"a": torch.arange(6.0), "b": torch.zeros(0, 3)}, tmp_path / FILE)
    version = safetensors.__version__
    code, level = document(tmp_path)
    assert code == 0
    assert level["safetensors"] == {
        "version": version,
        "files": 1,
        "arrays": 2,
        "unread": {},
        "refused": [],
        "unasked": [],
    }
    run(["verify", str(tmp_path), "--level", "full"])
    said = " ".join(capfd.readouterr().out.split())
    assert (
        f"read by safetensors {version}, too: 1 header, 2 arrays of the same names, types, shapes and offsets" in said
    )


def test_files_that_only_shardctl_reads_are_named(tmp_path, document, capfd):
    torch.save({"a": torch.arange(6.0)}, tmp_path / "pytorch_model.bin")
    code, level = document(tmp_path)
    assert code == 0
    assert level["safetensors"]["unasked"] == ["pytorch_model.bin"]
    run(["verify", str(tmp_path), "--level", "full"])
    said = " ".join(capfd.readouterr().out.split())
    assert "read by shardctl alone, because safetensors reads no such files: pytorch_model.bin" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("dtype", "a is F32 [6] at byte {a} to shardctl and I32 [6] at byte {a} to it"),
        ("shape", "a is F32 [6] at byte {a} to shardctl and F32 [6, 1] at byte {a} to it"),
        ("less", "a is F32 [6] at byte {a} to shardctl and unknown to it"),
        ("more", "new is unknown to shardctl and F32 [6] at byte {end} to it"),
        ("order", "a is F32 [6] at byte {a} to shardctl and F32 [6] at byte {b} to it"),
    ],
)
def test_what_it_reads_otherwise_is_an_error(tmp_path, monkeypatch, document, change, said):
    save_file({"a": torch.arange(6.0), "b": torch.arange(6.0)}, tmp_path / FILE)
    start = 8 + int.from_bytes((tmp_path / FILE).read_bytes()[:8], "little")
    monkeypatch.setattr(safetensors, "safe_open", Changed(safetensors.safe_open, change))
    code, level = document(tmp_path)
    assert code == 3
    (found,) = [each for each in level["findings"] if each["check"] == "library"]
    assert found["severity"] == "error"
    assert said.format(a=start, b=start + 24, end=start + 48) in found["message"]
    assert level["safetensors"]["refused"] == [FILE]


def refuse(*_):
    raise safetensors.SafetensorError("no such thing")


def test_a_file_that_it_refuses_is_an_error(tmp_path, monkeypatch, document):
    save_file({"a": torch.arange(6.0)}, tmp_path / FILE)
    monkeypatch.setattr(safetensors, "safe_open", refuse)
    code, level = document(tmp_path)
    assert code == 3
    expected = f"shardctl reads {FILE}, and safetensors {safetensors.__version__} refuses it: no such thing"
    assert expected in [each["message"] for each in level["findings"]]


def test_a_type_that_it_does_not_know_is_said_and_is_no_fault_of_the_file(tmp_path, monkeypatch, compared):
    """As safetensors 0.5 does with F4 and F8_E8M0."""

    def refuse_narrow(content):
        return refuse() if b'"F4"' in content else real(content)

    real = safetensors.deserialize
    write_all_types(tmp_path)
    monkeypatch.setattr(safetensors, "safe_open", refuse)
    monkeypatch.setattr(safetensors, "deserialize", refuse_narrow)
    asked, (found,) = compared(tmp_path)
    assert (found.severity, found.file) == ("warning", FILE)
    reason = f"safetensors {safetensors.__version__} does not know F4"
    assert found.message == f"only shardctl read {FILE}: {reason}"
    assert asked.unread == {FILE: reason}
    assert not asked.refused


class FarAway(LocalSource):
    """A source without a folder, which counts what is read of it."""

    folder = None
    read = 0

    def read_at(self, path, offset, into):
        self.read += len(into)
        super().read_at(path, offset, into)


def test_of_a_file_that_is_far_away_only_the_header_is_fetched(tmp_path):
    save_file({"a": torch.arange(1 << 20), "b": torch.arange(6.0)}, tmp_path / FILE)
    with closing(FarAway(tmp_path)) as source:
        stored = scan_checkpoint(source)
        source.read = 0
        asked, findings = compare_headers(source, stored)
        assert (asked.files, asked.arrays, findings) == (1, 2, [])
        assert 100 < source.read < 1000


def test_no_byte_of_a_tensor_is_read(tmp_path, compared):
    """The data are a hole of a terabyte."""
    encoded = encode_header([("a", DTYPES[0], (1 << 40,))], {})
    (tmp_path / FILE).write_bytes(encoded.header)
    os.truncate(tmp_path / FILE, encoded.size)
    asked, findings = compared(tmp_path)
    assert (asked.files, asked.arrays, findings) == (1, 1, [])
