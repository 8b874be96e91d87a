"""Plans what Megatron-FSDP loads (`--ckpt-format fsdp_dtensor`): items of torch's DCP under the names of parameters.

The keys are those of `generate_state_dict` and `preprocess_fsdp_dtensor_state_dict` in
`megatron/training/checkpointing.py` of core 0.19, which asks for them with the names of its own modules: which layers
will load the files has to be known. Arrays are whole, so that any number of ranks loads them.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, UnsupportedError, UsageError
from shardctl.libraries.arrays.composing import build_manifest
from shardctl.libraries.arrays.composite import round_up_to_multiple
from shardctl.libraries.dcp.file_writer import format_file_prefix
from shardctl.libraries.megatron.args_writing import FOLDER, TRACKER, VERSION, build_arguments
from shardctl.libraries.megatron.dist_arrays import (
    ENGINE,
    EXPERTS,
    HALVES,
    LAYERS,
    MODULES,
    OWN,
    SCHEMA,
    VOCABULARY,
    StackCell,
    list_cells,
)
from shardctl.libraries.megatron.dist_arrays import NAME as ARRAYS
from shardctl.libraries.megatron.dist_cells import CellWriter
from shardctl.libraries.megatron.dist_groups import is_vector
from shardctl.libraries.megatron.dist_states import (
    SCHEDULE,
    STATES,
    STORED,
    add_progress,
    build_group,
    build_schedule,
    build_state_cell,
    collect_states,
    find_iteration,
    is_trained,
    list_trained,
    note_unknown_progress,
)
from shardctl.libraries.megatron.family_features import TRAITS
from shardctl.libraries.megatron.further_layers import COUNT, count_complete_layers
from shardctl.libraries.megatron.layer_options import OPTION, MegatronOptions
from shardctl.libraries.megatron.layers import count_experts, get_embedding_name
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.torch_save.item_writer import encode_object
from shardctl.libraries.torch_save.pickle_writer import PickleName, PickleObject
from shardctl.libraries.writer import Layout
from shardctl.tensors.manifest import CheckpointFile
from shardctl.tensors.naming_scheme import NamingScheme

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Manifest, TrainingState
    from shardctl.tensors.naming_scheme import Fact

NAME: Final = "fsdp_dtensor"
_FOLDER_KEY: Final = "folder"
_WEIGHT_KEY_PREFIX: Final = "model.module."
_HALF_PRECISION_WRAPPER_PREFIX: Final = "module.module.module."
"""What stands before the names of parameters in the optimizer: wrappers of FSDP, its adapter, and of 16 bits."""
_FP32_WRAPPER_PREFIX: Final = "module.module."
"""The same in fp32, where nothing wraps the model for 16 bits."""
_GATE_UP_SUFFIX_PATTERN: Final = re.compile(r"_[wv]$")
_TYPES_OF_16_BITS: Final = frozenset({"BF16", "F16"})
_NOT_IN_FP32: Final = (
    f"the names of optimizer states are those of a run in bfloat16, whatever --dtype says: {TITLE} 0.19 can neither "
    f"save nor load a model with gate and up projections as {NAME} if all of it is fp32"
)


def pack_fsdp_dtensor(order: PackRequest) -> Manifest:
    """Return the files of every rank that holds a part of an array no earlier replica holds.

    Raises as `Layout.pack` says.
    """
    from shardctl.libraries.megatron.embedding_copies import note_copies  # which needs NumPy

    SCHEMA.check(order.model)
    wanted = MegatronOptions.parse(order.options.get(OPTION, ""))
    _check_options(order, wanted)
    training, trained = order.have.training, list_trained(order)
    folder = f"iter_{find_iteration(training):07d}/" if trained else FOLDER
    embedding = get_embedding_name(order.model)
    padded = round_up_to_multiple(order.model.tensors[embedding].shape[0], wanted.multiple * order.mesh.degree("tp"))
    further = count_complete_layers(order)
    facts: dict[str, Fact] = {
        LAYERS: True,
        EXPERTS: True,
        HALVES: not TRAITS[order.model.family].turning,  # which only `--swiglu` divides
        VOCABULARY: padded,
        MODULES: OWN if wanted.local else ENGINE,
        COUNT: further,
        _FOLDER_KEY: folder,
    }
    dialect = NamingScheme(ARRAYS, order.mesh, stages=(order.model.layers,), facts=facts)
    named = [_rename_cell(cell, trained, wanted) for cell in list_cells(order.model, dialect)]
    args = build_arguments(order, order.mesh, order.dtypes[embedding], _build_more_arguments(padded, further, wanted))
    in_16_bits = order.dtypes[embedding].name in _TYPES_OF_16_BITS
    warnings: tuple[str, ...] = ()
    if trained and training is not None:
        add_progress(args, training)
        gated = any(_GATE_UP_SUFFIX_PATTERN.search(cell.name) for cell in named)
        if gated and not in_16_bits:
            in_16_bits = _ask_for_16_bits(args)
            warnings = (_NOT_IN_FP32,)
        warnings += tuple(note_unknown_progress(training))
    wrapper = _HALF_PRECISION_WRAPPER_PREFIX if in_16_bits else _FP32_WRAPPER_PREFIX
    states = [
        build_state_cell(cell, state, f"optimizer.state.{wrapper}{cell.name.removeprefix(_WEIGHT_KEY_PREFIX)}.{state}")
        for cell in named
        if is_trained(cell, trained)
        for state in STATES
    ]
    writer = CellWriter(order, dialect, folder, (*named, *states))
    for key, value in {"args": args, "checkpoint_version": VERSION, "iteration": find_iteration(training)}.items():
        writer.files.object(key, encode_object(value))
    if trained and training is not None:
        _write_settings(writer, [cell for cell in named if is_trained(cell, trained)], training, wrapper)
    writer.write()
    files = writer.files.finished(None)
    tracked = (str(find_iteration(training)) if trained else FOLDER.rstrip("/")).encode()
    files[TRACKER] = CheckpointFile(TRACKER, len(tracked), ((0, tracked),))
    held = training.states if training is not None else {}
    weights = replace(order.have, tensors={n: t for n, t in order.have.tensors.items() if n not in held})
    stored = [each for each in writer.stored if each[0] not in held]
    built = build_manifest(
        NAME, replace(order, have=weights), SCHEMA, dialect, files, stored, note_copies(order, further)
    )
    return replace(
        built,
        tensors={**built.tensors, **collect_states(training, writer.stored)},
        warnings=(*built.warnings, *warnings),
    )


def _check_options(order: PackRequest, wanted: MegatronOptions) -> None:
    traits = TRAITS[order.model.family]
    unknown = {
        "parts of gated DeltaNet": traits.delta,
        "parts of Mamba": traits.hybrid,
    }
    for what in (name for name, there in unknown.items() if there):
        raise UnsupportedError(f"what Megatron-FSDP calls the {what} is not known", hint="write --to torch_dist")
    if order.mesh.degree("pp") > 1:
        raise PartitionError(
            "Megatron-FSDP counts the layers of every stage from 0, so that several stages have the same keys in one "
            "fsdp_dtensor checkpoint",
            hint="leave --pp out; for a run with stages write --to torch_dist",
        )
    if wanted.chunks > 1 or wanted.last_row:
        part = "virtual=N" if wanted.chunks > 1 else "padding=last-row"
        raise UsageError(f"{part} of --megatron is not for {NAME}", hint="leave it out")
    if traits.turning and wanted.grouped and order.mesh.ep > 1:
        raise UnsupportedError(
            f"{TITLE} 0.19 counts the biases of grouped experts on every rank from 0, so that ranks of ep would load "
            "those of the first",
            hint="leave --ep out",
        )
    if wanted.local and wanted.grouped:
        raise UsageError(
            "megatron-core's local layers have no grouped experts that Megatron-FSDP divides",
            hint="give experts=grouped without layers=local",
        )


def _rename_cell(cell: StackCell, trained: Collection[str], wanted: MegatronOptions) -> StackCell:
    """Name a cell as its parameter; trained weights are the optimizer's, in fp32."""
    from shardctl.libraries.megatron.fsdp_keys import find_module_name  # loads what reads torch_dist

    name = find_module_name(cell.name, grouped=wanted.grouped, older=wanted.older)
    return replace(cell, name=f"{_WEIGHT_KEY_PREFIX}{name}", dtype=STORED if is_trained(cell, trained) else cell.dtype)


