"""Checks that the tensors of an expert, each stored by itself, are on the same ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardctl.tensors.manifest import Tensor
    from shardctl.tensors.placement import GroupMember

CHECK: Final = "alignment"
ExpertOwners = dict["GroupMember", list[tuple["Tensor", dict[tuple[int, ...], str]]]]
"""Of each expert of a layer: its tensors, and who has some of each in which file."""


def check_expert_owners(owners: ExpertOwners, name_holder: Callable[[str], str]) -> Iterator[CheckFinding]:
    """Yield each tensor of an expert that is on other ranks than most of its tensors.

    A rank that has no tensor of a kind, such as `down_proj`, of any expert of the layer says nothing: of a tensor of a
    few rows fewer ranks have a part than of a large one. `name_holder` says whose a file is.
    """
    having: dict[str, set[tuple[int, ...]]] = {}
    for tensors in owners.values():
        for tensor, files in tensors:
            having.setdefault(_name_kind(tensor.name), set()).update(files)
    for tensors in owners.values():
        places = Counter(frozenset(files) for _, files in tensors)
        first, own = max(tensors, key=lambda each: places[frozenset(each[1])])
        for tensor, files in tensors:
            kinds = having[_name_kind(first.name)], having[_name_kind(tensor.name)]
            yield from _compare_owners(first, own, tensor, files, kinds, name_holder)


def _compare_owners(
    first: Tensor,
    own: Mapping[tuple[int, ...], str],
    tensor: Tensor,
    files: Mapping[tuple[int, ...], str],
    having: tuple[set[tuple[int, ...]], set[tuple[int, ...]]],
    name_holder: Callable[[str], str],
) -> Iterator[CheckFinding]:
    beyond = [files[one] for one in files if one not in own and one in having[0]]
    lacking = [own[one] for one in own if one not in files and one in having[1]]
    if not beyond and not own.keys() & files.keys():
        beyond = list(files.values())
    if beyond:
        message = f"{tensor.name} is on {name_holder(beyond[0])}, and {first.name} of the same expert is on other ranks"
        yield CheckFinding("error", CHECK, message, tensor.name, beyond[0])
    elif lacking:
        message = f"{tensor.name} is not on {name_holder(lacking[0])}, which has {first.name} of the same expert"
        yield CheckFinding("error", CHECK, message, tensor.name, lacking[0])


def _name_kind(name: str) -> str:
    """Return the name of an expert's tensor without the numbers in it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
