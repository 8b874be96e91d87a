"""Defines what a reader must provide: its name, how it detects a container, and how it reads its headers."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

Weights = Literal["module", "master"] | None
"""Which copy of the weights is meant: the module's own, as it computes, or the optimizer's in fp32; None is the master
where there is one."""


@value_class
class Format:
    """A container that shardctl reads; every module of this package that reads one ends in `FORMAT = Format(...)`."""

    name: str
    """What `--from` calls it, such as ``safetensors``."""
    title: str
    """What messages call it, such as ``safetensors files``."""
    detect: Callable[[Source], bool]
    """Whether the source bears this container's marks: file names and magic bytes only, never a whole header.

    It answers for what *looks* like the container, however damaged: whether the bytes are sound is for `scan` to say.
    """
    scan: Callable[[Source], Manifest]
    """Reads headers only, never tensor data, and gives every tensor by its stored name.

    Raises SourceError for what is missing, malformed or hostile, and UnsupportedError for what is understood and not
    converted. What is odd but not wrong goes into the manifest's warnings.
    """
    scan_copy: Callable[[Source, Weights], Manifest] | None = None
    """The same, with the copy of the weights that is meant; only for containers that may hold two."""
    scan_indexed: Callable[[Source], Manifest] | None = None
    """The same without what an index places in another file; only for containers that have indexes."""
    scan_divided: Callable[[Source, int | None], Manifest] | None = None
    """The same, with over how many ranks each expert was divided; only for containers that may not say it."""
    names_safetensors: bool = False
    """Whether its files are safetensors files by names of its own, so that they are not meant as plain ones."""
    saved: bool = False
    """Whether its files are torch.save's, so that each may be a zip archive."""
    served: bool = False
    """Whether `from_pretrained` or an engine loads a directory of it, with the tokenizer and the settings in it."""


def find_given_file(source: Source) -> str | None:
    """Find the file's path, if the source was given as one file and not as a directory."""
    files = source.files()
    if len(files) != 1:
        return None
    path = next(iter(files))
    return path if PurePath(source.name).name == path else None
