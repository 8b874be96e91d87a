"""Groups stored tensors by module, so that names can be compared by whole words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardctl.models.tables.model import ModelTensor


@value_class
class StoredModule:
    """A module as its tensors show it; a parameter with a name of its own counts as a module."""

    path: str
    weight: ModelTensor
    bias: ModelTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.weight.shape

    @property
    def is_matrix(self) -> bool:
        """Whether the weight has two dims."""
        return len(self.shape) == 2  # noqa: PLR2004


class ModuleTree:
    """The modules of a checkpoint by path.

    `weight` and `bias` belong to the module before them. Any other last word is a parameter, such as
    `experts.gate_up_proj`, whose bias may be called `gate_up_proj_bias`.
    """

    def __init__(self, tensors: Iterable[ModelTensor]) -> None:
        named = {tensor.name: tensor for tensor in tensors}
        self.modules: Mapping[str, StoredModule] = {
            _name_module(name): StoredModule(_name_module(name), tensor, _find_bias(named, name))
            for name, tensor in named.items()
            if not _is_bias(named, name)
        }
        self._inside: dict[str, dict[str, None]] = {}
        """Of every path that something lies below: what lies right below it, modules or not."""
        for path in self.modules:
            owner = path
            while owner:
                child, (owner, _, _) = owner, owner.rpartition(".")
                known = self._inside.setdefault(owner, {})
                if child in known:
                    break
                known[child] = None

    def find(self, owner: str, name: str) -> StoredModule | None:
        """Return the module `name` within `owner`."""
        return self.modules.get(f"{owner}.{name}" if owner else name)

    def children(self, owner: str) -> Iterator[StoredModule]:
        """Return the modules right within `owner`."""
        return (self.modules[path] for path in self._inside.get(owner, ()) if path in self.modules)

    def within(self, owner: str) -> Iterator[StoredModule]:
        """Return the modules within `owner`, at any depth."""
        for path in self._inside.get(owner, ()):
            if path in self.modules:
                yield self.modules[path]
            yield from self.within(path)

    def count_numbered(self, owner: str) -> int:
        """Say how many numbers from 0 stand right below `owner`; 0 if one is left out."""
        numbers = sorted(int(path.rpartition(".")[2]) for path in self._inside.get(owner, ()) if path[-1].isdecimal())
        return len(numbers) if numbers == list(range(len(numbers))) else 0


def _name_module(name: str) -> str:
    owner, _, last = name.rpartition(".")
    return owner if last == "weight" and owner else name


def _is_bias(named: Mapping[str, ModelTensor], name: str) -> bool:
    owner, _, last = name.rpartition(".")
    if last == "bias":
        return f"{owner}.weight" in named
    bare = name.removesuffix("_bias")
    return last.endswith("_bias") and (bare in named or f"{bare}_weight" in named)


def _find_bias(named: Mapping[str, ModelTensor], name: str) -> ModelTensor | None:
    owner, _, last = name.rpartition(".")
    return named.get(f"{owner}.bias" if last == "weight" else f"{name.removesuffix('_weight')}_bias")
