"""Describes the arrays that MaxText has of a model, for both directions, where they are its elements in another order.

Names and shapes are those of MaxText of August 2026 (`checkpoint_conversion/utils/param_mapping.py`). Kernels are
`[in, out]`, with heads as a dim of their own; layers that are scanned lie along dim 1, experts along dim 0. Of other
models MaxText's converter changes the elements: it divides queries by the root of the head's size (Llama, Mistral,
Mixtral, Gemma 2), adds 1 to norms and multiplies embeddings (Gemma), which is not exact.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.base.errors import UnsupportedError, format_first_few
from shardctl.models.names.trainer_arrays import bind_arrays
from shardctl.models.tables.fusion import FusionPlaces, TensorFusion
from shardctl.tensors.box import Box
from shardctl.tensors.turns import unfold_box
from shardctl.tensors.views import NO_DIM, ArrayView

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardctl.models.tables.model import Model, ModelTensor
    from shardctl.tensors.manifest import Manifest

MAXTEXT: Final = "maxtext"
FRONT: Final = "params.params."
"""What names of MaxText's arrays begin with: `TrainState` of flax, whose parameters are a tree `params`."""
_NAMING_SCHEME_NOTE: Final = "MaxText's arrays; read as the tensors of transformers"
_SCANNED_LAYERS_DIM: Final = 1
"""The dim along which layers lie (`param_scan_axis` in its `configs/base.yml`)."""
_PLAIN, _TURNED, _ROWS, _COLUMNS, _PAIRED = "plain", "turned", "rows", "columns", "paired"
"""How a tensor runs through its array: as it is, transposed, or so with the heads of its rows or columns apart.

Or through two, whose elements take turns along its last dim.
"""
_NON_LAYER_ARRAYS: Final = {
    "model.embed_tokens.weight": ("token_embedder.embedding", _PLAIN),
    "model.norm.weight": ("decoder.decoder_norm.scale", _PLAIN),
    "lm_head.weight": ("decoder.logits_dense.kernel", _TURNED),
}
_SELF_ATTENTION_MODULE: Final = "self_attention"
_NORM_ARRAYS: Final = {
    "input_layernorm.weight": ("pre_self_attention_layer_norm.scale", _PLAIN),
    "post_attention_layernorm.weight": ("post_self_attention_layer_norm.scale", _PLAIN),
}
_MLP_ARRAYS: Final = {
    f"mlp.{ours}.weight": (f"mlp.{own}.kernel", _TURNED)
    for ours, own in (("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo"))
}
_PROJECTION_NAMES: Final = {"q": "query", "k": "key", "v": "value"}
_ATTENTION_ARRAYS: Final = {
    **{
        f"self_attn.{part}_proj.weight": (f"{_SELF_ATTENTION_MODULE}.{own}.kernel", _ROWS)
        for part, own in _PROJECTION_NAMES.items()
    },
    **{
        f"self_attn.{part}_proj.bias": (f"{_SELF_ATTENTION_MODULE}.{own}.bias", _ROWS)
        for part, own in _PROJECTION_NAMES.items()
    },
    **{
        f"self_attn.{part}_norm.weight": (f"{_SELF_ATTENTION_MODULE}.{_PROJECTION_NAMES[part]}_norm.scale", _PLAIN)
        for part in "qk"
    },
    "self_attn.o_proj.weight": (f"{_SELF_ATTENTION_MODULE}.out.kernel", _COLUMNS),
}
_MLA_ARRAYS: Final = {
    "self_attn.q_proj.weight": (f"{_SELF_ATTENTION_MODULE}.query.kernel", _ROWS),
    "self_attn.q_a_proj.weight": (f"{_SELF_ATTENTION_MODULE}.wq_a.kernel", _TURNED),
    "self_attn.q_a_layernorm.weight": (f"{_SELF_ATTENTION_MODULE}.q_norm.scale", _PLAIN),
    "self_attn.q_b_proj.weight": (f"{_SELF_ATTENTION_MODULE}.wq_b.kernel", _ROWS),
    "self_attn.kv_a_proj_with_mqa.weight": (f"{_SELF_ATTENTION_MODULE}.wkv_a.kernel", _TURNED),
    "self_attn.kv_a_layernorm.weight": (f"{_SELF_ATTENTION_MODULE}.kv_norm.scale", _PLAIN),
    "self_attn.kv_b_proj.weight": (f"{_SELF_ATTENTION_MODULE}.wkv_b.kernel", _ROWS),
    "self_attn.o_proj.weight": (f"{_SELF_ATTENTION_MODULE}.out.kernel", _COLUMNS),
}
_DEEPSEEK_MOE_BLOCK: Final = "DeepSeekMoeBlock_0"
_SHARED_EXPERT_ARRAYS: Final = {
    f"mlp.shared_experts.{name.removeprefix('mlp.')}": (
        f"{_DEEPSEEK_MOE_BLOCK}.shared_experts.{own.removeprefix('mlp.')}",
        how,
    )
    for name, (own, how) in _MLP_ARRAYS.items()
}
_ROUTER_WEIGHT_NAME: Final = "mlp.gate.weight"
_ROUTER_ARRAYS: Final = {
    _ROUTER_WEIGHT_NAME: (f"{_DEEPSEEK_MOE_BLOCK}.MoeBlock_0.gate.kernel", _TURNED),
    "mlp.gate.e_score_correction_bias": (f"{_DEEPSEEK_MOE_BLOCK}.MoeBlock_0.gate.bias", _PLAIN),
}
_QWEN_ARRAYS: Final = {
    **_NORM_ARRAYS,
    **_ATTENTION_ARRAYS,
    **_MLP_ARRAYS,
    _ROUTER_WEIGHT_NAME: ("moe_block.gate.kernel", _TURNED),
}
_DEEPSEEK_ARRAYS: Final = {**_NORM_ARRAYS, **_MLA_ARRAYS, **_MLP_ARRAYS, **_SHARED_EXPERT_ARRAYS, **_ROUTER_ARRAYS}
_OLMO3_ARRAYS: Final = {
    "post_attention_layernorm.weight": ("post_self_attention_layer_norm.scale", _PLAIN),
    "post_feedforward_layernorm.weight": ("post_mlp_layer_norm.scale", _PLAIN),
    **{ours: (own.replace(_SELF_ATTENTION_MODULE, "attention"), how) for ours, (own, how) in _ATTENTION_ARRAYS.items()},
    **_MLP_ARRAYS,
}
_LINEAR_ATTENTION_MODULE: Final = "linear_attn"
_QWEN3_NEXT_ARRAYS: Final = {
    **{f"{norm}.weight": (f"{norm}.scale", _PLAIN) for norm in ("input_layernorm", "post_attention_layernorm")},
    **{
        ours: (own.replace(_SELF_ATTENTION_MODULE, "attention.attention"), how)
        for ours, (own, how) in _ATTENTION_ARRAYS.items()
    },
    "self_attn.o_proj.weight": ("attention.attention.out.kernel", _TURNED),
    **{
        f"{_LINEAR_ATTENTION_MODULE}.{name}.weight": (f"attention.{name}.kernel", _TURNED)
        for name in ("in_proj_qkvz", "in_proj_ba")
    },
    **{
        f"{_LINEAR_ATTENTION_MODULE}.{name}.weight": (f"attention.{name}.kernel", _TURNED)
        for name in ("conv1d", "out_proj")
    },
    **{f"{_LINEAR_ATTENTION_MODULE}.{name}": (f"attention.{name}", _PLAIN) for name in ("A_log", "dt_bias")},
    f"{_LINEAR_ATTENTION_MODULE}.norm.weight": ("attention.norm.rms_norm.scale", _PLAIN),
    **{
        ours.replace("mlp", "mlp.shared_expert"): (own.replace("mlp", "mlp.shared_expert"), how)
        for ours, (own, how) in _MLP_ARRAYS.items()
    },
    "mlp.shared_expert_gate.weight": ("mlp.shared_expert_gate.kernel", _TURNED),
    _ROUTER_WEIGHT_NAME: ("mlp.routed_experts.gate.kernel", _TURNED),
}
_GPT_OSS_ATTENTION_MODULE: Final = "GptOssAttention"
_GPT_OSS_MLP_MODULE: Final = "GptOssMlp"
_GPT_OSS: Final = {
    **_NORM_ARRAYS,
    **{
        ours: (own.replace(_SELF_ATTENTION_MODULE, _GPT_OSS_ATTENTION_MODULE), how)
        for ours, (own, how) in _ATTENTION_ARRAYS.items()
    },
    "self_attn.o_proj.bias": (f"{_GPT_OSS_ATTENTION_MODULE}.out.bias", _PLAIN),
    "self_attn.sinks": (f"{_GPT_OSS_ATTENTION_MODULE}.sinks", _PLAIN),
    "mlp.router.weight": (f"{_GPT_OSS_MLP_MODULE}.gate.kernel", _TURNED),
    "mlp.router.bias": (f"{_GPT_OSS_MLP_MODULE}.gate.bias", _PLAIN),
    "mlp.experts.gate_up_proj": (f"{_GPT_OSS_MLP_MODULE}.wi_{{}}", _PAIRED),
    "mlp.experts.gate_up_proj_bias": (f"{_GPT_OSS_MLP_MODULE}.wi_{{}}_bias", _PAIRED),
    "mlp.experts.down_proj": (f"{_GPT_OSS_MLP_MODULE}.wo", _PLAIN),
    "mlp.experts.down_proj_bias": (f"{_GPT_OSS_MLP_MODULE}.wo_bias", _PLAIN),
}
_LAYER_ARRAYS_BY_FAMILY: Final = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), _QWEN_ARRAYS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK_ARRAYS),
    "gpt_oss": _GPT_OSS,
    "olmo3": _OLMO3_ARRAYS,
    "qwen3_next": _QWEN3_NEXT_ARRAYS,
}
"""By family: the tensors of a layer, what MaxText calls the array, and how they run through it."""
_LAYER_CYCLES_BY_FAMILY: Final = {"gpt_oss": (2, "layers"), "olmo3": (4, "layers"), "qwen3_next": (4, "layer")}
"""Families whose scanned layers are those at one place of each cycle: layers of a cycle, and what the place is called.

As many as `inhomogeneous_layer_cycle_interval` of `configs/models/` says; the last of them has full attention.
"""
_FULL_ATTENTION_TENSOR: Final = "self_attn.q_proj.weight"
_EXPERT_BLOCKS_BY_FAMILY: Final = {
    "deepseek_v2": f"{_DEEPSEEK_MOE_BLOCK}.MoeBlock_0",
    "deepseek_v3": f"{_DEEPSEEK_MOE_BLOCK}.MoeBlock_0",
    "qwen3_next": "mlp.routed_experts",
}
"""What has the experts; elsewhere `moe_block`."""
_EXPERT_ARRAY_NAMES: Final = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
_QUANTIZED_TENSOR_SUFFIXES: Final = ("_blocks", "_scales")
_LAYER_PATTERN: Final = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_EXPERT_PATTERN: Final = re.compile(r"mlp\.experts\.([0-9]+)\.([a-z_]+)\.weight")
_TRAINING_STATE_PATTERN: Final = re.compile(r"opt_state\..+|step")
_SCANNED_LAYERS_PATTERN: Final = re.compile(rf"{re.escape(FRONT)}decoder\.[a-z_]*layers\.")


