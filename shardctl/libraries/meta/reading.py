"""Reads Llama 2 and 3 as Meta publishes them: one `consolidated.NN.pth` per rank, and `params.json`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError, UnsupportedError
from shardctl.libraries.files.choice import describe_missing
from shardctl.libraries.files.links import check_link
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.meta.params import PARAMS, read_params
from shardctl.libraries.meta.parts import BUFFERS, MetaRankFile, join_parts
from shardctl.libraries.reader import Format, find_given_file
from shardctl.libraries.torch_save.reading import read_weights
from shardctl.manifest import CheckpointFile, Manifest, OpaqueObject, TrainingState

if TYPE_CHECKING:
    from shardctl.storage import Source

_TITLE: Final = "Meta's consolidated.NN.pth files"
_FILE: Final = re.compile(r"consolidated\.([0-9]{2,4})\.pth")
_SCALES: Final = re.compile(r"fp8_scales_[0-9]+\.pt")
_LEFT: Final = frozenset({PARAMS, "checklist.chk", "orig_params.json"})
"""Files that describe Meta's own, and would be wrong beside others."""


def detect_meta(source: Source) -> bool:
    """Detect whether the directory holds files of these names; one of them given alone is a file of torch.save."""
    return find_given_file(source) is None and any(_FILE.fullmatch(path) for path in source.files())


def scan_meta(source: Source) -> Manifest:
    """Read every pickle without running it, and join what the ranks have of each tensor.

    Names and the order of rows stay Meta's: the model of the config, which is made from `params.json`, translates them.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or the parts do not fit together.
        HostileError: a file tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: tensors that Llama 2 and 3 have not.
    """
    scales = next((path for path in source.files() if _SCALES.fullmatch(path)), None)
    if scales is not None:
        raise UnsupportedError(
            f"{scales} says that weights are quantised to 8 bits, in Meta's own way",
            hint="give the same model in bfloat16",
        )
    params = read_params(source)
    parts: list[MetaRankFile] = []
    warnings: list[str] = []
    for path in _list_rank_files(source):
        check_link(source, path)
        found = read_weights(source, path)
        parts.append(MetaRankFile(path, found.saved, found.state.views))
        warnings += found.state.warnings
    joined = join_parts(parts, params)
    config = params.config(joined.shapes) if params is not None else None
    side, left = list_side_files(source, {part.path for part in parts})
    objects = [OpaqueObject(o.name, "drop", o.file, size=o.size) if o.name in _LEFT else o for o in side]
    objects += [OpaqueObject(name, "drop", file=parts[0].path) for name in sorted(BUFFERS & parts[0].views.keys())]
    notes = list(joined.notes)
    if config is None:
        what = f"{PARAMS} is unlike that of Llama 2 and 3" if params is not None else f"there is no {PARAMS}"
        notes.append(f"{what}: without --config, names and the order of rows stay Meta's")
    return Manifest(
        format=FORMAT.name,
        tensors=joined.tensors,
        files={part.path: CheckpointFile(part.path, source.files()[part.path].size) for part in parts},
        objects=tuple(objects),
        warnings=(*warnings, *left),
        training=TrainingState(writer="Meta's Llama", ranks=len(parts), notes=tuple(notes)),
        own_config=config,
    )


def _list_rank_files(source: Source) -> list[str]:
    """List the files in the order of ranks; raises SourceError for a gap."""
    numbers = {int(found[1]): path for path in source.files() if (found := _FILE.fullmatch(path))}
    if not numbers:
        raise SourceError(f"{source.name} holds no {_TITLE}")
    width = len(next(iter(numbers.values()))) - len("consolidated..pth")
    gaps = [f"consolidated.{n:0{width}}.pth" for n in range(max(numbers)) if n not in numbers]
    if gaps:
        raise SourceError(
            f"{describe_missing(gaps)}, but {numbers[max(numbers)]} is there",
            hint="every rank's file is needed; fetch the rest",
        )
    return [numbers[n] for n in sorted(numbers)]


FORMAT: Final = Format("meta", _TITLE, detect_meta, scan_meta, saved=True)
