"""Plans a conversion: makes a copy plan from an opened checkpoint and options, for `plan`, `--dry-run` and `reshard`.

For example:

    with open_checkpoint("./llama") as checkpoint:
        work = plan_conversion(checkpoint, ReshardOptions(mesh=Mesh.of(tp=4)))
        print(work.layout, work.plan.read_bytes, work.budget.limit)
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.errors import MemoryBudgetError, UsageError
from shardctl.base.garbage_collection import pause_garbage_collection
from shardctl.base.value import value_class
from shardctl.base.workers import choose_thread_count
from shardctl.checkpoint.adapters.merging import (
    ARITHMETIC_VERSION,
    MERGE_ARITHMETIC,
    MERGED,
    describe_adapters,
    merge_adapters,
)
from shardctl.checkpoint.completing import COMPLETED
from shardctl.checkpoint.config_files import CONFIG
from shardctl.checkpoint.expert_stacks import unstack_experts
from shardctl.checkpoint.name_check import refuse_foreign_names
from shardctl.checkpoint.pipeline_parts import check_pipeline_options
from shardctl.checkpoint.quantization.dequantizing import (
    DEQUANTIZED,
    DEQUANTIZED_MODULES,
    QUANTIZED,
    dequantize_checkpoint,
    dequantize_modules,
)
from shardctl.checkpoint.quantization.quantizing import choose_recipe, holds_fp4_experts, quantize_checkpoint
from shardctl.checkpoint.splitting import ONLY, is_whole_model, split_checkpoint
from shardctl.conversion.array_choice import NAMES, choose_arrays, decide_names
from shardctl.conversion.engine.budget import HostMemoryBudget, divide_host_memory, require_bookkeeping
from shardctl.conversion.expansion import check_expansion
from shardctl.conversion.optimizer_states import add_optimizer_states, build_specs, get_states
from shardctl.conversion.tensor_choice import (
    choose_dtypes,
    choose_extra_tensors,
    filter_tensors,
    get_cast_type,
    list_coded_arrays,
)
from shardctl.conversion.written_auxiliary_files import list_carried_files, write_older_config
from shardctl.libraries.arrays.form import EXPERTS, INPUTS_FIRST_EXPERTS
from shardctl.libraries.catalogue import get_layout, list_layouts_with
from shardctl.libraries.consumers.profile import find_profile
from shardctl.libraries.files.extra_tensors import add_extra_tensors, pack_extra_tensors
from shardctl.libraries.writer import Layout, PackRequest
from shardctl.models import find_quantization_config
from shardctl.models.names.binding import list_head_names
from shardctl.models.names.hub.conversion_table import HUB_NAMES
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.options.reshard_options import LAYOUT_OPTIONS
from shardctl.storage import read_bytes
from shardctl.storage.byte_names import name_to_bytes
from shardctl.tensors.copyplan import CopyPlan, join_manifests
from shardctl.tensors.manifest import ConstantFill
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.pieces import PlacedCheckpoint, balance_stages, compute_layer_costs, parse_stages
from shardctl.tensors.record import (
    APPLIED,
    AVERAGED,
    BASE_ONLY,
    DERIVED,
    FUSED_ORDER_UNKNOWN,
    GIVEN,
    OVERFLOWED,
    RULES_PROOF,
    SAVED_NAMES,
    SUBTREE,
    UNTIED,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.libraries.arrays.form import ArrayForm
    from shardctl.models import Model
    from shardctl.tensors.manifest import Manifest, OpaqueObject, Region
    from shardctl.tensors.placement import PartitionSpec
    from shardctl.verify.consumer import ConsumerVerdict


_COMMON_OPTIONS: Final = frozenset({"max_shard_size", "names", "experts"})
"""Those of the layouts' options that have fields of their own in a request, or shape the arrays before."""
_SPECIAL_OPTIONS: Final = tuple(name for name in LAYOUT_OPTIONS if name not in _COMMON_OPTIONS)
"""Those that only the layout itself understands."""
_USUAL_VALUES: Final = {each.name: each.default for each in fields(ReshardOptions)}
_INHERITED_RECORD_KEYS: Final = (
    *("dtype", "keep_fp32", "include", "exclude", "left_out", "retyped", OVERFLOWED),
    *(DEQUANTIZED, DEQUANTIZED_MODULES, MERGED, MERGE_ARITHMETIC, QUANTIZED, ONLY, COMPLETED, SAVED_NAMES),
    *(APPLIED, AVERAGED, SUBTREE, UNTIED),
)

