"""Changes pickles of torch.save by their opcodes, and compares what shardctl reads in them with what torch.load does.

    python docs/benchmarks/fuzz_pickles.py --cases 200000 --seed 0

Every case is a file that torch could meet: a pickle of a state dict with some opcodes removed, repeated, exchanged,
inserted or given other arguments, in a real container. `torch.load(weights_only=True)` judges it; where it refuses a
file that shardctl reads (protocol 4, opcodes that it lacks), Python's own unpickler does, with the names that torch
allows and no others. A file that both read must have the same names, types, shapes and bytes. Needs torch.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import pickletools
import random
import resource
import struct
import sys
import warnings
import zipfile
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from shardctl.base.errors import ShardctlError
from shardctl.libraries.torch_save.legacy_file import read_legacy
from shardctl.libraries.torch_save.state_dict import extract_state_dict
from shardctl.libraries.torch_save.zip_file import read_torch_zip
from shardctl.storage import FileStat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
MEMORY = 4 << 30
"""Bytes of address space of the whole run: some changed files make an unpickler ask for tens of gigabytes."""
FAR = 1 << 20
"""Bytes of a tensor that are still compared; strides can repeat elements."""


@dataclass(frozen=True)
class Template:
    """A file of torch.save, taken apart."""

    legacy: bool
    head: bytes
    """What stands before the pickle, in a legacy file."""
    opcodes: tuple[bytes, ...]
    """Of the pickle, each with its argument."""
    tail: bytes
    """What follows, in a legacy file."""
    records: tuple[tuple[str, bytes], ...] = ()
    """The other records of a zip archive."""

    def file(self, opcodes: list[bytes]) -> bytes:
        """The file with another pickle."""
        content = b"".join(opcodes)
        if self.legacy:
            return self.head + content + self.tail
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("m/data.pkl", content)
            for name, data in self.records:
                archive.writestr(name, data)
        return buffer.getvalue()


def split(data: bytes) -> tuple[bytes, ...]:
    """The opcodes of a pickle."""
    starts = [at for _, _, at in pickletools.genops(data)]
    return tuple(data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True))


def states() -> list[Any]:
    """What is saved: of every kind that a checkpoint has."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(4, 6, generator=generator)
    halves = torch.rand(8, generator=generator).half()
    marked = torch.nn.Parameter(base.clone())
    marked.sharded = True  # type: ignore[attr-defined]
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    return [
        {"a": base, "b": base.t(), "c": base[1:3, ::2], "h": halves, "d": torch.arange(6)},
        collections.OrderedDict(w=base, v=halves, tie=base),
        module.state_dict(),
        {
            "p": torch.nn.Parameter(base),
            "marked": marked,
            "q": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        },
        {"epoch": 3, "model": collections.OrderedDict(w=base, x=halves), "optimizer": {"state": {0: {"m": base}}}},
        {"u": torch.arange(4).to(torch.uint16), "e": torch.empty(0), "s": torch.tensor(1.5), "x": halves[2:5]},
        {
            "f8": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn),
            "bool": base > 0.5,
            "n": None,
            "t": (1, [2]),
        },
    ]


def templates() -> list[Template]:
    """The states in both containers and every protocol."""
    found = []
    for state in states():
        for protocol in (2, 2, 2, 3, 4, 5):
            buffer = io.BytesIO()
            torch.save(state, buffer, pickle_protocol=protocol)
            with zipfile.ZipFile(buffer) as archive:
                names = archive.namelist()
                data = archive.read(next(name for name in names if name.endswith("/data.pkl")))
                kept = [(n, archive.read(n)) for n in names if "/data/" in n or n.endswith(("/byteorder", "/version"))]
            records = tuple(("m/" + name.split("/", 1)[1], content) for name, content in kept)
            found.append(Template(False, b"", split(data), b"", records))
        for protocol in (1, 2, 4):
            buffer = io.BytesIO()
            torch.save(state, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
            data, ends, file = buffer.getvalue(), [], io.BytesIO(buffer.getvalue())
            for _ in range(5):
                for opcode, _, at in pickletools.genops(file):
                    if opcode.code == "." and at is not None:
                        ends.append(at + 1)
            found.append(Template(True, data[: ends[2]], split(data[ends[2] : ends[3]]), data[ends[3] :]))
    return found


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def storage(kind: str = "FloatStorage", key: str = "0", numel: int = 24, *, legacy: bool = False) -> bytes:
    module = "torch.storage" if kind == "UntypedStorage" else "torch"
    return (
        b"(" + text("storage") + f"c{module}\n{kind}\n".encode() + text(key) + text("cpu") + bytes((75, numel))
        + b"N" * legacy + b"tQ"
    )  # fmt: skip


def tensor(source: bytes, size: bytes = b"K\x02\x85", stride: bytes = b"K\x01\x85", offset: int = 0) -> bytes:
    hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + source + bytes((75, offset)) + size + stride + b"\x89" + hooks + b"tR"
    )


