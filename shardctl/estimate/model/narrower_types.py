"""Computes a model's tensors in another type: plain floats, or codes with scales in an existing layout.

The bytes are those of a known layout, but nobody has quantized this model: they are modelled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.dtype import BY_NAME, CASTABLE, FLOATS
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.model.inventory import TensorInventory, TensorKind
from shardctl.models.quantization.following import compute_blocks, follow_cuts
from shardctl.models.quantization.storage import IN, OUT, AlongDim, build_packed_dim
from shardctl.tensors.placement import PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.quantization.storage import Form

WidenedPart = Literal["none", "vectors", "all"]
_MATRIX_NDIM: Final = 2
_EXPERT_STACK_NDIM: Final = 3
_ROUTER_MODULE_NAMES: Final = frozenset({"gate", "router", "shared_expert_gate"})
"""What the modules are called that choose experts; quantizers leave them as they are."""
_LAYER_EMBEDDING_NAMES: Final = frozenset({"relative_attention_bias"})
"""Names of what is looked up in layers: T5's biases of positions are an embedding."""
_CONVOLUTION_MODULE_NAMES: Final = frozenset({"conv1d", "conv"})


@value_class
class QuantizedLayout:
    """In which arrays a linear weight `[out, in]` would be stored."""

    name: str
    """As `--dtype` takes it."""
    arrays: tuple[tuple[str, str, Form], ...]
    """Of each its suffix, its safetensors dtype, and how its dims follow those of the weight."""
    formula: str
    """Bytes of one weight."""
    source: str


LAYOUTS: Final = (
    QuantizedLayout(
        "fp8",
        (
            ("weight", "F8_E4M3", (AlongDim(OUT), AlongDim(IN))),
            ("weight_scale_inv", "F32", (AlongDim(OUT, 128), AlongDim(IN, 128))),
        ),
        "out * in + 4 * ceil(out / 128) * ceil(in / 128)",
        "DeepSeek-AI 2024, sec. 3.3.2; transformers, integrations/finegrained_fp8.py",
    ),
    QuantizedLayout(
        "int8",
        (("weight", "I8", (AlongDim(OUT), AlongDim(IN))), ("SCB", "F32", (AlongDim(OUT),))),
        "out * in + 4 * out",
        "Dettmers et al. 2022 (LLM.int8()); bitsandbytes, nn/modules.py, Int8Params",
    ),
    QuantizedLayout(
        "nf4",
        (
            ("weight", "U8", (AlongDim(OUT), AlongDim(IN, 2))),
            ("weight.absmax", "U8", (AlongDim(OUT), AlongDim(IN, 64))),
            ("weight.nested_absmax", "F32", (AlongDim(OUT, 256), AlongDim(IN, 64))),
        ),
        "out * in / 2 + out * in / 64 + 4 * out * in / 16384",
        "Dettmers et al. 2023 (QLoRA), sec. 3; bitsandbytes, functional.py, quantize_4bit with compress_statistics",
    ),
    QuantizedLayout(
        "int4",
        (
            ("qweight", "I32", (build_packed_dim(IN, 4), AlongDim(OUT))),
            ("qzeros", "I32", (AlongDim(IN, 128), build_packed_dim(OUT, 4))),
            ("scales", "F16", (AlongDim(IN, 128), AlongDim(OUT))),
        ),
        "out * in / 2 + ceil(in / 128) * (out / 2 + 2 * out)",
        "Frantar et al. 2022 (GPTQ), groups of 128; GPTQModel, nn_modules/qlinear/__init__.py",
    ),
)
"""The layouts of codes; the linear weights of layers have them, all else stays as it is."""
_SCALE_SUFFIXES: Final = tuple(f".{suffix}" for one in LAYOUTS for suffix, _, _ in one.arrays if suffix != "weight")
TYPES: Final = (*FLOATS, *(layout.name for layout in LAYOUTS))
"""Every type that `narrow_inventory` knows."""


def find_quantized_layout(name: str) -> QuantizedLayout | None:
    """Find the layout of that name; None for a plain float."""
    return next((one for one in LAYOUTS if one.name == name), None)


