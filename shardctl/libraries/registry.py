"""The containers shardctl reads; an unknown or ambiguous directory is an error that says what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import (
    ChangedError,
    HostileError,
    SourceError,
    TwoModelsError,
    UnsupportedError,
    UsageError,
    format_first_few,
)
from shardctl.base.settings import is_text
from shardctl.libraries.catalogue import FORMATS
from shardctl.libraries.dcp import reading as dcp
from shardctl.libraries.files.file_names import (
    DCP_METADATA,
    OPTIMIZER_FILES,
    PIPELINE_FORMAT,
    SAFETENSORS,
    WEIGHT_SUFFIXES,
)
from shardctl.libraries.files.impostors import refuse_adapter, refuse_foreign, refuse_impostor
from shardctl.libraries.files.links import list_broken_links
from shardctl.libraries.reader import find_given_file
from shardctl.libraries.safetensors import reading as safetensors
from shardctl.libraries.torch_save import reading as torch_save
from shardctl.libraries.torch_save.pickle_budget import list_leftovers
from shardctl.tensors.training import find_master_weights, note_master_weights, take_master_weights

if TYPE_CHECKING:
    from shardctl.libraries.reader import Format, Weights
    from shardctl.libraries.torch_save.archive_crcs import ArchiveCrcs
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

_MAX_NAMES_SHOWN: Final = 5


def detect_format(source: Source) -> Format:
    """Return the container of a source, by its marks alone; where it bears the marks of several, safetensors wins.

    Raises:
        SourceError: there is none, or more than one.
        UnsupportedError: what is there is a checkpoint of a kind that shardctl does not read.
    """
    found = _list_matching_formats(source)
    if not found:
        raise _build_unknown_error(source)
    if found[0] is safetensors.FORMAT and dcp.FORMAT in found:
        _refuse_second_model(source)
    if [each.name for each in found] == [dcp.FORMAT.name, torch_save.FORMAT.name]:
        found = _leave_trainer_files(source, found)
    if len(found) > 1 and found[0] is not safetensors.FORMAT:
        raise SourceError(
            f"{source.name} looks like {' and like '.join(f.title for f in found)}",
            hint=f"say which with --from {' or --from '.join(f.name for f in found)}",
        )
    return found[0]


def _refuse_second_model(source: Source) -> None:
    """Raise TwoModelsError for safetensors files beside a model of torch's DCP: one of the two may be an older save."""
    model = dcp.find_model(source)
    if model is not None:
        plain = next(path for path in source.files() if path.endswith(SAFETENSORS) and "/" not in path)
        raise TwoModelsError(
            f"{source.name} holds two models, which may differ: {plain}, and a distributed checkpoint in {model}",
            hint=f"say which with --from {dcp.FORMAT.name} or --from {safetensors.FORMAT.name}",
        )


def _leave_trainer_files(source: Source, found: list[Format]) -> list[Format]:
    """Return the formats without that of files of torch.save, if these hold no matrix: counters and random numbers.

    So does Lightning's `meta.pt` beside the `.distcp` files of a sharded save, and the `rng.pt` of slime.
    """
    try:
        held = torch_save.scan_torch_save(source).tensors.values()
    except (SourceError, UnsupportedError):
        return [dcp.FORMAT]
    return found if any(len(tensor.shape) > 1 for tensor in held) else [dcp.FORMAT]


