"""Makes what an estimate needs from an opened checkpoint, independent of the mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from shardctl.base.dtype import BY_NAME, FLOATS
from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.base.value import value_class
from shardctl.checkpoint.quantization.dequantizing import dequantize_checkpoint, describe_decoded
from shardctl.conversion.tensor_choice import choose_dtypes, filter_tensors, list_coded_arrays
from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.model.inventory import TensorInventory, build_inventory
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.narrower_types import QuantizedLayout, find_quantized_layout, narrow_inventory
from shardctl.estimate.search.mesh_comparison import WeightTotals
from shardctl.models import NEEDING_TABLE, ModelConfig, count_parameters, describe_model
from shardctl.models.counting import is_quantized, list_meant_parameters
from shardctl.models.tables.predicting import PREDICTING_KEYS, get_count, list_predicting_names
from shardctl.models.tables.text_config import merge_text_config
from shardctl.planning.tuning import tune_inventory
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.placement import PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.estimate.model.layer_graph import LayerGraph
    from shardctl.models import Model
    from shardctl.models.tables.model import ModelTensor
    from shardctl.options import ReshardOptions
    from shardctl.planning.tuning import TuningChoice
    from shardctl.tensors.manifest import Manifest


@value_class
class AdaptedBase:
    """A model as estimates see it beside its adapter: it keeps its weights and is not trained."""

    architecture: str
    """Empty if nobody knows which model it is."""
    adapter: TensorInventory
    """The tensors of the adapter alone."""

    @property
    def known(self) -> bool:
        """Whether it is counted."""
        return bool(self.architecture)


@value_class
class ExtraModel:
    """A model that ranks hold beside the one that is trained."""

    name: str
    heaviest: HeaviestRanks
    totals: WeightTotals


@value_class
class EstimatedModel:
    """A model as estimates see it."""

    inventory: TensorInventory
    parameters: int
    """Elements that can be trained, however they are stored."""
    anatomy: LayerGraph | None
    unmodelled: str
    """Why there is no anatomy, if so."""
    dtype: str
    """Of activations; safetensors' name."""
    dequantised: bool = False
    """Whether weights stand for codes that are stored, as training would have them."""
    base: AdaptedBase | None = None
    """Of an adapter: what it changes. `inventory` and `anatomy` are then those of both, `parameters` its own."""
    beside: tuple[ExtraModel, ...] = ()
    """What ranks hold besides: of the policy that RLHF trains, a reference and a reward model."""
    quantised: QuantizedLayout | None = None
    """In which arrays the weights would be if someone quantized them: then their bytes are not counted but modelled."""

    def if_quantized(self, name: str | None) -> EstimatedModel:
        """Return the same model as if its linear weights were in the type `name`; itself for None.

        Raises UsageError for an unknown type, an adapter, and for a model that is quantized already.
        """
        if name is None:
            return self
        if self.base is not None:
            raise UsageError(
                f"--dtype {name} applies to models, not to adapters",
                hint="name the config of a quantized base with --config PATH",
            )
        return replace(self, inventory=narrow_inventory(self.inventory, name), quantised=find_quantized_layout(name))


