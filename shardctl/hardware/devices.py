"""Finds a device by the names that people and drivers give it, among those of `devices.toml` and in a user's file."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from shardctl.base.amounts import format_memory_size
from shardctl.base.errors import UsageError
from shardctl.hardware.device_spec import GB, GIB, MIB, PCIE3, TERA, DeviceSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "GB",
    "GIB",
    "PCIE3",
    "TERA",
    "DeviceSpec",
    "build_device",
    "find_named_device",
    "get_device",
    "list_devices",
]

DEVICE_FILE: Final = ".toml"
"""What the name of a user's own device ends with."""
_MAX_FILE_BYTES: Final = 1 << 20
_Amount = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9]+$")]


class _DeviceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device as a file has it; `DeviceSpec` says what its figures mean, and a rate that is left out is not known."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    memory_gib: _Amount
    """As marketed: makers' GB are GiB."""
    names: tuple[_Name, ...] = ()
    """What people call it, without maker and memory, in small letters and digits; the usual first."""
    compute_capability: _Rate = 0.0
    usable_gib: _Amount | None = None
    """What a process finds; `memory_gib` if neither this nor `usable_mib` is given."""
    usable_mib: _Amount | None = None
    measured_by: str = ""
    bf16_tflops: _Rate = 0.0
    memory_gb_per_s: _Rate = 0.0
    link_gb_per_s: _Rate = 0.0
    network_gb_per_s: _Rate = 0.0
    host_gb_per_s: _Rate = 0.0
    per_node: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 8
    source: str = ""

    def build_spec(self) -> DeviceSpec:
        """Build the device; raises ValueError if it could use more memory than it has."""
        memory, usable = round(self.memory_gib * GIB), round(self.memory_gib * GIB)
        if self.usable_gib is not None and self.usable_mib is not None:
            raise ValueError(f"{self.name} has usable_gib and usable_mib")
        if self.usable_gib is not None:
            usable = round(self.usable_gib * GIB)
        elif self.usable_mib is not None:
            usable = round(self.usable_mib * MIB)
        if usable > memory:
            raise ValueError(f"{self.name} has more usable memory than memory_gib")
        return DeviceSpec(
            name=self.name,
            memory_bytes=memory,
            usable_bytes=usable,
            compute_capability=self.compute_capability,
            flops_bf16=self.bf16_tflops * TERA,
            memory_bandwidth=self.memory_gb_per_s * GB,
            link_bandwidth=self.link_gb_per_s * GB,
            network_bandwidth=self.network_gb_per_s * GB,
            pcie=self.host_gb_per_s * GB,
            per_node=self.per_node,
            measured_by=self.measured_by,
            source=self.source,
            spellings=self.names,
        )


class _DeviceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: Annotated[tuple[_DeviceRecord, ...], msgspec.Meta(min_length=1)]


def _parse_devices(text: str) -> tuple[DeviceSpec, ...]:
    """Parse a file of devices; raises ValueError for one that is malformed."""
    return tuple(one.build_spec() for one in msgspec.convert(tomllib.loads(text), _DeviceFile).device)


@cache
def list_devices() -> tuple[DeviceSpec, ...]:
    """List every device of `devices.toml`, in its order."""
    return _parse_devices(files("shardctl.hardware").joinpath("devices.toml").read_text(encoding="utf-8"))


def build_device(described: Mapping[str, object]) -> DeviceSpec:
    """Build the device that a dictionary describes with the keys of a file of devices; raises UsageError.

    >>> build_device({"name": "mine", "memory_gib": 80}).memory_bytes == 80 * GIB
    True
    """
    try:
        return msgspec.convert(dict(described), _DeviceRecord).build_spec()
    except ValueError as error:
        hint = "a device has name and memory_gib, and the keys of docs/devices.md"
        raise UsageError(f"the dictionary describes no device: {error}", hint=hint) from error


