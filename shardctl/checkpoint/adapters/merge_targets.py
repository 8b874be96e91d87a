"""Finds which tensors of a base model an adapter's matrices change, and which part of the matrices each takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.files.impostors import ADAPTER_CONFIG
from shardctl.tensors.bands import ChunkIndex
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.libraries.peft.modules import AdaptedModule
    from shardctl.libraries.peft.settings import AdapterSettings
    from shardctl.models.adaptation.adapted_weight import AdaptedWeight
    from shardctl.models.adaptation.strided_view import StridedView
    from shardctl.tensors.manifest import Tensor
    from shardctl.tensors.views import ArrayView

_MATRIX_NDIM: Final = 2
_EXPERT_STACK_NDIM: Final = 3
_STACKED_BY_INPUT: Final = ("gpt_oss",)
"""Families whose experts are stacked as `[experts, in, out]` (`is_transposed` in transformers)."""
_CLASSES_STACKED_BY_INPUT: Final = ("AriaForConditionalGeneration", "OpenAIPrivacyFilterForTokenClassification")
"""Classes without a table that do the same."""
INPUTS_FIRST_VERSION: Final = (0, 18)
"""The last version of PEFT whose second matrix is that of the outputs of `[experts, in, out]`, however experts are."""
OUTPUTS_FIRST_VERSION: Final = (0, 19)
"""The version of PEFT since which the second matrix is that of the inputs wherever experts are `[out, in]`."""


@value_class
class MergeTarget:
    """A tensor of the base, and how the matrices of a module of the adapter belong to it."""

    name: str
    """The canonical name of the tensor."""
    module: AdaptedModule
    rank: int
    scaling: float
    by_input: bool = False
    """Whether the array that is adapted has inputs before outputs."""
    experts: int = 0
    """How many experts the matrices speak of; 0 for a single matrix that is a module's own weight."""
    rounded: bool = False
    """Whether the product is rounded to the type of the tensor before it is added."""
    view: ArrayView | None = None
    """How the tensor runs through the array of all experts; None if it is that array."""
    bias_name: str = ""

    def build_weights(self, base: Tensor, parts: Mapping[str, StridedView]) -> Iterator[tuple[Box, AdaptedWeight]]:
        """Yield the boxes of the tensor, mostly one, with what computes each."""
        from shardctl.models.adaptation.adapted_weight import AdaptedWeight, LowRankProduct

        shape = (base.shape[-2], base.shape[-1])
        chunks = cover_tensor(base)
        magnitude = parts["magnitude"].index() if "magnitude" in parts else None
        members = range(base.shape[0]) if len(base.shape) == _EXPERT_STACK_NDIM else (0,)
        for member in members:
            left, right = self.find_factors(parts, shape, self.view.origin[0] if self.view else member)
            product = LowRankProduct(left.index(), right.index(), self.rank, self.scaling, self.rounded)
            if len(base.shape) == _MATRIX_NDIM:
                box, stored, name = Box.whole(shape), ChunkIndex(chunks), base.name
            else:
                box = Box((member, 0, 0), (1, *shape))
                stored = _drop_first_dim(ChunkIndex(chunks), box)
                name = f"{base.name}, expert {member}"
            yield box, AdaptedWeight(name, shape, stored, product, magnitude, self.by_input)

    def find_factors(
        self, parts: Mapping[str, StridedView], shape: tuple[int, int], expert: int
    ) -> tuple[StridedView, StridedView]:
        """Find the two matrices whose product is added to the tensor, or to an expert of it."""
        up, down = parts["up"], parts["down"]
        if self.experts:
            up, down = up.take(1, expert, self.rank, self.experts), down.take(0, expert * self.rank, self.rank)
        left, right = (down.transposed(), up.transposed()) if self.by_input else (up, down)
        if self.view is None:
            return left, right
        (first, second), steps = self.view.axes, self.view.steps
        if first > second:
            left, right = right.transposed(), left.transposed()
        left = left.take(0, self.view.origin[first], shape[0], steps[0])
        return left, right.take(1, self.view.origin[second], shape[1], steps[1])


def find_target(
    checkpoint: OpenedCheckpoint, settings: AdapterSettings, module: AdaptedModule
) -> Iterator[MergeTarget]:
    """Yield the tensors that a module of an adapter changes; none if the base has no such module.

    Raises SourceError for matrices that do not fit, UnsupportedError for a layer that is no matrix.
    """
    assert module.down is not None and module.up is not None  # noqa: S101, PT018 - sorted before
    if len(module.down.shape) != _MATRIX_NDIM or len(module.up.shape) != _MATRIX_NDIM:
        raise UnsupportedError(f"{module.module} is a convolution, and shardctl cannot merge adapters of convolutions")
    tensors, model = checkpoint.manifest.tensors, checkpoint.model
    name = models.find_weight_name(model, f"{module.module}.weight")
    if not module.inside and name in tensors and len(tensors[name].shape) == _MATRIX_NDIM:
        yield _find_matrix(checkpoint, settings, module, name)
        return
    arrays = _list_parameters(checkpoint, settings, module.module)
    if module.inside < len(arrays):
        name, shape = arrays[-1 - module.inside]
        target = _fit_array(checkpoint, settings, module, name, shape)
        fusion = model.fusions.get(name) if model is not None else None
        if fusion is None:
            yield target
            return
        for part, view in zip(fusion.tensors, fusion.places.views, strict=True):
            yield replace(target, name=part, view=view)


