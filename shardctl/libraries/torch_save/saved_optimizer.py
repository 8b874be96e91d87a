"""Reads the optimizer that a script of training saved in one file with the weights, as Lightning does, too.

That is what `torch.optim.Optimizer.state_dict` returns: `state` by the number of the parameter, or by its name where
`get_state_dict` or FSDP made it, and `param_groups`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.errors import UnsupportedError
from shardctl.base.settings import as_setting, is_text
from shardctl.libraries.dcp.items import NUMBERS, decode_number
from shardctl.libraries.dcp.keys import (
    STEPS,
    SortedKeys,
    build_named_states,
    build_parameter_groups,
    find_steps_done,
)
from shardctl.libraries.dcp.numbered_states import NUMBERED_NOTE, name_parameters
from shardctl.libraries.torch_save.pickle_budget import VisitCounter
from shardctl.libraries.torch_save.pickle_tree import as_mapping
from shardctl.libraries.torch_save.state_dict import GROUPS, STATE, get_optimizer
from shardctl.libraries.torch_save.tensors import as_tensor
from shardctl.storage import read_bytes
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, Tensor, TrainingState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.settings import Setting
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView
    from shardctl.storage import Source


class SavedOptimizer:
    """The optimizer to which some keys of a file lead, of which `views` are the tensors."""

    def __init__(self, saved: SavedFile, keys: tuple[str, ...]) -> None:
        self._saved = replace(saved, tree=None)
        top = as_mapping(saved.tree) or {}
        self.key = ".".join(keys) or saved.path
        self.views: dict[str, StorageView] = {}
        self._objects: dict[str, object] = {name: top[name] for name in STEPS if name in top}
        self._sorted = SortedKeys(others=list(self._objects))
        visits = VisitCounter(saved.path)
        node: object = top
        for key in keys:
            node = (as_mapping(node) or {}).get(key)
        held = get_optimizer(node) or {}
        for parameter, states in (as_mapping(held[STATE]) or {}).items():
            inside = as_mapping(states) or {}
            visits.charge_nodes(1 + len(inside))
            for name, node in inside.items():
                self._add(self._sorted.states, (STATE, parameter, name), node)
        for number, group in enumerate(held[GROUPS]):
            inside = as_mapping(group) or {}
            visits.charge_nodes(1 + len(inside))
            for name, node in inside.items():
                self._add(self._sorted.settings, (GROUPS, number, name), node)

    def _add(self, table: dict[str, tuple[str, str]], way: tuple[object, ...], node: object) -> None:
        """Add a value, by the keys that lead to it; what has no text or number for a key is passed over."""
        if not all(isinstance(part, int) or is_text(part) for part in way):
            return
        key = ".".join(map(str, (self.key, *way)))
        table[key] = (str(way[1]), str(way[2]))
        try:
            view = as_tensor(node, f"{self._saved.path}: tensor {ascii(key)[:200]}")
        except UnsupportedError:  # which is no reason to refuse the weights
            view = None
        if view is None:
            self._objects[key] = node
        else:
            self.views[key] = view

    def collect_training(
        self, source: Source, weights: Mapping[str, Tensor], warnings: list[str], *, ordered: bool = True
    ) -> TrainingState:
        """Collect states and settings; what is left behind, and why, is added to `warnings`.

        Parameters that are numbered get names only if the weights are `ordered` as the model's modules are.
        """

        def read_value(key: str) -> Setting:
            view = self.views.get(key)
            if view is None:
                setting = as_setting(self._objects.get(key))
                return setting[0] if setting is not None else None
            if view.shape or view.dtype.name not in NUMBERS:
                return None
            where = self._saved.region(view, key)
            return decode_number(view.dtype.name, read_bytes(source, where.file, where.offset, view.dtype.unit_bytes))

        found = self._sorted
        members: dict[str, Setting] = {}
        shapes = {key: view.shape for key, view in self.views.items()}
        named = name_parameters(found, weights, shapes, read_value) if ordered else None
        if named is not None:
            found, members = named
        states = build_named_states(found, weights, self.views, self._build_tensor, warnings)
        groups = build_parameter_groups(found, weights, lambda key: members[key] if key in members else read_value(key))
        return TrainingState(
            writer="torch.save",
            ranks=1,
            step=find_steps_done(found, read_value),
            states=states,
            groups=groups if states else (),
            notes=() if named is None else (NUMBERED_NOTE,),
        )

    def _build_tensor(self, key: str, name: str) -> Tensor:
        view = self.views[key]
        region: Region = self._saved.region(view, key)
        return Tensor(name, view.dtype, view.shape, (Chunk(Box.whole(view.shape), view.dtype, region, key),))