def read_device(path: Path) -> DeviceSpec:
    """Read the one device of a user's file; raises UsageError if it cannot be read, or is malformed."""
    hint = "the file has one [[device]] with name and memory_gib, and the keys of docs/devices.md"
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        found = _parse_devices(data.decode("utf-8")) if len(data) <= _MAX_FILE_BYTES else ()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="name a file, a device or a size") from error
    except ValueError as error:
        raise UsageError(f"{path} describes no device: {error}", hint=hint) from error
    if len(found) != 1:
        raise UsageError(f"{path} describes {len(found) or 'no'} devices, and --gpu takes one", hint=hint)
    return found[0]


_DEVICE_BRAND_WORDS: Final = frozenset(
    {"nvidia", "amd", "tesla", "geforce", "instinct", "intel", "apple", "google", "aws", "ac"}
) | {part + generation for part in ("hbm", "sxm") for generation in ("", "2", "2e", "3", "3e", "4", "5", "6")}
"""What stands in a device's full name, and does not tell it from others of this table."""
_MAX_SUGGESTED_DEVICES: Final = 4
"""Names that an error lists."""


def get_device(named: str | int) -> DeviceSpec:
    """Return the device of that name, such as ``h100`` or ``A100-80g``, or one that is nothing but so many bytes.

    Names are those people use and those that drivers report; one that ends with ``.toml`` is a file. Raises UsageError,
    with the nearest names, for one that is not known, for one that several devices have, and for a malformed file.

    >>> get_device("nvidia a100-sxm4-80gb").name, get_device(80 << 30).name
    ('A100-80GB', '80.0 GiB')
    """
    if isinstance(named, int):
        if named < 1:
            raise UsageError(f"a device of {named} bytes holds nothing", hint="write a size such as 80GiB")
        return DeviceSpec(format_memory_size(named), named, named, source="given")
    if named.endswith(DEVICE_FILE):
        return read_device(Path(named))
    found = find_named_device(named)
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{named!r} is several devices", hint=f"write {' or '.join(map(format_short_name, found))}")
    if named.isdecimal() and len(named) < len(str(1 << 64)):
        raise UsageError(f"device {named!r} has no unit", hint=f"did you mean {_suggest_sizes(int(named))}?")
    raise UsageError(f"unknown device {named!r}", hint=f"{_suggest_names(named)}docs/devices.md lists all")


def find_named_device(named: str) -> list[DeviceSpec]:
    """Find the devices that have the name; several where it leaves out their memory."""
    words = [word for word in re.findall(r"[a-z0-9]+", named.lower()) if word not in _DEVICE_BRAND_WORDS]
    return [one for one in list_devices() if _is_named(one, words)]


def _is_named(one: DeviceSpec, words: list[str]) -> bool:
    """Return whether the words are its name, with or without its memory, wherever that stands."""
    size = one.memory_bytes // GIB
    sizes = {str(size), f"{size}g", f"{size}gb", f"{size}gib"}
    joined, alone = "".join(words), "".join(word for word in words if word not in sizes)
    return any(alone == name or joined in {name, *(name + memory for memory in sizes)} for name in one.spellings)


def format_short_name(one: DeviceSpec) -> str:
    """Format the name as one types it."""
    return one.name.lower().replace(" ", "-").removesuffix("b")


def _suggest_sizes(number: int) -> str:
    """Suggest what a number without a unit may stand for: a size, or the devices that have as much."""
    same = [format_short_name(one) for one in list_devices() if one.memory_bytes == number * GIB]
    return " or ".join([f"{number}GB", ", ".join(same[:_MAX_SUGGESTED_DEVICES])] if same else [f"{number}GB"])


def _suggest_names(named: str) -> str:
    near = get_close_matches(
        named.lower(), [format_short_name(one) for one in list_devices()], _MAX_SUGGESTED_DEVICES, 0.5
    )
    return f"did you mean {' or '.join(near)}? A size such as 80GB works too; " if near else "use a size such as 80GB; "