def scan_checkpoint(
    source: Source,
    *,
    override: str | None = None,
    weights: Weights = None,
    prefer_index: bool = False,
    etp: int | None = None,
) -> Manifest:
    """Return what the source contains and where, by stored names; headers only, never tensor data.

    `override` names a format, and nothing is detected then. Where a directory holds another checkpoint beside the one
    that is read, the manifest's warnings say that it is left behind. `weights` says which copy of them is meant, in
    formats that may hold two. What two files hold has two chunks, unless `prefer_index` says that an index decides.
    `etp` is over how many ranks each expert was divided, in formats that may not say it.

    Raises:
        UsageError: there is no format of that name, it has one copy of weights only and `weights` is given, or it
            is not divided among ranks and `etp` is given.
        SourceError: as `detect_format`, and as the format's own `scan_checkpoint`.
    """
    refuse_adapter(source)
    chosen = _get_format(override) if override is not None else detect_format(source)
    if etp is not None and chosen.scan_divided is None:
        raise UsageError(
            f"--source-etp {etp} was given, but {chosen.title} say how they are divided", hint="leave --source-etp out"
        )
    if weights is None and etp is not None and chosen.scan_divided is not None:
        return _finish_scan(source, chosen.scan_divided(source, etp))
    if weights is None:
        indexed = chosen.scan_indexed if prefer_index else None
        return note_master_weights(_finish_scan(source, (indexed or chosen.scan)(source)))
    if chosen.scan_copy is not None:
        return _finish_scan(source, chosen.scan_copy(source, weights))
    found = _finish_scan(source, chosen.scan(source))
    masters = find_master_weights(found)
    if not masters:
        raise UsageError(
            f"--weights {weights} was given, but {chosen.title} hold one copy of the weights only",
            hint="leave --weights out",
        )
    return found if weights == "module" else take_master_weights(found, masters)


def _finish_scan(source: Source, found: Manifest) -> Manifest:
    """Return the manifest with what is left behind of the files of torch.save in it, whoever read them."""
    if found.training is None and found.format in {safetensors.FORMAT.name, torch_save.FORMAT.name}:
        found = _add_optimizer_beside(source, found)
    return _check_names(replace(found, warnings=(*found.warnings, *list_leftovers(source))))


def _add_optimizer_beside(source: Source, found: Manifest) -> Manifest:
    """Return the weights with the optimizer that was saved by itself in a folder or a file beside them.

    A file that cannot be read is a warning, and an error for whoever asks for its states. Raises HostileError for one
    that tries to run code, and as `scan_optimizer_folder`.
    """
    if find_given_file(source) is not None:
        return found
    found = dcp.scan_optimizer_folder(source, found)
    paths = [path for path in OPTIMIZER_FILES if path in source.files()]
    if not paths or found.training is not None:
        return found
    try:
        if len(paths) > 1:
            raise UnsupportedError(f"there are several, {' and '.join(paths)}")
        from shardctl.libraries.torch_save.optimizer_file import add_optimizer_file

        return add_optimizer_file(source, found, paths[0], ordered=found.format == torch_save.FORMAT.name)
    except (HostileError, ChangedError):
        raise
    except SourceError as error:
        return dcp.note_unreadable(found, paths[0], error)


def _check_names(found: Manifest) -> Manifest:
    """Return the manifest if its names can be written: pickles and trees may hold halves of characters."""
    names = [*found.tensors, *(found.training.states if found.training is not None else ())]
    if not is_text("".join(names)):
        odd = next(name for name in names if not is_text(name))
        raise SourceError(f"the tensor {odd!a:.200} has a name that is not Unicode text")
    return found


def refuse_nested_saves(source: Source) -> None:
    """Raise SourceError if checkpoints are in folders of the source, and it is not said which."""
    from shardctl.libraries.files.nested_saves import (
        choose_nested_save,
        list_nested_saves,
        list_unfinished_saves,
        list_weight_folders,
    )

    files = source.files()
    saves, chosen, unfinished = list_nested_saves(files), choose_nested_save(files), list_unfinished_saves(files)
    if not saves and not chosen and unfinished:
        raise SourceError(
            f"{source.name}/{unfinished[-1]} holds torch.distributed.checkpoint files, but no {DCP_METADATA}",
            hint=dcp.HOW_METADATA_IS_LOST,
        )
    if not saves and chosen:
        others = list_weight_folders(files)
        held, hint = "a folder in it does", f"the weights are in {source.name}/{chosen}: give that"
        if len(others) > 1:
            shown = ", ".join(others[:_MAX_NAMES_SHOWN]) + (", ..." if len(others) > _MAX_NAMES_SHOWN else "")
            held, hint = f"{len(others)} folders in it do: {shown}", f"give one of them, such as {source.name}/{chosen}"
        raise SourceError(f"{source.name} holds no checkpoint itself, but {held}", hint=hint)
    if not saves:
        return
    hint = f"the weights are in {source.name}/{chosen}: give that"
    if chosen in saves:
        hint = f"give one of them, such as {source.name}/{chosen}"
    elif not chosen:
        hint = "they hold states of an optimizer, and no weights: give the folder that the model was saved in"
    raise SourceError(
        f"{source.name} holds distributed checkpoints in folders of their own: {', '.join(saves[:_MAX_NAMES_SHOWN])}",
        hint=hint,
    )


