"""The folders of Megatron-LM's ranks, and the ranks that have one.

`get_checkpoint_name` of `megatron/training/checkpointing.py` gives them their names: ``mp_rank_TT``, ``_PPP`` behind
it where there are pipeline stages, ``_EEE`` where experts are divided, so that two numbers alone may be either.
"""

from __future__ import annotations

from math import lcm
from typing import Final

from shardctl.errors import UnsupportedError
from shardctl.mesh import Mesh
from shardctl.schemas.megatron.layers import TITLE

FILE: Final = "model_optim_rng.pt"
"""What a rank's folder holds."""


def folder_name(tp: int, pp: int | None, ep: int | None) -> str:
    """The folder of a rank; None for an axis of one.

    >>> folder_name(1, None, 0), folder_name(0, 3, 1)
    ('mp_rank_01_000', 'mp_rank_00_003_001')
    """
    return f"mp_rank_{tp:02d}" + "".join(f"_{index:03d}" for index in (pp, ep) if index is not None)


def least_mesh(*, tp: int, pp: int, ep: int, etp: int) -> Mesh:
    """The mesh of as few ranks as hold everything."""
    stage = lcm(tp, ep * etp)
    return Mesh.of(pp=pp, dp=stage // tp, tp=tp, ep=ep, etp=etp)


def folders(mesh: Mesh) -> dict[int, str]:
    """The folder of every rank that has one of its own, in the order of ranks.

    Raises UnsupportedError where different parts of experts would be in folders of the same name, as the format has no
    place for the rank inside an expert.
    """
    named: dict[str, tuple[int, int]] = {}
    for rank in range(mesh.world):
        at = mesh.coordinate(rank)
        pp = at["pp"] if mesh.degree("pp") > 1 else None
        name = folder_name(at["tp"], pp, at["ep"] if mesh.ep > 1 else None)
        before = named.setdefault(name, (rank, at["etp"]))
        if before[1] != at["etp"]:
            raise UnsupportedError(
                f"{TITLE}'s folders are named by tp and ep, and {name} would hold two parts of experts: etp={mesh.etp} "
                f"does not fit tp={mesh.degree('tp')}, ep={mesh.ep}",
                hint="use a divisor of tp for etp",
            )
    return {rank: name for name, (rank, _) in sorted(named.items(), key=lambda item: item[1])}