class Pieces:
    """Opcodes that make something, or change what is on the top of the stack, in many ways."""

    def __init__(self, rng: random.Random, *, legacy: bool) -> None:
        self.rng = rng
        self.legacy = legacy

    def source(self) -> bytes:
        """A storage, often one that the file has, and sometimes of another type or size."""
        kinds = ("FloatStorage", "FloatStorage", "FloatStorage", "HalfStorage", "LongStorage", "ByteStorage")
        kind = self.rng.choice((*kinds, "UntypedStorage"))
        return storage(kind, self.rng.choice("00123"), self.rng.choice((24, 24, 8, 6, 4, 3, 0)), legacy=self.legacy)

    def made(self) -> bytes:
        """A tensor."""
        return tensor(self.source(), offset=self.rng.choice((0, 0, 0, 1, 5)))

    def value(self) -> bytes:
        """Anything that leaves one more on the stack."""
        made, source, rng = self.made(), self.source(), self.rng
        pairs = b"](" + text("w") + made + b"\x86" + text("extra") + self.made() + b"\x86e"
        parameter = b"ctorch._utils\n_rebuild_parameter"
        sizes = b"K\x00K\x02\x85K\x01\x85"
        state = rng.choice((b"}", b"N", b"}" + text("data") + made + b"s", b"N}" + text("data") + made + b"s\x86"))
        dtype = b"ctorch\n" + rng.choice((b"float32", b"float16", b"uint16", b"int64")) + b"\n"
        return rng.choice(
            (
                made,
                source,
                ORDERED + b"(" + pairs + b"tR",
                ORDERED + b"(" + pairs + b"t\x81",
                ORDERED + b"(" + pairs + b"tR" + text("w") + made + b"s",
                ORDERED + b"(}" + text("w") + made + b"stR",
                ORDERED + b")R" + text("w") + made + b"s",
                b"ccollections\nCounter\n)R" + text("w") + made + b"s",
                parameter + b"\n(" + made + b"\x89" + HOOKS + b"tR",
                parameter + b"_with_state\n(" + made + b"\x89" + HOOKS + state + b"tR",
                parameter + b"_with_state\n(" + made + b"\x89" + HOOKS + b"}" + text("mine") + b"K\x01stR",
                b"ctorch.nn.parameter\nParameter\n" + made + b"\x85R",
                b"ctorch.nn.parameter\nParameter\n" + made + b"\x89\x86\x81",
                b"ctorch\nTensor\n(K\x02tR",
                b"ctorch\nFloatTensor\n)\x81(" + source + sizes + b"tb",
                b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n("
                + source + sizes + b"\x89" + HOOKS + b"t" + state + b"tR",
                tensor(source, b"](K\x02e", b"](K\x01e"),
                tensor(source, b"]q\xf0K\x02a", b"K\x01\x85") + b"h\xf0K\x03a0",
                b"ctorch\nSize\n(K\x02K\x02ttR",
                b"ctorch._utils\n_rebuild_tensor_v3\n(" + source + sizes + b"\x89" + HOOKS + dtype + b"tR",
                text(rng.choice(("w", "a", "model", "data", "0"))),
                bytes((75, rng.randrange(8))),
                rng.choice((b"N", b"\x88", b")", b"}", b"]")),
                bytes((ord("h"), rng.randrange(40))),
            )
        )  # fmt: skip

    def change(self) -> bytes:
        """What changes the top of the stack, or something else, and leaves as many on it."""
        made, source, rng = self.made(), self.source(), self.rng
        return rng.choice(
            (
                b"(" + source + b"K\x00K\x02\x85K\x01\x85tb",
                b"(K\x00K\x00" + HOOKS + b"tb",
                b"}" + text("data") + made + b"sb",
                b"}" + text("note") + b"K\x01sb",
                text("w") + made + b"s",
                text(rng.choice(("k", "extra"))) + self.value() + b"s",
                b"K\x01a",
                b"(" + text("k") + made + text("v") + self.made() + b"u",
                bytes((ord("q"), rng.randrange(40))),
                b"0" + self.value(),
                self.value() + b"0",
                b"20",
                source + b"0",
            )
        )

    def loose(self) -> bytes:
        """A single opcode that takes or leaves what it likes."""
        return self.rng.choice((*(bytes((code,)) for code in b"(tusaebR\x81Q021\x85\x86\x87dl\x94o"), self.value()))


ORDERED = b"ccollections\nOrderedDict\n"
HOOKS = ORDERED + b")R"


def changed(opcode: bytes, opcodes: list[bytes], rng: random.Random) -> bytes:
    """The opcode with another argument of its kind."""
    code = opcode[:1]
    if code in b"hqK" and len(opcode) == 2:
        return code + bytes((rng.choice((opcode[1] ^ 1, rng.randrange(40), max(opcode[1], 1) - 1)),))
    alike = [other for other in opcodes if other[:1] == code]
    return rng.choice(alike)


def mutated(template: Template, rng: random.Random) -> list[bytes]:
    """The opcodes of a file, with a few changes; the last stays where it is."""
    opcodes = list(template.opcodes)
    pieces = Pieces(rng, legacy=template.legacy)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        if len(opcodes) < SHORTEST:
            break
        at = rng.randrange(1, len(opcodes) - 1)
        rng.choice((_change, _change, _add, _add, _argue, _argue, _remove, _repeat, _exchange, _copy, _loose))(
            opcodes, at, pieces
        )
    return opcodes


SHORTEST = 6
"""Opcodes of a pickle that is still changed."""


def _made(opcodes: list[bytes], at: int, codes: bytes) -> int:
    """A place behind an opcode of some kind, and behind the memo's that follows it."""
    found = [i for i, opcode in enumerate(opcodes) if opcode[0] in codes]
    if not found:
        return at
    at = found[at % len(found)] + 1
    return at + (opcodes[at][0] in b"qr\x94")


def _change(opcodes: list[bytes], at: int, pieces: Pieces) -> None:
    opcodes[(at := _made(opcodes, at, b"RRRQ\x81}])")) : at] = [pieces.change()]


def _add(opcodes: list[bytes], at: int, pieces: Pieces) -> None:
    """Another entry of a dict."""
    found = [i for i, opcode in enumerate(opcodes) if opcode in {b"u", b"s"}]
    name = pieces.rng.choice(("w", "more", "model", "a", "b"))
    key = text(name)
    if found:
        at = found[at % len(found)]
        entry = key + pieces.value()
        opcodes[at:at] = [entry] if opcodes[at] == b"u" else [b"s" + entry]


def _argue(opcodes: list[bytes], at: int, pieces: Pieces) -> None:
    opcodes[at] = changed(opcodes[at], opcodes, pieces.rng)


def _remove(opcodes: list[bytes], at: int, pieces: Pieces) -> None:
    del opcodes[at : min(at + pieces.rng.choice((1, 1, 2, 5)), len(opcodes) - 1)]


def _repeat(opcodes: list[bytes], at: int, pieces: Pieces) -> None:
    del pieces
    opcodes.insert(at, opcodes[at])


def _exchange(opcodes: list[bytes], at: int, pieces: Pieces) -> None:
    other = pieces.rng.randrange(1, len(opcodes) - 1)
    opcodes[at], opcodes[other] = opcodes[other], opcodes[at]


def _copy(opcodes: list[bytes], at: int, pieces: Pieces) -> None:
    start = pieces.rng.randrange(1, len(opcodes) - 1)
    opcodes[at:at] = opcodes[start : min(start + pieces.rng.randrange(1, 24), len(opcodes) - 1)]


def _loose(opcodes: list[bytes], at: int, pieces: Pieces) -> None:
    opcodes[at:at] = [pieces.loose()]


# The two readers


class MemorySource:
    """A source of one file."""

    folder = None
    held_bytes = 0
    name = location = "memory"

    def __init__(self, content: bytes) -> None:
        self.content = content

    def files(self) -> Mapping[str, FileStat]:
        return {"m.pt": FileStat(len(self.content), "")}

    def expect(self, spans: object) -> None:
        pass

    def read_at(self, _path: str, offset: int, into: memoryview) -> None:
        into[:] = self.content[offset : offset + len(into)]


Seen = dict[str, tuple[str, tuple[int, ...], bytes | None]]
"""By name: type, shape, bytes (None if they are too many)."""


def seen_by_shardctl(content: bytes, *, legacy: bool) -> Seen:
    source: Any = MemorySource(content)
    saved = (read_legacy if legacy else read_torch_zip)(source, "m.pt")
    found: Seen = {}
    for name, view in extract_state_dict(saved.tree, "m.pt").views.items():
        region = saved.region(view, name)
        shape, unit = view.dtype.unit_shape(view.shape), view.dtype.unit_bytes
        data: bytes | None = b""
        if prod(shape):
            base = np.frombuffer(content, np.uint8)[region.offset :]
            strided = as_strided(base, (*shape, unit), (*region.strides, 1), writeable=False)
            data = strided.tobytes() if prod(shape) * unit <= FAR else None
        found[name] = (view.dtype.torch, view.shape, data)
    return found


class Allowed(pickle.Unpickler):
    """Python's own unpickler, which finds the names that torch allows."""

    def find_class(self, module: str, name: str) -> Any:
        from torch._weights_only_unpickler import _get_allowed_globals

        allowed = _get_allowed_globals()
        if f"{module}.{name}" in allowed:
            return allowed[f"{module}.{name}"]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


class AllowedModule:
    """What torch.load calls a pickle module."""

    __name__ = "allowed"
    Unpickler = Allowed

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return Allowed(file, **options).load()


def seen_by_torch(content: bytes, *, plain: bool = False) -> Seen:
    options: dict[str, Any] = (
        {"weights_only": False, "pickle_module": AllowedModule} if plain else {"weights_only": True}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held = torch.load(io.BytesIO(content), **options)
        own = [value for value in held.values() if isinstance(value, torch.Tensor)]
        if all(_is_counter(value) for value in own):
            inner = [held[k] for k in WRAPPERS if k in held and isinstance(held[k], dict)]
            wrapped = [d for d in inner if any(isinstance(v, torch.Tensor) for v in d.values())]
            if wrapped or not own:
                held = wrapped[0] if wrapped else {}
        return {str(k): _seen(v) for k, v in held.items() if isinstance(v, torch.Tensor)}


def _is_counter(value: torch.Tensor) -> bool:
    """Return whether a tensor next to a model is a counter or a loss, or the state of a random number generator."""
    return value.ndim == 0 or value.shape == (1,) or (value.ndim == 1 and value.dtype == torch.uint8)


def _seen(value: torch.Tensor) -> tuple[str, tuple[int, ...], bytes | None]:
    dtype = str(value.dtype).removeprefix("torch.")
    shape = tuple(value.shape)
    if value.numel() * value.element_size() > FAR:
        return dtype, shape, None
    dense = value.detach().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    return dtype, shape, dense.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


OUTCOMES = {
    "same": "both read it, with the same result",
    "refused": "both refuse it",
    "strict": "torch reads it, shardctl refuses it",
    "plain": "only Python's unpickler can judge it, with the same result",
    "alone": "only shardctl reads it",
    "DIFFERENT": "both read it, with different results",
    "CRASH": "shardctl fails with an unexpected error",
}


def outcome(content: bytes, *, legacy: bool) -> str:
    """What becomes of one file: a key of `OUTCOMES`."""
    try:
        ours = seen_by_shardctl(content, legacy=legacy)
    except ShardctlError:
        ours = None
    except Exception:  # noqa: BLE001 - what is looked for
        return "CRASH"
    for plain in (False, True):
        try:
            theirs = seen_by_torch(content, plain=plain)
        except Exception:  # noqa: BLE001, S112 - torch refuses in any way it likes
            continue
        if ours is None:
            return "strict" if not plain else "refused"
        if ours != theirs:
            return "DIFFERENT"
        return "plain" if plain else "same"
    return "refused" if ours is None else "alone"


def cases(number: int, seed: int, first: int = 0) -> Iterator[tuple[int, Template, list[bytes]]]:
    """Files, each a matter of the seed and its own number only."""
    known = templates()
    for case in range(first, first + number):
        rng = random.Random(f"{seed}-{case}")
        template = rng.choice(known)
        yield case, template, mutated(template, rng)


def run(number: int, seed: int, first: int = 0) -> tuple[collections.Counter[str], list[tuple[int, str, bytes]]]:
    """How many files had which outcome, and those whose outcome is a fault."""
    counted: collections.Counter[str] = collections.Counter()
    faults = []
    for case, template, opcodes in cases(number, seed, first):
        found = outcome(template.file(opcodes), legacy=template.legacy)
        counted[found] += 1
        if found.isupper():
            faults.append((case, found, b"".join(opcodes)))
    return counted, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    counted, faults = run(options.cases, options.seed, options.first)
    print("| outcome | files |\n| --- | ---: |")
    for key, meaning in OUTCOMES.items():
        print(f"| {meaning} | {counted[key]:,} |")
    good = options.cases - len(faults)
    print(f"\nJudged by torch {torch.__version__}.\n\n{options.cases:,} cases, {good:,} as they should be")
    for case, found, content in faults[:20]:
        print(f"\n{found}: case {case}\n{content!r}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