class _ArrayPart(NamedTuple):
    """A part of a tensor in an array of MaxText."""

    tensor: ModelTensor
    box: Box
    view: ArrayView


def build_maxtext_arrays(model: Model, there: Collection[str] = (), *, scanned: bool = True) -> dict[str, TensorFusion]:
    """Build every array that MaxText has of a model, by its name in a checkpoint, with layers `scanned` or each apart.

    What besides the model's own is `there`, such as layers that predict, has no array.

    Raises UnsupportedError for a family whose arrays have other elements or are not known here, and for tensors that
    MaxText does not have.
    """
    if model.family not in _LAYER_ARRAYS_BY_FAMILY:
        rounded = re.match(r"llama$|mistral$|mixtral$|gemma", model.family) is not None
        why = "it scales some weights, or adds to them, and rounds them" if rounded else "they are not known here"
        raise UnsupportedError(
            f"MaxText's arrays of {model.architecture or 'this model'} are not written: {why}",
            hint=(
                f"known are {', '.join(_LAYER_ARRAYS_BY_FAMILY)}; use MaxText's python -m"
                " maxtext.checkpoint_conversion.to_maxtext"
            ),
        )
    del there
    if scanned:
        _check_cycles(model)
    matched = map(_LAYER_PATTERN.fullmatch, model.tensors)
    sparse = sorted(int(found[1]) for found in matched if found is not None and found[2] == _ROUTER_WEIGHT_NAME)
    parts: dict[str, list[_ArrayPart]] = {}
    unknown = []
    for tensor in model.own():
        found = _find_place(model.family, tensor.name, sparse, scanned=scanned)
        if found is None:
            unknown.append(tensor.name)
            continue
        array, how, expert, layer = found
        for turn, (box, view) in enumerate(_list_views(tensor, how)):
            placed = _insert_dim(view, 0, expert) if expert is not None else view
            if layer is not None:
                placed = _insert_dim(placed, _SCANNED_LAYERS_DIM, layer)
            whole = array.format(turn) if how == _PAIRED else array
            parts.setdefault(f"{FRONT}{whole}", []).append(_ArrayPart(tensor, box, placed))
    if unknown:
        raise UnsupportedError(
            f"MaxText has no array for {format_first_few(unknown)} of {model.architecture}",
            hint="add --dtype bf16, which decodes them" if unknown[0].endswith(_QUANTIZED_TENSOR_SUFFIXES) else None,
        )
    return {array: _build_array(array, some) for array, some in parts.items()}


