"""Reads Megatron-LM's directories of ranks (`--ckpt-format torch`): one `model_optim_rng.pt` per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.libraries.megatron.directory import has_ranks
from shardctl.libraries.reader import Format

if TYPE_CHECKING:
    from shardctl.libraries.reader import Weights
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest


def detect_megatron(source: Source) -> bool:
    """Detect whether there are folders of ranks with files of their weights, of one iteration or below it."""
    return has_ranks(source)


def scan_megatron(source: Source, etp: int | None = None, weights: Weights = None) -> Manifest:
    """Read every rank's pickle without running it.

    `etp` is over how many ranks each expert was divided, where neither args nor shapes say it; `weights` is the copy
    that is meant where the optimizer has one in fp32.

    Arrays have the names of megatron-core's local layers, whatever theirs are, behind that of their rank's folder and
    of their chunk of a virtual pipeline; which tensors of a model lie in them, the model's config decides, which is
    made from the args.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or the files are not those of one mesh.
        HostileError: a file tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: a version that is not known, or experts' parts that folders' names do not tell apart.
    """
    from shardctl.libraries.megatron.legacy_checkpoint import read_megatron_ranks

    return read_megatron_ranks(source, etp, weights)


def _scan_copy(source: Source, weights: Weights) -> Manifest:
    """Read the copy of the weights that is meant."""
    return scan_megatron(source, None, weights)


FORMAT: Final = Format(
    "megatron",
    "Megatron-LM's directories of ranks",
    detect_megatron,
    scan_megatron,
    scan_copy=_scan_copy,
    scan_divided=scan_megatron,
    saved=True,
)
