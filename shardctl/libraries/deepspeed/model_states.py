"""Reads a `*_model_states.pt`: module tensors, shapes of the flat partitions, counters and versions.

Written by DeepSpeed `runtime/engine.py`, `_save_checkpoint` and `_common_checkpoint_state`.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.base.value import state_class
from shardctl.libraries.deepspeed.values import as_dict, as_integer, as_list, is_name, locate_array, parse_shapes
from shardctl.libraries.torch_save.pickle_tree import as_mapping
from shardctl.libraries.torch_save.reading import open_saved
from shardctl.libraries.torch_save.tensors import as_tensor

if TYPE_CHECKING:
    from shardctl.libraries.deepspeed.values import FileArray
    from shardctl.libraries.torch_save.tensors import SavedFile
    from shardctl.storage import Source

_MODULE_KEY: Final = "module"
_ENGINE_STATE_KEYS: Final = frozenset(
    {
        _MODULE_KEY,
        *("buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
        *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers"),
        *("universal_checkpoint_info", "autoep_layers"),
    }
)
"""Keys of the engine's own; whatever else there is, a trainer put there."""


@state_class
class ModelState:
    """One file, read."""

    path: str
    module: dict[str, FileArray]
    """The tensors of the module's state dict, by name; at stage 3 the parameters are empty ones."""
    others: list[str] = field(default_factory=list)
    """What of the file is left behind."""
    buffers: frozenset[str] | None = None
    """Names of tensors that are no parameters; None if the file has no such list."""
    groups: list[dict[str, tuple[int, ...]]] | None = None
    """Per group (at stage 3: sub-group) of the optimizer the shapes of its parameters, in the order in which they were
    made flat; None if the file has no such list."""
    frozen_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: dict[str, FileArray] = field(default_factory=dict)
    """Parameters that the optimizer does not have: at stage 3 this rank's part."""
    shared: dict[str, str] = field(default_factory=dict)
    """Other names of tied parameters, each with the one that is stored."""
    steps: int | None = None
    data_parallel: int | None = None
    model_parallel: int | None = None
    tensor_parallel: int | None = None
    version: str = ""
    optimizer: Any = None
    """The node of the optimizer's state, where no files of their own have it (stage 0)."""
    config: dict[Any, Any] = field(default_factory=dict)
    """DeepSpeed's configuration."""
    universal: dict[Any, Any] = field(default_factory=dict)
    """How tensor-parallel parts fit together (`universal_checkpoint_info`)."""
    expert_layers: list[Any] = field(default_factory=list)
    """Which layers' experts DeepSpeed's AutoEP divided, and how."""
    saved: SavedFile | None = None


def read_model_state(source: Source, path: str) -> ModelState:
    """Read one file.

    Raises:
        SourceError: it is damaged, or not what its name says.
        HostileError: it tries to run code or to exhaust the reader.
        UnsupportedError: a container or a tensor of a kind that is not converted.
    """
    saved = open_saved(source, path)
    tree = as_mapping(saved.tree)
    if tree is None or _MODULE_KEY not in tree:
        raise SourceError(f"{path} is not the state of a module: it has no entry {_MODULE_KEY!r}")
    found = ModelState(path, {}, saved=replace(saved, tree=None))  # what is needed of the tree is taken out of it here
    found.module, found.others = collect_tensors(saved, tree[_MODULE_KEY])
    found.others += [
        str(key)[:200] for key, value in tree.items() if key not in _ENGINE_STATE_KEYS and value is not None
    ]
    if tree.get("buffer_names") is not None:
        found.buffers = frozenset(name for name in as_list(tree["buffer_names"]) if isinstance(name, str))
    if tree.get("param_shapes") is not None:
        found.groups = [parse_shapes(group, path) for group in as_list(tree["param_shapes"])]
    found.frozen_shapes = parse_shapes(tree.get("frozen_param_shapes"), path)
    found.frozen, _ = collect_tensors(saved, tree.get("frozen_param_fragments"))
    found.shared = {
        alias: name for alias, name in as_dict(tree.get("shared_params")).items() if is_name(alias) and is_name(name)
    }
    found.steps = as_integer(tree.get("global_steps"))
    found.data_parallel = as_integer(tree.get("dp_world_size"))
    found.model_parallel = as_integer(tree.get("mp_world_size"))
    found.tensor_parallel = as_integer(as_dict(tree.get("checkpoint_parallel_dimensions")).get("tp_degree"))
    version = tree.get("ds_version")
    found.version = version[:40] if isinstance(version, str) and version.isprintable() else ""
    found.optimizer = tree.get("optimizer")
    found.config = as_dict(tree.get("ds_config"))
    found.universal = as_dict(tree.get("universal_checkpoint_info"))
    found.expert_layers = as_list(tree.get("ds_autoep_layers")) or as_list(tree.get("autoep_layers"))
    return found


def collect_tensors(saved: SavedFile, node: object) -> tuple[dict[str, FileArray], list[str]]:
    """Collect the tensors in a mapping by name, and the names of what else is in it."""
    found: dict[str, FileArray] = {}
    others: list[str] = []
    for name, value in as_dict(node).items():
        view = as_tensor(value, f"{saved.path}: tensor {ascii(name)[:200]}")
        if view is None:
            others.append(str(name)[:200])
        elif not is_name(name):
            raise SourceError(f"{saved.path} has a tensor under {ascii(name)[:100]}, which is not a name")
        else:
            found[name] = locate_array(saved, view, name)
    return found, others
