"""Takes an adapter for a checkpoint of its own, whose matrices are cut as those of its base are.

Of a base that is cut by outputs, the first matrix is whole on every rank and the second is cut; of one that is cut by
inputs, the first is cut and the second is whole, as in vLLM (lora/layers/column_parallel_linear.py and
row_parallel_linear.py, `slice_lora_a` and `slice_lora_b`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.checkpoint.config_files import CONFIG, read_config
from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
from shardctl.libraries.files.impostors import ADAPTER_CONFIG, NEW_EMBEDDINGS
from shardctl.libraries.peft.modules import require_elements, sort_tensors
from shardctl.libraries.peft.settings import parse_settings
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.family import Row
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_json
from shardctl.tensors.mesh import EXPERT_FSDP
from shardctl.tensors.placement import AxisPartition, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from shardctl.libraries.peft.modules import AdaptedModule
    from shardctl.libraries.peft.settings import AdapterSettings
    from shardctl.models import KvHeads, Model, ModelTensor
    from shardctl.options import SourceOptions
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.record import CheckpointRecord

_MATRIX_NDIM: Final = 2
_FSDP_AXES: Final = ("fsdp", EXPERT_FSDP)
_REPLICATED_EXPERTS_WARNING: Final = (
    "the matrices of all experts of a layer stay whole on every rank, because no cut of them is a rank's"
)


def open_adapter_checkpoint(
    source: Source, stored: Manifest, record: CheckpointRecord | None, source_options: SourceOptions
) -> OpenedCheckpoint:
    """Open an adapter, whose base is the model that `--config` names, or the directory that the adapter's config names.

    Without one, only names say where tensors are. Raises SourceError where the adapter does not fit that model, or its
    config makes no sense.
    """
    place = source_options.config or _find_base(source)
    base = read_config(source, place).values if place is not None else None
    if source_options.config is None and place is not None:
        said = f"its base is taken to be {place}, which {ADAPTER_CONFIG} names; --config PATH names another"
        stored = replace(stored, warnings=(*stored.warnings, said))
    if NEW_EMBEDDINGS in source.files():
        text = f"{NEW_EMBEDDINGS} has rows of further tokens; they travel along, and --merge appends them"
        stored = replace(stored, warnings=(*stored.warnings, text))
    opened = describe_adapter(source, stored, base, kv_heads=source_options.kv_heads or "error")
    return replace(opened, record=record, allow_unverified=source_options.allow_unverified)


def _find_base(source: Source) -> Path | None:
    """Find the directory of the base, if it is on this machine where it was when the adapter was trained."""
    values = read_json(source, ADAPTER_CONFIG, CONFIG_TEXT)
    named = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    if not isinstance(named, str) or not named:
        return None
    place = Path(named)
    return place if (place / CONFIG).is_file() else None


def describe_adapter(
    source: Source,
    stored: Manifest,
    base: Mapping[str, Any] | None,
    *,
    kv_heads: KvHeads = "error",
    config_file: str = ADAPTER_CONFIG,
    settings: AdapterSettings | None = None,
) -> OpenedCheckpoint:
    """Return an adapter as a checkpoint, whose matrices are cut if `base`, the config of its base, is known.

    Its `settings` are read from `config_file` unless they are given.
    """
    model, problem = None, None
    if base is not None:
        try:
            described = models.describe_model(models.drop_quantization_config(base), kv_heads=kv_heads)
            model = build_adapter_model(described, stored, settings or read_adapter_settings(source, config_file))
        except UnsupportedError as error:
            problem = error
    said = model.warnings if model is not None else ()
    return OpenedCheckpoint(
        source,
        stored,
        replace(stored, warnings=(*stored.warnings, *said)),
        model,
        problem,
        None,
        None,
        untabled=None if model is not None else cache(partial(models.build_untabled_model, None, stored)),
        adapter=True,
        base_config=base,
    )


def read_adapter_settings(source: Source, config_file: str = ADAPTER_CONFIG) -> AdapterSettings:
    """Read what `adapter_config.json` says; raises as `parse_settings`."""
    values = read_json(source, config_file, CONFIG_TEXT)
    if not isinstance(values, dict):
        raise SourceError(f"{ADAPTER_CONFIG} is not a JSON object")
    return parse_settings(values, merged=False)


@value_class
class AdapterSummary:
    """What an adapter is."""

    kind: str
    """What people call it, such as `DoRA`."""
    base: str
    """Where its base was when it was trained; empty if that is not said."""
    modules: int
    """How many modules and parameters of the base it changes."""
    replaced: int
    """How many tensors of the base it has whole."""
    targets: tuple[str, ...]
    """What its config says that it changes."""
    rank: int = 0
    alpha: float = 0.0
    ranks: tuple[int, ...] = ()
    """The ranks that its matrices have."""
    problem: str = ""
    """Why shardctl can neither cut nor merge it, if it cannot."""


def summarise_adapter(checkpoint: OpenedCheckpoint) -> AdapterSummary:
    """Summarise an adapter from its config and its headers; raises SourceError for a config that makes no sense."""
    made = next((each.content for each in checkpoint.manifest.objects if each.name == ADAPTER_CONFIG), None)
    try:
        settings = (
            parse_settings(parse_json(made, ADAPTER_CONFIG, CONFIG_TEXT), merged=False)
            if made is not None
            else read_adapter_settings(checkpoint.source)
        )
        found = sort_tensors(checkpoint.manifest.tensors.values())
    except UnsupportedError as error:
        values = read_json(checkpoint.source, ADAPTER_CONFIG, CONFIG_TEXT)
        base = ModelConfig(values, ADAPTER_CONFIG).text("base_model_name_or_path", "")
        return AdapterSummary(str(values.get("peft_type")), base, 0, 0, (), problem=error.message)
    try:
        require_elements(checkpoint.manifest.tensors.values())
    except SourceError as error:
        return AdapterSummary(settings.kind, settings.base, 0, 0, settings.targets, problem=error.message)
    ranks = {module.up.shape[1] for module in found.modules.values() if module.up is not None and not module.inside}
    experts = [module for module in found.modules.values() if module.inside or settings.parameters]
    return AdapterSummary(
        kind=settings.kind,
        base=settings.base,
        modules=len(found.modules),
        replaced=len(found.replaced),
        targets=settings.targets,
        rank=settings.rank,
        alpha=settings.alpha,
        ranks=tuple(sorted(ranks)) if not experts else (),
    )


def build_adapter_model(base: Model, stored: Manifest, settings: AdapterSettings) -> Model:
    """Build the model of an adapter of `base`; raises SourceError for what the base does not have."""
    require_elements(stored.tensors.values())
    found = sort_tensors(stored.tensors.values())
    tensors: dict[str, ModelTensor] = {}
    stacked = False
    for module in found.modules.values():
        weight = base.tensors.get(models.find_weight_name(base, f"{module.module}.weight"))
        if weight is None or module.inside or len(weight.shape) != _MATRIX_NDIM:
            stacked = True
            weight = _find_expert(base, module, settings)
            parts = _place_whole(module, weight)
        else:
            parts = _place_parts(base, module, weight)
        tensors.update((tensor.name, tensor) for tensor in parts)
    for name, tensor in (*found.replaced.items(), *found.rows.items(), *found.copies):
        known = base.tensors.get(models.find_weight_name(base, name))
        if known is None or known.shape[1:] != tensor.shape[1:]:  # a resized vocabulary has other rows
            raise _refuse_module(name, settings)
        whole = tensor is found.rows.get(name)
        tensors[tensor.name] = _build_tensor(tensor, known, ((), ()) if whole else known.spec.cuts)
    ordered = {name: tensors[name] for name in stored.tensors}
    title = f"an adapter of {base.architecture}"
    return models.Model("", title, base.layers, ordered, warnings=(_REPLICATED_EXPERTS_WARNING,) if stacked else ())


def _place_parts(base: Model, module: AdaptedModule, weight: ModelTensor) -> Iterator[ModelTensor]:
    """Yield the matrices and vectors of a module, cut as its weight is."""
    assert module.down is not None and module.up is not None  # noqa: S101, PT018 - sorted before
    outputs, inputs = (1, 0) if module.embedding or base.transposed else (0, 1)
    if (module.up.shape[0], module.down.shape[-1]) != (weight.shape[outputs], weight.shape[inputs]):
        made = [module.up.shape[0], module.down.shape[-1]]
        raise SourceError(
            f"the adapter's matrices of {module.module} make one of {made}, but the weight has {list(weight.shape)}",
            hint="the adapter may be of another model than the one that --config names",
        )
    along = [[cut for cut in weight.spec.cuts[dim] if cut.axis not in _FSDP_AXES] for dim in (outputs, inputs)]
    spread = [AxisPartition(cut.axis) for cut in weight.spec.cuts[0] if cut.axis in _FSDP_AXES]
    yield _build_tensor(module.down, weight, (tuple(spread), tuple(along[1])))
    yield _build_tensor(module.up, weight, ((*along[0], *spread), ()))
    for vector in (module.bias, module.magnitude):
        if vector is not None:
            rest = ((),) * (len(vector.shape) - 1)
            cuts = (*along[0], *spread) if vector.shape[0] == weight.shape[outputs] else tuple(spread)
            yield _build_tensor(vector, weight, (cuts, *rest))


def _place_whole(module: AdaptedModule, expert: ModelTensor) -> Iterator[ModelTensor]:
    """Yield the matrices of all experts of a layer, where the layer is."""
    for tensor in (module.down, module.up, module.bias, module.magnitude):
        if tensor is not None:
            spread = tuple(AxisPartition("fsdp") for cut in expert.spec.cuts[0] if cut.axis in _FSDP_AXES)
            yield _build_tensor(tensor, expert, (spread, *((),) * (len(tensor.shape) - 1)), whole=True)


def _build_tensor(
    tensor: Tensor, weight: ModelTensor, cuts: tuple[tuple[AxisPartition, ...], ...], *, whole: bool = False
) -> ModelTensor:
    spec = PartitionSpec(cuts, weight.spec.where, None if whole else weight.spec.member)
    row = Row(models.list_name_patterns([tensor.name])[0], "")
    return models.ModelTensor(tensor.name, tensor.shape, tensor.dtype, spec, row)


def _find_expert(base: Model, module: AdaptedModule, settings: AdapterSettings) -> ModelTensor:
    """Find a tensor of the layer whose experts a module of the adapter changes."""
    start = f"{module.module}."
    found = next((t for name, t in base.tensors.items() if name.startswith(start)), None)
    if found is None or not settings.parameters:
        raise _refuse_module(module.module, settings)
    return found


def _refuse_module(name: str, settings: AdapterSettings) -> SourceError:
    return SourceError(
        f"the adapter targets {name}, but the model that --config names has no such module",
        hint=f"it was trained on {settings.base}" if settings.base else f"see {ADAPTER_CONFIG}",
    )
