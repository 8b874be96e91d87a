"""Plans a Universal Checkpoint, from which a DeepSpeed engine of any ZeRO stage resumes.

The files are those that DeepSpeed's converter writes (`checkpoint/ds_to_universal.py`), with what both loaders read:
`load_hp_checkpoint_state_from_checkpoint_dir` in `runtime/base_optimizer.py`, of stages 1 and 2, and
`load_hp_checkpoint_state_from_checkpoint_dir_stage3` in `runtime/zero/stage3.py`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME, CASTABLE
from shardctl.base.errors import UnsupportedError
from shardctl.base.value import state_class
from shardctl.libraries.safetensors.hf_writing import list_whole_arrays
from shardctl.libraries.torch_save.item_writer import build_archive, build_tensor_value
from shardctl.libraries.torch_save.pickle_writer import PickleCall, PickleName, Value
from shardctl.libraries.writer import Layout
from shardctl.tensors.manifest import CheckpointFile, Chunk, ConstantFill, Manifest, Region, compute_dense_strides
from shardctl.tensors.training import split_state_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.dtype import DType
    from shardctl.libraries.arrays.form import ArrayForm
    from shardctl.libraries.safetensors.packing import TensorArray
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import TrainingState

NAME: Final = "universal"
FOLDER: Final = "universal"
"""What `latest_universal` names."""
DEEPSPEED: Final = "0.19.8"
"""The version whose files these are like; engines refuse a checkpoint without one."""
VERSION: Final = 0.4
"""Of Universal Checkpoints."""
_MASTER_WEIGHTS_KEY: Final = "fp32"
_STEP_KEY: Final = "step"
_OPTIMIZER_STATE_NAMES: Final = frozenset({"exp_avg", "exp_avg_sq", _STEP_KEY})
"""All that the converter knows; the loader of stage 3 asks for these and no others."""
_MODEL_STATES_FILE: Final = "mp_rank_00_model_states.pt"
"""What engines of stages 1 and 2 ask for."""
_MODULE_3: Final = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""What those of stage 3 ask for: the same, without tensors."""
_EXPERT_ARRAY_PATTERN: Final = re.compile(r".*\.experts\.w[123]")
"""What AutoEP calls its arrays of experts (DeepSpeed `checkpoint/ds_to_universal.py`)."""
_EXPERT_STACK_NDIM: Final = 3
_MAX_FOLDER_NAME_BYTES: Final = 255
"""Bytes of the name of a folder."""


_Number = tuple["DType", tuple[int, ...], bytes]
"""Type, shape and content of a tensor of one element."""
_Groups = list[tuple[list[str], dict[str, Value]]]


def pack_universal(request: PackRequest) -> Manifest:
    """Return a file for every parameter and every state, and what the engine has besides.

    What is trained has a folder: what has states, or, if nothing has, every float. The rest is in the module's file.
    Raises UnsupportedError for states that Universal Checkpoints have no place for, and names that no folder can have.
    """
    have, form, dtypes = request.have, request.form, request.dtypes
    aliases = {other: names[0] for names in form.names.values() for other in names[1:]}
    arrays = [array for array in list_whole_arrays(have, form, dtypes) if array.name not in aliases]
    split = {array.name: split_state_name(array.name) for array in arrays}
    weights = [array for array in arrays if split[array.name] is None]
    states = [(*parts, array) for array in arrays if (parts := split[array.name]) is not None]
    trained = {parameter for _, parameter, _ in states} or {a.name for a in weights if a.dtype.name in CASTABLE}
    builder = _UniversalBuilder()
    for array in weights:
        if array.name in trained:
            builder.parameter(array, array.name, _MASTER_WEIGHTS_KEY)
    for state, parameter, array in states:
        builder.parameter(array, parameter, state)
    shapes = {array.name: array.shape for array in weights if array.name in trained}
    groups = _list_groups(have.training, form, shapes)
    done = (have.training.step if have.training is not None else None) or 0
    step = _find_step_state(request)
    if states and step is None:
        step = BY_NAME["F32"], (), struct.pack("<f", done)
    builder.optimizer(groups, step, len(shapes))
    described = [{name: shapes[name] for name in members} for members, _ in groups] or [shapes]
    builder.module([array for array in weights if array.name not in trained], described, aliases, done)
    builder.text("latest_universal", FOLDER)
    tensors = {
        name: replace(tensor, dtype=dtypes[name], chunks=tuple(builder.chunks.get(name, ())))
        for name, tensor in have.tensors.items()
    }
    return Manifest(NAME, tensors, builder.files, have.objects, training=have.training)


def _find_step_state(request: PackRequest) -> _Number | None:
    """Find the state `step` of the first parameter that has one, which engines of stage 3 take as that of all."""
    states = request.have.training.states if request.have.training is not None else {}
    for name, tensor in states.items():
        if (split_state_name(name) or ("", name))[0] == _STEP_KEY and tensor.size == 1 and tensor.chunks:
            where = tensor.chunks[0].where
            if isinstance(where, ConstantFill):
                return tensor.dtype, tensor.shape, where.unit
            return tensor.dtype, tensor.shape, request.read(where.file, where.offset, tensor.nbytes)
    return None