_PLANNING_MEMORY: Final = 2 << 30
"""Bytes of bookkeeping up to which a conversion is worked out only to tell what it needs, if the limit is too low."""


def prepare_source_options(source_options: SourceOptions | None, reshard_options: ReshardOptions) -> SourceOptions:
    """Return how a source is to be understood to say what `reshard_options` means for devices.

    Other libraries' engines hold a key/value head on several ranks of their own accord, and are not asked.
    """
    source_options = source_options or SourceOptions()
    own_ranks = reshard_options.to is not None and get_layout(reshard_options.to).ranks == "library"
    return replace(source_options, kv_heads="replicate") if own_ranks else source_options


@value_class
class PlannedConversion:
    """A conversion, worked out and not yet begun."""

    checkpoint: OpenedCheckpoint
    reshard_options: ReshardOptions
    layout: str
    mesh: Mesh
    have: Manifest
    """What is converted: the checkpoint, filtered; optimizer states are among its tensors if they travel along."""
    plan: CopyPlan
    placed: PlacedCheckpoint | None
    """Who holds what, for a mesh layout."""
    budget: HostMemoryBudget
    carried: tuple[OpaqueObject, ...]
    """Side files that travel along, in their new form."""
    options: Mapping[str, str]
    """The options that shape the bytes, for the record."""
    impossible: str = ""
    """Why the limit on host memory cannot hold it, if so; `budget` is then of the least that can."""
    consumer: ConsumerVerdict | None = None
    """Whether the consumer that `--for` names will load the result."""
    allow_overflow: bool = False
    """Whether finite values may become infinite: a permission of this run, and no part of what is planned."""

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers per pipeline stage; empty where nothing was cut for a mesh."""
        if self.placed is not None:
            return self.placed.stages
        return self.plan.want.dialect.stages if self.plan.want.dialect is not None else ()

    @property
    def write_bytes(self) -> int:
        """Bytes of all files of the result but its record."""
        return self.plan.write_bytes + sum(side.nbytes for side in self.carried)

    @property
    def required_space(self) -> int:
        """Bytes that must be free where it is written; 0 where blocks are shared, as how many is not known before."""
        return 0 if self.reshard_options.reflink else self.write_bytes

    def identity(self) -> str:
        """Return a hash of everything that decides the output's bytes, except the values of the source's elements."""
        options = {key: value for key, value in self.options.items() if key != RULES_PROOF}
        state = hashlib.sha256(json.dumps([self.layout, options, self.have.format]).encode())
        for path, file in self.plan.want.files.items():
            state.update(name_to_bytes(path) + f"\0{file.size}\0".encode())
            for offset, data in file.literals:
                state.update(offset.to_bytes(8, "little") + data)
        boxes: dict[int, str] = {}  # by id: the plan keeps them all, and layers share most of them
        for copy in self.plan.copies:
            for chunk in (*copy.reads, *copy.target.chunks):
                box = boxes.get(id(chunk.box))
                if box is None:
                    box = boxes[id(chunk.box)] = f"\0{chunk.box}"
                state.update(f"{copy.source.name}{box}{chunk.dtype.name}{_format_place(chunk.where)}".encode())
        for side in self.carried:
            state.update(name_to_bytes(side.name) + f"\0{side.size}\0".encode() + (side.content or b""))
        return state.hexdigest()[:32]


@value_class
class DraftedConversion:
    """A conversion of which is known what its layout is asked for, but not yet which bytes go where."""

    checkpoint: OpenedCheckpoint
    """With the weights that are wanted of it, such as those without quantization."""
    reshard_options: ReshardOptions
    layout: Layout
    mesh: Mesh
    request: PackRequest
    notes: tuple[str, ...]
    """Warnings about the placement and the names."""

    @property
    def threads(self) -> int:
        """How many threads it may have."""
        return _choose_threads(self.checkpoint, self.reshard_options)

    def list_carried_files(self, files: Collection[str]) -> tuple[OpaqueObject, ...]:
        """List the side files that travel along in their new form; the layout makes `files` itself."""
        sides = list_carried_files(self.checkpoint, self.request.have, self.request.dtypes, self.layout)
        consumer = self.reshard_options.consumer
        if consumer is not None and not find_profile(consumer).rope_parameters:
            sides = [write_older_config(self.checkpoint, side) if side.name == CONFIG else side for side in sides]
        return tuple(side for side in sides if side.name not in files)


def _format_place(where: Region | ConstantFill) -> str:
    """Format where a chunk is as `repr` does, in a third of the time."""
    if isinstance(where, ConstantFill):
        return repr(where)
    return f"Region(file={where.file!r}, offset={where.offset!r}, strides={where.strides!r})"


@pause_garbage_collection()
def plan_conversion(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, *, least: bool = False
) -> PlannedConversion:
    """Work out what `reshard_options` means for a checkpoint.

    With `least`, a limit on host memory that cannot hold it is replaced by the least that can, and `impossible` says
    so; only what 2 GiB cannot even list is refused.

    Raises UsageError for options that contradict each other, PartitionError for a mesh that does not fit the tensors,
    CoverageError for a source that lacks elements, MemoryBudgetError for too little memory.
    """
    return work_out_conversion(draft_conversion(checkpoint, reshard_options, least=least), least=least)


@pause_garbage_collection()
def draft_conversion(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, *, least: bool = False
) -> DraftedConversion:
    """Choose layout, types, names and the place of each tensor; raises as `plan_conversion`."""
    refuse_foreign_names(checkpoint)
    mesh, layout = reshard_options.mesh or Mesh.of(), choose_layout(reshard_options)
    check_pipeline_options(checkpoint, reshard_options, layout.name)
    checkpoint = split_checkpoint(_compute_weights(checkpoint, reshard_options), reshard_options.only)
    split = checkpoint.adapter and reshard_options.experts != "keep"
    if split:
        from shardctl.checkpoint.adapters.expert_adapters import fuse_expert_adapter, split_expert_adapter

        if reshard_options.experts == "split":
            checkpoint = split_expert_adapter(checkpoint)
        else:
            inputs_first = reshard_options.experts == INPUTS_FIRST_EXPERTS
            checkpoint = fuse_expert_adapter(checkpoint, inputs_first=inputs_first)
    elif reshard_options.experts == INPUTS_FIRST_EXPERTS:
        raise UsageError(
            f"--experts {INPUTS_FIRST_EXPERTS} is a layout of adapters, and the source is not an adapter",
            hint="use --experts fused",
        )
    checkpoint = _quantize_weights(checkpoint, reshard_options)
    partial_codes = reshard_options.quantize is not None or bool(reshard_options.dequantize)
    coded = list_coded_arrays(checkpoint) if partial_codes else frozenset()
    plain = _list_plain_floats(checkpoint, reshard_options)
    tensors = (
        checkpoint.manifest.tensors.values()
        if reshard_options.include is None and reshard_options.exclude is None
        else ()
    )
    limit = max(reshard_options.host_memory, _PLANNING_MEMORY) if least else reshard_options.host_memory
    cut = layout.ranks in {"always", "optional"} and mesh.world > 1
    chunks, wanted = sum([len(tensor.chunks) for tensor in tensors]), len(tensors) if cut else 0  # some rank holds each
    require_bookkeeping(len(tensors), chunks, limit, wanted=wanted)
    chosen = choose_extra_tensors(checkpoint, filter_tensors(checkpoint, reshard_options), reshard_options)
    have = add_optimizer_states(chosen, reshard_options.optimizer_states, layout)
    dtypes = choose_dtypes(have, reshard_options, coded, plain)
    if reshard_options.dtype != "keep":
        from shardctl.checkpoint.quantization.unexplained_codes import check_cast

        noted = check_cast(checkpoint, have, coded, get_cast_type(reshard_options))
        have = replace(have, warnings=(*have.warnings, *noted))
    reshard_options = decide_names(checkpoint, reshard_options, layout, have)
    had = have.tensors
    forms = replace(reshard_options, experts="keep") if split else reshard_options
    have, arrays = choose_arrays(checkpoint, forms, layout, have, dtypes)
    if have.tensors is not had:
        dtypes = choose_dtypes(have, reshard_options, coded, plain)
    placed = None
    if layout.ranks == "always" or (layout.ranks == "optional" and mesh.world > 1):
        placed = place_checkpoint(checkpoint, have, mesh, reshard_options.stages, arrays.names)
        if mesh.world > 1:
            _require_lists(have, placed, limit)
    request = _build_pack_request(checkpoint, reshard_options, layout, have, placed, arrays, dtypes)
    notes = checkpoint.note_placement(mesh) if placed is not None else ()
    if layout.source_names:
        notes = (*notes, *checkpoint.note_names())
    return DraftedConversion(checkpoint, reshard_options, layout, mesh, request, notes)


@pause_garbage_collection()
def work_out_conversion(drafted: DraftedConversion, *, least: bool = False) -> PlannedConversion:
    """Work out which bytes go where; see `plan_conversion`."""
    checkpoint, layout, request = drafted.checkpoint, drafted.layout, drafted.request
    want = layout.pack(request)
    have = replace(request.have, warnings=(*request.have.warnings, *drafted.notes, *want.warnings))
    changes = _record_layout_changes(have, want, request.dtypes)
    have, want = add_extra_tensors(have), pack_extra_tensors(have, want)
    plan = join_manifests(have, want)
    if drafted.reshard_options.reflink:
        from shardctl.conversion.block_alignment import align_files  # which needs NumPy

        plan = align_files(plan)
    if not drafted.reshard_options.allow_expansion:
        check_expansion(plan, checkpoint.encoded)
    divide = partial(divide_host_memory, plan, threads=drafted.threads, beside=checkpoint.source.held_bytes)
    reshard_options, budget, impossible = divide_memory(drafted.reshard_options, divide, least=least)
    return PlannedConversion(
        checkpoint=checkpoint,
        reshard_options=reshard_options,
        layout=layout.name,
        mesh=drafted.mesh,
        have=have,
        plan=plan,
        placed=request.placed,
        budget=budget,
        carried=drafted.list_carried_files(want.files),
        options=_inherit_options(checkpoint)
        | _record_options(reshard_options)
        | ({DEQUANTIZED: "true"} if checkpoint.encoded else {})
        | ({"dropped_rows": str(checkpoint.dropped_rows)} if checkpoint.dropped_rows else {})
        | ({AVERAGED: checkpoint.averaged} if checkpoint.averaged else {})
        | ({APPLIED: checkpoint.applied} if checkpoint.applied else {})
        | ({UNTIED: "true"} if checkpoint.untied else {})
        | ({COMPLETED: checkpoint.completed} if checkpoint.completed else {})
        | _record_base_model(checkpoint)
        | ({"left_out": "true"} if checkpoint.part and not is_whole_model(checkpoint.part) else {})
        | ({SUBTREE: checkpoint.subtree} if checkpoint.subtree else {})
        | changes
        | _record_rules(checkpoint, request.placed),
        impossible=impossible,
    )


def divide_memory(
    reshard_options: ReshardOptions, divide: Callable[[int], HostMemoryBudget], *, least: bool
) -> tuple[ReshardOptions, HostMemoryBudget, str]:
    """Divide the limit on host memory, with `least` the least that can hold it where the limit cannot.

    Returns the options with the limit that counts, and why it is not the one that was given.
    """
    try:
        return reshard_options, divide(reshard_options.host_memory), ""
    except MemoryBudgetError as error:
        if not least:
            raise
        return replace(reshard_options, host_memory=error.needed), divide(error.needed), error.message


def _require_lists(have: Manifest, placed: PlacedCheckpoint, limit: int) -> None:
    """Raise MemoryBudgetError if `limit` bytes cannot hold the list of all pieces; counts them if that may be so."""
    chunks = sum(len(tensor.chunks) for tensor in have.tensors.values())
    guessed = placed.guess_box_count()
    try:
        require_bookkeeping(len(have.tensors), chunks, limit, wanted=guessed)
    except MemoryBudgetError:
        require_bookkeeping(len(have.tensors), chunks, limit, wanted=placed.count_boxes(), counted=True)


def choose_layout(reshard_options: ReshardOptions) -> Layout:
    """Choose the layout that the options ask for; raises UsageError for options that contradict each other."""
    mesh = reshard_options.mesh or Mesh.of()
    layout = get_layout(reshard_options.to or ("ranks" if mesh.world > 1 else "hf"))
    if layout.ranks == "none" and mesh.world > 1:
        raise UsageError(
            f"layout {layout.name} has no ranks, but the mesh is {mesh}", hint="use --to ranks, or leave the mesh out"
        )
    if reshard_options.names is not None and reshard_options.names not in NAMES:
        raise UsageError(
            f"unknown --names {reshard_options.names!r}",
            hint="use hub, keep, transformers, accelerate, torchtitan, automodel, veomni or maxtext",
        )
    if reshard_options.experts not in EXPERTS:
        raise UsageError(f"unknown --experts {reshard_options.experts!r}", hint=f"use {', '.join(EXPERTS)}")
    _check_meaningful(reshard_options, layout, mesh)
    return layout


def _build_pack_request(
    checkpoint: OpenedCheckpoint,
    reshard_options: ReshardOptions,
    layout: Layout,
    have: Manifest,
    placed: PlacedCheckpoint | None,
    arrays: ArrayForm,
    dtypes: dict[str, DType],
) -> PackRequest:
    """Build what is asked of a layout."""
    mesh = reshard_options.mesh or Mesh.of()
    require_model = partial(checkpoint.require_model, f"--to {layout.name}")
    stages = None
    if reshard_options.stages is not None:
        stages = parse_stages(reshard_options.stages, checkpoint.require_placement(mesh).layers, mesh.degree("pp"))
    return PackRequest(
        have=have,
        form=arrays,
        dtypes=dtypes,
        mesh=mesh,
        placed=placed,
        config=checkpoint.config or {},
        require_model=require_model,
        read=partial(read_bytes, checkpoint.source),
        stages=stages,
        max_shard_size=reshard_options.max_shard_size,
        options={name: value for name, value in _collect_special_options(reshard_options).items() if value is not None},
    )


def _collect_special_options(reshard_options: ReshardOptions) -> dict[str, str | None]:
    """Collect the options that only the layouts themselves understand."""
    return {name: getattr(reshard_options, name) for name in _SPECIAL_OPTIONS}


def _check_meaningful(reshard_options: ReshardOptions, layout: Layout, mesh: Mesh) -> None:
    """Refuse options that would be ignored: whoever gave them expects something of them."""
    if reshard_options.stages is not None and mesh.degree("pp") == 1:
        raise UsageError("--stages needs pipeline stages, but the mesh has pp=1", hint="add --pp N")
    if reshard_options.allow_partial_adapter and not reshard_options.merge:
        raise UsageError("--allow-partial-adapter has an effect only with --merge", hint="leave it out")
    if reshard_options.keep_fp32 is not None and reshard_options.dtype == "keep":
        raise UsageError("--keep-fp32 has an effect only with a cast", hint="add --dtype bf16 or fp16")
    for name in (*sorted(_COMMON_OPTIONS), *_SPECIAL_OPTIONS):
        if name not in layout.options and getattr(reshard_options, name) != _USUAL_VALUES[name]:
            raise UsageError(
                f"--to {layout.name} does not use --{name.replace('_', '-')}",
                hint=f"leave it out; layouts with this option: {', '.join(list_layouts_with(name))}",
            )


def _compute_weights(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> OpenedCheckpoint:
    """Return the checkpoint with the weights that are wanted of it.

    Where a cast is asked for, quantized weights are taken back to numbers; adapters are merged into the result.
    """
    threads = _choose_threads(checkpoint, reshard_options)
    declared = checkpoint.config is not None and find_quantization_config(checkpoint.config) is not None
    if reshard_options.dequantize:
        checkpoint = _decode_modules(checkpoint, reshard_options, threads, quantised=declared)
    elif (declared or checkpoint.stored_quantization is not None) and reshard_options.dtype != "keep":
        checkpoint = dequantize_checkpoint(checkpoint, get_cast_type(reshard_options), threads)
    return merge_adapters(checkpoint, reshard_options.merge, threads, partial=reshard_options.allow_partial_adapter)


def _decode_modules(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, threads: int, *, quantised: bool
) -> OpenedCheckpoint:
    """Return the checkpoint with the weights of some modules decoded; raises UsageError for options that contradict."""
    if reshard_options.dtype == "keep":
        raise UsageError("--dequantize has an effect only with --dtype", hint="add --dtype bf16 or fp16")
    if reshard_options.quantize is not None:
        raise UsageError(
            "--dequantize keeps other weights quantized, and --quantize needs numbers",
            hint="leave --dequantize out, and name the modules with --quantize-ignore",
        )
    if not quantised and checkpoint.stored_quantization is None:
        raise UsageError("--dequantize is for quantized weights, and the source has none", hint="leave it out")
    return dequantize_modules(checkpoint, reshard_options.dequantize, get_cast_type(reshard_options), threads)


def _quantize_weights(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> OpenedCheckpoint:
    """Return the checkpoint with its weights quantized, if that is asked for."""
    if reshard_options.quantize is None:
        if reshard_options.quantize_ignore:
            raise UsageError("--quantize-ignore has an effect only with --quantize", hint="add --quantize FORMAT")
        return checkpoint
    if reshard_options.optimizer_states == "keep":
        raise UsageError("optimizer states do not belong to quantized weights", hint="leave --optimizer-states out")
    recipe = choose_recipe(reshard_options.quantize)
    checkpoint = replace(checkpoint, manifest=replace(checkpoint.manifest, training=None))
    if not holds_fp4_experts(checkpoint):
        checkpoint = unstack_experts(checkpoint, recipe.build_config(()))
    return quantize_checkpoint(
        checkpoint,
        recipe,
        reshard_options.quantize_ignore,
        choose_dtypes(checkpoint.manifest, reshard_options, plain=_list_plain_floats(checkpoint, reshard_options)),
        _choose_threads(checkpoint, reshard_options),
    )


def _list_plain_floats(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> frozenset[str]:
    """List the 8-bit floats that are cast, because they are numbers by themselves."""
    if reshard_options.dtype == "keep":
        return frozenset()
    from shardctl.checkpoint.quantization.unexplained_codes import list_plain_floats

    return list_plain_floats(checkpoint)


def _choose_threads(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> int:
    return reshard_options.threads or choose_thread_count(far=checkpoint.source.folder is None)


def place_checkpoint(
    checkpoint: OpenedCheckpoint, have: Manifest, mesh: Mesh, stages: str | None, names: Mapping[str, tuple[str, ...]]
) -> PlacedCheckpoint:
    """Cut a checkpoint's tensors for a mesh by its model's rules; `names` are those under which ranks hold them."""
    model = checkpoint.require_placement(mesh)
    specs = build_specs(model, have)
    on_stages = choose_stages(model, have, mesh, stages, specs)
    return PlacedCheckpoint(tuple(have.tensors.values()), specs, mesh, on_stages, names)


def choose_stages(
    model: Model, have: Manifest, mesh: Mesh, stages: str | None, specs: Mapping[str, PartitionSpec] | None = None
) -> tuple[int, ...]:
    """Choose the layers of each stage: as `--stages` says, else so that the heaviest stage is as light as can be.

    `specs` says how each tensor is cut, if that is known already.
    """
    pp = mesh.degree("pp")
    if stages is not None:
        return parse_stages(stages, model.layers, pp)
    if pp == 1:
        return (model.layers,)
    states = get_states(have)
    weights = [tensor for name, tensor in have.tensors.items() if name not in states]
    specs = build_specs(model, have) if specs is None else specs
    return balance_stages(*compute_layer_costs(weights, specs, model.layers), pp)


def _inherit_options(checkpoint: OpenedCheckpoint) -> dict[str, str]:
    """Carry over what an earlier conversion left out or cast: it is so in this one's result, too."""
    earlier = checkpoint.record.options if checkpoint.record else {}
    found = {key: earlier[key] for key in _INHERITED_RECORD_KEYS if key in earlier}
    if checkpoint.model is None and earlier.get("names") == HUB_NAMES:  # its arrays were read as those of the class
        found[SAVED_NAMES] = HUB_NAMES
    return found


