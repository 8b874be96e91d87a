"""Injects one fault and asks which level of `verify` finds it."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from fault_files import BESIDE_KINDS, FILE_KINDS
from fault_kinds import PART_KINDS
from fault_models import LIBRARIES, MESHES, write_library, write_model, write_ranks, write_several
from fault_parts import RankDirectory
from fault_states import CODE_KINDS

from shardctl.base.errors import Interrupted, ShardctlError
from shardctl.options import VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WHOLE_KINDS = {**FILE_KINDS, **BESIDE_KINDS, **CODE_KINDS}
"""Kinds that are given a directory, and that of another run."""
KINDS = (*PART_KINDS, *_WHOLE_KINDS)
SEVERAL = "one device"
"""The place of a checkpoint that is not cut: several files with an index."""
FOUND = ("structure", "full", "--against", "--mesh", "--forward")
"""The levels, in the order in which they are tried."""
MISSED = "missed"
_LEVELS = {"structure": "structure", "content": "full", "identity": "--against"}


@dataclass(frozen=True)
class FaultTrial:
    """One fault in one checkpoint."""

    kind: str
    """Empty for a checkpoint without a fault."""
    model: str
    mesh: str
    recorded: bool
    level: str
    """Which level found it, or `missed`."""
    said: str = ""
    """The first error."""


class FaultBench:
    """Sound checkpoints below a folder, each made once, and copies of them with a fault."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def give_source(self, model: str, seed: int = 0) -> Path:
        place = self._base / f"{_slug(model)}-{seed}" / "whole"
        return place if place.exists() else write_model(model, place, seed)

    def give_sound(self, model: str, mesh: str, seed: int = 0) -> Path:
        """A checkpoint over a mesh; raises ShardctlError where the mesh cannot divide the model."""
        source = self.give_source(model, seed)
        place = source.with_name(_slug(mesh))
        if not place.exists() and mesh == SEVERAL:
            write_several(source, place)
        elif not place.exists() and mesh in LIBRARIES:
            write_library(source, mesh, place)
        elif not place.exists():
            write_ranks(source, model, mesh, place)
        return place

    def list_trials(self, model: str, mesh: str, kinds: tuple[str, ...] = KINDS) -> Iterator[FaultTrial]:
        """Inject every kind that has something to change, with and without a record."""
        for kind in kinds:
            broken = self._inject(kind, model, mesh)
            if broken is None:
                continue
            source = self.give_source(model)
            yield FaultTrial(kind, model, mesh, True, *find_level(broken, source, None))
            (broken / RECORD).unlink(missing_ok=True)
            yield FaultTrial(kind, model, mesh, False, *find_level(broken, source, _parse_mesh(mesh)))

    def try_sound(self, model: str, mesh: str) -> FaultTrial:
        """Verify a checkpoint without a fault and without a record, at all levels but the forward pass."""
        sound, place = self.give_sound(model, mesh), self._base / "sound"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sound, place)
        (place / RECORD).unlink()
        return FaultTrial(
            "", model, mesh, False, *find_level(place, self.give_source(model), _parse_mesh(mesh), run=False)
        )

    def _inject(self, kind: str, model: str, mesh: str) -> Path | None:
        sound = self.give_sound(model, mesh)
        broken = self._base / "broken" / sound.name
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(sound, broken)
        if kind in PART_KINDS:
            if mesh not in MESHES:
                return None
            seed = zlib.crc32(f"{kind} {model} {mesh}".encode())
            edit = RankDirectory(broken, np.random.default_rng(seed)).read()
            done = PART_KINDS[kind](edit)
            if done:
                edit.write()
        else:
            other = self.give_sound(model, mesh, seed=1)
            done = _WHOLE_KINDS[kind](broken, other)
        assert not done or _hash_files(broken) != _hash_files(sound), f"{kind} changed nothing in {model} on {mesh}"
        return broken if done else None


def _parse_mesh(mesh: str) -> Mesh | None:
    return Mesh.parse(MESHES[mesh]) if mesh in MESHES else None


def find_level(broken: Path, source: Path, mesh: Mesh | None, *, run: bool = True) -> tuple[str, str]:
    """Find the first level that says an error, and what it says; `mesh` is given where no record names it.

    Without `run` the forward pass is not tried.
    """
    tries = [("", VerifyOptions(level="full", against=source))]
    if mesh is not None:
        tries.append(("--mesh", VerifyOptions(mesh=mesh)))
    if run:
        tries.append(("--forward", VerifyOptions(level="forward", against=source, mesh=mesh, device="cpu")))
    for name, options in tries:
        try:
            found = verify(broken, options)
        except Interrupted:
            raise
        except ShardctlError as error:
            return name or "structure", error.message
        for level in found.levels:
            if level.errors:
                return name or _LEVELS[level.name], level.errors[0].message
    return MISSED, ""


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def _hash_files(place: Path) -> dict[str, str]:
    files = (file for file in place.rglob("*") if file.is_file() and file.name != RECORD)
    return {str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
