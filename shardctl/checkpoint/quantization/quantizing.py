"""Makes of an opened checkpoint one whose weights are quantized to the nearest codes, without data.

What follows, from the plan of a conversion to the comparison of its result, takes it for any quantized checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.dtype import BY_NAME, CASTABLE, FLOATS
from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.checkpoint.expert_stacks import unstack_experts
from shardctl.checkpoint.quantization.quantized_modules import ModuleSelection, select_modules
from shardctl.models.quantization import quantize_model
from shardctl.models.rounding.recipes import RECIPES, find_recipe
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import Chunk, ConstantFill, Manifest, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.computed_source import ComputedArray
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.models.rounding.recipes import RoundingRecipe
    from shardctl.models.rounding.rounded_weight import RoundedIntegers, RoundedScales, RoundedWeight, WholeScale
    from shardctl.models.rounding.scales import ScaleRule
    from shardctl.models.rounding.stored_matrix import SharedPeak, StoredMatrix

EXACT_RECIPE: Final = "fp8-block"
"""The format that FP4 experts of a checkpoint of FP8 are converted to if it holds them exactly."""
EXPERT_TYPE: Final = "expert_dtype"
"""The key of config.json that says what the experts of DeepSeek-V4 are."""
_QUANTIZATION_CONFIG_KEY: Final = "quantization_config"
_QUANTIZED_ARRAY_LABEL: Final = "{} (quantized)"
"""What the place of an array is called in messages."""
_EXPERT_CODES: Final = re.compile(r"\.experts\.\d+\.\w+\.weight(_packed)?$")
_NEEDING_DATA: Final = {
    "fp8": "has scales of activations; fp8-channel, fp8-block and fp8-tensor leave those to the engine",
    "fp8-static": "has scales of activations; fp8-channel, fp8-block and fp8-tensor leave those to the engine",
    "nvfp4-w4a4": "has a global scale of activations; nvfp4 quantizes weights alone",
    **dict.fromkeys(("gptq", "awq", "smoothquant", "autoround", "spinquant"), "moves errors to where data shows least"),
}
_FUSED_MODULE_GROUPS: Final = (
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
"""Modules that engines put into one matrix, with one global scale (LLM Compressor, observers/helpers.py)."""


def get_expert_type(config: Mapping[str, object]) -> object:
    """Return what a config says that experts are, in its settings of quantization or next to them."""
    settings = models.find_quantization_config(config)
    inner = settings.values.get(EXPERT_TYPE) if settings is not None else None
    return config.get(EXPERT_TYPE) if inner is None else inner


def holds_fp4_experts(checkpoint: OpenedCheckpoint) -> bool:
    """Return whether the config says that experts are FP4 in a checkpoint of FP8, as DeepSeek-V4's does."""
    config = checkpoint.config or {}
    settings = models.find_quantization_config(config)
    if settings is None or settings.values.get("quant_method") != "fp8" or settings.values.get("moe_quant_algo"):
        return False
    return get_expert_type(config) == "fp4" and checkpoint.model is not None and bool(checkpoint.model.encodings)


def choose_recipe(name: str) -> RoundingRecipe:
    """Return the format that `--quantize` names; raises UsageError for one that is none, or that needs data."""
    if name in RECIPES:
        return RECIPES[name]
    known = ", ".join(RECIPES)
    if name in _NEEDING_DATA:
        raise UsageError(
            f"--quantize {name} needs data to run the model on: it {_NEEDING_DATA[name]}",
            hint=f"use LLM Compressor, or a format that needs none: {known}",
        )
    raise UsageError(f"unknown --quantize {name!r}", hint=f"use {known}")


def quantize_checkpoint(
    checkpoint: OpenedCheckpoint,
    recipe: RoundingRecipe,
    ignore: Sequence[str],
    dtypes: Mapping[str, DType],
    threads: int,
) -> OpenedCheckpoint:
    """Return `checkpoint` with its weights as codes and scales, worked out when they are read.

    `dtypes` are the types that tensors are cast to before, by name. What is left as it is, a note says. Raises
    UsageError where the model is not known or `ignore` names nothing, UnsupportedError where it is quantized already or
    has weights that the format does not take.
    """
    model, config = checkpoint.model, checkpoint.config
    if config is not None and models.find_quantization_config(config) is not None:
        if recipe.name == EXACT_RECIPE and holds_fp4_experts(checkpoint):
            from shardctl.checkpoint.quantization.exact_experts import convert_experts

            return convert_experts(checkpoint, threads)
        raise UnsupportedError(
            "the source is quantized already",
            hint="add --dtype bf16, which takes its weights back to numbers first; the errors of both add up",
        )
    if model is None or config is None or not model.tabled:
        raise UsageError("--quantize needs a model that shardctl knows, to tell linear layers from all else")
    selection = select_modules(checkpoint, model, recipe, ignore, dtypes)
    return _encode_checkpoint(checkpoint, recipe, selection, recipe.build_config(selection.ignored), dtypes, threads)