def bind_maxtext_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under the names of transformers if all names are MaxText's; else as it is.

    What it has of the optimizer is left behind, which a warning says.
    """
    if model.family not in _LAYER_ARRAYS_BY_FAMILY or f"{FRONT}token_embedder.embedding" not in stored.tensors:
        return stored
    weights = {
        name: tensor for name, tensor in stored.tensors.items() if _TRAINING_STATE_PATTERN.fullmatch(name) is None
    }
    arrays = build_maxtext_arrays(model, scanned=any(map(_SCANNED_LAYERS_PATTERN.match, weights)))
    if not all(name in arrays and arrays[name].declared == tensor.shape for name, tensor in weights.items()):
        return stored
    left = [name for name in stored.tensors if name not in weights]
    said = (f"left behind: what MaxText's optimizer keeps ({format_first_few(left)})",) if left else ()
    found = bind_arrays(stored, arrays, _NAMING_SCHEME_NOTE)
    tensors = {name: tensor for name, tensor in found.tensors.items() if name not in left}
    return replace(found, tensors=tensors, warnings=(*found.warnings, *said))


def _check_cycles(model: Model) -> None:
    """Raise UnsupportedError for layers of which MaxText cannot scan those at one place of each cycle."""
    if model.family not in _LAYER_CYCLES_BY_FAMILY:
        return
    cycle = _LAYER_CYCLES_BY_FAMILY[model.family][0]
    said = f"MaxText scans layers of {model.architecture} in cycles of {cycle}"
    if model.layers % cycle:
        raise UnsupportedError(f"{said}, but there are {model.layers}")
    full = [
        number for number in range(model.layers) if f"model.layers.{number}.{_FULL_ATTENTION_TENSOR}" in model.tensors
    ]
    if model.family == "qwen3_next" and full != [*range(cycle - 1, model.layers, cycle)]:
        raise UnsupportedError(
            f"{said}, the last with full attention, but layers {format_first_few(map(str, full))} have it"
        )


def _find_place(
    family: str, name: str, sparse: list[int], *, scanned: bool
) -> tuple[str, str, int | None, int | None] | None:
    """Find a tensor's array, how it runs through it, and the numbers of its expert and of its layer there."""
    if name in _NON_LAYER_ARRAYS:
        return (*_NON_LAYER_ARRAYS[name], None, None)
    layer = _LAYER_PATTERN.fullmatch(name)
    if layer is None:
        return None
    number, group = int(layer[1]), "layers"
    if _LAYER_ARRAYS_BY_FAMILY[family] is _DEEPSEEK_ARRAYS:  # its first layers have no experts
        dense = sparse[0] if sparse else number + 1
        number, group = (number, "dense_layers") if number < dense else (number - dense, "moe_layers")
    expert = _EXPERT_PATTERN.fullmatch(layer[2])
    if expert is not None and expert[2] in _EXPERT_ARRAY_NAMES:
        block = _EXPERT_BLOCKS_BY_FAMILY.get(family, "moe_block")
        own, how = f"{block}.{_EXPERT_ARRAY_NAMES[expert[2]]}", _TURNED
    elif layer[2] in _LAYER_ARRAYS_BY_FAMILY[family]:
        own, how = _LAYER_ARRAYS_BY_FAMILY[family][layer[2]]
    else:
        return None
    counted = int(expert[1]) if expert is not None else None
    if scanned and family in _LAYER_CYCLES_BY_FAMILY:
        cycle, place = _LAYER_CYCLES_BY_FAMILY[family]
        return f"decoder.{group}.{place}_{number % cycle}.{own}", how, counted, number // cycle
    if scanned:
        return f"decoder.{group}.{own}", how, counted, number
    return f"decoder.{group}_{number}.{own}", how, counted, None


