"""Builds a transformers model without weights, whose parts are filled, run and emptied one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardctl.base.value import state_class

if TYPE_CHECKING:
    from collections.abc import Iterator

Torch = Any


@dataclass(slots=True, eq=False)
class TensorSlot:
    """A place for one tensor: a parameter or a stored buffer of a module."""

    module: Torch
    attribute: str
    names: list[str]
    """Its names in the state dict; several if the module has several."""
    empty: Torch
    """What stands there when nothing is loaded: the buffer as it was made, or a parameter that takes no memory, is on
    the right device because code asks for that, and makes what computes with it not a number."""
    device: str
    """Where what fills it is computed with."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""
        return tuple(self.empty.shape)

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer."""
        return self.attribute in self.module._buffers  # noqa: SLF001 - modules offer no other way

    def put(self, tensor: Torch) -> None:
        """Set a tensor, of the slot's shape, or the empty one."""
        from torch import nn

        self.module.__dict__.pop(self.attribute, None)
        if self.is_buffer:
            self.module._buffers[self.attribute] = tensor  # noqa: SLF001
        else:
            whole = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            self.module._parameters[self.attribute] = whole  # noqa: SLF001

    def stand_in(self, thing: object) -> None:
        """Set something that is no tensor, and gives tensors when it is indexed."""
        self.module.__dict__[self.attribute] = thing  # found before parameters are

    def clear(self) -> None:
        """Leave the slot empty again."""
        self.put(self.empty)


@dataclass(slots=True, eq=False)
class ModelUnit:
    """A part of the model that is filled, run and emptied as one: a block, or what stands before or after them."""

    name: str
    module: Torch
    slots: list[TensorSlot]
    block: bool
    """Whether it is one of a list of alike modules."""
    device: str
    """Where it runs."""


@state_class
class ModelSkeleton:
    """A model without weights, taken into units."""

    model: Torch
    units: list[ModelUnit] = field(default_factory=list)
    loose: list[TensorSlot] = field(default_factory=list)
    """Slots of modules that contain blocks, which are filled all the time; as a rule there are none."""
    slots: dict[str, list[TensorSlot]] = field(default_factory=dict)
    """By every name of the state dict: the slots that hold that tensor, several if it is tied."""

    spread: bool = False
    """Whether units run on more than one device."""

    @classmethod
    def of(cls, model: Torch, device: str) -> ModelSkeleton:
        """Find the units and slots of a model whose parameters have no memory, and move the rest of it to `device`."""
        skeleton, by_module = cls(model), dict[int, list[TensorSlot]]()
        for slot in skeleton._find_slots(device):
            by_module.setdefault(id(slot.module), []).append(slot)
            slot.clear()
        for name, module, block in _list_units(model, ""):
            inside = [slot for each in module.modules() for slot in by_module.pop(id(each), ())]
            if inside:
                skeleton.units.append(ModelUnit(name, module, inside, block, device))
        skeleton.loose = [slot for slots in by_module.values() for slot in slots]
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
        return skeleton

    def move_unit(self, unit: ModelUnit, device: str) -> None:
        """Have a part of the model run on another device: its buffers, and what stands for its weights, go there."""
        unit.device, self.spread = device, True
        for slot in unit.slots:
            slot.device, slot.empty = device, _build_stand_in(slot.empty, device)
            slot.clear()
        for module in unit.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)  # noqa: SLF001

    def _find_slots(self, device: str) -> list[TensorSlot]:
        """Find every slot once, whatever names it has, and those of one tensor together."""
        found: dict[tuple[int, str], TensorSlot] = {}
        shared: dict[int, list[TensorSlot]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for attribute, tensor in _list_stored_tensors(module):
                name, key = f"{path}.{attribute}" if path else attribute, (id(module), attribute)
                if key not in found:
                    found[key] = TensorSlot(module, attribute, [], _build_stand_in(tensor, device), device)
                    shared.setdefault(id(tensor), []).append(found[key])
                found[key].names.append(name)
                self.slots[name] = shared[id(tensor)]
        return list(found.values())


def _build_stand_in(tensor: Torch, device: str) -> Torch:
    import torch
    from torch import nn

    if not isinstance(tensor, nn.Parameter):
        return tensor.to(device)
    stand_in = torch.full((), float("nan"), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return nn.Parameter(stand_in, requires_grad=False)


def _list_stored_tensors(module: Torch) -> Iterator[tuple[str, Torch]]:
    for attribute, tensor in module._parameters.items():  # noqa: SLF001
        if tensor is not None:
            yield attribute, tensor
    for attribute, tensor in module._buffers.items():  # noqa: SLF001
        if tensor is not None and attribute not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield attribute, tensor


def _list_units(module: Torch, name: str) -> Iterator[tuple[str, Torch, bool]]:
    """List the outermost lists' elements as blocks, and whole children that contain no such list."""
    from torch import nn

    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, nn.ModuleList):
            yield from ((f"{path}.{number}", block, True) for number, block in enumerate(child) if block is not None)
        elif any(isinstance(each, nn.ModuleList) for each in child.modules()):
            yield from _list_units(child, path)
        else:
            yield path, child, False
