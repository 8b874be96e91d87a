"""Sorts the tensors of an adapter by the module that each belongs to.

Names: PEFT 0.18 to 0.21 (utils/save_and_load.py, `get_peft_model_state_dict`). A module's own weight, and a bias that
was trained, is called `base_layer.weight` there; several parameters of one module, such as the arrays of its experts,
are told apart by how often `base_layer` stands before the matrix.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.value import state_class
from shardctl.libraries.files.impostors import ADAPTER_PREFIX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardctl.tensors.manifest import Tensor

_ADAPTER_TENSOR_FIELDS: Final = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_B.bias": "bias",
    "lora_embedding_A": "down",
    "lora_embedding_B": "up",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_TRAINABLE_TOKENS_SUFFIX: Final = ".token_adapter.trainable_tokens_delta"
"""How the rows of `trainable_token_indices` are called."""
_ADAPTER_TENSOR_PATTERN: Final = re.compile(
    rf"(?P<module>.+?)(?P<inside>(?:\.base_layer)*)\.(?P<part>{'|'.join(map(re.escape, _ADAPTER_TENSOR_FIELDS))})"
)


@state_class
class AdaptedModule:
    """The tensors that an adapter has for one weight."""

    module: str
    """The name of the module in the base."""
    inside: int
    """How many parameters of the same module have been adapted after this one."""
    embedding: bool = False
    down: Tensor | None = None
    """`[rank, in]`; of all experts of a layer, `[experts * rank, in]`."""
    up: Tensor | None = None
    """`[out, rank]`; of all experts, `[out, rank * experts]`."""
    bias: Tensor | None = None
    magnitude: Tensor | None = None


@state_class
class AdapterTensors:
    """The tensors of an adapter."""

    modules: dict[tuple[str, int], AdaptedModule] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    """Whole tensors that take the place of those of the base, by their names there."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Rows that take the place of some of the base's, by the name of the tensor there."""
    copies: list[tuple[str, Tensor]] = field(default_factory=list)
    """Tensors that PEFT saves, and does not read where it merges: the replaced ones, and their originals, again."""


def require_elements(tensors: Collection[Tensor]) -> None:
    """Raise SourceError for an adapter without tensors, or with matrices that were saved without their elements."""
    hint = (
        "ZeRO-3 and FSDP leave such files where parameters are not gathered for saving: save again within "
        "deepspeed.zero.GatheredParameters or FullyShardedDataParallel.summon_full_params"
    )
    if not tensors:
        raise SourceError("the adapter's file holds no tensors", hint=hint)
    empty = [tensor.name for tensor in tensors if not tensor.size]
    if empty:
        count = f"{len(empty):,} of {len(tensors):,} tensors"
        raise SourceError(f"{count} of the adapter have no elements: {format_first_few(empty)}", hint=hint)


def sort_tensors(tensors: Iterable[Tensor]) -> AdapterTensors:
    """Sort the tensors of an adapter.

    Raises UnsupportedError for names that PEFT's LoRA does not have, SourceError for one matrix without the other.
    """
    found = AdapterTensors()
    for tensor in tensors:
        if not tensor.name.startswith(ADAPTER_PREFIX):
            raise UnsupportedError(
                f"the adapter has a tensor {tensor.name!r:.200}, but names in PEFT adapters begin with {ADAPTER_PREFIX}"
            )
        name = tensor.name.removeprefix(ADAPTER_PREFIX)
        match = _ADAPTER_TENSOR_PATTERN.fullmatch(name)
        if match is None:
            if "lora_" in name:
                raise UnsupportedError(f"shardctl does not know the adapter tensor {tensor.name!r:.200}")
            _add_whole(found, name, tensor)
            continue
        key = match["module"], match["inside"].count(".base_layer")
        module = found.modules.setdefault(key, AdaptedModule(*key))
        module.embedding |= "embedding" in match["part"]
        setattr(module, _ADAPTER_TENSOR_FIELDS[match["part"]], tensor)
    for module in found.modules.values():
        if module.down is None or module.up is None:
            raise SourceError(f"the adapter has only one of the two matrices of {module.module}")
    return found


def _add_whole(found: AdapterTensors, name: str, tensor: Tensor) -> None:
    """Add a tensor without a product, by the name of the base's tensor that it replaces.

    Where PEFT saves the embeddings of a resized vocabulary, it saves a module that was trained whole thrice: as it is
    merged, by its place in the wrapper, and as it was (utils/save_and_load.py, `get_peft_model_state_dict`).
    """
    if name.endswith(_TRAINABLE_TOKENS_SUFFIX):
        found.rows[name.removesuffix(_TRAINABLE_TOKENS_SUFFIX) + ".weight"] = tensor
        return
    plain = name
    for wrapper in (".token_adapter.base_layer.", ".base_layer.", ".modules_to_save.", ".original_module."):
        plain = plain.replace(wrapper, ".")
    if ".original_module." in name:
        found.copies.append((plain, tensor))
    elif ".modules_to_save." not in name and plain in found.replaced:
        found.copies.append((plain, found.replaced[plain]))
        found.replaced[plain] = tensor
    elif plain in found.replaced:
        found.copies.append((plain, tensor))
    else:
        found.replaced[plain] = tensor
