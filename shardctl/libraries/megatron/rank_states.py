"""Finds optimizer states in Megatron-LM's directories of ranks, in the order of the model's own arrays.

A distributed optimizer has `distrib_optim.pt` beside the weights: for every buffer the fp32 weights and each state of
all its parameters one behind another (`get_parameter_state_dp_zero` of `optimizer/distrib_optimizer.py`). Any other
has them among the weights' file, each in the shape of its parameter (`Float16OptimizerWithFloat16Params` and
`FP32Optimizer` of `optimizer/optimizer.py`). Nothing names a parameter; the model's dictionary beside them has them in
the order in which the optimizer met them, and samples of the fp32 weights must be the weights but for rounding.
"""

from __future__ import annotations

from dataclasses import field
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.value import state_class
from shardctl.libraries.megatron.buffer_layout import place_parameters
from shardctl.libraries.megatron.dist_groups import has_decay, list_groups, read_settings
from shardctl.libraries.megatron.dist_parameters import BUFFERS, UnknownOrderError
from shardctl.libraries.megatron.state_reader import MASTER, StateReader
from shardctl.libraries.torch_save.pickle_tree import GlobalNode, as_mapping
from shardctl.libraries.torch_save.reading import open_saved
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.training import format_state_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.base.settings import Setting
    from shardctl.libraries.megatron.rank_file import MegatronRankFile
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView
    from shardctl.storage import Source
    from shardctl.tensors.mesh import Mesh

STATES_FILE: Final = "distrib_optim.pt"
EXPERTS: Final = ".mlp.experts."
"""What is in the names of weights that ep divides."""
SHARED: Final = ("embedding.word_embeddings.weight", "output_layer.weight")
"""What the first stage and the last have both, if the head is the embedding."""
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
"""What `--ddp-bucket-size` is if it is not given (`distributed/distributed_data_parallel.py`)."""
_MAX_SAMPLED_BOXES: Final = 512
_MIN_BOXES_PER_RANK: Final = 8
_FIRST_ORDERED_VERSION: Final = 2.0
"""The first `checkpoint_version` whose weights have the rows of the run that wrote them."""

_MASTER_WEIGHT_KEYS: Final = ("fp32_from_fp16_params", "fp32_from_fp16")
_HALF_PRECISION_DTYPES: Final = frozenset({"F16", "BF16"})


@state_class
class RankStates:
    """The states that were found beside the arrays of ranks."""

    states: dict[str, Tensor] = field(default_factory=dict)
    """By canonical name, of arrays with their rank's folder."""
    masters: dict[str, Tensor] = field(default_factory=dict)
    """The optimizer's fp32 weights, by array."""
    groups: tuple[Mapping[str, Setting], ...] = ()
    files: list[str] = field(default_factory=list)
    """Those that hold states and no weights."""
    compared: int = 0
    """Values of `masters` that were compared with those of the weights."""
    distributed: bool = False
    left: str = ""
    """Why states that are there are not among `states`."""


def read_rank_states(
    source: Source, files: Mapping[str, MegatronRankFile], ranks: Mapping[int, str], mesh: Mesh
) -> RankStates:
    """Read where the states of every rank's arrays are; raises as `read_rank_file`."""
    found = RankStates()
    first = next(iter(files.values()))
    found.distributed = any(_find_states_file(source, each) for each in files.values())
    if not found.distributed and first.optimizer is None:
        return found
    if first.before_core or first.version < _FIRST_ORDERED_VERSION:
        found.left = f"checkpoint_version {first.version:g} keeps their rows in another order than weights"
        return found
    try:
        _collect_states(source, files, ranks, mesh, found)
    except UnknownOrderError as error:
        found.states, found.masters, found.files, found.left = {}, {}, [], str(error)
        return found
    found.groups = tuple(list_groups(dict(enumerate(_list_chained(first.optimizer)))))
    return found


