"""Names the folders of Megatron-LM's ranks, and lists the ranks that have one.

`get_checkpoint_name` of `megatron/training/checkpointing.py` gives them their names: ``mp_rank_TT``, ``_PPP`` behind
it where there are pipeline stages, ``_EEE`` where experts are divided, so that two numbers alone may be either.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE: Final = "Megatron-LM"
FILE: Final = "model_optim_rng.pt"
"""What a rank's folder holds."""


def format_folder_name(tp: int, pp: int | None, ep: int | None) -> str:
    """Format the folder of a rank; None for an axis of one.

    >>> format_folder_name(1, None, 0), format_folder_name(0, 3, 1)
    ('mp_rank_01_000', 'mp_rank_00_003_001')
    """
    return f"mp_rank_{tp:02d}" + "".join(f"_{index:03d}" for index in (pp, ep) if index is not None)


def build_least_mesh(*, tp: int, pp: int, ep: int, etp: int) -> Mesh:
    """Build the mesh of as few ranks as hold everything: where etp divides tp, each has a folder of its own."""
    stage = lcm(tp, ep * etp)
    return Mesh.of(pp=pp, dp=stage // tp, tp=tp, ep=ep, etp=etp)


def list_mesh_folders(mesh: Mesh) -> Iterator[str]:
    """List the folder of every rank of a least mesh, in the order of ranks.

    Raises UnsupportedError where different parts of experts would be in folders of the same name, as the format has no
    place for the rank inside an expert.
    """
    tp = mesh.degree("tp")
    if tp % mesh.etp:
        raise UnsupportedError(
            f"{TITLE}'s folders are named by tp and ep, and would hold several parts of experts: etp={mesh.etp} does "
            f"not divide tp={tp}",
            hint="use a divisor of tp for etp",
        )
    return (_name_folder(mesh, rank) for rank in range(mesh.world))


def _name_folder(mesh: Mesh, rank: int) -> str:
    at = mesh.coordinate(rank)
    return format_folder_name(at["tp"], at["pp"] if mesh.degree("pp") > 1 else None, at["ep"] if mesh.ep > 1 else None)
