"""Detects and reads DeepSpeed checkpoints: `mp_rank_*_model_states.pt` and the flat partitions of ZeRO ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.deepspeed.files import choose_checkpoint, is_deepspeed_file, sort_files
from shardctl.libraries.reader import Format

if TYPE_CHECKING:
    from shardctl.libraries.reader import Weights
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest


def detect_deepspeed(source: Source) -> bool:
    """Detect whether the directory, or one in it, has files that are named as DeepSpeed names them."""
    return any(is_deepspeed_file(path) for path in source.files())


def scan_deepspeed(source: Source, weights: Weights = None) -> Manifest:
    """Read every pickle without running it, and say where each part of each tensor is.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or files contradict each other.
        HostileError: a file tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: a kind of partition that is not converted, or the copy of the weights that is not there.
    """
    from shardctl.libraries.deepspeed.checkpoint import DeepSpeedReader

    found = sort_files(source)
    if not found:
        raise SourceError(f"{source.name} holds no files of DeepSpeed")
    return DeepSpeedReader(source, choose_checkpoint(source, found), weights).manifest(FORMAT.name)


FORMAT: Final = Format("deepspeed", "files of DeepSpeed", detect_deepspeed, scan_deepspeed, scan_deepspeed, saved=True)
