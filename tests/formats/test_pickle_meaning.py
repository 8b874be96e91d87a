"""A pickle means to shardctl what it means to torch, or is refused: torch.load is the judge."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch_corpus import FOUR, LITTLE, VERSION, pickled, tensor
from zip_builder import Entry, build

from shardctl.base.errors import HostileError, SourceError
from shardctl.libraries.registry import scan_checkpoint
from shardctl.libraries.torch_save import reading as torch_save
from shardctl.libraries.torch_save.pickle_budget import PickleBudget, budget_of
from shardctl.libraries.torch_save.pickle_machine import parse_pickle
from shardctl.storage.local import LocalSource

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "fuzz_pickles.py"
OTHER = Entry("m/data/1", bytes(range(16)))
SECOND = tensor(key="1")
ORDERED = b"ccollections\nOrderedDict\n"
PAIRS = b"](U\x01w" + tensor() + b"\x86U\x01v" + SECOND + b"\x86e"
PARAMETER = b"ctorch._utils\n_rebuild_parameter"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(build(Entry("m/data.pkl", content), LITTLE, VERSION, FOUR, OTHER))
    return path


def scan(path: Path):
    source = LocalSource(path)
    try:
        return scan_checkpoint(source)
    finally:
        source.close()


def state(items: bytes) -> bytes:
    return tensor() + items


SET = b"(" + SECOND.partition(b"(")[2].partition(b"K\0")[0] + b"K\0K\x04\x85K\x01\x85tb"
"""Sets a tensor to another storage, as torch did before 0.4."""
DIFFERENT = {
    "a-tensor-with-a-state": (pickled(("w", state(SET))), "state, items or keywords set on it"),
    "items-set-on-a-tensor": (pickled(("w", state(b"U\x01kK\x01s"))), "state, items or keywords set on it"),
    "appended-to-a-tensor": (pickled(("w", state(b"K\x01a"))), "state, items or keywords set on it"),
    "a-parameter-with-other-data": (
        pickled(("w", PARAMETER + b"_with_state\n(" + tensor() + b"\x89}}U\x04data" + SECOND + b"stR")),
        "state that gives it other elements",
    ),
    "a-slot-with-other-data": (
        pickled(("w", PARAMETER + b"_with_state\n(" + tensor() + b"\x89}N}U\x04data" + SECOND + b"s\x86tR")),
        "state that gives it other elements",
    ),
    "a-storage-of-two-types": (
        pickled(("w", tensor()), ("v", tensor("(K\x08t", numel="K\x08", storage="torch\nHalfStorage"))),
        "different types, sizes or places",
    ),
    "a-storage-of-two-sizes": (pickled(("w", tensor()), ("v", tensor("(K\x02t", numel="K\x02"))), "different types"),
    "a-storage-in-two-places": (
        pickled(("w", tensor()), ("v", tensor().replace(b"U\x03cpu", b"U\x06cuda:0"))),
        "different types, sizes or places",
    ),
    "a-parameter-made-by-its-class": (
        pickled(("w", tensor()), ("v", b"ctorch.nn.parameter\nParameter\n" + SECOND + b"\x85R")),
        "is made by torch.nn.parameter.Parameter",
    ),
    "a-tensor-made-by-its-class": (pickled(("w", b"ctorch\nFloatTensor\n)R")), "is made by torch.FloatTensor"),
    "a-mapping-made-anew": (b"\x80\x02" + ORDERED + b"(" + PAIRS + b"t\x81.", "something else than pairs or a dict"),
    "a-mapping-of-no-pairs": (b"\x80\x02" + ORDERED + b"(](U\x01wet" + b"R.", "something else than pairs"),
    "a-name-in-the-arguments-and-the-items": (
        b"\x80\x02" + ORDERED + b"(" + PAIRS + b"tRU\x01w" + SECOND + b"s.",
        "same key twice",
    ),
}


@pytest.mark.parametrize(("content", "fragment"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_torch_would_read_otherwise_is_refused(tmp_path, content, fragment):
    with pytest.raises(SourceError, match=fragment):
        scan(write(tmp_path / "m.pt", content))


SAME = {
    "a-mapping-with-arguments-and-items": b"\x80\x02" + ORDERED + b"(" + PAIRS + b"tRU\x01x" + SECOND + b"s.",
    "a-mapping-of-a-dict": b"\x80\x02" + ORDERED + b"(}U\x01w" + SECOND + b"stR.",
    "pairs-that-grow-after-the-call": b"\x80\x02" + ORDERED + b"](U\x01w" + SECOND + b"\x86eq\x01\x85Rh\x01U\x01v"
    + tensor() + b"\x86a0.",
    "sizes-that-grow-after-the-call": pickled(("w", tensor("]q\x01K\x02a") + b"h\x01K\x02a0")),
    "a-storage-said-twice": pickled(("w", tensor()), ("v", tensor("(K\x02t"))),
    "a-parameter-with-attributes": pickled(
        ("w", PARAMETER + b"_with_state\n(" + SECOND + b"\x89}}U\x04mine" + b"K\x01stR")
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", SAME.values(), ids=SAME)
def test_what_torch_reads_is_read_as_torch_reads_it(tmp_path, fuzzer, content):
    file = write(tmp_path / "m.pt", content).read_bytes()
    assert fuzzer.outcome(file, legacy=False) in {"same", "plain"}


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_pickles", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_pickles"] = module
    spec.loader.exec_module(module)
    return module


def test_files_of_changed_opcodes_are_read_as_torch_reads_them(fuzzer):
    """`docs/benchmarks/fuzz_pickles.py` does this at length; the reader of version 0.1 failed 20 of 3,000 cases."""
    counted, faults = fuzzer.run(600, seed=13)
    assert faults == []
    assert counted["same"] + counted["plain"] > 50


def test_the_judge_sees_a_difference(fuzzer, monkeypatch):
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(4)}, buffer)
    assert fuzzer.outcome(buffer.getvalue(), legacy=False) == "same"
    monkeypatch.setattr(fuzzer, "seen_by_shardctl", lambda *_, **__: {"a": ("int64", (4,), bytes(32))})
    assert fuzzer.outcome(buffer.getvalue(), legacy=False) == "DIFFERENT"


# Work is charged where it is done


def many(piece: bytes, number: int) -> bytes:
    return piece * number


LONG = b"(" + b"K\x01" * 1_000_000 + b"tq\x01"
"""A tuple of a million numbers, in the memo."""
MANY_PAIRS = b"](" + b"".join(b"J" + i.to_bytes(4, "little") + b"N\x86" for i in range(300_000)) + b"eq\x010"
SHARED = {
    "as-a-key": (LONG + many(b"}h\x01Ns0", 200_000) + b".", SourceError, "a tuple of 1,000,000 parts as a key"),
    "as-arguments-beside-getattr": (
        b"cbuiltins\ngetattr\n0" + LONG + b"cmine\nmade\nq\x02" + many(b"0h\x02h\x01R", 200_000) + b".",
        HostileError,
        "MiB of objects",
    ),
    "as-arguments-of-a-tensor": (
        b"}(U\x01w" + LONG + b"0ctorch._utils\n_rebuild_tensor_v2\nh\x01Ru.",
        SourceError,
        "1,000,000 arguments",
    ),
    "as-pairs": (MANY_PAIRS + many(ORDERED + b"h\x01\x85R0", 100_000) + b"N.", HostileError, "10,000 numbers"),
    "as-an-id": (b"}U\x01w" + LONG + b"Qs.", SourceError, "no tensors"),
}


@pytest.mark.parametrize(("content", "error", "fragment"), SHARED.values(), ids=SHARED)
def test_a_shared_tuple_costs_its_length_once_or_is_charged(tmp_path, content, error, fragment):
    import time

    path = write(tmp_path / "m.pt", b"\x80\x02" + content)
    begun = time.process_time()
    with pytest.raises(error, match=fragment):
        scan(path)
    assert time.process_time() - begun < 20


def test_all_pickles_of_a_checkpoint_share_a_budget(tmp_path):
    budget = PickleBudget(opcodes=1_000)
    pickle = b"N0" * 300 + b"N."
    parse_pickle(pickle, "x", budget=budget)
    with pytest.raises(HostileError, match="opcodes, or those of the checkpoint's files do together"):
        parse_pickle(pickle, "y", budget=budget)
    (tmp_path / "m.pt").write_bytes(bytes(1 << 20))
    source = LocalSource(tmp_path)
    assert budget_of(source) is budget_of(source)
    assert budget_of(source).opcodes == PickleBudget().opcodes + (1 << 20) // 128
    source.close()


# What is left behind


def test_names_that_are_not_known_to_be_harmless_are_left_behind_and_said(tmp_path):
    names = b"".join(b"U\x01" + bytes([97 + n]) + b"cmine.code\nThing%d\n" % n for n in range(9))
    inside = b"}(U\x06nested](" + names + b"eu"
    found = scan(write(tmp_path / "m.pt", pickled(("w", tensor()), ("o", inside))))
    (warning,) = [text for text in found.warnings if "not known to be harmless" in text]
    assert "mine.code.Thing0, mine.code.Thing1" in warning
    assert warning.endswith("and 4 more")


def test_a_shared_dict_is_walked_a_bounded_number_of_times(tmp_path):
    """Thirty levels of a dict with ten names for the next one are 10 ** 30 values in 3 kB."""
    from shardctl.libraries.rank_pickles import reading as pickled_ranks

    levels = b"}(U\x01w" + tensor() + b"u"
    for level in range(30):
        levels += b"q%c0}(" % level + b"".join(b"U\x01%ch%c" % (97 + n, level) for n in range(10)) + b"u"
    path = write(tmp_path / "model_world_size_2_rank_0.pt", b"\x80\x02" + levels + b".")
    write(tmp_path / "model_world_size_2_rank_1.pt", b"\x80\x02" + levels + b".")
    source = LocalSource(path.parent)
    with pytest.raises(HostileError, match="same dicts and lists inside of each other"):
        pickled_ranks.scan_pickled_ranks(source)
    source.close()


def test_trees_are_dropped_as_soon_as_their_tensors_are_known(tmp_path):
    source = LocalSource(write(tmp_path / "m.pt", pickled(("w", tensor()))))
    assert torch_save.read_weights(source, "m.pt").saved.tree is None
    source.close()


# A small file that asks for a large result


def ties(path: Path, count: int) -> Path:
    torch.save(dict.fromkeys((f"t{n}" for n in range(count)), torch.zeros(1 << 20)), path)
    return path


def test_names_that_share_a_storage_are_not_written_out_beyond_a_factor(tmp_path):
    from shardctl.checkpoint.opening import open_checkpoint
    from shardctl.conversion.conversion_plan import plan_conversion
    from shardctl.options import ReshardOptions

    path = ties(tmp_path / "m.pt", 80)
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(
            HostileError, match=r"the source stores 4\.2 MB, but its tensors would take 335\.5 MB"
        ) as caught:
            plan_conversion(checkpoint, ReshardOptions())
        assert "--allow-expansion" in (caught.value.hint or "")
        assert plan_conversion(checkpoint, ReshardOptions(allow_expansion=True)).write_bytes > 300_000_000
    with open_checkpoint(ties(tmp_path / "n.pt", 60)) as checkpoint:
        assert plan_conversion(checkpoint, ReshardOptions()).write_bytes > 240_000_000


def test_the_command_line_refuses_it_and_says_how_to_allow_it(tmp_path, capsys):
    from shardctl.cli.program import run

    path = ties(tmp_path / "m.pt", 80)
    assert run(["reshard", str(path), str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert "would take 335.5 MB when each name is written out" in said
    assert "add --allow-expansion" in said
    assert not (tmp_path / "out").exists()
    assert run(["reshard", str(path), str(tmp_path / "out"), "--allow-expansion", "--dry-run"]) == 0


def test_casts_and_ranks_are_no_expansion(tmp_path, monkeypatch):
    from shardctl.checkpoint.opening import open_checkpoint
    from shardctl.conversion import expansion
    from shardctl.conversion.conversion_plan import plan_conversion
    from shardctl.options import ReshardOptions

    monkeypatch.setattr(expansion, "_EXPANSION_ALLOWANCE_BYTES", 0)
    torch.save({"w": torch.zeros(1000, 100, dtype=torch.bfloat16)}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert plan_conversion(checkpoint, ReshardOptions(dtype="fp32")).write_bytes > 400_000


def test_memory_for_too_many_tensors_is_refused_before_a_plan_is_made(tmp_path, monkeypatch):
    from shardctl.base.errors import MemoryBudgetError
    from shardctl.checkpoint.opening import open_checkpoint
    from shardctl.conversion import conversion_plan as drafting
    from shardctl.options import ReshardOptions

    torch.save({f"t{n}": torch.zeros(1) for n in range(3000)}, tmp_path / "m.pt")
    monkeypatch.setattr(drafting, "join_manifests", lambda *_: pytest.fail("a plan is made"))
    monkeypatch.setattr("shardctl.conversion.engine.budget._CHEAP_LISTS", 0)
    refused = pytest.raises(MemoryBudgetError, match=r"--memory 52MiB cannot hold .* needs more than 60 MiB")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint, refused as caught:
        drafting.plan_conversion(checkpoint, ReshardOptions(host_memory=52 << 20))
    assert "3,000 tensors in 3,000 chunks" in (caught.value.hint or "")
