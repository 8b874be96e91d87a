"""Small safetensors files: one for each way to be wrong, and the odd ones that are right, with the verdict on each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shardctl.base.errors import SourceError, UnsupportedError


def build(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file of that header and data; `length` lies about the header's length."""
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def one(name: str, dtype: str, shape: list[int], size: int) -> bytes:
    return build(json.dumps({name: entry(dtype, shape, 0, size)}), bytes(range(size)))


@dataclass(frozen=True)
class Bad:
    name: str
    content: bytes
    message: str
    error: type[SourceError] = SourceError
    library_accepts: bool = False
    """Deliberate strictness: the library takes it, and shardctl does not."""


A4 = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
"""The entry of a four-byte tensor `a`."""
DEEP = 5_000

BAD = (
    # not a safetensors file at all
    Bad("empty", b"", "is empty"),
    Bad("seven-bytes", b"\x02\0\0\0\0\0\0", "has 7 bytes"),
    Bad("lfs-pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    Bad("html", b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
    Bad("html-after-bom", b"\xef\xbb\xbf\n<HTML><head></head></HTML>", "web page"),
    Bad("zip", b"PK\x03\x04" + bytes(60), "a zip archive"),
    Bad("pickle", b"\x80\x02}q\x00." + bytes(60), "Python pickle"),
    Bad("gguf", b"GGUF\x03\0\0\0" + bytes(60), "a GGUF file"),
    Bad("hdf5", b"\x89HDF\r\n\x1a\n" + bytes(60), "HDF5"),
    Bad("never-filled", bytes(300), "zero bytes"),
    # the length
    Bad("length-beyond-file", build("{}", length=3), "ends inside its header"),
    Bad("length-zero", build("", b"{}"), "malformed"),
    Bad("length-over-limit", build("{}", length=100_000_001), "the format allows 100,000,000"),
    Bad("length-all-ones", b"\xff" * 8 + b"{}", "the format allows 100,000,000"),
    # the JSON
    Bad("not-utf8", build(b'{"\xff":1}'), "not UTF-8 text at byte 2"),
    Bad("utf8-surrogate", build('{"\ud800":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"x"), "not UTF-8"),
    Bad("bom", build("\ufeff{}"), "expected a JSON object"),
    Bad("array", build("[]"), "expected a JSON object"),
    Bad("null", build("null"), "expected a JSON object"),
    Bad("unclosed", build("{" + A4, b"abcd"), "expected ','"),
    Bad("two-objects", build("{}{}"), "expected the end"),
    Bad("nul-padding", build("{}\0\0\0\0\0\0"), "expected the end"),
    Bad("trailing-comma", build("{" + A4 + ",}", b"abcd"), "expected a string"),
    Bad("missing-comma", build("{" + A4 + A4.replace("a", "b", 1) + "}", b"abcd"), "expected ','"),
    Bad("no-colon", build('{"a"}'), "expected ':'"),
    Bad("single-quotes", build("{'a':1}"), "expected a string"),
    Bad("control-character-in-name", build('{"a\nb":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "control char"),
    Bad("form-feed-as-space", build("{\f}"), "expected a string"),
    Bad("deep-array-as-entry", build('{"a":' + "[" * DEEP + "]" * DEEP + "}"), "expected a JSON object"),
    Bad("deep-array-in-shape", build('{"a":{"shape":' + "[" * DEEP + "]" * DEEP + "}}"), "malformed"),
    Bad("deep-objects", build('{"a":' * DEEP + "1" + "}" * DEEP), "malformed"),
    Bad("deep-metadata", build('{"__metadata__":' + '{"a":' * DEEP + '"b"' + "}" * DEEP + "}"), "strings to strings"),
    Bad("long-entry", build('{"a":{' + " " * 20_000 + A4[5:] + "}", b"abcd"), "not closed", library_accepts=True),
    Bad("long-name", build('{"' + "n" * 20_000 + A4[2:] + "}", b"abcd"), "more than 10,000", library_accepts=True),
    # names
    Bad("lone-surrogate", build('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "lone surrogate"),
    Bad("tensor-twice", build("{" + A4 + "," + A4 + "}", b"abcd"), "'a' appears twice", library_accepts=True),
    Bad(
        "tensor-twice-by-escape",
        build("{" + A4 + "," + A4.replace('"a"', '"\\u0061"') + "}", b"abcd"),
        "'a' appears twice",
        library_accepts=True,
    ),
    Bad("metadata-twice", build('{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' appears twice"),
    Bad(
        "metadata-twice-by-escape", build('{"__metadata__":{},"\\u005f_metadata__":{}}'), "'__metadata__' appears twice"
    ),
    Bad("metadata-key-twice", build('{"__metadata__":{"a":"1","a":"2"}}'), "appears twice", library_accepts=True),
    Bad("metadata-tensor", build('{"__metadata__"' + A4[3:] + "}", b"abcd"), "maps strings to strings"),
    Bad("metadata-number", build('{"__metadata__":{"a":1}}'), "at 'a': expected a string"),
    Bad("metadata-null-value", build('{"__metadata__":{"a":null}}'), "at 'a': expected a string"),
    Bad("metadata-list", build('{"__metadata__":[]}'), "expected a JSON object"),
    Bad("metadata-surrogate", build('{"__metadata__":{"a":"\\udc00"}}'), "lone surrogate"),
    # entries
    Bad("entry-is-null", build('{"a":null}'), "expected a JSON object"),
    Bad("entry-as-array", build('{"a":["U8",[4],[0,4]]}', b"abcd"), "expected a JSON object", library_accepts=True),
    Bad("no-dtype", build('{"a":{"shape":[4],"data_offsets":[0,4]}}', b"abcd"), "no field 'dtype'"),
    Bad("no-shape", build('{"a":{"dtype":"U8","data_offsets":[0,4]}}', b"abcd"), "no field 'shape'"),
    Bad("no-offsets", build('{"a":{"dtype":"U8","shape":[4]}}', b"abcd"), "no field 'data_offsets'"),
    Bad(
        "unknown-field",
        build('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"scale":1}}', b"abcd"),
        "an unknown field 'scale'",
        library_accepts=True,
    ),
    Bad(
        "field-twice",
        build('{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', b"abcd"),
        "'dtype' appears twice",
    ),
    Bad("unknown-dtype", one("a", "F5_E2M2", [8], 5), "'F5_E2M2', which is not one of the 22", UnsupportedError),
    Bad("lower-case-dtype", one("a", "u8", [4], 4), "'u8', which is not", UnsupportedError),
    Bad("dtype-number", build('{"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}', b"abcd"), "not a string"),
    Bad(
        "dtype-as-map",
        build('{"a":{"dtype":{"U8":null},"shape":[4],"data_offsets":[0,4]}}', b"abcd"),
        "malformed",
        library_accepts=True,
    ),
    Bad(
        "dtype-as-list",
        build('{"a":{"dtype":["U8"],"shape":[4],"data_offsets":[0,4]}}', b"abcd"),
        "not a string",
    ),
    Bad("shape-null", build('{"a":{"dtype":"U8","shape":null,"data_offsets":[0,1]}}', b"a"), "not a list of sizes"),
    Bad("shape-negative", one("a", "U8", [-4], 4), "not a list of sizes"),
    Bad("shape-two-negatives", one("a", "U8", [-2, -2], 4), "not a list of sizes"),
    Bad(
        "shape-minus-zero",
        build('{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        "not a list of sizes",
    ),
    Bad("shape-float", build('{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}', b"abcd"), "not a list of"),
    Bad("shape-exponent", build('{"a":{"dtype":"U8","shape":[4e0],"data_offsets":[0,4]}}', b"abcd"), "not a list of"),
    Bad("shape-string", build('{"a":{"dtype":"U8","shape":["4"],"data_offsets":[0,4]}}', b"abcd"), "not a list of"),
    Bad("shape-true", build('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"a"), "not a list of sizes"),
    Bad("shape-nan", build('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"a"), "NaN is not JSON"),
    Bad("shape-leading-zero", build('{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}', b"abcd"), "malformed"),
    Bad("shape-huge-number", one("a", "U8", [2**64], 4), "not a list of sizes"),
    Bad(
        "shape-endless-number",
        build('{"a":{"dtype":"U8","shape":[' + "9" * 9000 + '],"data_offsets":[0,4]}}', b"abcd"),
        "not a list of sizes",
    ),
    Bad("product-overflows", one("a", "U8", [2**32, 2**32], 0), "overflows 64 bits"),
    Bad("product-overflows-then-zero", one("a", "U8", [2**32, 2**32, 0], 0), "overflows 64 bits"),
    Bad("product-wraps-to-size", one("a", "U8", [2**63, 2, 4], 4), "overflows 64 bits"),
    Bad("bits-overflow", one("a", "F64", [2**60], 8), "overflows 64 bits"),
    Bad("too-many-dims", one("a", "U8", [1] * 33, 1), "33 dims", UnsupportedError, library_accepts=True),
    Bad("offsets-one", build('{"a":{"dtype":"U8","shape":[4],"data_offsets":[4]}}', b"abcd"), "not a pair"),
    Bad("offsets-three", build('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}}', b"abcd"), "not a pair"),
    Bad("offsets-reversed", build('{"a":{"dtype":"U8","shape":[0],"data_offsets":[4,0]}}', b"abcd"), "span -4"),
    Bad("size-too-small", one("a", "F32", [2], 4), "takes 8 bytes, but its data_offsets span 4"),
    Bad("size-too-large", one("a", "F32", [2], 16), "takes 8 bytes, but its data_offsets span 16"),
    Bad("scalar-without-bytes", one("a", "F32", [], 0), "takes 4 bytes"),
    Bad("f4-half-byte", one("a", "F4", [3], 2), "does not end on a byte"),
    Bad("f4-scalar", one("a", "F4", [], 1), "does not end on a byte"),
    Bad("f6-partial-byte", one("a", "F6_E2M3", [3], 3), "does not end on a byte"),
    # the data
    Bad("truncated", build("{" + A4 + "}", b"abc"), "is truncated"),
    Bad("header-only", build("{" + A4 + "}"), "is truncated"),
    Bad("trailing-byte", build("{" + A4 + "}", b"abcde"), "1 bytes after its last tensor"),
    Bad("data-without-tensors", build("{}", b"a"), "1 bytes after its last tensor"),
    Bad("hole-at-start", build('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"ab"), "leaves a hole"),
    Bad(
        "hole-between",
        build("{" + A4 + ',"b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}', b"abcdef"),
        "'b' begins at data byte 5 and leaves a hole",
    ),
    Bad(
        "overlap",
        build("{" + A4 + ',"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}}', b"abcde"),
        "'b' begins at data byte 3 and overlaps",
    ),
    Bad(
        "same-bytes-for-two",
        build("{" + A4 + "," + A4.replace("a", "b", 1) + "}", b"abcd"),
        "overlaps",
    ),
    Bad(
        "empty-inside-another",
        build("{" + A4 + ',"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}', b"abcd"),
        "overlaps",
    ),
    Bad(
        "empty-beyond-the-end",
        build("{" + A4 + ',"b":{"dtype":"U8","shape":[0],"data_offsets":[9,9]}}', b"abcd"),
        "leaves a hole",
    ),
)


@dataclass(frozen=True)
class Odd:
    """Unusual, and right: accepted bit for bit, here and by the library."""

    name: str
    content: bytes
    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    """dtype, shape and data of each array."""


U8 = ("U8", (4,), b"abcd")
ODD = (
    Odd("no-tensors", build("{}"), {}),
    Odd("only-metadata", build('{"__metadata__":{"format":"pt"}}'), {}),
    Odd("null-metadata", build('{"__metadata__":null,' + A4 + "}", b"abcd"), {"a": U8}),
    Odd("padded", build("{" + A4 + "}    \n", b"abcd"), {"a": U8}),
    Odd("leading-space", build(" \t\r\n{" + A4 + "}", b"abcd"), {"a": U8}),
    Odd(
        "space-everywhere",
        build('{ "a" :\n{ "shape" : [ 4 ] , "data_offsets" : [ 0 ,\t4 ] , "dtype" : "U8" } }', b"abcd"),
        {"a": U8},
    ),
    Odd(
        "escaped-fields",
        build("{" + A4.replace("dtype", "d\\u0074ype").replace("U8", "\\u00558") + "}", b"abcd"),
        {"a": U8},
    ),
    Odd("empty-name", build("{" + A4.replace('"a"', '""') + "}", b"abcd"), {"": U8}),
    Odd("brace-in-name", build("{" + A4.replace('"a"', '"}{"') + "}", b"abcd"), {"}{": U8}),
    Odd("quote-in-name", build("{" + A4.replace('"a"', '"\\"\\\\"') + "}", b"abcd"), {'"\\': U8}),
    Odd("unicode-name", build("{" + A4.replace('"a"', '"模型.😀"') + "}", b"abcd"), {"模型.😀": U8}),
    Odd("surrogate-pair", build("{" + A4.replace('"a"', '"\\ud83d\\ude00"') + "}", b"abcd"), {"😀": U8}),
    Odd("nul-in-name", build("{" + A4.replace('"a"', '"a\\u0000"') + "}", b"abcd"), {"a\0": U8}),
    Odd("path-as-name", build("{" + A4.replace('"a"', '"../../etc/passwd"') + "}", b"abcd"), {"../../etc/passwd": U8}),
    Odd(
        "listed-backwards",
        build('{"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},' + A4 + "}", b"abcdef"),
        {"b": ("U8", (2,), b"ef"), "a": U8},
    ),
    Odd(
        "unaligned",
        build(
            '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],'
            '"data_offsets":[1,9]}}',
            b"x\0\0\0\0\0\0\xf8\x7f",
        ),
        {"a": ("U8", (1,), b"x"), "b": ("F64", (1,), b"\0\0\0\0\0\0\xf8\x7f")},
    ),
    Odd("scalar", one("s", "F32", [], 4), {"s": ("F32", (), b"\0\1\2\3")}),
    Odd("empty-tensor", one("e", "BF16", [3, 0, 2], 0), {"e": ("BF16", (3, 0, 2), b"")}),
    Odd("empty-and-large", one("e", "U8", [0, 2**40, 2**40], 0), {"e": ("U8", (0, 2**40, 2**40), b"")}),
    Odd(
        "empty-at-running-offset",
        build(
            "{" + A4 + ',"z":{"dtype":"I64","shape":[0],"data_offsets":[4,4]},"y":{"dtype":"U8","shape":[0],'
            '"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}',
            b"abcde",
        ),
        {"a": U8, "z": ("I64", (0,), b""), "y": ("U8", (0,), b""), "b": ("U8", (1,), b"e")},
    ),
    Odd(
        "bool-255",
        build('{"m":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}', b"\0\1\xff"),
        {"m": ("BOOL", (3,), b"\0\1\xff")},
    ),
    Odd(
        "signalling-nan",
        build('{"n":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\1\0\x80\x7f"),
        {"n": ("F32", (1,), b"\1\0\x80\x7f")},
    ),
    Odd("f4", one("q", "F4", [2, 4], 4), {"q": ("F4", (2, 4), b"\0\1\2\3")}),
    Odd("f4-odd-last-dim", one("q", "F4", [2, 3], 3), {"q": ("F4", (2, 3), b"\0\1\2")}),
    Odd("f6", one("q", "F6_E3M2", [4, 4], 12), {"q": ("F6_E3M2", (4, 4), bytes(range(12)))}),
)
