"""Measures what a conversion takes: its files, bytes and memory, where possible without a list of what goes where."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardctl.base.value import value_class
from shardctl.conversion.conversion_plan import divide_memory, draft_conversion, list_changes, work_out_conversion
from shardctl.conversion.engine.budget import divide_counted_memory
from shardctl.conversion.expansion import compute_expansion_limit
from shardctl.libraries.catalogue import get_layout
from shardctl.tensors.copyplan import join_manifests
from shardctl.tensors.manifest import Region
from shardctl.tensors.naming_scheme import NamingScheme

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.conversion.conversion_plan import DraftedConversion, PlannedConversion
    from shardctl.conversion.engine.budget import HostMemoryBudget
    from shardctl.options import ReshardOptions
    from shardctl.tensors.copyplan import CopyPlan
    from shardctl.tensors.manifest import Manifest, OpaqueObject, Tensor
    from shardctl.tensors.mesh import Mesh


@value_class
class MeasuredConversion:
    """What a conversion takes."""

    checkpoint: OpenedCheckpoint
    reshard_options: ReshardOptions
    layout: str
    mesh: Mesh
    stages: tuple[int, ...]
    """Layers per pipeline stage; empty where nothing was cut for a mesh."""
    have: Manifest
    """What is converted; optimizer states are among its tensors if they travel along."""
    dialect: NamingScheme | None
    """Of the arrays that are written, if a library makes its own."""
    files: Mapping[str, int]
    """By path, the size of each file with tensors."""
    read_bytes: int
    budget: HostMemoryBudget
    carried: tuple[OpaqueObject, ...]
    """Side files that travel along, in their new form."""
    impossible: str
    """Why the limit on host memory cannot hold it, if so; `budget` is then of the least that can."""
    plan_copy: Callable[[], CopyPlan]
    """Works out where each tensor goes."""

    @property
    def write_bytes(self) -> int:
        """Bytes of all files of the result but its record."""
        return sum(self.files.values()) + sum(side.nbytes for side in self.carried)

    @property
    def changes(self) -> tuple[str, ...]:
        """What is changed besides the layout, such as ``cast to bf16``."""
        return list_changes(self.checkpoint, self.reshard_options)

    def prefix(self, rank: int) -> str:
        """Return what the paths of a rank's files begin with; empty where the layout has no files of ranks."""
        return get_layout(self.layout).prefix(self.dialect or NamingScheme(self.layout, self.mesh), rank)


def measure_conversion(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, *, least: bool = False
) -> MeasuredConversion:
    """Measure what `plan_conversion` would plan; raises as it."""
    drafted = draft_conversion(checkpoint, reshard_options, least=least)
    return _measure_alone(drafted, least=least) or measure_planned(work_out_conversion(drafted, least=least))


def measure_planned(work: PlannedConversion) -> MeasuredConversion:
    """Say what a conversion takes that was worked out already."""
    return MeasuredConversion(
        checkpoint=work.checkpoint,
        reshard_options=work.reshard_options,
        layout=work.layout,
        mesh=work.mesh,
        stages=work.stages,
        have=work.have,
        dialect=work.plan.want.dialect,
        files={path: file.size for path, file in work.plan.want.files.items()},
        read_bytes=work.plan.read_bytes,
        budget=work.budget,
        carried=work.carried,
        impossible=work.impossible,
        plan_copy=lambda: work.plan,
    )


def _measure_alone(drafted: DraftedConversion, *, least: bool) -> MeasuredConversion | None:
    """Measure a conversion of tensors that are stored whole, each in one place: nothing can be missing of them."""
    layout, request, checkpoint = drafted.layout, drafted.request, drafted.checkpoint
    have, dtypes = request.have, request.dtypes
    if layout.measure is None or have.extra or not all(map(_is_stored_whole, have.tensors.values())):
        return None
    measured = layout.measure(request)
    if measured is None:
        return None
    stored = Counter([(tensor.dtype, tensor.shape) for tensor in have.tensors.values()])
    written = sum(measured.files.values())
    if not drafted.reshard_options.allow_expansion and written > compute_expansion_limit(have, checkpoint.encoded):
        return None
    divide = partial(
        divide_counted_memory,
        len(have.tensors),
        len(have.tensors) + measured.chunks,
        {(tensor.dtype, dtypes[name]) for name, tensor in have.tensors.items()},
        threads=drafted.threads,
        beside=checkpoint.source.held_bytes,
    )
    reshard_options, budget, impossible = divide_memory(drafted.reshard_options, divide, least=least)
    return MeasuredConversion(
        checkpoint=checkpoint,
        reshard_options=reshard_options,
        layout=layout.name,
        mesh=drafted.mesh,
        stages=request.placed.stages if request.placed is not None else (),
        have=replace(have, warnings=(*have.warnings, *drafted.notes)),
        dialect=None,
        files=measured.files,
        read_bytes=sum(count * dtype.nbytes(shape) for (dtype, shape), count in stored.items()),
        budget=budget,
        carried=drafted.list_carried_files(measured.files),
        impossible=impossible,
        plan_copy=lambda: join_manifests(have, layout.pack(request)),
    )


def _is_stored_whole(tensor: Tensor) -> bool:
    if len(tensor.chunks) != 1 or tensor.encoded_bytes is not None:
        return False
    (chunk,) = tensor.chunks
    return chunk.box.shape == tensor.shape and chunk.dtype is tensor.dtype and isinstance(chunk.where, Region)