def _collect_states(
    source: Source, files: Mapping[str, MegatronRankFile], ranks: Mapping[int, str], mesh: Mesh, found: RankStates
) -> None:
    """Add the states of every rank to `found`; where the optimizer is distributed, ranks with the same weights share.

    The first rank of those that hold the same weights writes their states, also where it has a folder of its own.
    """
    placed: dict[tuple[object, ...], dict[str, dict[str, Tensor]]] = {}
    kinds = _list_kinds(files, mesh)
    for rank, name in ranks.items():
        file, at = files[name], mesh.coordinate(rank)
        saved = _open_states_file(source, file, found) if found.distributed else file.saved
        held = _list_chained(saved.tree if saved is not file.saved else None if found.distributed else file.optimizer)
        if held and len(held) != len(kinds):
            raise UnknownOrderError(f"{saved.path} has {len(held)} optimizers where {len(kinds)} are known")
        for number, routed in enumerate(kinds):
            key = (routed, at["pp"], *((at["ep"], at["etp"]) if routed else (at["tp"],)))
            tree = held[number] if held else None
            if tree is None and key not in placed:
                raise UnknownOrderError(f"{saved.path} has no states, nor a {STATES_FILE} beside it")
            if tree is not None and (key not in placed or not found.distributed):
                chunks = list(_list_parameters(file, routed=routed, divided=len(kinds) > 1))
                place = _place_distributed if found.distributed else _list_replicated_states
                reader = StateReader(source, file, saved, max(_MAX_SAMPLED_BOXES // len(ranks), _MIN_BOXES_PER_RANK))
                placed[key] = place(reader, tree, chunks)
                found.compared += reader.compared
            for array, states in placed[key].items():
                for state, tensor in states.items():
                    _add_state(found, f"{name}/{array}", state, tensor)


def _add_state(found: RankStates, array: str, state: str, tensor: Tensor) -> None:
    if state == MASTER:
        found.masters[array] = _rename_tensor(tensor, array)
    else:
        name = format_state_name(state, array)
        found.states[name] = _rename_tensor(tensor, name)


def _rename_tensor(tensor: Tensor, name: str) -> Tensor:
    return Tensor(name, tensor.dtype, tensor.shape, tensor.chunks)


def _list_kinds(files: Mapping[str, MegatronRankFile], mesh: Mesh) -> list[bool]:
    """List the optimizers, each with whether it has experts: those that ep divides have one of their own."""
    routed = mesh.ep > 1 and any(EXPERTS in name for each in files.values() for name in each.views)
    return [False, True] if routed else [False]


def _list_chained(tree: object) -> list[object]:
    """List the states of each of several optimizers; one alone stands for itself, and nothing for none."""
    if tree is None:
        return []
    return list(tree) if isinstance(tree, list | tuple) else [tree]


def _find_states_file(source: Source, file: MegatronRankFile) -> str:
    """Find the path of what a distributed optimizer wrote beside a rank's weights; empty if there is no such file."""
    path = f"{file.path.rpartition('/')[0]}/{STATES_FILE}".removeprefix("/")
    return path if path in source.files() else ""


def _open_states_file(source: Source, file: MegatronRankFile, found: RankStates) -> SavedFile:
    path = _find_states_file(source, file)
    if not path:  # all that the rank has, earlier ones have, too
        return file.saved
    found.files.append(path)
    return open_saved(source, path)


def _list_parameters(file: MegatronRankFile, *, routed: bool, divided: bool) -> Iterator[list[tuple[str, StorageView]]]:
    """List the parameters of each chunk of layers that an optimizer has, in the order of modules."""
    chunks: dict[str, list[tuple[str, StorageView]]] = {}
    for name, view in file.views.items():
        chunk = chunks.setdefault(name.rpartition("/")[0], [])
        if not name.endswith(BUFFERS) and (not divided or (EXPERTS in name) == routed):
            chunk.append((name, view))
    yield from chunks.values()


def _place_distributed(
    reader: StateReader, tree: object, chunks: Sequence[Sequence[tuple[str, StorageView]]]
) -> dict[str, dict[str, Tensor]]:
    """Place the parameters of a distributed optimizer in its buffers: one for each chunk and type of parameters."""
    held = as_mapping(tree)
    if held is None or held.get("buckets_coalesced") is not True:
        raise UnknownOrderError(f"{reader.saved.path} is of before February 2024, when buckets had arrays of their own")
    buffers: list[list[tuple[str, StorageView]]] = []
    for chunk in chunks:
        by_type: dict[DType, list[tuple[str, StorageView]]] = {}
        for name, view in chunk:
            by_type.setdefault(view.dtype, []).append((name, view))
        buffers += by_type.values()
    numbers = sorted(key for key in held if type(key) is int)
    if numbers != list(range(len(buffers))):
        raise UnknownOrderError(f"{reader.saved.path} has {len(numbers)} buffers where {len(buffers)} are known")
    found: dict[str, dict[str, Tensor]] = {}
    for number, buffer in enumerate(buffers):
        found |= _place_buffer(reader, held[number], buffer)
    return found


def _place_buffer(
    reader: StateReader, node: object, buffer: Sequence[tuple[str, StorageView]]
) -> dict[str, dict[str, Tensor]]:
    """Place the parameters of a buffer in the layout that its size and its fp32 weights bear out."""
    path, dtype = reader.saved.path, buffer[0][1].dtype
    types = as_mapping(node) or {}
    key, inner = next(iter(types.items()), (None, None))
    said = key[0] if isinstance(key, tuple) and key else None
    if len(types) != 1 or not isinstance(said, GlobalNode) or said.name != dtype.torch:
        raise UnknownOrderError(f"{path} has buffers of {said}, where parameters are {dtype}")
    states = dict(as_mapping(inner) or {})
    size = states.pop("numel_unpadded", None)
    views = {str(state): reader.build_view(each, str(state)) for state, each in states.items()}
    if MASTER not in views or any(view.shape != (size,) for view in views.values()):
        raise UnknownOrderError(f"{path} has states of other sizes than its buffers")
    reason = f"{path} has {size} elements of {dtype}, which its parameters do not fill in any known way"
    for starts in _list_layouts(reader.file, buffer, size):
        found = {
            name: {
                state: reader.build_tensor(reader.name_state(name, state), each, view.shape, start)
                for state, each in views.items()
            }
            for (name, view), start in zip(buffer, starts, strict=True)
        }
        try:
            reader.compare_masters({name: held[MASTER] for name, held in found.items()})
        except UnknownOrderError as error:
            reason = str(error)
        else:
            return found
    raise UnknownOrderError(reason)


def _list_layouts(
    file: MegatronRankFile, buffer: Sequence[tuple[str, StorageView]], size: object
) -> Iterator[tuple[int, ...]]:
    """Yield where parameters may begin, the likeliest first: in one bucket, or in those of an overlapped reduction."""
    said = file.arguments
    ranks = 1
    for name in ("data_parallel_size", "context_parallel_size"):
        value = said.get(name)
        ranks *= value if isinstance(value, int) else 1
    limit = said.get("ddp_bucket_size")
    limit = limit if isinstance(limit, int) else max(_LEAST_BUCKET, _BUCKET_PER_RANK * ranks)
    counts = [Box.whole(view.shape).size for _, view in buffer]
    seen: set[tuple[int, ...]] = set()
    for alone, most in product(((), SHARED, SHARED[:1]), (None, limit)):
        starts, total = place_parameters(counts, [name.endswith(alone) for name, _ in buffer], most)
        if total == size and starts not in seen:
            seen.add(starts)
            yield starts


def _list_replicated_states(
    reader: StateReader, tree: object, chunks: Sequence[Sequence[tuple[str, StorageView]]]
) -> dict[str, dict[str, Tensor]]:
    """List the states of every parameter; raises UnknownOrderError if groups or shapes are not those of parameters."""
    held = as_mapping(tree) or {}
    masters = next((held[name] for name in _MASTER_WEIGHT_KEYS if name in held), None)
    inner = as_mapping(held.get("optimizer")) if masters is not None else held
    groups = (inner or {}).get("param_groups")
    states = as_mapping((inner or {}).get("state"))
    if not isinstance(groups, list) or states is None:
        raise UnknownOrderError(f"{reader.saved.path} has no states of an optimizer that is known")
    parameters = [each for chunk in chunks for each in chunk]
    found: dict[str, dict[str, Tensor]] = {}
    seen: set[bool] = set()
    for index, group in enumerate(groups):
        numbers = (as_mapping(group) or {}).get("params")
        if not isinstance(numbers, list) or not numbers:
            continue
        decayed = has_decay(read_settings(group))
        mine = [each for each in parameters if _is_vector(*each) != decayed]
        if decayed in seen or len(mine) != len(numbers):
            raise UnknownOrderError(
                f"a group of {len(numbers)} parameters has the settings of {len(mine)} others; no file names them"
            )
        seen.add(decayed)
        for number, (name, view) in zip(numbers, mine, strict=True):
            found[name] = _read_parameter(reader, states.get(number), name, view)
        _add_masters(reader, masters, index, mine, found)
    if len(found) != len(parameters):
        raise UnknownOrderError(f"{len(found)} of {len(parameters)} parameters have states")
    reader.compare_masters({name: each[MASTER] for name, each in found.items() if MASTER in each})
    return found


def _is_vector(name: str, view: StorageView) -> bool:
    """Return whether a parameter has no weight decay (`get_standard_config_overrides` of `optimizer/__init__.py`)."""
    return len(view.shape) == 1 or name.endswith(".bias")


def _read_parameter(reader: StateReader, node: object, name: str, view: StorageView) -> dict[str, Tensor]:
    """Read the states of a parameter that have its shape; steps are read elsewhere."""
    found = {}
    for state, each in (as_mapping(node) or {}).items():
        if state != "step":
            found[str(state)] = _read_state(reader, each, reader.name_state(name, str(state)), view)
    return found


def _read_state(reader: StateReader, node: object, title: str, view: StorageView) -> Tensor:
    stored = reader.build_view(node, title)
    tensor = reader.build_tensor(title, stored, view.shape)
    where = tensor.chunks[0].where
    if stored.shape != view.shape or stored.strides != getattr(where, "strides", None):
        raise UnknownOrderError(f"{title} is {list(stored.shape)}, and the parameter {list(view.shape)}")
    return tensor


def _add_masters(
    reader: StateReader,
    masters: Any,  # noqa: ANN401 - a node of a tree
    index: int,
    mine: Sequence[tuple[str, StorageView]],
    found: dict[str, dict[str, Tensor]],
) -> None:
    """Add the fp32 copies of a group's parameters in 16 bits; others are the optimizer's own."""
    if masters is None:
        return
    copied = [each for each in mine if each[1].dtype.name in _HALF_PRECISION_DTYPES]
    group = masters[index] if isinstance(masters, list) and index < len(masters) else None
    if not isinstance(group, list) or len(group) != len(copied):
        raise UnknownOrderError(f"{reader.saved.path} has no fp32 copy of every parameter in 16 bits")
    for (name, view), node in zip(copied, group, strict=True):
        found[name][MASTER] = _read_state(reader, node, reader.name_state(name, MASTER), view)
