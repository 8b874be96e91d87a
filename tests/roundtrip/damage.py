"""Ways to damage a checkpoint on disk, each as small as it can be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def header(file: Path) -> dict[str, dict]:
    """The JSON header of a safetensors file."""
    data = file.read_bytes()
    return json.loads(data[8 : data_start(file)])


def data_start(file: Path) -> int:
    """Where the header ends and the tensors begin."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def region(file: Path, name: str) -> tuple[int, int]:
    """The bytes `[start, stop)` of the file that hold an array."""
    start, stop = header(file)[name]["data_offsets"]
    return data_start(file) + start, data_start(file) + stop


def row_bytes(file: Path, name: str) -> int:
    """Bytes of one row of an array."""
    start, stop = region(file, name)
    return (stop - start) // header(file)[name]["shape"][0]


def flip(file: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0] ^ (1 << bit)
        opened.seek(offset)
        opened.write(bytes([byte]))


def overwrite(file: Path, offset: int, data: bytes) -> None:
    """Put other bytes in the place of some."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def swap_rows(file: Path, name: str, one: int, other: int) -> None:
    """Exchange two rows of an array."""
    start, size, data = region(file, name)[0], row_bytes(file, name), file.read_bytes()
    rows = [data[start + n * size : start + (n + 1) * size] for n in (one, other)]
    overwrite(file, start + one * size, rows[1])
    overwrite(file, start + other * size, rows[0])


def exchange(one: Path, other: Path) -> None:
    """Give two files each other's names."""
    kept = one.rename(one.with_suffix(".kept"))
    other.rename(one)
    kept.rename(other)