def quantize_as(result: OpenedCheckpoint, source: OpenedCheckpoint, threads: int) -> OpenedCheckpoint:
    """Return `source` quantized as `result` is, if that is in a format that follows from the weights alone."""
    if result.config is None or source.config is None or source.model is None:
        return source
    if holds_fp4_experts(source) and get_expert_type(result.config) == "fp8":
        from shardctl.checkpoint.quantization.exact_experts import convert_experts

        return convert_experts(source, threads)
    settings = models.find_quantization_config(result.config)
    recipe = find_recipe(settings.values) if settings is not None else None
    if recipe is None or settings is None or models.find_quantization_config(source.config) is not None:
        return source
    if any(name not in source.manifest.tensors for name in result.manifest.tensors if _EXPERT_CODES.search(name)):
        source = unstack_experts(source, settings.values)
    there = source.manifest.tensors
    chosen = tuple(
        name
        for name in there
        if name.endswith(".weight")
        and f"{name}_scale" in result.manifest.tensors
        and f"{name.removesuffix('weight')}{recipe.codes_name}" in result.manifest.tensors
    )
    if not chosen:
        return source
    said = result.record.options.get("dtype", "") if result.record is not None else ""
    cast = FLOATS.get(said)
    from shardctl.checkpoint.quantization.unexplained_codes import list_plain_floats

    plain = list_plain_floats(source)
    castable = {name for name, tensor in there.items() if tensor.dtype.name in CASTABLE or name in plain}
    dtypes = {n: cast if cast is not None and n in castable else t.dtype for n, t in there.items()}
    return _encode_checkpoint(source, recipe, ModuleSelection(chosen), dict(settings.values), dtypes, threads)


def _encode_checkpoint(
    checkpoint: OpenedCheckpoint,
    recipe: RoundingRecipe,
    selection: ModuleSelection,
    settings: Mapping[str, object],
    dtypes: Mapping[str, DType],
    threads: int,
) -> OpenedCheckpoint:
    from shardctl.checkpoint.computed_source import ComputedSource
    from shardctl.models.rounding.rounded_weight import REMEMBERED, ROUNDING_BYTES

    assert checkpoint.model is not None  # noqa: S101 - asked before
    stored = checkpoint.manifest.tensors
    weights = _build_weights(stored, recipe, selection.chosen, dtypes)
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, ComputedArray] = {}
    for name, tensor in stored.items():
        if name not in weights:
            tensors[name] = tensor
            continue
        for array in _list_arrays(weights[name]):
            tensors[array.name] = _build_tensor(tensor, array)
            arrays[_QUANTIZED_ARRAY_LABEL.format(array.name)] = array
        if recipe.number == "int4":
            shape = _build_shape_tensor(tensor, weights[name].matrix.module)
            tensors[shape.name] = shape
    manifest = replace(checkpoint.manifest, tensors=tensors)
    if selection.warning:
        manifest = replace(manifest, warnings=(*manifest.warnings, selection.warning))
    config = {**(checkpoint.config or {}), _QUANTIZATION_CONFIG_KEY: settings}
    note = f"{len(weights):,} weights are quantized to {recipe.name}{selection.note}"
    thread_bytes = threads * ROUNDING_BYTES + REMEMBERED
    return replace(
        checkpoint,
        source=ComputedSource(checkpoint.source, arrays, thread_bytes=thread_bytes, note=note),
        manifest=manifest,
        model=quantize_model(checkpoint.model, config, Manifest("", tensors, {})),
        config=config,
        remade_config=True,
        adapted=(*checkpoint.adapted, *(stored[name] for name in weights)),
    )