def _list_views(tensor: ModelTensor, how: str) -> Iterator[tuple[Box, ArrayView]]:
    """List the parts of a tensor and where they are in its array, without the dims of experts and of layers."""
    shape = tensor.shape
    if how in {_PLAIN, _TURNED}:
        turned = range(len(shape))[::-1] if how == _TURNED else range(len(shape))
        yield Box.whole(shape), ArrayView((0,) * len(shape), tuple(turned))
        return
    if how == _PAIRED:
        unfolded = unfold_box(Box.whole(shape), 2)
        for turn in range(2):
            box = Box((*unfolded.origin[:-1], turn), (*unfolded.shape[:-1], 1))
            yield box, ArrayView((0,) * len(shape), (*range(len(shape)), NO_DIM))
        return
    dim = 1 if how == _COLUMNS else 0
    head = next((section.unit for cut in tensor.spec.cuts[dim] for section in cut.sections), shape[dim])
    for number in range(shape[dim] // head):
        start, extents = [0] * len(shape), list(shape)
        start[dim], extents[dim] = number * head, head
        box = Box(tuple(start), tuple(extents))
        if len(shape) == 1:
            yield box, ArrayView((number, 0), (1,))
        elif how == _COLUMNS:
            yield box, ArrayView((number, 0, 0), (2, 1))
        else:
            yield box, ArrayView((0, number, 0), (2, 0))


def _insert_dim(view: ArrayView, dim: int, index: int) -> ArrayView:
    """Return a view into an array of one more dim, at an index of that."""
    origin = (*view.origin[:dim], index, *view.origin[dim:])
    return ArrayView(origin, tuple(axis + (axis >= dim) for axis in view.axes), view.steps)


def _build_array(name: str, parts: list[_ArrayPart]) -> TensorFusion:
    shapes = tuple(part.tensor.shape for part in parts)
    places = FusionPlaces.of([part.view for part in parts], shapes, [part.box for part in parts])
    return TensorFusion(name, tuple(part.tensor.name for part in parts), places)
