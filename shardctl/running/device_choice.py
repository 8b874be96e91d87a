"""Chooses the devices of a level, and what comes next where one of them has not the memory or fails."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class
from shardctl.running.device import list_devices

if TYPE_CHECKING:
    from shardctl.base.errors import ShardctlError

_AUTO_DEVICE_KIND: Final = "auto"
"""What may also be the CPU."""


@state_class
class DeviceChoice:
    """The devices that a level may use.

    A device that was named by its number is the only one; `cuda` is any of CUDA's, and `auto` the CPU as well.
    """

    kind: str
    """As it was asked for."""
    places: list[str]
    """Those that ranks are spread over."""
    notes: list[str] = field(default_factory=list)
    """What was done on another device than planned, and why."""
    _failed: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str | None) -> DeviceChoice:
        """Choose by what was asked for, `auto` by default; raises what `list_devices` raises."""
        asked = kind or _AUTO_DEVICE_KIND
        return cls(asked, list_devices(asked))

    @property
    def bounded(self) -> bool:
        """Whether as little as possible is to be loaded at once, because nobody named a device."""
        return self.kind == _AUTO_DEVICE_KIND

    def list_for(self, rank: int | None) -> list[str]:
        """List where a rank may be loaded, its own device first; those that have failed before come last."""
        at = (rank or 0) % len(self.places)
        places = [*self.places[at:], *self.places[:at]]
        if self.bounded and "cpu" not in places:
            places.append("cpu")
        return sorted(places, key=lambda place: place in self._failed)

    def leave(self, place: str, what: str, error: ShardctlError, following: str) -> None:
        """Note that `what` runs on the `following` device, because of an error on this `place`."""
        self._failed[place] = None
        self.notes.append(f"{what} on {following}, because {error.message}")