def refuse_unread_weights(source: Source) -> None:
    """Raise SourceError for weights that no loader reads: links to nothing, and suffixes in capital letters."""
    for name in list_broken_links(source):
        if name.endswith(WEIGHT_SUFFIXES):
            raise SourceError(
                f"{name} is a link to a file that does not exist",
                hint="the download's cache was emptied, or the link was copied alone; fetch the file again",
            )
    for path in source.files():
        suffix = path[path.rfind(".") :]
        if "/" not in path and suffix.lower() in WEIGHT_SUFFIXES and suffix not in WEIGHT_SUFFIXES:
            raise SourceError(
                f"{path} has the extension {suffix}, which no library reads: it is {suffix.lower()}",
                hint="rename the files, and correct their names in an index",
            )


def stated_crcs(source: Source, stored: Manifest) -> ArchiveCrcs:
    """Return what the files that `scan_checkpoint` found state of their own bytes; reads nothing yet."""
    from shardctl.libraries.torch_save.archive_crcs import ArchiveCrcs

    return ArchiveCrcs(source, stored.files, saved=any(f.saved for f in FORMATS if f.name == stored.format))


def is_served(stored: Manifest) -> bool:
    """Return whether these are files that `from_pretrained` or an engine loads, if their config lies beside them."""
    return any(format_.served for format_ in FORMATS if format_.name == stored.format)


def is_plain_safetensors(stored: Manifest) -> bool:
    """Return whether these are safetensors files that nothing but transformers loads, which needs a config."""
    return stored.format == safetensors.FORMAT.name


def _list_matching_formats(source: Source) -> list[Format]:
    found = [format_ for format_ in FORMATS if format_.detect(source)]
    pipeline = [format_ for format_ in found if format_.name == PIPELINE_FORMAT]
    if pipeline:  # which repositories have beside the same weights in one file, for other programs
        return pipeline
    if not any(format_.names_safetensors for format_ in found):
        return found
    return [format_ for format_ in found if format_ is not safetensors.FORMAT]


def _get_format(name: str) -> Format:
    for format_ in FORMATS:
        if format_.name == name:
            return format_
    raise UsageError(f"there is no format {name!r}", hint=f"formats: {', '.join(f.name for f in FORMATS)}")


def _build_unknown_error(source: Source) -> SourceError:
    """Build the error that says what was found instead of a checkpoint."""
    refuse_foreign(source)
    known = ", ".join(f.title for f in FORMATS)
    files = list(source.files())
    given = find_given_file(source)
    if given is not None:
        refuse_impostor(source, given, "a checkpoint that shardctl reads")
        return SourceError(f"{source.name} is not a checkpoint", hint=f"recognised are {known}")
    if not files:
        return SourceError(f"{source.name} holds no files", hint=f"recognised are {known}")
    snapshots = sorted({path.split("/")[1] for path in files if path.startswith("snapshots/")})
    if snapshots:
        return SourceError(
            f"{source.name} is a Hugging Face cache folder, not a checkpoint",
            hint=f"give one of its snapshots, such as {source.name}/snapshots/{snapshots[-1]}",
        )
    refuse_unread_weights(source)
    refuse_nested_saves(source)
    return SourceError(
        f"{source.name} holds no checkpoint, only {format_first_few(files, _MAX_NAMES_SHOWN)}",
        hint=f"recognised are {known}",
    )
