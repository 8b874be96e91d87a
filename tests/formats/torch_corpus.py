"""Small files with the suffix of weights: one for each way to be wrong or hostile, with the verdict on each."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from dataclasses import dataclass

from zip_builder import Entry, build

from shardctl.base.errors import HostileError, SourceError, UnsupportedError

LITTLE = Entry("m/byteorder", b"little")
VERSION = Entry("m/version", b"3\n")
FOUR = Entry("m/data/0", bytes(16))
"""A storage of four float32."""


def tensor(
    size: str = "(K\x04t", stride: str = "(K\x01t", *, key: str = "0", numel: str = "K\x04", **names: str
) -> bytes:
    """The opcodes of a call of `_rebuild_tensor_v2`; the arguments are opcodes too."""
    function = names.get("function", "torch._utils\n_rebuild_tensor_v2")
    storage = f"(X\x07\0\0\0storagec{names.get('storage', 'torch' + chr(10) + 'FloatStorage')}\nU{chr(len(key))}{key}"
    storage += f"U\x03cpu{numel}tQ"
    offset, rest = names.get("offset", "K\0"), names.get("rest", "\x89}")
    return f"c{function}\n({storage}{offset}{size}{stride}{rest}tR".encode("latin1")


def pickled(*items: tuple[str, bytes]) -> bytes:
    """A dict of text to whatever the opcodes make."""
    return b"\x80\x02}(" + b"".join(b"U" + bytes([len(k)]) + k.encode() + v for k, v in items) + b"u."


def file(*items: tuple[str, bytes], extra: tuple[Entry, ...] = (LITTLE, VERSION, FOUR)) -> bytes:
    return build(Entry("m/data.pkl", pickled(*items)), *extra)


def one(*args: str, **kwargs: str) -> bytes:
    return file(("w", tensor(*args, **kwargs)))


GOOD = one()
"""What the others differ from."""
STORAGE = "K\x04"
WIDE = "\x8a\x08" + "\0\0\0\0\0\1\0\0"
"""2 ** 40."""


class Attack:
    def __reduce__(self):
        return os.system, ("touch shardctl-was-here",)


def legacy(protocol: int = 2, data: object = None, *, tail: bytes = b"", raw: bytes | None = None) -> bytes:
    parts = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    head = b"".join(pickle.dumps(part, protocol) for part in parts)
    return head + (raw if raw is not None else pickle.dumps(data, protocol)) + tail


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as t:
        for name in ("storages", "tensors", "pickle"):
            t.addfile(tarfile.TarInfo(name), io.BytesIO())
    return buffer.getvalue()


@dataclass(frozen=True)
class Bad:
    name: str
    content: bytes
    message: str
    error: type[SourceError] = SourceError


def _attacks(protocol: int) -> list[Bad]:
    payload = pickle.dumps({"w": Attack()}, protocol)
    where = f"protocol-{protocol}"
    return [
        Bad(f"os-system-zip-{where}", build(Entry("m/data.pkl", payload), LITTLE, VERSION), "runs code", HostileError),
        Bad(f"os-system-legacy-{where}", legacy(protocol, {"w": Attack()}), "runs code", HostileError),
        Bad(f"os-system-bare-{where}", payload, "runs code", HostileError),
        Bad(
            f"os-system-as-magic-{where}",
            pickle.dumps(Attack(), protocol) + legacy(protocol),
            "runs code",
            HostileError,
        ),
    ]


BAD = (
    *(bad for protocol in range(6) for bad in _attacks(protocol)),
    Bad(
        "getattr-chain",
        file(("w", b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\n(ctorch\nserialization\nU\x02ostRU\x06systemtR")),
        "torch.serialization.os, which runs code",
        HostileError,
    ),
    Bad(
        "attack-in-an-optimizer", file(("w", tensor()), ("o", b"cposix\nsystem\n(U\x02lstR")), "runs code", HostileError
    ),
    # no file of torch.save at all
    Bad("empty", b"", "is empty"),
    Bad("one-byte", b"P", "neither a zip archive nor a pickle"),
    Bad("lfs-pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    Bad("html", b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
    Bad("never-filled", bytes(300), "zero bytes"),
    Bad("gguf", b"GGUF\x03\0\0\0" + bytes(60), "a GGUF file"),
    Bad("safetensors", b"\x02\0\0\0\0\0\0\0{}", "neither a zip archive nor a pickle"),
    Bad("bare-pickle", pickle.dumps({"w": 1}, 2), "neither a zip archive nor a pickle"),
    Bad("tar", tar(), "before version 0.1.10", UnsupportedError),
    # the zip
    Bad("truncated", GOOD[:-10], "does not end with its directory"),
    Bad("no-pickle", build(LITTLE, FOUR), "without data.pkl"),
    Bad("torchscript", file(("w", tensor()), extra=(Entry("m/constants.pkl"),)), "TorchScript", UnsupportedError),
    Bad("torchscript-code", file(("w", tensor()), extra=(Entry("m/code/a.py"),)), "TorchScript", UnsupportedError),
    Bad(
        "big-endian", file(("w", tensor()), extra=(Entry("m/byteorder", b"big"), FOUR)), "big-endian", UnsupportedError
    ),
    Bad("odd-endian", file(("w", tensor()), extra=(Entry("m/byteorder", b"pdp"), FOUR)), "neither little nor big"),
    Bad("duplicate-storage", file(("w", tensor()), extra=(LITTLE, FOUR, FOUR)), "'m/data/0' twice"),
    Bad("dot-dot", file(("w", tensor()), extra=(LITTLE, Entry("m/../data/0", bytes(16)))), "may leave", HostileError),
    Bad("storage-missing", file(("w", tensor(key="1"))), "storage '1', which the file does not have"),
    Bad(
        "storage-smaller", file(("w", tensor()), extra=(Entry("m/data/0", bytes(12)),)), "16 bytes, but the file has 12"
    ),
    Bad(
        "storage-larger", file(("w", tensor()), extra=(Entry("m/data/0", bytes(20)),)), "16 bytes, but the file has 20"
    ),
    # the pickle
    Bad("pickle-cut", build(Entry("m/data.pkl", pickled()[:-1]), LITTLE), "cut off"),
    Bad("deep", build(Entry("m/data.pkl", b"(" * 100_000 + b".")), "deeper than", HostileError),
    Bad("memo", build(Entry("m/data.pkl", b"Nr\xff\xff\xff\x7f.")), "memo", HostileError),
    Bad("binunicode8", build(Entry("m/data.pkl", b"\x8d" + b"\xff" * 7 + b"\x7f.")), "only 1 remain"),
    Bad("tree-is-a-list", build(Entry("m/data.pkl", b"].")), "a list, not a mapping"),
    Bad("tree-is-deep", build(Entry("m/data.pkl", b"]" * 50_000 + b"a" * 49_999 + b".")), "a list, not a mapping"),
    Bad("tree-is-a-tensor", build(Entry("m/data.pkl", tensor() + b"."), FOUR), "not a mapping"),
    Bad("whole-module", build(Entry("m/data.pkl", b"cmine\nNet\n)\x81.")), "class mine.Net", UnsupportedError),
    Bad("whole-module-wrapped", file(("model", b"cmine\nNet\n)\x81")), "class mine.Net", UnsupportedError),
    Bad("no-tensors", file(("epoch", b"K\x03")), "no tensors, only 'epoch' (int)"),
    Bad("empty-mapping", file(), "no tensors, only an empty mapping"),
    Bad("unknown-wrapper", file(("ema", pickled(("w", tensor()))[2:-1])), "no tensors, only 'ema' (dict)"),
    Bad(
        "two-wrappers",
        file(("model", pickled(("w", tensor()))[2:-1]), ("state_dict", pickled(("w", tensor()))[2:-1])),
        "several places: 'state_dict', 'model'",
    ),
    Bad("wrapper-and-own", file(("w", tensor()), ("model", pickled(("w", tensor()))[2:-1])), "several places"),
    Bad("name-is-a-number", build(Entry("m/data.pkl", b"}K\x01" + tensor() + b"s."), FOUR), "not under a name"),
    Bad(
        "name-surrogate", build(Entry("m/data.pkl", b"}X\3\0\0\0\xed\xa0\x80" + tensor() + b"s."), FOUR), "not Unicode"
    ),
    # the tensors
    Bad("too-long", one("(K\x05t"), "reaches byte 20 of a storage of 16 bytes"),
    Bad("offset-too-far", one(offset="K\x01"), "reaches byte 20"),
    Bad("stride-too-far", one("(K\x02t", "(K\x04t"), "reaches byte 20"),
    Bad("offset-negative", one("(K\x01t", offset="J\xff\xff\xff\xff"), "negative or malformed"),
    Bad("stride-negative", one("(K\x02t", "(J\xff\xff\xff\xfft"), "negative or malformed"),
    Bad("size-negative", one("(J\xff\xff\xff\xfft"), "negative or malformed"),
    Bad("size-text", one("(U\x014t"), "negative or malformed"),
    Bad("size-none", one("N"), "negative or malformed"),
    Bad("size-enormous", one("(\x8a\x09" + "\xff" * 8 + "\0t"), "negative or malformed"),
    Bad("ranks-differ", one("(K\x02K\x02t"), "negative or malformed"),
    Bad("too-many-dims", one("(" + "K\x01" * 65 + "t", "(" + "K\x01" * 65 + "t"), "negative or malformed"),
    Bad("product-overflows", one(f"({WIDE * 2}t", "(K\x01K\x01t"), "reaches byte"),
    Bad("stride-bomb", one(f"({WIDE}t", "(K\0t"), "strides repeat elements", HostileError),
    Bad(
        "stride-bomb-of-dims", one(f"({WIDE * 20}t", f"({'K' + chr(0)}" * 1 + "K\0" * 19 + "t"), "repeat", HostileError
    ),
    Bad("numel-negative", one(numel="J\xff\xff\xff\xff"), "not a storage"),
    Bad("numel-enormous", one(numel=WIDE), "but the file has 16"),
    Bad("storage-type-unknown", one(storage="torch\nMysteryStorage"), "does not know", UnsupportedError),
    Bad("storage-type-elsewhere", one(storage="evil\nFloatStorage"), "does not know", UnsupportedError),
    Bad("dtype-complex128", one(storage="torch\nComplexDoubleStorage"), "cannot hold", UnsupportedError),
    Bad("conjugated", one(rest="\x89}}U\x04conj\x88s"), "conjugated or negated", UnsupportedError),
    Bad("sparse", file(("w", b"ctorch._utils\n_rebuild_sparse_tensor\n)R")), "is sparse", UnsupportedError),
    Bad("meta", file(("w", b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n)R")), "meta device", UnsupportedError),
    Bad("dtensor", file(("w", b"ctorch.distributed.tensor\nDTensor\n)R")), "part of a DTensor", UnsupportedError),
    Bad("future", file(("w", b"ctorch._utils\n_rebuild_tensor_v9\n)R")), "does not know", UnsupportedError),
    Bad(
        "wrapped-too-often",
        file(("w", b"ctorch._utils\n_rebuild_parameter\n(" * 9 + tensor() + b"\x89}tR" * 9)),
        "wrapped more than",
    ),
    # the legacy container
    Bad(
        "persistent-id-as-text",
        legacy(0, raw=b"(dS'w'\nP('storage', 1)\ns.", tail=pickle.dumps([], 0)),
        "refers to something that is not a storage",
    ),
    Bad("legacy-cut", legacy(data={}), "cut off"),
    Bad("legacy-protocol", legacy().replace(b"\xe9\x03", b"\xea\x03"), "cut off"),
    Bad(
        "legacy-big-endian",
        legacy(data={}, tail=pickle.dumps([], 2)).replace(b"\x88", b"\x89", 1),
        "big",
        UnsupportedError,
    ),
    Bad("legacy-storage-unnamed", legacy(data={}, tail=pickle.dumps(["7"], 2)), "nothing refers to"),
    Bad("legacy-no-list", legacy(data={}, tail=pickle.dumps(7, 2)), "does not list its storages"),
    Bad(
        "legacy-storage-cut",
        legacy(raw=pickled(("w", tensor())), tail=pickle.dumps(["0"], 2) + (4).to_bytes(8, "little") + bytes(15)),
        "would end at",
    ),
    Bad(
        "legacy-storage-lies",
        legacy(raw=pickled(("w", tensor())), tail=pickle.dumps(["0"], 2) + (1 << 61).to_bytes(8, "little") + bytes(16)),
        "would end at",
    ),
    Bad(
        "legacy-storage-negative",
        legacy(raw=pickled(("w", tensor())), tail=pickle.dumps(["0"], 2) + b"\xff" * 8 + bytes(16)),
        "would end at",
    ),
    Bad(
        "legacy-storage-smaller",
        legacy(raw=pickled(("w", tensor())), tail=pickle.dumps(["0"], 2) + (3).to_bytes(8, "little") + bytes(12)),
        "16 bytes, but the file has 12",
    ),
    Bad(
        "legacy-storage-twice",
        legacy(raw=pickled(("w", tensor())), tail=pickle.dumps(["0", "0"], 2) + (4).to_bytes(8, "little") + bytes(48)),
        "lists it twice",
    ),
    Bad(
        "legacy-trailing",
        legacy(raw=pickled(("w", tensor())), tail=pickle.dumps(["0"], 2) + (4).to_bytes(8, "little") + bytes(17)),
        "1 bytes after its last storage",
    ),
)
