"""Finds which ranks of a mesh compute with the same parts, and which compute together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.tensors.mesh import EXPERT_AXES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.tensors.mesh import Mesh

COMPUTING: Final = ("tp", *EXPERT_AXES)
"""The axes along which ranks compute with parts; along the others they gather, or do the same."""


def list_places(mesh: Mesh) -> dict[tuple[int, ...], list[int]]:
    """List the places on the axes along which ranks compute with parts, each with its ranks, in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world):
        at = mesh.coordinate(rank)
        found.setdefault(tuple(at[axis] for axis in COMPUTING), []).append(rank)
    return found


def list_alike_ranks(mesh: Mesh, at: Mapping[str, int], *, expert: bool) -> tuple[int, ...]:
    """List the ranks that compute with the same part as the one at `at` of what is an expert's, or is not."""
    axes = EXPERT_AXES if expert else ("tp",)
    everywhere = ((rank, mesh.coordinate(rank)) for rank in range(mesh.world))
    return tuple(rank for rank, other in everywhere if all(other[axis] == at[axis] for axis in axes))