def narrow_inventory(inventory: TensorInventory, name: str, *, widened: WidenedPart = "none") -> TensorInventory:
    """Return the inventory as if its model were stored in the type `name`, or quantized to it.

    What is `widened` of the floats that are not quantized becomes fp32.

    A plain float changes every float tensor. Codes replace the linear weights of the layers, experts included;
    embeddings, heads, norms, biases, routers and convolutions stay. They are cut where the weights are, between blocks.
    Raises UsageError for an unknown type, and for a model that is quantized already.
    """
    if name not in TYPES:
        raise UsageError(f"unknown type {name!r} to estimate with", hint=f"use {', '.join(TYPES)}")
    coded = next((k for k in inventory.kinds if k.matrix and k.dtype.name not in CASTABLE and _is_in_layers(k)), None)
    if coded is not None:
        raise UsageError(
            f"the size of the model in {name} is not known, because the model is quantized: "
            f"{coded.example} is {coded.dtype}",
            hint="start from the checkpoint that it was quantized from",
        )
    if name in FLOATS:
        kinds = [replace(k, dtype=FLOATS[name]) if k.dtype.name in CASTABLE else k for k in inventory.kinds]
        return TensorInventory(tuple(kinds), inventory.layers)
    chosen = find_quantized_layout(name)
    assert chosen is not None  # noqa: S101 - it is of TYPES, and no float
    return TensorInventory(
        tuple(
            new
            for kind in inventory.kinds
            for new in (_list_coded_kinds(kind, chosen) if is_linear(kind) else (_widen_kind(kind, widened),))
        ),
        inventory.layers,
    )


def is_scale(kind: TensorKind) -> bool:
    """Return whether it is an array of scales, beside codes of a layout."""
    return kind.example.endswith(_SCALE_SUFFIXES)


def is_module_scale(kind: TensorKind) -> bool:
    """Return whether it is an array of scales that a module of bitsandbytes has beside its matrix."""
    return kind.example.endswith((".absmax", ".SCB"))


def _widen_kind(kind: TensorKind, widened: WidenedPart) -> TensorKind:
    stays = widened == "none" or (widened == "vectors" and kind.matrix) or kind.dtype.name not in CASTABLE
    return kind if stays else replace(kind, dtype=FLOATS["fp32"])


def is_linear(kind: TensorKind) -> bool:
    """Return whether it is a weight that quantizers replace."""
    parts = set(kind.example.split("."))
    if (
        not kind.trainable
        or not _is_in_layers(kind)
        or parts & (_ROUTER_MODULE_NAMES | _CONVOLUTION_MODULE_NAMES | _LAYER_EMBEDDING_NAMES)
    ):
        return False
    if len(kind.shape) == _EXPERT_STACK_NDIM:
        return kind.spec.of_expert
    return len(kind.shape) == _MATRIX_NDIM and kind.matrix and kind.example.endswith(".weight")


def _is_in_layers(kind: TensorKind) -> bool:
    """Return whether it is of layers alone: an embedding that encoder and decoder share is on the first stage, too."""
    return all(where == "layer" for where, _ in kind.spec.where)


def _list_coded_kinds(kind: TensorKind, chosen: QuantizedLayout) -> Iterator[TensorKind]:
    """List the arrays in place of a weight, or of a stack of them, one for each expert."""
    deep = len(kind.shape) - _MATRIX_NDIM
    forms = [_build_stacked_form(form, deep) for _, _, form in chosen.arrays]
    together = compute_blocks(forms)
    module = kind.example.removesuffix(".weight")
    for (suffix, dtype, _), form in zip(chosen.arrays, forms, strict=True):
        cuts = follow_cuts(kind.spec.cuts, kind.shape, form, together, {}) if kind.spec.cuts else ()
        yield TensorKind(
            example=f"{module}.{suffix}",
            shape=tuple(a.extent(kind.shape[a.dim]) for a in form if isinstance(a, AlongDim)),
            dtype=BY_NAME[dtype],
            spec=PartitionSpec(cuts, kind.spec.where, kind.spec.member),
            members=kind.members,
            trainable=False,
        )


def _build_stacked_form(form: Form, deep: int) -> Form:
    """Build the form for each matrix of a stack, whose first dim counts them."""
    if not deep:
        return form
    return (AlongDim(0), *(replace(a, dim=a.dim + deep) if isinstance(a, AlongDim) else a for a in form))
