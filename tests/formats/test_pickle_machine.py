"""The pickle machine reads what pickle writes, imports and calls nothing, and gives up within its limits."""

from __future__ import annotations

import builtins
import codecs
import collections
import contextlib
import os
import pathlib
import pickle
import pickletools
import struct
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardctl.base.errors import HostileError, ShardctlError, SourceError, UnsupportedError
from shardctl.libraries.torch_save.pickle_machine import parse_pickle
from shardctl.libraries.torch_save.pickle_state import PickleLimits, TruncatedError
from shardctl.libraries.torch_save.pickle_tree import CallNode, GlobalNode, as_mapping

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple)
    ),
    max_leaves=20,
)


def value(data: bytes, **limits: int) -> object:
    return parse_pickle(data, "x.bin", limits=PickleLimits(**limits)).value


# What is right is read right


@given(DATA, st.sampled_from(PROTOCOLS))
@settings(max_examples=150, deadline=None)
def test_plain_data_comes_back_as_python_reads_it(data, protocol):
    assert value(pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", range(3, 6))
@pytest.mark.parametrize("data", [b"", b"a" * 300, b"\xff" * 70_000])
def test_bytes(data, protocol):
    assert value(pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_cyclic_objects_stay_shared_and_cyclic(protocol):
    inner: list[object] = [1]
    inner.append(inner)
    read = value(pickle.dumps([inner, inner], protocol))
    assert isinstance(read, list)
    assert read[0] is read[1] is read[0][1]


def test_every_opcode_of_python_is_known():
    from shardctl.libraries.torch_save.pickle_machine import _OPCODE_HANDLERS, _STOP_OPCODE

    assert {ord(op.code) for op in pickletools.opcodes} == {*_OPCODE_HANDLERS, _STOP_OPCODE}


@dataclass
class Thing:
    a: int


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_object_is_a_note_of_how_to_make_it(protocol):
    node = value(pickle.dumps(Thing(3), protocol))
    assert isinstance(node, CallNode)
    assert node.state == {"a": 3}
    assert str(Thing.__name__) in {
        str(g).rpartition(".")[2] for g in (node.function, *node.args) if isinstance(g, GlobalNode)
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_collections_are_mappings(protocol):
    ordered = collections.OrderedDict(a=1, b=2)
    ordered.note = "kept"  # type: ignore[attr-defined]
    node = value(pickle.dumps(ordered, protocol))
    assert as_mapping(node) == {"a": 1, "b": 2}
    assert as_mapping(value(pickle.dumps(collections.defaultdict(list, c=[3]), protocol))) == {"c": [3]}
    assert as_mapping(value(pickle.dumps(collections.OrderedDict(), protocol))) == {}
    assert as_mapping(value(pickle.dumps(Thing(1), protocol))) is None


def test_an_ordered_dict_of_python_2_is_a_mapping():
    data = b"ccollections\nOrderedDict\n((lp0\n(lp1\nS'a'\naI1\naa(lp2\nS'b'\naI2\naatR."
    assert as_mapping(value(data)) == {"a": 1, "b": 2}


def test_text_of_python_2_is_utf8_or_bytes():
    assert value(b"U\x02\xc3\xa9.") == "é"
    assert value(b"U\x01\xff.") == b"\xff"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sets_and_keyword_arguments_are_inert(protocol):
    node = value(pickle.dumps({1, 2}, protocol))
    assert isinstance(node, CallNode)
    assert str(node.function).endswith(".set")
    path = value(pickle.dumps(pathlib.PurePosixPath("a/b"), protocol))
    assert isinstance(path, CallNode)


def test_enums_reach_their_members_through_inert_getattr():
    """ShardedTensor does: the name becomes longer, nothing is fetched."""
    data = b"c__builtin__\ngetattr\n(ctorch.distributed\nPlacement\nX\x03\0\0\0CPUtR."
    assert value(data) == GlobalNode("torch.distributed", "Placement.CPU")


def test_one_pickle_after_another():
    data = pickle.dumps(1, 2) + pickle.dumps("b", 4)
    first = parse_pickle(data, "x")
    assert (first.value, parse_pickle(data, "x", start=first.end).value) == (1, "b")


# Nothing runs


class Reduce:
    def __init__(self, function, *args):
        self.how = (function, args)

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_os_system_is_refused_and_does_not_run(protocol, tmp_path):
    marker = tmp_path / "ran"
    payload = pickle.dumps({"w": Reduce(os.system, f"touch {marker}")}, protocol)
    with pytest.raises(HostileError, match=r"x\.bin.*system, which runs code"):
        value(payload)
    assert not marker.exists()
    pickle.loads(payload)  # noqa: S301 - proves that the payload is live
    assert marker.exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("function", [eval, exec, compile, open, builtins.__import__, setattr])
def test_builtins_that_run_code_are_refused(function, protocol):
    with pytest.raises(HostileError, match="runs code"):
        value(pickle.dumps(Reduce(function, "1"), protocol))


NAMES = """
    os.system posix.system nt.system os.popen os.execv subprocess.Popen subprocess.call subprocess.check_output
    builtins.eval __builtin__.eval __builtin__.execfile __builtins__.exec builtins.__import__ builtins.open
    runpy.run_path runpy._run_code ctypes.CDLL importlib.import_module sys.modules shutil.rmtree socket.socket pty.spawn
    commands.getoutput webbrowser.open pip.main pdb.run code.interact timeit.timeit multiprocessing.Process
    torch.load torch.hub.load torch.serialization.load torch.jit.load torch.utils.cpp_extension.load
    torch.serialization.os torch._utils.sys numpy.testing._private.utils.runstring numpy.load pickle.loads _pickle.loads
    marshal.loads types.CodeType types.FunctionType operator.attrgetter operator.methodcaller collections.__builtins__
    collections.OrderedDict.__init__.__globals__ torch.Tensor.__class__.__base__.__subclasses__
    _posixsubprocess.fork_exec uuid._get_command_stdout _codecs.lookup codecs.lookup torch.storage._load_from_bytes
""".split()  # noqa: SIM905 - a list of words


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["global", "stack-global", "inst"])
def test_names_that_run_code_are_refused_wherever_they_stand(name, form):
    module, attribute = (name.rpartition(".")[::2]) if "__" not in name[2:] else name.split(".", 1)
    if form == "global":
        data = f"c{module}\n{attribute}\n.".encode()
    elif form == "inst":
        data = f"(i{module}\n{attribute}\n.".encode()
    else:
        data = short(module) + short(attribute) + b"\x93."
    with pytest.raises(HostileError, match="runs code"):
        value(data)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


GETATTR = b"cbuiltins\ngetattr\n"
CHAINS = {
    "of-an-innocent-module": GETATTR + b"(ctorch\nserialization\nVos\ntR.",
    "in-two-steps": GETATTR + b"(" + GETATTR + b"(ctorch\nserialization\nVos\ntRVsystem\ntR.",
    "dunder": GETATTR + b"(ccollections\nOrderedDict\nV__subclasses__\ntR.",
    "of-an-instance": GETATTR + b"(ccollections\nOrderedDict\n)RV__class__\ntR.",
    "of-an-instance-dotted": GETATTR + b"(ccollections\nOrderedDict\n)RVa.__globals__\ntR.",
    "other-alias": b"c__builtin__\ngetattr\n(ctorch\nserialization\nVsys\ntR.",
    "handed-on": b"cfunctools\npartial\n(" + GETATTR + b"ctorch\nserialization\ntRVos\n\x85R.",
    "handed-on-by-memo": GETATTR + b"p0\n0cfunctools\npartial\n(g0\nctorch\nserialization\ntR.",
    "as-an-object": b"(" + GETATTR + b"ctorch\nserialization\nVos\no.",
    "as-a-class": GETATTR + b"(ctorch\nserialization\nVos\nt\x81.",
}


@pytest.mark.parametrize("data", CHAINS.values(), ids=CHAINS)
def test_getattr_that_reaches_for_code_is_refused(data):
    with pytest.raises(HostileError):
        value(data)


def test_naming_a_module_does_not_import_it(tmp_path, monkeypatch):
    (tmp_path / "innocent_looking.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    node = value(b"cinnocent_looking\nrun\n)R.")
    assert isinstance(node, CallNode)
    assert "innocent_looking" not in sys.modules


def test_a_name_cannot_write_to_the_terminal():
    assert str(GlobalNode("a", "\x1b[2J")) == r"'a.\x1b[2J'"


# Limits

U8 = struct.Struct("<Q").pack
BOMBS = {
    "opcodes": (b"N0" * 1000 + b"N.", {"opcodes": 1000}, HostileError, "opcodes"),
    "marks": (b"(" * 5000 + b".", {}, HostileError, "deeper than 4,096"),
    "objects": (b"}" * 100_000 + b".", {"memory": 1 << 20}, HostileError, "MiB of objects"),
    "text-of-four-bytes": (
        b"\x8d" + U8(1 << 20) + "\xe9".encode() * (1 << 19) + b"N0" * 64 + b".",
        {"memory": 2 << 20},
        HostileError,
        "MiB",
    ),
    "memo-index": (b"Nr\xff\xff\xff\xff.", {}, HostileError, "memo 4,294,967,295"),
    "memo-index-in-text": (b"Np99999999999999999999\n.", {}, HostileError, "memo"),
    "memo-index-negative": (b"Np-1\n.", {}, HostileError, "memo -1"),
    "memo-never-stored": (b"h\x07.", {}, SourceError, "memo 7, which was never stored"),
    "memo-negative": (b"Np0\ng-1\n.", {}, SourceError, "memo -1, which was never stored"),
    "memo-hole": (b"Nq\x05h\x03.", {}, SourceError, "memo 3, which was never stored"),
    "binunicode8": (b"\x8d" + b"\xff" * 8 + b"abc.", {}, TruncatedError, "only 4 remain"),
    "binbytes8": (b"\x8e" + U8(1 << 40) + b"abc.", {}, TruncatedError, "declares 1,099,511,627,776 bytes"),
    "bytearray8": (b"\x96" + U8(1 << 62) + b"abc.", {}, TruncatedError, "declares"),
    "binstring-length": (b"T\xff\xff\xff\xffabc.", {}, TruncatedError, "declares 4,294,967,295"),
    "frame": (b"\x80\x04\x95" + U8(1 << 40) + b"N.", {}, TruncatedError, "cut off"),
    "long4": (b"\x8b\xff\xff\xff\x7f.", {}, HostileError, "integer of 2,147,483,647 bytes"),
    "long4-negative": (b"\x8b\xff\xff\xff\xff.", {}, HostileError, "integer of"),
    "digits": (b"L" + b"9" * 5000 + b"L\n.", {}, SourceError, "does not parse"),
    "line": (b"V" + b"a" * 70_000 + b"\n.", {}, SourceError, "line of more than"),
    "line-without-end": (b"Vabc", {}, TruncatedError, "cut off"),
    "name": (short("a" * 200) + b"\x8d" + U8(2000) + b"b" * 2000 + b"\x93.", {}, SourceError, "more than 1,000 char"),
    "name-not-text": (b"NN\x93.", {}, SourceError, "other than text"),
    "empty": (b"", {}, TruncatedError, "cut off at byte 0"),
    "no-stop": (b"N", {}, TruncatedError, "cut off at byte 1"),
    "half-an-argument": (b"J\x01\x02", {}, TruncatedError, "cut off"),
    "empty-stack": (b"0.", {}, SourceError, "never opened"),
    "empty-stack-at-stop": (b".N", {}, SourceError, "takes more from the stack"),
    "empty-stack-at-tuple": (b"\x85.", {}, SourceError, "takes more from the stack"),
    "left-on-stack": (b"NN.", {}, SourceError, "values left"),
    "left-mark": (b"N(N.", {}, SourceError, "values left"),
    "unknown-opcode": (b"\xffN.", {}, SourceError, "unknown opcode 0xff"),
    "future-protocol": (b"\x80\x06N.", {}, UnsupportedError, "protocol 6"),
    "extension": (b"\x82\x01.", {}, UnsupportedError, "extension code"),
    "buffers": (b"\x97.", {}, UnsupportedError, "out-of-band"),
    "not-utf8": (b"\x8c\x01\xff.", {}, SourceError, "does not parse"),
    "string-quotes": (b"Sabc\n.", {}, SourceError, "without quotes"),
    "append-to-tuple": (b")Na.", {}, SourceError, "appends to a tuple"),
    "store-in-list": (b"]NNs.", {}, SourceError, "stores by key into a list"),
    "odd-items": (b"}(Nu.", {}, SourceError, "without a value"),
    "key-twice": (b"}(K\x01NK\x01Nu.", {}, SourceError, "same key twice"),
    "key-list": (b"}]Ns.", {}, SourceError, "list as a key"),
    "key-nested-tuple": (b"}))\x86Ns.", {}, SourceError, "nested tuple as a key"),
    "key-deep-tuple": (b"})" + b"\x85" * 200_000 + b"Ns.", {}, SourceError, "nested tuple as a key"),
    "call-text": (b"Vos.system\n)R.", {}, SourceError, "calls a str"),
    "call-list": (b"ca\nb\n]R.", {}, SourceError, "list for arguments"),
    "call-keywords": (b"ca\nb\n)N\x92.", {}, SourceError, "keyword arguments"),
    "object-of-nothing": (b"(o.", {}, SourceError, "object of nothing"),
    "state-of-list": (b"]Nb.", {}, SourceError, "state of a list"),
    "state-twice": (b"ca\nb\n)R}b}b.", {}, SourceError, "twice"),
    "getattr-of-number": (GETATTR + b"K\x01K\x02\x86R.", {}, SourceError, "strange arguments"),
}


@pytest.mark.parametrize(("data", "limits", "error", "fragment"), BOMBS.values(), ids=BOMBS)
def test_malformed_and_hostile_pickles_have_a_verdict(data, limits, error, fragment):
    with pytest.raises(error) as caught:
        value(data, **limits)
    assert type(caught.value) is error
    assert fragment in caught.value.message
    assert caught.value.message.startswith("x.bin: ")


def test_keys_with_arranged_collisions_are_counted_before_they_cost():
    modulus = (1 << 61) - 1  # what Python takes hashes of integers by
    keys = [modulus * (i + 1) for i in range(20_000)]
    body = b"".join(b"\x8a\x0a" + k.to_bytes(10, "little") + b"N" for k in keys)
    with pytest.raises(HostileError, match="more than 10,000 numbers"):
        value(b"}(" + body + b"u.")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_optimizer_of_many_parameters_is_no_attack(protocol):
    state = {i: {"step": 1} for i in range(30_000)}
    assert value(pickle.dumps(state, protocol)) == state


def test_depth_without_marks_costs_no_stack():
    read = value(b"]" * 300_000 + b"a" * 299_999 + b".")
    assert isinstance(read, list)
    del read  # freeing it must not overflow the stack either


# Fuzz

SEEDS = [
    pickle.dumps({"a": collections.OrderedDict(b=(1, 2.5, "x" * 300)), "c": [Thing(1), b"y"], "d": -(1 << 70)}, p)
    for p in PROTOCOLS
] + [codecs.decode("80025d7100580100000061710161", "hex") + b"."]


@given(st.sampled_from(SEEDS), st.data())
@settings(max_examples=400, deadline=None)
def test_mutants_raise_nothing_but_our_own_errors(seed, data):
    mutant = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutant) - 1))
        kind = data.draw(st.sampled_from(("set", "cut", "insert", "copy")))
        if kind == "set":
            mutant[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del mutant[at : at + data.draw(st.integers(1, 8))]
        elif kind == "insert":
            mutant[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            mutant[at:at] = mutant[: data.draw(st.integers(1, 40))]
        if not mutant:
            break
    try:
        value(bytes(mutant), opcodes=20_000)
    except ShardctlError as error:
        assert not error.message.endswith(".")  # noqa: PT017 - an error may come or not


@given(st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_noise_raises_nothing_but_our_own_errors(data):
    with contextlib.suppress(ShardctlError):
        value(data, opcodes=20_000)
