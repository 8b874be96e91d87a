"""Builds what is trained of a model if it is fine-tuned in part: a low-rank adapter, or the tensors that match."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.model.inventory import TensorInventory, TensorKind, build_inventory
from shardctl.estimate.model.narrower_types import is_linear, narrow_inventory
from shardctl.estimate.model.rank_shards import SHARDING
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.placement import PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardctl.base.dtype import DType
    from shardctl.estimate.model.narrower_types import WidenedPart

ALL_LINEAR: Final = "all-linear"
_MATRIX_NDIM: Final = 2
_UPCAST_WEIGHTS_BY_LIBRARY: Final[Mapping[str | None, WidenedPart]] = {None: "none", "peft": "all", "trl": "vectors"}
"""PEFT 0.21, utils/other.py, `prepare_model_for_kbit_training`; TRL, models/utils.py, `peft_module_casting_to_bf16`."""
_ROUTER_MODULE_NAMES: Final = frozenset({"gate", "router", "shared_expert_gate"})
_FUSED_EXPERT_PROJECTIONS: Final = (frozenset({"gate_proj", "up_proj"}), frozenset({"w1", "w3"}))
_MAX_NAMES_SHOWN: Final = 3
"""Names that an error shows."""


@value_class
class TuningChoice:
    """What is trained of a model."""

    rank: int | None = None
    """Of a low-rank adapter (Hu et al. 2021); None trains the model's own tensors."""
    targets: str = ALL_LINEAR
    """The modules that it changes, with commas between, as PEFT's `target_modules`."""
    base_dtype: str | None = None
    """The type of the weights that are not trained; None for as they are."""
    prepared: Literal["peft", "trl"] | None = None
    """Who made what is not quantized of the base fp32: PEFT all of it, TRL all but the embedding and the head."""
    pattern: str | None = None
    """A regular expression of the names that are trained; None for all."""


def tune_inventory(
    tensors: Iterable[Tensor],
    specs: Mapping[str, PartitionSpec],
    layers: int,
    choice: TuningChoice,
    *,
    dtypes: Mapping[str, DType],
    buffers: frozenset[str],
) -> tuple[TensorInventory, TensorInventory]:
    """Return the model as it is fine-tuned, and what of it is trained.

    Raises UsageError if nothing is, and for a type that its weights cannot have.
    """
    every = tuple(tensors)
    if choice.rank is None:
        return _freeze_others(every, specs, layers, choice.pattern or "", dtypes=dtypes, buffers=buffers)
    base = build_inventory(every, specs, layers, dtypes=dtypes, buffers=buffers)
    if choice.base_dtype is not None:
        base = narrow_inventory(base, choice.base_dtype, widened=_UPCAST_WEIGHTS_BY_LIBRARY[choice.prepared])
    frozen = tuple(replace(kind, trainable=False) for kind in base.kinds)
    targets = [
        t for t in every if t.name not in buffers and _is_target(t, specs[t.name], dtypes[t.name], choice.targets)
    ]
    if not targets:
        raise UsageError(
            f"no linear layer is called {choice.targets}", hint=f"the layers are {_list_modules(every, specs, dtypes)}"
        )
    names = {_get_module(tensor) for tensor in targets if specs[tensor.name].of_expert}
    if choice.targets == ALL_LINEAR:
        # PEFT takes these names for those of experts, and leaves out dense layers that have them.
        targets = [t for t in targets if specs[t.name].of_expert or _get_module(t) not in names]
    pairs = [
        pair
        for tensor in targets
        for pair in _build_pair(tensor, specs[tensor.name], choice.rank, wide=_is_merged(tensor, specs, names))
    ]
    adapter = build_inventory(
        [tensor for tensor, _ in pairs],
        {tensor.name: spec for tensor, spec in pairs},
        layers,
        dtypes={tensor.name: dtypes[tensor.name.rpartition(".lora_")[0] + ".weight"] for tensor, _ in pairs},
        apart=True,
    )
    return TensorInventory((*frozen, *adapter.kinds), layers), adapter


