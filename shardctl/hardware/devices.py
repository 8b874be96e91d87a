"""Finds a device by the names that people and drivers give it."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Final

from shardctl.base.amounts import format_memory_size
from shardctl.base.errors import UsageError
from shardctl.hardware.device_spec import GB, GIB, PCIE3, TERA, DeviceSpec
from shardctl.hardware.devices_geforce import GEFORCE
from shardctl.hardware.devices_hopper import NEWER_SERVERS
from shardctl.hardware.devices_nvidia import SERVERS, WORKSTATIONS
from shardctl.hardware.devices_others import OTHERS

__all__ = ["DEVICES", "GB", "GIB", "PCIE3", "TERA", "DeviceSpec", "find_named_device", "get_device"]

DEVICES: Final = (*SERVERS, *NEWER_SERVERS, *WORKSTATIONS, *GEFORCE, *OTHERS)
"""Every device; to add one, write its figures and their source into one of these tuples."""
_MAKERS: Final = frozenset(
    {"nvidia", "amd", "tesla", "geforce", "instinct", "intel", "apple", "google", "aws", "ac"}
) | {part + generation for part in ("hbm", "sxm") for generation in ("", "2", "2e", "3", "3e", "4", "5", "6")}
"""What stands in a device's full name, and does not tell it from others of this table."""
_NEAREST: Final = 4
"""Names that an error lists."""


def get_device(named: str | int) -> DeviceSpec:
    """Return the device of that name, such as ``h100`` or ``A100-80g``, or one that is nothing but so many bytes.

    Names are those people use and those that drivers report. Raises UsageError, with the nearest names, for one that
    is not known, and for one that several devices have.

    >>> get_device("nvidia a100-sxm4-80gb").name, get_device(80 << 30).name
    ('A100-80GB', '80.0 GiB')
    """
    if isinstance(named, int):
        if named < 1:
            raise UsageError(f"a device of {named} bytes holds nothing", hint="write a size such as 80GiB")
        return DeviceSpec(format_memory_size(named), named, named, source="given")
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
    words = [word for word in re.findall(r"[a-z0-9]+", named.lower()) if word not in _MAKERS]
    return [one for one in DEVICES if _is_named(one, words)]


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
    same = [format_short_name(one) for one in DEVICES if one.memory_bytes == number * GIB]
    return " or ".join([f"{number}GB", ", ".join(same[:_NEAREST])] if same else [f"{number}GB"])


def _suggest_names(named: str) -> str:
    near = get_close_matches(named.lower(), [format_short_name(one) for one in DEVICES], _NEAREST, 0.5)
    return f"did you mean {' or '.join(near)}? A size such as 80GB works too; " if near else "use a size such as 80GB; "
