"""Reads and writes golden outputs: what a model computed from given inputs, to be compared later without its source.

A file holds no logits, of which there are as many as tokens in the vocabulary for each position, but a sketch of them
(Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002): each element is added to one of
`BUCKETS` sums with a sign, both chosen by a hash of its index. The norm of the difference of two sketches estimates
that of the difference of the outputs. All positions have the same hash, so the standard deviation of the estimate is
9 % if all positions differ in the same direction, and 1 % if 64 positions differ independently. Signed
differences that fall into the same bucket and sum to zero cannot be seen.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from dataclasses import asdict, replace
from math import inf, isfinite, prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.base.errors import DestinationError, SourceError, UnsupportedError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA: Final = "shardctl.golden/1"
BUCKETS: Final = 64
"""Sums for each position: the standard deviation of a distance is sqrt(2 / 64) / 2, 9 %, for one position, and for
many that differ in the same direction."""
TOP_TOKENS: Final = 5
CHECK: Final = "golden"
Values = np.ndarray[Any, np.dtype[np.float64]]
_SPLITMIX64_CONSTANTS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of splitmix64 (Steele, Lea and Flood, 2014)."""
_ELEMENT_BYTES_BY_DTYPE: Final = {"int64": 8, "float32": 4, "bool": 1}
"""Types of inputs, and bytes of an element."""
_MAX_BYTES: Final = 256 << 20
"""No golden output is larger: inputs of some images, and sums of some thousand positions."""


@value_class
class GoldenInput:
    """One argument of the model's forward."""

    dtype: str
    """`int64`, `float32` or `bool`."""
    shape: tuple[int, ...]
    data: str
    """The elements, little-endian, in base 64."""

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], data: bytes) -> GoldenInput:
        """Make one from its bytes."""
        return cls(dtype, shape, b64encode(data).decode())

    def decode(self) -> bytes:
        """Return the bytes of the elements."""
        return b64decode(self.data)


@value_class
class OutputSketch:
    """What is kept of an output, of which the last dim is the vocabulary or the hidden size."""

    output: str
    """Such as `logits`."""
    shape: tuple[int, ...]
    norm: float
    """L2 norm of all elements."""
    sums: tuple[tuple[float, ...], ...]
    """For each position `BUCKETS` signed sums."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Of logits: for each position the likeliest tokens, the likeliest first."""
    log_probabilities: tuple[tuple[float, ...], ...] = ()
    """Those of the tokens."""


@value_class
class GoldenOutput:
    """A golden output, as its file has it."""

    architecture: str
    dtype: str
    """In which the model computed: fp32, bf16 or fp16."""
    inputs: Mapping[str, GoldenInput]
    sketch: OutputSketch
    bound: float
    """The relative L2 distance that is allowed: what other kernels and another order of sums may change."""
    digest: str
    """Of the checkpoint's elements, whatever its layout."""
    versions: Mapping[str, str]


@value_class
class GoldenComparison:
    """How far an output is from a golden one."""

    error: float
    """Relative L2 distance, estimated from the sketches; infinite if the outputs have other shapes or NaN."""
    bound: float
    positions: int = 0
    same_tokens: int = 0
    """Positions whose likeliest token is the same."""
    largest_difference: float = 0.0
    """Of the log-probabilities of the likeliest tokens of the golden output that are among those of the other."""


def sketch_output(name: str, output: Values) -> OutputSketch:
    """Sketch an output; raises UnsupportedError for one that is not finite, of which nothing can be kept."""
    rows = output.reshape(-1, output.shape[-1])
    if not np.isfinite(rows).all():
        raise UnsupportedError(f"{name} are not all finite, so there is no golden output")
    buckets, signs = _hash_indices(rows.shape[1])
    sums = np.zeros((len(rows), BUCKETS))
    for bucket in range(BUCKETS):
        chosen = buckets == bucket
        sums[:, bucket] = rows[:, chosen] @ signs[chosen]
    sketch = OutputSketch(name, output.shape, float(np.linalg.norm(rows)), tuple(map(tuple, sums.tolist())))
    if name != "logits":
        return sketch
    scores = compute_log_probabilities(rows)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_TOKENS]
    return replace(
        sketch,
        tokens=tuple(map(tuple, best.tolist())),
        log_probabilities=tuple(map(tuple, np.take_along_axis(scores, best, 1).tolist())),
    )


def compute_log_probabilities(logits: Values) -> Values:
    """Compute the log-probabilities along the last dim."""
    shifted: Values = logits - logits.max(-1, keepdims=True)
    scores: Values = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return scores


def compare_with_golden(golden: GoldenOutput, name: str, output: Values) -> GoldenComparison:
    """Compare an output with a golden one."""
    right = golden.sketch
    if name != right.output or output.shape != right.shape or not np.isfinite(output).all():
        return GoldenComparison(inf, golden.bound)
    found, base = sketch_output(name, output), right.norm or 1.0
    apart = float(np.linalg.norm(np.asarray(found.sums) - np.asarray(right.sums)))
    largest = 0.0
    for here, there, ours, theirs in zip(
        found.tokens, right.tokens, found.log_probabilities, right.log_probabilities, strict=True
    ):
        score = dict(zip(here, ours, strict=True))
        pairs = zip(there, theirs, strict=True)
        largest = max([largest, *(abs(score[token] - old) for token, old in pairs if token in score)])
    same = sum(here[:1] == there[:1] for here, there in zip(found.tokens, right.tokens, strict=True))
    error = max(apart, abs(found.norm - right.norm)) / base
    return GoldenComparison(error, golden.bound, len(right.tokens), same, largest)


