"""What is refused of a `shardctl.json` whose seal fits: everything that no conversion could have written."""

import hashlib
import json

import pytest

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError
from shardctl.tensors.box import Box
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import (
    CheckpointRecord,
    HashedSpans,
    RecordedTensor,
    StoredBox,
    encode_record,
    parse_record,
)

GOOD = CheckpointRecord(
    version="0.1.0",
    plan="p",
    layout="ranks",
    digest="d",
    source_digest="d",
    source={"format": "safetensors", "files": {"model.safetensors": 9}},
    mesh=Mesh.of(tp=2),
    stages=(2,),
    architecture="LlamaForCausalLM",
    options={"dtype": "bf16"},
    files={"a.safetensors": 100, "caf\udce9.md": 7},
    hashes={"a.safetensors": HashedSpans(((0, 8), (40, 4)), "00"), "caf\udce9.md": HashedSpans(((0, 7),), "11")},
    tensors={
        name: RecordedTensor(
            BY_NAME["F32"], (2,), "d", "d", ties, spelling, (StoredBox("a.safetensors", name, Box((0,), (2,))),)
        )
        for name, ties, spelling in (("a", ("a2", "a3"), ("x",)), ("b", (), ("x",)))
    },
)


def sealed(raw):
    body = json.dumps({key: value for key, value in raw.items() if key != "seal"}, indent=1)[:-2].encode()
    return body + b',\n "seal": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def changed(*path, to):
    """The record with another value at a path of keys, sealed anew."""
    raw = json.loads(encode_record(GOOD))
    at = raw
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return sealed(raw)


def test_a_record_is_what_it_was():
    assert parse_record(encode_record(GOOD)) == GOOD
    assert parse_record(sealed(json.loads(encode_record(GOOD)))) == GOOD


@pytest.mark.parametrize(
    ("stages", "said"),
    [([10**9], "more than the 500,000"), ([250_000, 250_001], "more than the 500,000"), ([1] * 3, "of 3 stages")],
)
def test_stages_are_those_of_the_mesh_and_of_a_model(stages, said):
    pp = {"axes": [[name, 2 if name == "pp" else 1] for name in ("pp", "dp", "fsdp", "cp", "tp")], "ep": 1, "etp": 1}
    raw = json.loads(encode_record(GOOD)) | {"mesh": pp, "stages": stages}
    with pytest.raises(SourceError, match=said):
        parse_record(sealed(raw))


NUMBERS = (float("inf"), float("nan"), -1, 1.5, 2**63, 10**400, True, "1", None, [])


@pytest.mark.parametrize("to", NUMBERS, ids=lambda to: f"{to!r:.12}")
@pytest.mark.parametrize(
    "path",
    [
        ("files", "a.safetensors"),
        ("source", "files", "model.safetensors"),
        ("stages", 0),
        ("mesh", "axes", 0, 1),
        ("mesh", "ep"),
        ("hashes", "a.safetensors", 0, 0, 0),
        ("hashes", "a.safetensors", 0, 1, 1),
        ("tensors", "a", "shape", 0),
        ("tensors", "a", "stored", 0, 0),
        ("tensors", "a", "stored", 0, 2, 0),
        ("tensors", "a", "stored", 0, 3, 0),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_a_number_that_is_no_size_is_damage(path, to):
    with pytest.raises(SourceError, match="is damaged"):
        parse_record(changed(*path, to=to))


@pytest.mark.parametrize("to", [None, 3, [], {}, float("inf")], ids=repr)
@pytest.mark.parametrize(
    "path",
    [
        *[(key,) for key in ("version", "plan", "layout", "digest", "source_digest", "architecture")],
        ("options", "dtype"),
        ("source", "format"),
        ("hashes", "a.safetensors", 1),
        ("tensors", "a", "digest"),
        ("tensors", "a", "ties", 0),
        ("tensors", "a", "spelling", 0),
        ("tensors", "a", "stored", 0, 1),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_what_is_not_text_where_text_stands_is_damage(path, to):
    with pytest.raises(SourceError, match="is damaged"):
        parse_record(changed(*path, to=to))


def test_the_hash_of_a_file_that_is_not_listed_is_damage():
    with pytest.raises(SourceError, match=r"is damaged: KeyError 'other\.bin'"):
        parse_record(changed("hashes", to={"other.bin": [[[0, 1]], "00"]}))


@pytest.mark.parametrize(
    ("spans", "problem"),
    [([[0, 101]], "beyond its end"), ([[0, 8], [4, 8]], "overlap"), ([[0, 50]] * 3, "overlap")],
)
def test_a_hash_is_of_parts_of_its_file_each_once(spans, problem):
    with pytest.raises(SourceError, match=problem):
        parse_record(changed("hashes", "a.safetensors", 0, to=spans))


@pytest.mark.parametrize("ties", [["b"], ["a"], ["a2", "a2"]])
def test_a_tie_is_no_other_tensors_name(ties):
    with pytest.raises(SourceError, match=f"it ties a to {ties[0]}"):
        parse_record(changed("tensors", "a", "ties", to=ties))


def test_two_tensors_are_not_tied_to_one_name():
    with pytest.raises(SourceError, match="it ties b to a3"):
        parse_record(changed("tensors", "b", "ties", to=["a3"]))


@pytest.mark.parametrize("mesh", [{}, [], {"axes": [], "ep": 1, "etp": 1}, {"axes": [["tp", 2]], "ep": 1, "etp": 3}])
def test_a_mesh_that_is_none_is_damage(mesh):
    with pytest.raises(SourceError, match="is damaged"):
        parse_record(changed("mesh", to=mesh))
