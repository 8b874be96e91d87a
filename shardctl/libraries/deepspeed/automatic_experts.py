"""Puts arrays of experts together that DeepSpeed's automatic expert parallelism (AutoEP) divided among ranks.

Written by DeepSpeed `runtime/engine.py` (`_save_moe_checkpoint`); which rank has which experts, and in what order, is
in `ds_autoep_layers` (`checkpoint/autoep_affine.py`, `make_autoep_placement_descriptor`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.deepspeed.pieces import TensorPartition
from shardctl.libraries.deepspeed.values import as_dict, as_integer, as_list
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardctl.libraries.deepspeed.model_states import ModelState
    from shardctl.libraries.deepspeed.values import FileArray

_EXPERT_ARRAY_PATTERN: Final = re.compile(r"(.*)\.(w[123])(?:\.([0-9]{1,9}))?")
_ROUTER_ARRAY_PATTERN: Final = re.compile(r"(.*)\.([^.]+)\.(gate\.(?:weight|bias))")
_MAX_EXPERTS_PER_LAYER: Final = 1 << 20
"""Experts of a layer."""
_PLACEMENT_VERSION: Final = 1
"""Of the description of who has which."""
_UNIVERSAL_CHECKPOINT_HINT: Final = (
    "DeepSpeed's ds_to_universal.py may make a Universal Checkpoint of it, which shardctl reads"
)


class AutomaticExperts:
    """The layers of a checkpoint whose experts are divided among ranks.

    Raises SourceError or UnsupportedError for a description that is malformed, or not known here.
    """

    def __init__(self, models: Mapping[int, ModelState]) -> None:
        self._ranks: dict[str, dict[int, list[int]]] = {}
        """By the prefix of a layer's arrays and expert-parallel rank: the numbers of its experts, in order."""
        self._counts: dict[str, int] = {}
        state = next(iter(models.values()), None)
        if state is None or not state.expert_layers:
            return
        if len(models) > 1:
            raise UnsupportedError(
                f"{state.path}: AutoEP divided experts, and {len(models)} model-parallel ranks divided their layers; "
                "how both fit together is not known here",
                hint="DeepSpeed itself converts no such checkpoint; save it with one model-parallel rank",
            )
        for node in state.expert_layers:
            self._add_layer(state.path, as_dict(node))

    def holds(self, name: str) -> bool:
        """Return whether this is an array of experts, whole or of one expert alone."""
        found = _EXPERT_ARRAY_PATTERN.fullmatch(name)
        return found is not None and found[1] in self._ranks

    def find_router(self, name: str, stored: Collection[str]) -> str | None:
        """Find the name under which the optimizer has a router's tensor that `stored` has under two.

        A layer has its router as `router`, and once more under the name that the model's own module had.
        """
        found = _ROUTER_ARRAY_PATTERN.fullmatch(name)
        if found is None or found[2] == "router" or f"{found[1]}.experts" not in self._ranks:
            return None
        known = f"{found[1]}.router.{found[3]}"
        return known if known in stored else None

    def locate_expert(self, name: str, array: FileArray) -> tuple[str, int, FileArray]:
        """Return the whole array's name, the expert's number, and its matrix as an array of one."""
        found = _EXPERT_ARRAY_PATTERN.fullmatch(name)
        if found is None or found[3] is None:
            raise SourceError(f"{array.file}: {name!r} is not the matrix of one expert")
        alone = replace(array, shape=(1, *array.shape), strides=(0, *array.strides))
        return f"{found[1]}.{found[2]}", int(found[3]), alone

    def cut(self, name: str, shapes: Mapping[int, tuple[int, ...]], *, by_expert: bool) -> TensorPartition | None:
        """Return where the arrays of ranks, or those of experts with `by_expert`, lie in the whole; None for a number.

        Raises SourceError for arrays that do not fit together.
        """
        if not any(shapes.values()):
            return None
        found = _EXPERT_ARRAY_PATTERN.fullmatch(name)
        prefix = found[1] if found is not None else ""
        count = self._counts[prefix]
        held = {number: [number] for number in range(count)} if by_expert else self._ranks[prefix]
        rest = {shape[1:] for shape in shapes.values()}
        if len(rest) != 1 or any(rank not in held or len(held[rank]) != shape[0] for rank, shape in shapes.items()):
            raise SourceError(f"{name!r} has shapes that are not those of its experts: {list(shapes.values())}")
        extents = rest.pop()
        zeros = (0,) * len(extents)
        parts = {
            rank: tuple(
                (Box((place, *zeros), (1, *extents)), (number, *zeros)) for place, number in enumerate(held[rank])
            )
            for rank in shapes
        }
        return TensorPartition((count, *extents), parts)

    def _add_layer(self, path: str, held: dict[str, object]) -> None:
        prefix, count = held.get("expert_key_prefix"), as_integer(held.get("num_experts"))
        degree, own = as_integer(held.get("ep_size")), as_integer(held.get("num_local_experts"))
        if (
            not isinstance(prefix, str)
            or not prefix
            or not count
            or not degree
            or max(count, degree) > _MAX_EXPERTS_PER_LAYER
        ):
            raise SourceError(f"{path} is malformed: AutoEP's description of a layer lacks its name or its numbers")
        placement = as_dict(held.get("expert_placement"))
        if not placement:
            if own is None or own * degree != count:
                raise SourceError(f"{path}: {degree} ranks with {own} experts each do not have the {count} of {prefix}")
            ranks = {rank: list(range(rank * own, (rank + 1) * own)) for rank in range(degree)}
        elif placement.get("version") != _PLACEMENT_VERSION:
            raise UnsupportedError(
                f"{path} says in version {placement.get('version')!r} which rank has which experts, and "
                f"{_PLACEMENT_VERSION} is known here",
                hint=_UNIVERSAL_CHECKPOINT_HINT,
            )
        else:
            ranks = {
                as_integer(as_dict(each).get("rank")) or 0: [
                    -1 if (number := as_integer(one)) is None else number
                    for one in as_list(as_dict(each).get("experts"))
                ]
                for each in as_list(placement.get("ranks"))
            }
        numbers = [number for each in ranks.values() for number in each]
        if len(ranks) != degree or set(numbers) != set(range(count)):
            raise SourceError(f"{path} is malformed: the ranks of {prefix} do not have its {count} experts")
        if any(len(set(each)) < len(each) for each in ranks.values()):
            raise SourceError(f"{path} is malformed: a rank of {prefix} has an expert twice")
        self._ranks[prefix], self._counts[prefix] = ranks, count
