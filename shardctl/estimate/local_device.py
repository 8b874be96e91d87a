"""Asks torch for this machine's device; no other module of the estimator loads torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardctl.base.errors import MachineError, UsageError
from shardctl.hardware.devices import DeviceSpec, find_named_device, get_device, list_devices

_NAME_DEVICE_HINT: Final = "name the device, such as --gpu h100-80g"


def find_local_device() -> tuple[DeviceSpec, int]:
    """Find the smallest accelerator here and how many there are; its memory as measured, its speed as the table has it.

    Raises UsageError if torch is not installed or finds none, MachineError if a device does not answer.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError("--gpu auto asks torch, which is not installed", hint=_NAME_DEVICE_HINT) from error
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        raise UsageError("torch finds no GPU here", hint=_NAME_DEVICE_HINT)
    try:
        found = [torch.cuda.get_device_properties(index) for index in range(number)]
    except RuntimeError as error:  # such as a device that another program has for itself
        said = str(error).partition("\n")[0]
        raise MachineError(f"torch cannot ask the GPUs here: {said}", hint=_NAME_DEVICE_HINT) from error
    least = min(found, key=lambda one: one.total_memory)
    return _match_device(str(least.name), int(least.total_memory)), number


def _match_device(name: str, nbytes: int) -> DeviceSpec:
    """Return the device of the table whose name is meant and whose memory is nearest; else one that is only a size.

    >>> _match_device("NVIDIA H100 80GB HBM3", 85_000_000_000).name, _match_device("Novel", 10**9).flops_bf16
    ('NVIDIA H100 80GB HBM3', 0.0)
    """
    meant = find_named_device(name) or _find_by_part(name)
    if not meant:
        return replace(get_device(nbytes), name=name, measured_by="torch")
    nearest = min(meant, key=lambda one: abs(one.usable_bytes - nbytes))
    return replace(nearest, name=name, usable_bytes=nbytes, measured_by="torch")


def _find_by_part(name: str) -> list[DeviceSpec]:
    """Find the devices of which the name has the longest part: a GB200's has that of a B200, too."""
    plain = "".join(c for c in name.lower() if c.isalnum())
    parts = {one.name: max((len(s) for s in one.spellings if s in plain), default=0) for one in list_devices()}
    longest = max(parts.values())
    return [one for one in list_devices() if longest and parts[one.name] == longest]