def _record_layout_changes(have: Manifest, want: Manifest, dtypes: Mapping[str, DType]) -> dict[str, str]:
    """Record what the layout itself changes: tensors that it drops, which its warnings name, and its own types."""
    left_out = len(want.tensors) < len(have.tensors)
    retyped = any(tensor.dtype is not dtypes[name] for name, tensor in want.tensors.items())
    return {name: "true" for name, done in (("left_out", left_out), ("retyped", retyped)) if done}


def _record_base_model(checkpoint: OpenedCheckpoint) -> dict[str, str]:
    """Record that a base model was converted, whose config is that of a class with a head."""
    if checkpoint.model is None or (checkpoint.record is not None and checkpoint.record.filtered):
        return {}
    heads = list_head_names(checkpoint.model)
    return {BASE_ONLY: "true"} if heads and heads.isdisjoint(checkpoint.manifest.tensors) else {}


def _record_rules(checkpoint: OpenedCheckpoint, placed: PlacedCheckpoint | None) -> dict[str, str]:
    """Record that no table, but derived or given rules say how tensors are cut."""
    if placed is None:
        return {}
    if checkpoint.ruled:
        return {"rules": GIVEN}
    model = checkpoint.find_placement(placed.mesh)
    if model is None or model.derivation is None:
        return {}
    unordered = model.derivation.unordered
    return {"rules": DERIVED} | ({FUSED_ORDER_UNKNOWN: ", ".join(unordered)} if unordered else {})


