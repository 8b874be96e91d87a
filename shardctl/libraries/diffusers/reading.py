"""Reads a pipeline of diffusers as one checkpoint: each tensor is named after its folder, such as ``unet/conv.weight``.

A pipeline is a directory with `model_index.json`, which names the class of each part. The parts that are models have a
folder with weights each (diffusers, `pipelines/pipeline_utils.py`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.libraries.files.file_names import INDEX_SUFFIX, LOADED_SUFFIXES, PIPELINE, PIPELINE_FORMAT
from shardctl.libraries.files.links import check_link
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.reader import Format
from shardctl.libraries.safetensors import reading as safetensors
from shardctl.libraries.torch_save import reading as torch_save
from shardctl.libraries.torch_save.pickle_budget import list_leftovers
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_text
from shardctl.storage.folder_view import FolderView
from shardctl.tensors.manifest import Chunk, Manifest, OpaqueObject, Region, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.storage import Source

_CONFIG_FILE: Final = "config.json"
_WEIGHT_FILE_PATTERN: Final = re.compile(
    r"(?:diffusion_pytorch_model|model|pytorch_model)(?:\.(?P<before>\w+))?(?:-\d+-of-\d+)?(?:\.(?P<after>\w+))?"
    r"\.(?:safetensors|bin)"
)
"""What the weights of a part are called, with the variant if they are one (diffusers,
`pipelines/pipeline_loading_utils.py`)."""


def detect_pipeline(source: Source) -> bool:
    """Detect whether there is a list of parts, and a folder that has weights."""
    return PIPELINE in source.files() and bool(_list_weight_folders(source))


def scan_pipeline(source: Source) -> Manifest:
    """Read the headers of every part, each as its own container has them.

    Raises:
        SourceError: the list of parts is no JSON object, a part that it names has a config and no weights, or several
            variants of the weights; else as the part's own reader, whose message begins with the part.
    """
    declared = _read_parts(source)
    folders = _list_weight_folders(source)
    parts = [name for name in declared if name in folders]
    for name, class_name in declared.items():
        if name not in folders and _is_model(source, name, class_name):
            raise SourceError(
                f"{name}/ has the config of {class_name or 'a model'}, but no weights", hint="fetch the missing files"
            )
    if not parts:
        raise SourceError(f"{PIPELINE} names none of the folders that hold weights: {format_first_few(folders)}")
    found = {name: _scan_part(source, name) for name in parts}
    roots = tuple(f"{name}/" for name in parts)
    side, left = list_side_files(source, {path for path in source.files() if path.startswith(roots)})
    undeclared = [
        f"{folder}/ holds weights, but {PIPELINE} does not name it: it is carried as it is"
        for folder in folders
        if folder not in declared and any(one.name.startswith(f"{folder}/") and one.policy == "carry" for one in side)
    ]
    metadata, differing = _merge_metadata(found)
    return Manifest(
        format=PIPELINE_FORMAT,
        tensors={tensor.name: tensor for each in found.values() for tensor in each.tensors.values()},
        files={path: file for each in found.values() for path, file in each.files.items()},
        objects=(*side, *(one for each in found.values() for one in each.objects)),
        metadata=metadata,
        warnings=(*(text for each in found.values() for text in each.warnings), *left, *undeclared, *differing),
    )


def _read_parts(source: Source) -> dict[str, str]:
    """Read the parts that the pipeline has, each with its class."""
    if PIPELINE not in source.files():
        raise SourceError(f"{source.name} has no {PIPELINE} of a pipeline of diffusers")
    values = parse_json(read_text(source, PIPELINE, CONFIG_TEXT), PIPELINE, CONFIG_TEXT)
    if not isinstance(values, dict):
        raise SourceError(f"{PIPELINE} is not a JSON object")
    parts = {}
    for name, value in values.items():
        if isinstance(value, list) and value and value[0] is not None:
            parts[name] = str(value[1]) if len(value) > 1 else ""
    return parts


def _list_weight_folders(source: Source) -> list[str]:
    """List the folders of the root that have weights, or an index of some, in them."""
    suffixes = (*LOADED_SUFFIXES, *(f"{suffix}{INDEX_SUFFIX}" for suffix in LOADED_SUFFIXES))
    return sorted({path.split("/")[0] for path in source.files() if path.count("/") == 1 and path.endswith(suffixes)})


def _is_model(source: Source, name: str, class_name: str) -> bool:
    """Return whether a part's folder has the config of a model; tokenizers may have one of the model beside them."""
    path = f"{name}/{_CONFIG_FILE}"
    if path not in source.files() or "Tokenizer" in class_name or "Processor" in class_name:
        return False
    config = parse_json(read_text(source, path, CONFIG_TEXT), path, CONFIG_TEXT)
    return isinstance(config, dict) and ("_class_name" in config or "architectures" in config)