def _build_weights(
    stored: Mapping[str, Tensor], recipe: RoundingRecipe, chosen: Sequence[str], dtypes: Mapping[str, DType]
) -> dict[str, RoundedWeight]:
    """Build what quantizes each weight; those that engines put into one matrix share their global scale."""
    from shardctl.models.rounding.rounded_weight import RoundedWeight, ScaleMemory
    from shardctl.models.rounding.scales import ScaleRule
    from shardctl.models.rounding.stored_matrix import StoredMatrix
    from shardctl.tensors.bands import ChunkIndex

    memory = ScaleMemory()
    matrices = {}
    for name in chosen:
        tensor, dtype = stored[name], dtypes[name]
        if dtype not in FLOATS.values():
            raise UnsupportedError(f"{name} is {dtype}, which is not quantized", hint="add --dtype bf16 or fp32")
        chunks = ChunkIndex(cover_tensor(tensor))
        rows, columns = tensor.shape
        matrices[name] = StoredMatrix(name.removesuffix(".weight"), (rows, columns), chunks, dtype)
    rules = {dtype: ScaleRule(recipe, dtype.name) for dtype in {m.dtype for m in matrices.values()}}
    peaks = _build_peaks(matrices, rules) if recipe.whole else {}
    return {n: RoundedWeight(m, rules[m.dtype], memory, peaks.get(n)) for n, m in matrices.items()}


def _build_peaks(matrices: Mapping[str, StoredMatrix], rules: Mapping[DType, ScaleRule]) -> dict[str, SharedPeak]:
    """Build what finds the largest magnitude of each weight, or of all that are in one matrix."""
    from shardctl.models.rounding.stored_matrix import SharedPeak

    found: dict[str, SharedPeak] = {}
    for name, matrix in matrices.items():
        if name in found:
            continue
        rule = rules[matrix.dtype]
        parent, _, own = matrix.module.rpartition(".")
        together = (
            next((group for group in _FUSED_MODULE_GROUPS if own in group), ()) if rule.recipe.scale == "fp8" else ()
        )
        names = [f"{parent}.{each}.weight" for each in together] or [name]
        members = [matrices[each] for each in names if each in matrices and matrices[each].dtype == matrix.dtype]
        peak = SharedPeak(members, rule)
        found |= {f"{member.module}.weight": peak for member in members}
    return found


def _list_arrays(weight: RoundedWeight) -> Iterator[RoundedIntegers | RoundedScales | WholeScale]:
    from shardctl.models.rounding.rounded_weight import RoundedIntegers, RoundedScales, WholeScale

    yield RoundedIntegers(weight)
    yield RoundedScales(weight)
    if weight.rule.recipe.scale == "fp8":
        yield WholeScale(weight)


def _build_tensor(tensor: Tensor, array: RoundedIntegers | RoundedScales | WholeScale) -> Tensor:
    """The array as a tensor in a file of its own, which is named as the source names the weight."""
    codes = tensor.name == array.name or array.name.endswith("_packed")
    read = (tensor.nbytes if tensor.encoded_bytes is None else tensor.encoded_bytes) if codes else 0
    where = Region(_QUANTIZED_ARRAY_LABEL.format(array.name), 0, compute_dense_strides(array.dtype, array.shape))
    chunk = Chunk(Box.whole(array.shape), array.dtype, where, array.name)
    passes = 2 if array.weight.rule.recipe.whole else 1
    return Tensor(
        array.name,
        array.dtype,
        array.shape,
        (chunk,),
        spelling=_spell(tensor, array.name),
        encoded_bytes=read * passes,
    )


def _build_shape_tensor(tensor: Tensor, module: str) -> Tensor:
    """The array with the shape of a weight whose codes are packed."""
    name, dtype = f"{module}.weight_shape", BY_NAME["I64"]
    chunks = tuple(
        Chunk(Box((place,), (1,)), dtype, ConstantFill(extent.to_bytes(8, "little")), name)
        for place, extent in enumerate(tensor.shape)
    )
    return Tensor(name, dtype, (2,), chunks, spelling=_spell(tensor, name))


def _spell(tensor: Tensor, name: str) -> tuple[str, ...]:
    """Return what the source would call an array of a weight, if it has a name of its own for that."""
    if len(tensor.spelling) != 1 or not tensor.spelling[0].endswith(".weight"):
        return ()
    return (f"{tensor.spelling[0].removesuffix('weight')}{name.rpartition('.')[2]}",)