def _record_options(reshard_options: ReshardOptions) -> dict[str, str]:
    shaping = {
        "dtype": reshard_options.dtype if reshard_options.dtype != "keep" else None,
        "keep_fp32": reshard_options.keep_fp32 if reshard_options.dtype != "keep" else None,
        "names": reshard_options.names,
        "experts": reshard_options.experts if reshard_options.experts != "keep" else None,
        "for": reshard_options.consumer,
        "only": reshard_options.only,
        "include": reshard_options.include,
        "exclude": reshard_options.exclude,
        "extra_tensors": reshard_options.extra_tensors if reshard_options.extra_tensors != "keep" else None,
        "optimizer_states": reshard_options.optimizer_states,
        MERGED: describe_adapters(reshard_options.merge) or None,
        MERGE_ARITHMETIC: str(ARITHMETIC_VERSION) if reshard_options.merge else None,
        QUANTIZED: reshard_options.quantize,
        DEQUANTIZED_MODULES: ", ".join(reshard_options.dequantize) or None,
        "quantize_ignore": ", ".join(reshard_options.quantize_ignore) or None,
        **_collect_special_options(reshard_options),
    }
    return {key: value for key, value in shaping.items() if value is not None}


def list_changes(checkpoint: OpenedCheckpoint, options: ReshardOptions) -> tuple[str, ...]:
    """List what a conversion was asked to change besides the layout, such as ``cast to bf16``."""
    changes = (
        f"cast to {options.dtype}" if options.dtype != "keep" else "",
        f"quantized to {options.quantize}" if options.quantize is not None else "",
        "dequantized" if checkpoint.encoded else "",
        f"{format_plural(len(options.merge), 'adapter')} merged" if options.merge else "",
        f"the sum {checkpoint.averaged}" if checkpoint.averaged else "",
        f"with the deltas {checkpoint.applied}" if checkpoint.applied else "",
        f"experts {options.experts}" if options.experts != "keep" else "",
        *(
            f"--{name} {value}"
            for name in ("only", "include", "exclude")
            if (value := getattr(options, name)) is not None
        ),
    )
    return tuple(filter(None, changes))