def _scan_part(source: Source, name: str) -> Manifest:
    """Scan one part, and return it with the names and paths that it has in the pipeline."""
    hidden, notes = _choose_variant(source, name)
    view = FolderView(source, name, without=hidden)
    reader = safetensors.FORMAT if safetensors.FORMAT.detect(view) else torch_save.FORMAT
    try:
        found = reader.scan(view)
    except (SourceError, UnsupportedError) as error:
        if error.message.startswith(view.name):
            raise
        raise type(error)(f"{name}/{error.message}", hint=error.hint) from error
    for path in (*found.files, *(each.file for each in found.objects if each.policy == "carry" and each.file)):
        check_link(source, f"{name}/{path}")
    left = (OpaqueObject(f"{name}/{path}", "drop", file=f"{name}/{path}") for path in hidden)
    return replace(
        found,
        tensors={tensor.name: tensor for tensor in (_rename_tensor(name, each) for each in found.tensors.values())},
        files={f"{name}/{path}": replace(file, path=f"{name}/{path}") for path, file in found.files.items()},
        objects=(
            *(replace(each, name=f"{name}/{each.name}", file=f"{name}/{each.file}") for each in found.objects),
            *left,
        ),
        warnings=(*(f"{name}/: {text}" for text in (*found.warnings, *list_leftovers(view))), *notes),
    )


def _choose_variant(source: Source, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choose the weights that diffusers loads where nobody asks for a variant; return the other files, and a note.

    Where there is one variant and nothing else, it is that.
    """
    variants: dict[str, list[str]] = {}
    for path in source.files():
        folder, _, file = path.partition("/")
        match = _WEIGHT_FILE_PATTERN.fullmatch(file) if folder == name else None
        if match is not None:
            variants.setdefault(match["before"] or match["after"] or "", []).append(file)
    others = {variant: files for variant, files in variants.items() if variant}
    if "" not in variants and len(others) > 1:
        raise SourceError(
            f"{name}/ holds several variants of its weights, and nothing says which: {', '.join(others)}",
            hint="leave one of them there",
        )
    if "" not in variants:
        return (), tuple(
            f"{name}/ holds the variant {variant}, which is written without that name" for variant in others
        )
    return tuple(file for files in others.values() for file in files), tuple(
        f"{name}/ holds the variant {variant} besides, which is left behind" for variant in others
    )


def _rename_tensor(part: str, tensor: Tensor) -> Tensor:
    prefix = f"{part}/"
    return replace(
        tensor,
        name=prefix + tensor.name,
        chunks=tuple(_move_chunk(prefix, chunk) for chunk in tensor.chunks),
        ties=tuple(prefix + name for name in tensor.ties),
        spelling=tuple(prefix + name for name in tensor.spelling),
    )


def _move_chunk(prefix: str, chunk: Chunk) -> Chunk:
    if not isinstance(chunk.where, Region):
        return chunk
    return replace(chunk, where=replace(chunk.where, file=prefix + chunk.where.file))


def _merge_metadata(found: Mapping[str, Manifest]) -> tuple[dict[str, str], list[str]]:
    """Merge the free-form strings of all parts, and warn of those that parts do not share."""
    merged: dict[str, str] = {}
    warnings = []
    for key in dict.fromkeys(key for each in found.values() for key in each.metadata):
        values = {each.metadata[key] for each in found.values() if key in each.metadata}
        if len(values) == 1:
            merged[key] = values.pop()
        else:
            warnings.append(f"__metadata__ {key!r} differs between parts, and is left behind")
    return merged, warnings


_FORMAT_TITLE: Final = "a pipeline of diffusers"
FORMAT: Final = Format(PIPELINE_FORMAT, _FORMAT_TITLE, detect_pipeline, scan_pipeline, served=True)
