"""Detects and reads Megatron-LM's distributed checkpoints, `torch_dist`, whatever mesh wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.files.file_names import DCP_METADATA
from shardctl.libraries.files.sharded_backend import (
    MARK,
    ShardedBackend,
    find_fsdp_folder,
    is_megatron,
    read_sharded_backend,
)
from shardctl.libraries.reader import Format

if TYPE_CHECKING:
    from shardctl.libraries.reader import Weights
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

_FORMAT_NAME: Final = "torch_dist"
_SUPPORTED_VERSION: Final = 1


def detect_torch_dist(source: Source) -> bool:
    """Detect whether Megatron-LM's files are there, or in a folder: that of the last iteration, or NeMo's."""
    return is_megatron(source) or find_fsdp_folder(source) is not None


def scan_torch_dist(source: Source, weights: Weights = None) -> Manifest:
    """Read the metadata, the head of every item, and what all ranks have alike, but run none of it.

    Arrays are named as Megatron-LM does, without what training loops put before its names; which tensors of a model
    lie in them, the model's config decides.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or files contradict each other.
        HostileError: a file tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: another container than torch's, or a version of Megatron-LM's that is not known.
    """
    from shardctl.libraries.dcp.metadata import read_metadata
    from shardctl.libraries.dcp.save import DcpSave
    from shardctl.libraries.megatron.dist_checkpoint import build_manifest

    backend = read_sharded_backend(source)
    flat = find_fsdp_folder(source) if backend is None else None
    if flat is not None:
        save = DcpSave(source, [read_metadata(source, f"{flat}{DCP_METADATA}")])
        return build_manifest(_FORMAT_NAME, save, flat, weights, fsdp=True)
    if backend is None:
        raise SourceError(
            f"{source.name} has no {MARK} of Megatron-LM that can be read; it is written last",
            hint="the save did not finish, or the file was not copied",
        )
    _check_backend(backend)
    path = f"{backend.folder}{DCP_METADATA}"
    if path not in source.files():
        raise SourceError(f"{backend.folder}{MARK} is there, but {path} is not", hint="a copy left out hidden files")
    return build_manifest(_FORMAT_NAME, DcpSave(source, [read_metadata(source, path)]), backend.folder, weights)


def _check_backend(backend: ShardedBackend) -> None:
    where = f"{backend.folder}{MARK}"
    if backend.name == "zarr":
        raise UnsupportedError(
            f"{where} says that tensors are stored as zarr, which Megatron-LM core wrote until 0.15",
            hint="load it with that version of Megatron-LM and save it with --dist-ckpt-format torch_dist",
        )
    if backend.name != _FORMAT_NAME or backend.common not in (None, "torch"):
        raise UnsupportedError(
            f"{where} has the backends {backend.name!r} and {ascii(backend.common)[:40]}, which are not known"
        )
    if backend.version != _SUPPORTED_VERSION:
        raise UnsupportedError(
            f"{where} has version {ascii(backend.version)[:40]} of {_FORMAT_NAME}; version {_SUPPORTED_VERSION} is"
            " known"
        )


FORMAT: Final = Format(
    _FORMAT_NAME, "Megatron-LM's distributed checkpoints", detect_torch_dist, scan_torch_dist, scan_torch_dist
)