def build_beside_model(name: str, checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> ExtraModel:
    """Build a model that is held and not trained, its weights as they are stored."""
    inventory = build_estimated_model(checkpoint, reshard_options).inventory
    return ExtraModel(name, HeaviestRanks(inventory), WeightTotals(inventory))


def count_decoded_weights(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, *, trained: bool = False
) -> OpenedCheckpoint:
    """Return a checkpoint whose quantized weights have the type that `--dtype` decodes them to.

    A plan of training counts the weights that codes stand for by itself.
    """
    if reshard_options.dtype not in FLOATS:
        return checkpoint
    dtype = FLOATS[reshard_options.dtype]
    if checkpoint.stored_quantization is not None and not checkpoint.hypothetical:
        return dequantize_checkpoint(checkpoint, dtype, 1)
    return checkpoint if trained else describe_decoded(checkpoint, reshard_options.dequantize, dtype)


def build_estimated_model(
    checkpoint: OpenedCheckpoint,
    reshard_options: ReshardOptions,
    *,
    trained: bool = False,
    tuning: TuningChoice | None = None,
    mtp_layers: int = 0,
    mtp_embedding: bool = False,
) -> EstimatedModel:
    """Build the tensors of a checkpoint by kind, as `reshard_options` would write them, and what its model is made of.

    `trained` takes codes of quantized weights for the weights that they stand for, which is what can be trained.
    With `tuning` only a part is. Raises UsageError for a part that there is not.
    """
    if mtp_layers:
        about = build_estimated_model(checkpoint, reshard_options, trained=trained)
        return _add_predicting_layers(about, checkpoint, mtp_layers, embedding=mtp_embedding)
    have = filter_tensors(checkpoint, reshard_options)
    if tuning is not None:
        return _build_tuned_model(checkpoint, have, reshard_options, tuning)
    if trained and has_coded_weights(checkpoint):
        return _build_dequantized_model(checkpoint, have, reshard_options)
    model = checkpoint.model
    dtypes = _choose_counted_dtypes(checkpoint, have, reshard_options)
    if model is None:
        inventory = _build_untabled_inventory(checkpoint, have, dtypes)
        elements = inventory.elements
    else:
        known = model.tensors
        specs = {name: known[name].spec for name in have.tensors}
        buffers = frozenset([tensor.name for tensor in known.values() if tensor.row.buffer])
        inventory = build_inventory(have.tensors.values(), specs, model.layers, dtypes=dtypes, buffers=buffers)
        elements = count_parameters(model, checkpoint.config, have.tensors)
    made_of, why = _find_anatomy(checkpoint)
    active = _choose_activation_dtype(checkpoint, reshard_options, inventory)
    about = EstimatedModel(inventory, elements, made_of, why, active)
    return _add_base(about, checkpoint) if checkpoint.adapter else about


def count_mtp_layers(checkpoint: OpenedCheckpoint, requested: int | None, *, megatron: bool) -> int:
    """Count the multi-token prediction layers that training adds to a model that is only described.

    Raises UsageError for a number where the model's family has no such layers, or files have them or not.
    """
    config = checkpoint.config or {}
    declared = get_count(merge_text_config(config), PREDICTING_KEYS) or 0
    number = requested if requested is not None else declared * (megatron and checkpoint.hypothetical)
    if number and not checkpoint.hypothetical:
        raise UsageError(
            "--mtp-layers applies to a config alone: of stored weights, the layers that are stored are counted",
            hint="leave it out, or name the config.json",
        )
    if number and not _list_predicting_tensors(config, number):
        if requested is None:
            return 0
        raise UsageError(
            f"--mtp-layers {number}: which weights its multi-token prediction layers have is not known of this model",
            hint="leave it out",
        )
    return number


def _list_predicting_tensors(
    config: Mapping[str, object], number: int, *, embedding: bool = False
) -> list[ModelTensor]:
    """List the tensors of so many multi-token prediction layers; empty for a family that has none.

    The Hub stores copies of the embedding and of the head with them, which training shares with the model's. If the
    model's `embedding` is on another stage, the last one has a copy of it (Megatron-LM, core/models/gpt/gpt_model.py).
    """
    merged = merge_text_config(config)
    key = next((key for key in PREDICTING_KEYS if key in merged), PREDICTING_KEYS[0])
    plain = {name: value for name, value in config.items() if name != "quantization_config"} | {key: number}
    optional = {t.name: t for t in describe_model(plain, kv_heads="replicate").tensors.values() if t.optional}
    vocabulary = merged.get("vocab_size")
    found = [optional[name] for name in list_predicting_names(plain, optional)]
    copies = [t for t in found if vocabulary in t.shape and "embed" in t.name][:embedding]
    return [*copies, *(t for t in found if vocabulary not in t.shape)]


def _add_predicting_layers(
    about: EstimatedModel, checkpoint: OpenedCheckpoint, number: int, *, embedding: bool
) -> EstimatedModel:
    """Return the model with multi-token prediction layers: their weights, and what they keep."""
    tensors = _list_predicting_tensors(checkpoint.config or {}, number, embedding=embedding)
    specs = {t.name: t.spec for t in tensors}
    dtypes = {t.name: BY_NAME[about.dtype] for t in tensors}
    more = build_inventory(
        [Tensor(t.name, t.dtype, t.shape, ()) for t in tensors], specs, about.inventory.layers, dtypes=dtypes
    )
    anatomy = replace(about.anatomy, predicting=number) if about.anatomy is not None else None
    return replace(
        about,
        inventory=replace(about.inventory, kinds=(*about.inventory.kinds, *more.kinds)),
        parameters=about.parameters + more.elements,
        anatomy=anatomy,
    )


def _choose_counted_dtypes(
    checkpoint: OpenedCheckpoint, have: Manifest, reshard_options: ReshardOptions
) -> Mapping[str, DType] | None:
    """Choose the type of each tensor as a conversion does; None if they keep theirs."""
    if reshard_options.dtype == "keep":
        return None
    from shardctl.checkpoint.quantization.unexplained_codes import list_plain_floats

    return choose_dtypes(have, reshard_options, list_coded_arrays(checkpoint), list_plain_floats(checkpoint))


def _build_tuned_model(
    checkpoint: OpenedCheckpoint, have: Manifest, reshard_options: ReshardOptions, tuning: TuningChoice
) -> EstimatedModel:
    """Build the model of which a part is trained."""
    model = checkpoint.require_model("fine-tuning of a part")
    if checkpoint.adapter or has_coded_weights(checkpoint):
        what = "an adapter" if checkpoint.adapter else "quantized"
        raise UsageError(
            f"{checkpoint.source.name} is {what}, and fine-tuning is estimated from plain weights",
            hint="name the model that it was made from; --base-dtype nf4 or int8 quantizes it",
        )
    specs = {name: model.tensors[name].spec for name in have.tensors}
    buffers = frozenset(n for n in have.tensors if model.tensors[n].row.buffer)
    whole, part = tune_inventory(
        have.tensors.values(),
        specs,
        model.layers,
        tuning,
        dtypes=choose_dtypes(have, reshard_options),
        buffers=buffers,
    )
    made_of, why = _find_anatomy(checkpoint)
    active = _choose_activation_dtype(checkpoint, reshard_options, whole)
    base = AdaptedBase(model.architecture, part) if tuning.rank is not None else None
    return EstimatedModel(whole, part.elements, made_of, why, active, base=base)


def _add_base(about: EstimatedModel, checkpoint: OpenedCheckpoint) -> EstimatedModel:
    """Return an adapter with its base, whose weights are there and not trained; without, where none is known."""
    config, adapter = checkpoint.base_config, about.inventory
    if config is None or checkpoint.model is None:
        return replace(about, unmodelled="the config of its base is not known", base=AdaptedBase("", adapter))
    model = describe_model(config, kv_heads="replicate")
    tensors = [Tensor(t.name, t.dtype, t.shape, (), t.ties) for t in model.own()]
    names = {tensor.name for tensor in tensors}
    base = build_inventory(tensors, {t.name: t.spec for t in model.own()}, model.layers, buffers=names)
    declared = ModelConfig(config).declared()
    try:
        made_of, why = build_layer_graph(model.text or config), ""
    except UnsupportedError as error:
        made_of, why = None, error.message
    return replace(
        about,
        inventory=replace(base, kinds=(*base.kinds, *adapter.kinds)),
        anatomy=made_of,
        unmodelled=why,
        dtype=declared.name if declared is not None else about.dtype,
        base=AdaptedBase(model.architecture, adapter),
    )


def _build_untabled_inventory(
    checkpoint: OpenedCheckpoint, have: Manifest, dtypes: Mapping[str, DType] | None
) -> TensorInventory:
    """The tensors of a checkpoint that no table knows, as derived rules cut them, or whole where nothing is derived."""
    if checkpoint.untabled is None:
        whole = {n: PartitionSpec(((),) * len(t.shape), (("first", 0),)) for n, t in have.tensors.items()}
        return build_inventory(have.tensors.values(), whole, 0, dtypes=dtypes)
    model = _derive_placement(checkpoint) or checkpoint.untabled().model
    specs = {name: model.tensors[name].spec for name in have.tensors}
    found = build_inventory(have.tensors.values(), specs, model.layers, dtypes=dtypes)
    return replace(found, unknown=_list_unknown_axes(model))


def _derive_placement(checkpoint: OpenedCheckpoint) -> Model | None:
    """Derive how tensors are cut; None where that cannot be, for arrays of quantized weights."""
    try:
        return checkpoint.derived() if checkpoint.derived is not None else None
    except UnsupportedError:
        return None


def _list_unknown_axes(model: Model) -> tuple[str, ...]:
    """List the axes of which nobody knows how they cut a layer; tp within experts (etp) cuts as tp does."""
    layered = [tensor.spec for tensor in model.tensors.values() if tensor.spec.where[0][0] == "layer"]
    found = {axis for spec in dict.fromkeys(layered) for axis in spec.axes}
    found |= {"etp"} if "tp" in found else set()
    return tuple(axis for axis in NEEDING_TABLE if axis not in found)


def has_coded_weights(checkpoint: OpenedCheckpoint) -> bool:
    """Return whether codes are stored, of which the config says what weights they stand for."""
    return checkpoint.model is not None and is_quantized(checkpoint.model, checkpoint.config)


def _build_dequantized_model(
    checkpoint: OpenedCheckpoint, have: Manifest, reshard_options: ReshardOptions
) -> EstimatedModel:
    """Build the model as it was before it was quantized."""
    model = checkpoint.require_model("a plan of training")
    plain = list_meant_parameters(model, checkpoint.config or {}, have.tensors)
    dtypes = {t.name: FLOATS.get(reshard_options.dtype, t.dtype) for t in plain}
    tensors = [Tensor(t.name, t.dtype, t.shape, ()) for t in plain]
    inventory = build_inventory(tensors, {t.name: t.spec for t in plain}, model.layers, dtypes=dtypes)
    made_of, why = _find_anatomy(checkpoint)
    active = _choose_activation_dtype(checkpoint, reshard_options, inventory)
    return EstimatedModel(inventory, inventory.elements, made_of, why, active, dequantised=True)


def _choose_activation_dtype(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, inventory: TensorInventory
) -> str:
    """Choose the type that is asked for, else the declared one.

    Of a config that declares none, that of most weights.
    """
    if reshard_options.dtype in FLOATS:
        return FLOATS[reshard_options.dtype].name
    if checkpoint.config is None:
        return ""
    declared = ModelConfig(checkpoint.config).declared()
    if declared is not None:
        return declared.name
    sizes: Counter[str] = Counter()
    for kind in inventory.kinds:
        if kind.trainable:
            sizes[kind.dtype.name] += kind.count * prod(kind.shape)
    return sizes.most_common(1)[0][0] if sizes else "F32"


def _find_anatomy(checkpoint: OpenedCheckpoint) -> tuple[LayerGraph | None, str]:
    if checkpoint.config is None:
        return None, "there is no config.json"
    model = checkpoint.model
    if model is None or not model.tabled:
        return None, "the architecture is not known"
    try:
        return build_layer_graph(model.text or checkpoint.config), ""
    except UnsupportedError as error:
        return None, error.message
