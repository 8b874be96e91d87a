"""Opens a source, plans its conversion, and refuses a destination that is the source or cannot be written."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING

from shardctl.base.errors import DestinationError, UsageError
from shardctl.base.workers import ExecutionOptions, choose_thread_count
from shardctl.checkpoint.name_selection import NameSelection
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.conversion.consumer_target import (
    apply_consumer,
    fit_consumer,
    locate_run,
    merge_lone_adapter,
    warn_of_merge,
    warn_of_unchecked,
)
from shardctl.conversion.conversion_plan import PlannedConversion, plan_conversion
from shardctl.conversion.engine.budget import require_bookkeeping
from shardctl.conversion.tensor_choice import get_cast_type
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.options.sum_options import requests_sum
from shardctl.storage.addresses import check_destination
from shardctl.storage.cloud import is_bucket
from shardctl.storage.durable import translate_os_errors
from shardctl.storage.hub import is_hub_address
from shardctl.storage.local import LocalSource
from shardctl.storage.path_overlap import is_same_or_inside
from shardctl.verify.agreement import list_untied_heads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.conversion.plan_file import PlanFile
    from shardctl.storage import Source


@contextmanager
def open_conversion(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None,
    source_options: SourceOptions | None,
    plan: PlanFile | None,
    *,
    allow_overflow: bool = False,
) -> Iterator[PlannedConversion]:
    """Open a source for the length of a `with` block and plan its conversion, as a plan file or the options say.

    Raises UsageError for a destination of a kind that is not written, before anything is read, and DestinationError if
    writing it would touch the source or anything else that is read.
    """
    check_destination(destination)
    asked = reshard_options or (plan.reshard_options if plan else ReshardOptions())
    wanted = apply_consumer(asked)
    said = warn_of_unchecked(asked, wanted)

    def count(entries: int) -> None:
        """Refuse before headers are parsed what could not be planned; every entry is a chunk, perhaps a replica."""
        require_bookkeeping(0, entries, wanted.host_memory)

    whole = wanted.include is None and wanted.exclude is None and wanted.only is None
    options = source_options or (plan.source_options if plan else None)
    options = replace(options or SourceOptions(), unpadded=True)
    _require_inputs_elsewhere(destination, wanted, options or SourceOptions())
    if wanted.ema is not None and _is_local(destination) and is_same_or_inside(Path(destination), Path(path)):
        raise DestinationError(
            f"{destination} is the run {path} or inside it, where the next --ema would take it for a checkpoint",
            hint="write to another directory",
        )
    if wanted.consumer is not None:
        found, options = locate_run(path, options or SourceOptions())
        path = path if wanted.ema is not None else found  # which reads all checkpoints of the run
        adapter, (path, wanted, options) = path, merge_lone_adapter(path, wanted, options)
        if path != adapter:
            said += warn_of_merge(adapter, path)
            _require_inputs_elsewhere(destination, wanted, options)  # the adapter is one of them now
    with ExitStack() as stack:
        checkpoint, heads = open_input(stack, path, wanted, options, count if whole else None)
        said += heads
        for given in _list_parts(checkpoint.source):
            _check_apart(given, destination)
        work = (
            plan.drafted(checkpoint, reshard_options or plan.reshard_options)
            if plan
            else plan_conversion(checkpoint, wanted)
        )
        have = replace(work.have, warnings=(*work.have.warnings, *said))
        work = replace(work, have=have, allow_overflow=allow_overflow)
        if wanted.consumer is not None:
            work = fit_consumer(checkpoint, work, destination)
        if work.reshard_options.reflink and (is_bucket(destination) or is_hub_address(destination)):
            raise UsageError(f"--reflink is for a local directory, and {destination} is none", hint="leave it out")
        if is_bucket(destination):
            from shardctl.conversion.bucket_output import reserve_sending_memory

            work = reserve_sending_memory(work)
        elif is_hub_address(destination):
            from shardctl.conversion.hub_output import reserve_publishing_memory

            work = reserve_publishing_memory(work)
        yield work


def open_input(
    stack: ExitStack,
    path: str | Path,
    reshard_options: ReshardOptions,
    source_options: SourceOptions,
    count: Callable[[int], None] | None,
) -> tuple[OpenedCheckpoint, tuple[str, ...]]:
    """Open a source, or the sum of it and others, until `stack` ends; with what is to be said of its head."""
    combination = None
    if requests_sum(reshard_options):
        from shardctl.checkpoint.averaging import combine_checkpoints, parse_combination

        combination = parse_combination(path, reshard_options)
        if reshard_options.optimizer_states == "keep":
            raise UsageError("--optimizer-states keep is given, and a sum has no optimizer states", hint="leave it out")
    selection = NameSelection.parse(reshard_options.include, reshard_options.exclude)
    opening = partial(open_checkpoint, combination.first if combination else path, count=count, selection=selection)
    checkpoint = stack.enter_context(opening(source_options))
    heads = _list_untied_heads(checkpoint, reshard_options) if reshard_options.consumer is not None else ()
    if heads:
        stack.close()
        source_options = replace(source_options, untied=True)
        checkpoint = stack.enter_context(opening(source_options))
    if combination is None:
        return checkpoint, heads
    cast = get_cast_type(reshard_options) if reshard_options.dtype != "keep" else None
    threads, keep = reshard_options.threads or choose_thread_count(), reshard_options.keep_fp32
    return combine_checkpoints(checkpoint, combination, source_options, threads, cast, keep), heads


def _list_untied_heads(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> tuple[str, ...]:
    """List the heads that differ from the embedding that they are tied to, within the limit on host memory."""
    threads = reshard_options.threads or choose_thread_count()
    effort = ExecutionOptions(threads, block=min(8 << 20, reshard_options.host_memory // (16 * threads)))
    tensors = list(checkpoint.manifest.tensors.values())
    return tuple(list_untied_heads(tensors, checkpoint.source, effort))


def _require_inputs_elsewhere(
    destination: str | Path, reshard_options: ReshardOptions, source_options: SourceOptions
) -> None:
    """Raise DestinationError if `destination` holds an adapter, a base or a config that is read: it may be replaced."""
    if not _is_local(destination):
        return
    read: dict[str, tuple[str | Path | None, ...]] = {
        "--merge": reshard_options.merge,
        "--average-with": reshard_options.average_with,
        "--add-difference": reshard_options.add_difference or (),
        "--config": (source_options.config,),
        "--rules": (source_options.rules,),
        "--complete-from": (source_options.complete_from,),
        "--apply": source_options.apply,
    }
    for flag, places in read.items():
        for place in places:
            if place is not None and is_same_or_inside(Path(place), Path(destination)):
                raise DestinationError(
                    f"{destination} holds what {flag} reads: {place}", hint="write to another directory"
                )


def _is_local(destination: str | Path) -> bool:
    return not (is_hub_address(destination) or is_bucket(destination))


def _list_parts(source: Source) -> Iterator[Source]:
    """List the places that a source reads: one, or more if it joins sources, applies deltas or computes tensors."""
    parts: tuple[Source, ...] | None = getattr(source, "parts", None)
    if parts is None:
        yield source
    for part in parts or ():
        yield from _list_parts(part)


def _check_apart(given: Source, destination: str | Path) -> None:
    """Raise DestinationError if writing `destination` would touch the source, or a later scan of the source see it."""
    source: PurePath
    wanted: PurePath
    if is_hub_address(destination):
        return  # a branch is replaced as a whole, and what is there is for its writer to judge
    if is_bucket(destination):
        source, wanted = PurePosixPath(given.location), PurePosixPath(destination)
        same = source == wanted
    elif isinstance(given, LocalSource):
        here, there = (Path(os.path.realpath(path)) for path in (given.path, destination))
        source, wanted = here, there
        with translate_os_errors(destination, "looking at"):
            same = there.exists() and there.samefile(here)  # under another name, as bind mounts give
    else:
        return
    if same or wanted.is_relative_to(source):
        raise DestinationError(f"{destination} is the source itself or inside it", hint="write to another directory")
    if source.is_relative_to(wanted):
        raise DestinationError(f"{destination} contains the source", hint="write to another directory")