def _freeze_others(
    every: tuple[Tensor, ...],
    specs: Mapping[str, PartitionSpec],
    layers: int,
    pattern: str,
    *,
    dtypes: Mapping[str, DType],
    buffers: frozenset[str],
) -> tuple[TensorInventory, TensorInventory]:
    """Train those alone whose names match."""
    try:
        matches = re.compile(pattern).search
    except re.error as error:
        raise UsageError(f"{pattern!r} is no regular expression: {error}", hint=r"such as layers\.3[01]\.") from None
    still = frozenset(t.name for t in every if not matches(t.name))
    if len(still) == len(every):
        names = ", ".join(t.name for t in every[:_MAX_NAMES_SHOWN])
        raise UsageError(f"no tensor matches {pattern!r}", hint=f"names are such as {names}")
    found = build_inventory(every, specs, layers, dtypes=dtypes, buffers=still | buffers, apart=True)
    return found, replace(found, kinds=tuple(kind for kind in found.kinds if kind.trainable))


def _build_kind(tensor: Tensor, spec: PartitionSpec, dtype: DType) -> TensorKind:
    return TensorKind(tensor.name, tensor.shape, dtype, spec, (1,), trainable=True)


def _is_target(tensor: Tensor, spec: PartitionSpec, dtype: DType, targets: str) -> bool:
    """Return whether an adapter changes it: PEFT takes the ends of names, and all linear layers with the routers."""
    linear = is_linear(_build_kind(tensor, spec, dtype))
    if linear and len(tensor.shape) != _MATRIX_NDIM and targets == ALL_LINEAR:
        raise UsageError(
            f"{tensor.name} has all experts in one array, and what an adapter adds to it is not known",
            hint="name other layers, such as --lora-targets q_proj,v_proj",
        )
    module = tensor.name.removesuffix(".weight")
    if len(tensor.shape) != _MATRIX_NDIM or not (linear or _get_module(tensor) in _ROUTER_MODULE_NAMES):
        return False
    return targets == ALL_LINEAR or any(module == name or module.endswith(f".{name}") for name in targets.split(","))


def _get_module(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight").rpartition(".")[2]


def _is_merged(tensor: Tensor, specs: Mapping[str, PartitionSpec], names: set[str]) -> bool:
    """Return whether an expert's matrix is one of two that PEFT adapts as one, which has the ranks of both."""
    module = _get_module(tensor)
    return specs[tensor.name].of_expert and any(module in pair and pair <= names for pair in _FUSED_EXPERT_PROJECTIONS)


def _list_modules(every: tuple[Tensor, ...], specs: Mapping[str, PartitionSpec], dtypes: Mapping[str, DType]) -> str:
    some = (t for t in every if is_linear(_build_kind(t, specs[t.name], dtypes[t.name])))
    return ", ".join(dict.fromkeys(t.name.removesuffix(".weight").rpartition(".")[2] for t in some))


def _build_pair(tensor: Tensor, spec: PartitionSpec, rank: int, *, wide: bool) -> list[tuple[Tensor, PartitionSpec]]:
    """Build the narrow matrices of a weight `[out, in]`, cut where it is: A along `in`, B along `out`.

    Gate and up of an expert lie in one array, and PEFT 0.21 gives each half of it the ranks of both: B is `wide`.
    """
    module = tensor.name.removesuffix(".weight")
    out, into = tensor.shape
    cuts = spec.cuts or ((), ())
    shared = tuple(cut for cut in cuts[0] if cut.axis in SHARDING)
    across = tuple(cut for cut in cuts[1] if cut.axis not in SHARDING)
    return [
        (
            Tensor(f"{module}.lora_A.weight", tensor.dtype, (rank, into), ()),
            PartitionSpec((shared, across), spec.where, spec.member),
        ),
        (
            Tensor(f"{module}.lora_B.weight", tensor.dtype, (out, rank * (1 + wide)), ()),
            PartitionSpec((cuts[0], ()), spec.where, spec.member),
        ),
    ]