def _build_more_arguments(padded: int, further: int, wanted: MegatronOptions) -> dict[str, Value]:
    return {
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": wanted.multiple,
        "mtp_num_layers": further or None,
        "rank": 0,
        "transformer_impl": "local" if wanted.local else "transformer_engine",
        "moe_grouped_gemm": wanted.grouped,
        "ckpt_format": NAME,
        "use_megatron_fsdp": True,
        "use_distributed_optimizer": True,
    }


def _ask_for_16_bits(args: PickleObject) -> bool:
    """Change `args` to those of a run in bfloat16."""
    said = args.state if isinstance(args.state, dict) else {}
    said |= {"params_dtype": PickleName("torch", "bfloat16"), "bf16": True}
    return True


def _write_settings(writer: CellWriter, cells: list[StackCell], training: TrainingState, wrapper: str) -> None:
    """Write steps, the settings of every parameter's group, and the schedule of the learning rate.

    torch's Adam has steps beside the states of each parameter, Transformer Engine's among the settings of its group.
    """
    divided = writer.mesh.ep > 1 and count_experts(writer.order.model) > 0
    step = struct.pack("<f", training.step or 0)
    items = {
        (expert, decayed): {
            name: encode_object(value) for name, value in build_group(training, expert=expert, decayed=decayed).items()
        }
        for expert in (False, True)
        for decayed in (False, True)
    }
    parameters: dict[str, tuple[bool, bool]] = {}
    for cell in cells:
        name = cell.name.removeprefix(_WEIGHT_KEY_PREFIX)
        writer.files.scalar(f"optimizer.state.{wrapper}{name}.step", STORED, step)
        whole = _GATE_UP_SUFFIX_PATTERN.sub("", name)
        parameters[whole] = cell.expert is not None and divided, not is_vector(whole)
    for name, kind in parameters.items():
        for setting, item in items[kind].items():
            writer.files.object(f"optimizer.param_to_group_meta.{wrapper}{name}.{setting}", item)
    for setting, value in build_schedule(training).items():
        writer.files.object(f"{SCHEDULE}.{setting}", encode_object(value))


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
    return dialect.text(_FOLDER_KEY, FOLDER) + format_file_prefix(rank)


LAYOUT: Final = Layout(
    NAME,
    pack_fsdp_dtensor,
    ranks="library",
    options=frozenset({"max_shard_size", OPTION}),
    states="on request",
    own_settings=True,
    trainer="Megatron-LM",
    prefix=_format_file_prefix,
)