def _hash_indices(count: int) -> tuple[np.ndarray[Any, Any], Values]:
    """Return a bucket and a sign for each index of the last dim, the same on every machine."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_SPLITMIX64_CONSTANTS[0])
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_SPLITMIX64_CONSTANTS[1])
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SPLITMIX64_CONSTANTS[2])
        mixed ^= mixed >> np.uint64(31)
    signs = np.where(mixed >> np.uint64(63), -1.0, 1.0)
    return (mixed % np.uint64(BUCKETS)).astype(np.int64), signs


def write_golden(path: Path, golden: GoldenOutput) -> None:
    """Write a golden output to a new file; raises DestinationError if there is one, or it cannot be written."""
    text = json.dumps({"schema": SCHEMA} | asdict(golden), indent=1, allow_nan=False)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        try:
            os.link(partial, path)  # fails where there is a file, and never shows half of one
        finally:
            partial.unlink()
    except FileExistsError as error:
        raise DestinationError(f"{path} exists", hint="golden outputs are not replaced: name another file") from error
    except OSError as error:
        raise DestinationError(f"{path} cannot be written: {error.strerror}") from error


def require_new_file(path: Path) -> None:
    """Raise DestinationError if a golden output cannot become this file, before anything is computed."""
    if os.path.lexists(path):
        raise DestinationError(f"{path} exists", hint="golden outputs are not replaced: name another file")
    if not path.parent.is_dir():
        raise DestinationError(f"{path} cannot be written: there is no directory {path.parent}")


def read_golden(path: Path) -> GoldenOutput:
    """Read a golden output; raises SourceError for what is none, or is damaged."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise SourceError(f"{path} is no golden output: it has more than {_MAX_BYTES >> 20} MiB")
        told = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is no golden output: {error}") from error
    try:
        return _parse_golden(told)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        hint = "write one with verify DIR --write-golden FILE"
        raise SourceError(f"{path} is no golden output: {what}", hint=hint) from error


def _parse_golden(told: Any) -> GoldenOutput:  # noqa: ANN401 - JSON
    if not isinstance(told, dict) or told.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    inputs = {}
    for name, one in told["inputs"].items():
        made = GoldenInput(_require_text(one["dtype"]), _parse_shape(one["shape"]), _require_text(one["data"]))
        if (
            made.dtype not in _ELEMENT_BYTES_BY_DTYPE
            or len(made.decode()) != prod(made.shape) * _ELEMENT_BYTES_BY_DTYPE[made.dtype]
        ):
            raise ValueError(f"the data of the input {name} do not have its type and shape")
        inputs[name] = made
    sketch = told["sketch"]
    shape = _parse_shape(sketch["shape"])
    positions = prod(shape[:-1])
    made_sketch = OutputSketch(
        _require_text(sketch["output"]),
        shape,
        _parse_number(sketch["norm"]),
        _parse_rows(sketch["sums"], positions, BUCKETS),
        tuple(tuple(int(each) for each in row) for row in sketch["tokens"]),
        _parse_rows(sketch["log_probabilities"], len(sketch["tokens"]), None),
    )
    if [len(row) for row in made_sketch.tokens] != [len(row) for row in made_sketch.log_probabilities]:
        raise ValueError("tokens and log-probabilities differ in number")
    if len(made_sketch.tokens) != (positions if made_sketch.output == "logits" else 0):
        raise ValueError("it does not have tokens for each position of logits, and for nothing else")
    bound = _parse_number(told["bound"])
    if bound < 0 or not inputs or told["dtype"] not in {"fp32", "bf16", "fp16"}:
        raise ValueError("it has no inputs, or an unknown dtype or a negative bound")
    return GoldenOutput(
        _require_text(told["architecture"]),
        _require_text(told["dtype"]),
        inputs,
        made_sketch,
        bound,
        _require_text(told["digest"]),
        {_require_text(name): _require_text(version) for name, version in told["versions"].items()},
    )


def _parse_shape(told: Any) -> tuple[int, ...]:  # noqa: ANN401 - JSON
    if not isinstance(told, list) or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in told):
        raise ValueError(f"{told!r:.80} is no shape")
    return tuple(told)


def _parse_rows(told: Any, count: int, width: int | None) -> tuple[tuple[float, ...], ...]:  # noqa: ANN401 - JSON
    rows = tuple(tuple(_parse_number(each) for each in row) for row in told)
    if len(rows) != count or any(width not in {None, len(row)} for row in rows):
        raise ValueError(f"it does not have numbers for each of {count} positions")
    return rows


def _parse_number(told: object) -> float:
    if isinstance(told, bool) or not isinstance(told, int | float) or not isfinite(told):
        raise ValueError(f"{told!r:.80} is no finite number")
    return float(told)


def _require_text(told: object) -> str:
    if not isinstance(told, str):
        raise TypeError(f"{told!r:.80} is no text")
    return told
