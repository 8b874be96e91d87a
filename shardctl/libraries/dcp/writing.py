"""Plans what `torch.distributed.checkpoint.load` reads into any mesh: `.metadata` and `.distcp` files.

Keys are those of ``{"model": ..., "optim": ...}`` with what `get_state_dict` returns: ``model.<name>``,
``optim.state.<name>.<state>`` and ``optim.param_groups.<n>.<setting>``. VeOmni calls the second ``optimizer``
(0.1.12, `checkpoint/dcp_checkpointer.py`), torchtitan, too, which flattens it beside weights at the root, and
Accelerate (1.15, `utils/fsdp_utils.py`), which has each of the two in a folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.libraries.dcp.file_writer import DcpFiles, format_file_prefix
from shardctl.libraries.files.file_names import SAFETENSORS
from shardctl.libraries.safetensors.hf_writing import USUAL_SHARD, group_by_size, list_whole_arrays
from shardctl.libraries.safetensors.packing import FileBuilder, TensorArray, build_container_metadata
from shardctl.libraries.safetensors.ranks_writing import Known, list_rank_arrays
from shardctl.libraries.safetensors.saved_apart import FOLDER
from shardctl.libraries.torch_save.item_writer import encode_object
from shardctl.libraries.writer import Layout
from shardctl.tensors.manifest import Manifest
from shardctl.tensors.training import split_state_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.libraries.arrays.form import ArrayForm
    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Chunk, TrainingState
    from shardctl.tensors.naming_scheme import NamingScheme

NAME: Final = "dcp"
_MODEL_KEY: Final = "model"
_OPTIMIZER_KEY: Final = "optim"
_TRAINER_OPTIMIZER_KEY: Final = "optimizer"
"""What some trainers call it."""
_TORCHTITAN_TRAINER: Final = "torchtitan"
"""Who has weights at the root, and flattens its optimizer."""
_AUTOMODEL_TRAINER: Final = "automodel"
"""Who has weights in `model/`, as safetensors, and a flat optimizer in `optim/`."""
_ACCELERATE_TRAINER: Final = "accelerate"
"""Who has both in folders of these names, of the first model and its optimizer:"""
_WEIGHT_FOLDER: Final = "pytorch_model_fsdp_0/"
_STATE_FOLDER: Final = "optimizer_0/"
_GROUP_MEMBER_KEYS: Final = frozenset({"params", "param_names"})
"""What a group says of its parameters, which is no setting."""
_ZERO_FILL_DTYPE: Final = BY_NAME["F32"]
_Way = tuple[str | int, ...]


def pack_dcp(request: PackRequest) -> Manifest:
    """Return the files of every rank of a mesh, or of the only one."""
    have, form, dtypes = request.have, request.form, request.dtypes
    if form.trainer in {_AUTOMODEL_TRAINER, _ACCELERATE_TRAINER}:
        return _pack_apart(request)
    builder = _DcpBuilder(request.max_shard_size or USUAL_SHARD, form.trainer)
    if have.training is not None:
        builder.settings(have.training, form)
    for name, shape in form.zeros.items():
        builder.zeros(name, shape)
    if request.placed is None:
        builder.rank(0, list_whole_arrays(have, form, dtypes))
    else:
        known: Known = {}
        for rank, held in request.placed.ranks():
            builder.rank(rank, (array for group in list_rank_arrays(held, form, dtypes, known) for array in group))
    files = builder.files.finished(builder.ways)
    tensors = {
        name: replace(tensor, dtype=dtypes[name], chunks=tuple(builder.chunks.get(name, ())))
        for name, tensor in have.tensors.items()
    }
    return Manifest(NAME, tensors, files, have.objects, training=have.training)


def _pack_apart(request: PackRequest) -> Manifest:
    """Return the files of a trainer that has weights in one folder, and what is trained besides in another.

    Weights are safetensors for NeMo Automodel, and a save of their own for Accelerate. Raises UsageError for a mesh,
    which they need none of to load the files into any.
    """
    have, form, dtypes = request.have, request.form, request.dtypes
    if request.placed is not None:
        raise UsageError(
            f"--names {form.trainer} takes no mesh", hint="leave the mesh out: the files are loaded into any"
        )
    weights, states = list[TensorArray](), list[TensorArray]()
    for array in list_whole_arrays(have, form, dtypes):
        (weights if split_state_name(array.name) is None else states).append(array)
    largest = request.max_shard_size or USUAL_SHARD
    if form.trainer == _AUTOMODEL_TRAINER:
        groups = group_by_size(weights, request.max_shard_size)
        stored = FileBuilder(build_container_metadata(have))
        for number, arrays in enumerate(groups, 1):
            stored.add(f"{FOLDER}shard-00001-model-{number:05d}-of-{len(groups):05d}{SAFETENSORS}", arrays)
        files, held = dict(stored.files), list(stored.stored())
        trained = _DcpBuilder(largest, _AUTOMODEL_TRAINER, f"{_OPTIMIZER_KEY}/")
    else:
        saved = _DcpBuilder(largest, _ACCELERATE_TRAINER, _WEIGHT_FOLDER)
        saved.rank(0, weights)
        files = saved.files.finished(saved.ways)
        held = [(name, chunk) for name, chunks in saved.chunks.items() for chunk in chunks]
        trained = _DcpBuilder(largest, _ACCELERATE_TRAINER, _STATE_FOLDER)
    if have.training is not None:
        trained.settings(have.training, form)
    trained.rank(0, states)
    files |= trained.files.finished(trained.ways) if trained.ways else {}
    for name, chunk in held:
        trained.chunks.setdefault(name, []).append(chunk)
    tensors = {
        name: replace(tensor, dtype=dtypes[name], chunks=tuple(trained.chunks.get(name, ())))
        for name, tensor in have.tensors.items()
    }
    return Manifest(NAME, tensors, files, have.objects, training=have.training)


class _DcpBuilder:
    """Collects items, the way to each, and the chunks of tensors that lie in them."""

    def __init__(self, largest: int, trainer: str, folder: str = "") -> None:
        self._flat = trainer in {_TORCHTITAN_TRAINER, _AUTOMODEL_TRAINER}
        self._optimizer = _TRAINER_OPTIMIZER_KEY if trainer and trainer != _AUTOMODEL_TRAINER else _OPTIMIZER_KEY
        self.files = DcpFiles(largest, folder)
        self.chunks: dict[str, list[Chunk]] = {}
        self.ways: dict[Value, Value] = {}

    def settings(self, training: TrainingState, form: ArrayForm) -> None:
        """Add hyper-parameters, in front of the first rank's tensors."""
        if self._flat:
            self._flat_settings(training, form)
            return
        for number, group in enumerate(training.groups):
            members: list[Value] = list(form.list_arrays(group.parameters))
            for name, value in (*group.settings.items(), ("params", members)):
                way: _Way = (self._optimizer, "param_groups", number, name)
                self.files.object(_join_key_path(way), encode_object(value))
                self.ways[_join_key_path(way)] = way

    def _flat_settings(self, training: TrainingState, form: ArrayForm) -> None:
        """Add the settings of every array by itself, as flattened optimizers have them."""
        for group in training.groups:
            for array in form.list_arrays(group.parameters):
                for name, value in group.settings.items():
                    if name not in _GROUP_MEMBER_KEYS:
                        way: _Way = (self._optimizer, f"param_groups.{array}.{name}")
                        self.files.object(_join_key_path(way), encode_object(value))
                        self.ways[_join_key_path(way)] = way

    def zeros(self, name: str, shape: tuple[int, ...]) -> None:
        """Add an array of zeros, in front of the first rank's tensors."""
        way = self._find_key_path(name)
        self.files.constant(_join_key_path(way), shape, _ZERO_FILL_DTYPE, bytes(_ZERO_FILL_DTYPE.nbytes(shape)))
        self.ways[_join_key_path(way)] = way

    def rank(self, rank: int, arrays: Iterable[TensorArray]) -> None:
        """Add the boxes of one rank that no earlier rank holds, too."""
        self.files.rank(rank)
        for array in arrays:
            way = self._find_key_path(array.name)
            region = self.files.tensor(_join_key_path(way), array.shape, array.dtype, array.box)
            if region is not None:
                self.ways[_join_key_path(way)] = way
                for tensor, chunk in replace(array, name=_join_key_path(way)).chunks(region):
                    self.chunks.setdefault(tensor, []).append(chunk)

    def _find_key_path(self, name: str) -> _Way:
        """Find where in the nested dicts an array is."""
        state = split_state_name(name)
        if state is None:
            return (name,) if self._flat else (_MODEL_KEY, name)
        if self._flat:
            return (self._optimizer, f"state.{state[1]}.{state[0].replace('/', '.')}")
        return (self._optimizer, "state", state[1], *state[0].split("/"))


def _join_key_path(way: _Way) -> str:
    return ".".join(map(str, way))


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
    del dialect
    return format_file_prefix(rank)


LAYOUT: Final = Layout(
    NAME,
    pack_dcp,
    ranks="optional",
    options=frozenset({"max_shard_size", "names", "experts"}),
    states="by default",
    own_steps=True,
    prefix=_format_file_prefix,
)