def _find_matrix(
    checkpoint: OpenedCheckpoint, settings: AdapterSettings, module: AdaptedModule, name: str
) -> MergeTarget:
    """Find a module's own weight."""
    assert module.down is not None and module.up is not None  # noqa: S101, PT018 - asked before
    model = checkpoint.model
    by_input = module.embedding or (model.transposed if model is not None and model.family else settings.transposed)
    if module.embedding and module.magnitude is not None:
        raise UnsupportedError(
            f"{module.module} is an embedding with DoRA, whose norms PEFT adds up in an order that depends on threads"
        )
    parts = {"magnitude": (module.magnitude, settings.dora), "bias": (module.bias, settings.biased)}
    for part, (tensor, declared) in parts.items():
        if declared != (tensor is not None):
            has, says = ("a", "has none") if tensor is not None else ("no", "has")
            raise SourceError(
                f"the adapter has {has} {part} of {module.module}, but by {ADAPTER_CONFIG} it {says} "
                "(use_dora, lora_bias)",
                hint="the config may belong to another adapter, or the file is truncated",
            )
    rank = module.down.shape[0]
    made = (module.down.shape[1], module.up.shape[0]) if by_input else (module.up.shape[0], module.down.shape[1])
    _check_fit(module, rank, settings.find_rank(module.module), module.up.shape[1])
    if made != checkpoint.manifest.tensors[name].shape:
        raise _build_misfit(module, made, checkpoint.manifest.tensors[name].shape)
    scaling = settings.compute_scaling(module.module, rank)
    bias = models.find_weight_name(checkpoint.model, f"{module.module}.bias")
    return MergeTarget(name, module, rank, scaling, by_input, rounded=module.embedding, bias_name=bias)


def _list_parameters(
    checkpoint: OpenedCheckpoint, settings: AdapterSettings, module: str
) -> list[tuple[str, tuple[int, ...]]]:
    """List the arrays of a module that the adapter says it changes, in the order of the class, with their shapes."""
    model = checkpoint.model
    arrays = {name: fusion.shape for name, fusion in model.fusions.items()} if model is not None else {}
    arrays |= {name: tensor.shape for name, tensor in checkpoint.manifest.tensors.items()}
    wanted = settings.parameters
    return [
        (name, shape)
        for name, shape in arrays.items()
        if name.rpartition(".")[0] == module and (name in wanted or name.endswith(tuple(f".{each}" for each in wanted)))
    ]


def _fit_array(
    checkpoint: OpenedCheckpoint,
    settings: AdapterSettings,
    module: AdaptedModule,
    name: str,
    shape: tuple[int, ...],
) -> MergeTarget:
    """Find out how the matrices belong to an array of all experts, which PEFT 0.18 takes the other way round."""
    assert module.down is not None and module.up is not None  # noqa: S101, PT018 - asked before
    if len(shape) != _EXPERT_STACK_NDIM or module.magnitude is not None or module.bias is not None:
        raise UnsupportedError(
            f"{name} has {len(shape)} dims; of single parameters, only stacked experts can be merged"
        )
    experts = shape[0]
    made = (module.up.shape[0], module.down.shape[1])
    rank, rest = divmod(module.down.shape[0], experts)
    by_input = made == shape[:0:-1]
    if by_input and made == shape[1:]:
        by_input = stacks_by_input(checkpoint) or bool(settings.version and settings.version < OUTPUTS_FIRST_VERSION)
    if rest or not (by_input or made == shape[1:]):
        raise _build_misfit(module, made, shape)
    _check_fit(module, rank, settings.find_rank(name), module.up.shape[1] // experts)
    scaling = settings.compute_scaling(name, rank)
    return MergeTarget(name, module, rank, scaling, by_input, experts=experts, rounded=True)


def stacks_by_input(base: OpenedCheckpoint) -> bool:
    """Return whether experts are stacked as `[experts, in, out]`, which every version of PEFT lays out alike."""
    model = base.model
    return model is not None and (model.family in _STACKED_BY_INPUT or model.architecture in _CLASSES_STACKED_BY_INPUT)


def _check_fit(module: AdaptedModule, rank: int, declared: int, other: int) -> None:
    if not rank == other == declared:
        raise SourceError(
            f"the matrices of {module.module} have ranks {rank} and {other}, but adapter_config.json says {declared}",
            hint="the config may belong to another adapter",
        )


def _build_misfit(module: AdaptedModule, made: tuple[int, ...], shape: tuple[int, ...]) -> SourceError:
    return SourceError(
        f"the adapter updates {module.module} with a matrix of {list(made)}, but that of the base is {list(shape)}",
        hint="it may have been trained on another model",
    )


def _drop_first_dim(stored: ChunkIndex, box: Box) -> ChunkIndex:
    """Return the chunks of one index of the first dim, as those of a matrix."""
    from shardctl.models.dequantization.tile import drop_first_dim

    return ChunkIndex([drop_first_dim(chunk) for chunk in stored.within(box)])
