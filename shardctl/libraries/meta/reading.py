"""Reads Llama 2, 3 and 4 as Meta publishes them: one `consolidated.NN.pth` per rank, and `params.json`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.files.choice import describe_missing
from shardctl.libraries.reader import Format, find_given_file

if TYPE_CHECKING:
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

_FORMAT_TITLE: Final = "Meta's consolidated.NN.pth files"
_RANK_FILE_PATTERN: Final = re.compile(r"consolidated\.([0-9]{2,4})\.pth")


def detect_meta(source: Source) -> bool:
    """Detect whether the directory holds files of these names; one of them given alone is a file of torch.save."""
    return find_given_file(source) is None and any(_RANK_FILE_PATTERN.fullmatch(path) for path in source.files())


def scan_meta(source: Source) -> Manifest:
    """Read every pickle without running it, and join what the ranks have of each tensor.

    Names and the order of rows stay Meta's: the model of the config, which is made from `params.json`, translates them.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or the parts do not fit together.
        HostileError: a file tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: tensors that Llama 2 and 3 have not; quantized weights.
    """
    from shardctl.libraries.meta.checkpoint import join_meta_files

    return join_meta_files(source, _list_rank_files(source))


def _list_rank_files(source: Source) -> list[str]:
    """List the files in the order of ranks; raises SourceError for a gap."""
    numbers = {int(found[1]): path for path in source.files() if (found := _RANK_FILE_PATTERN.fullmatch(path))}
    if not numbers:
        raise SourceError(f"{source.name} holds no {_FORMAT_TITLE}")
    width = len(next(iter(numbers.values()))) - len("consolidated..pth")
    gaps = [f"consolidated.{n:0{width}}.pth" for n in range(max(numbers)) if n not in numbers]
    if gaps:
        raise SourceError(
            f"{describe_missing(gaps)}, but {numbers[max(numbers)]} is there",
            hint="every rank's file is needed; fetch the rest",
        )
    return [numbers[n] for n in sorted(numbers)]


FORMAT: Final = Format("meta", _FORMAT_TITLE, detect_meta, scan_meta, saved=True)