def _list_groups(training: TrainingState | None, form: ArrayForm, trained: Mapping[str, object]) -> _Groups:
    """List, per group of the optimizer, the arrays of its parameters and its settings; none if none are known."""
    found: _Groups = []
    left = dict.fromkeys(trained)
    for group in training.groups if training is not None else ():
        members = [name for name in form.list_arrays(group.parameters) if name in left]
        for name in members:
            del left[name]
        found.append((members, dict(group.settings)))
    return [*found, (list(left), {})] if found and left else found


def _describe_experts(parameter: str, shape: tuple[int, ...]) -> dict[Value, Value]:
    """Describe an array of experts, which engines with AutoEP divide; they know it by the name, too."""
    if _EXPERT_ARRAY_PATTERN.fullmatch(parameter) is None or len(shape) != _EXPERT_STACK_NDIM:
        return {}
    return {"is_expert_param": True, "ep_num_experts": shape[0]}


@state_class
class _UniversalBuilder:
    """Collects files and the chunks that lie in them."""

    files: dict[str, CheckpointFile] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)

    def parameter(self, array: TensorArray, parameter: str, kind: str) -> None:
        """Add the master or a state of a parameter, in a file of its own; a step is a bare tensor."""
        if kind not in {_MASTER_WEIGHTS_KEY, *_OPTIMIZER_STATE_NAMES}:
            raise UnsupportedError(
                f"{parameter} has a state {kind}, and Universal Checkpoints have"
                f" {', '.join(sorted(_OPTIMIZER_STATE_NAMES))} only",
                hint="add --optimizer-states drop, or --to dcp",
            )
        if (
            "/" in parameter
            or "\0" in parameter
            or parameter in {"", ".", ".."}
            or len(parameter.encode()) > _MAX_FOLDER_NAME_BYTES
        ):
            raise UnsupportedError(f"{ascii(parameter)[:300]} cannot be the name of a folder")
        value = build_tensor_value(array.dtype, array.shape)
        tree = (
            value if kind == _STEP_KEY else {"cat_dim": 0, "param": value, **_describe_experts(parameter, array.shape)}
        )
        self.saved(f"zero/{parameter}/{kind}.pt", tree, [replace(array, name=parameter)])

    def optimizer(self, groups: _Groups, step: _Number | None, parameters: int) -> None:
        """Add what all parameters share: each loader looks for it at another place.

        Stages 1 and 2 load as many groups as there are here, so where none are known there is an empty one for every
        parameter, and an engine has no more. Stage 3 takes the step of all parameters from here.
        """
        known: list[Value] = [{**settings, "params": [number]} for number, (_, settings) in enumerate(groups)]
        known = known or [{"params": []} for _ in range(parameters)]
        state = {0: {_STEP_KEY: build_tensor_value(step[0], step[1])}} if step is not None else {}
        inner = {"state": state, "param_groups": known}
        shared = {"ds_version": DEEPSPEED, "param_groups": known, "optimizer_state_dict": inner}
        contents = [step[2]] if step is not None else []
        item = build_archive(shared, [len(content) for content in contents])
        path = f"{FOLDER}/zero/optimizer_state.pt"
        self.files[path] = CheckpointFile(path, item.size, (*item.literals, *zip(item.starts, contents, strict=True)))

    def module(
        self, rest: list[TensorArray], groups: list[dict[str, tuple[int, ...]]], aliases: dict[str, str], done: int
    ) -> None:
        """Add the shapes of what is trained, in the optimizer's order, and the tensors that are not."""
        shapes = [
            {name: PickleCall(PickleName("torch", "Size"), (shape,)) for name, shape in group.items()}
            for group in groups
        ]
        held = {array.name: build_tensor_value(array.dtype, array.shape, number) for number, array in enumerate(rest)}
        state: dict[str, Value] = {
            "module": held,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": None,
            "shared_params": {other: name for other, name in aliases.items() if split_state_name(name) is None},
            "frozen_param_fragments": None,
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": done,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": DEEPSPEED,
            "universal_checkpoint_info": {"universal_checkpoint_version": VERSION},
        }
        self.saved(_MODEL_STATES_FILE, state, rest)
        self.saved(_MODULE_3, state | {"module": {}}, [])

    def saved(self, name: str, value: Value, arrays: list[TensorArray]) -> None:
        """Add a file of torch.save with these arrays, each the storage of its number."""
        path = f"{FOLDER}/{name}"
        item = build_archive(value, [array.nbytes for array in arrays])
        for array, start in zip(arrays, item.starts, strict=True):
            region = Region(path, start, compute_dense_strides(array.dtype, array.shape))
            for tensor, chunk in array.chunks(region):
                self.chunks.setdefault(tensor, []).append(chunk)
        self.files[path] = CheckpointFile(path, item.size, item.literals)

    def text(self, path: str, content: str) -> None:
        """Add a file of text."""
        data = content.encode()
        self.files[path] = CheckpointFile(path, len(data), ((0, data),))


LAYOUT: Final = Layout(
    NAME,
    pack_universal,
    options=frozenset({"names", "experts"}),
    states="by default",
    trainer="DeepSpeed",
    own_steps=True,
)
