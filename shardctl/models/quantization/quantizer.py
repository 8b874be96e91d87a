"""Describes a quantized model: instead of each quantized weight the arrays that are stored of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field, replace
from sys import intern
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError, format_first_few
from shardctl.base.value import state_class, value_class
from shardctl.models.names.binding import find_canonical_name, list_older_names
from shardctl.models.quantization.arrays import list_stored_arrays
from shardctl.models.quantization.encoding import WeightEncoding
from shardctl.models.quantization.expert_codes import list_stacked_parts, list_weight_stacks, stack_arrays_alike
from shardctl.models.quantization.expressions import limit_matching
from shardctl.models.quantization.settings import find_quantization_config
from shardctl.models.quantization.storage import FLOAT, SCALE
from shardctl.models.quantization.unexplained import check_unexplained_codes
from shardctl.models.tables.family import Row
from shardctl.models.tables.model import ModelTensor
from shardctl.tensors.placement import PartitionSpec, build_member_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.models.quantization.encoding import WeightArray
    from shardctl.models.quantization.following import Cuts
    from shardctl.models.quantization.storage import Names, QuantizationScheme, WeightStorage
    from shardctl.models.tables.fusion import TensorFusion
    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest, Tensor

_WEIGHT_SUFFIX: Final = ".weight"
_PLAIN_NAMES: Final = frozenset({"weight", "bias"})
_MATRIX_NDIM: Final = 2
_SPARED_DIMS: Final = ("experts ", "index_heads ")
"""The first dims of what nobody quantizes: routers, and the weights of an indexer's heads (`_keep_in_fp32_modules`)."""
_CACHE_SCALES: Final = ("k_scale", "v_scale", "q_scale", "kv_scale")
"""Scales of the key/value cache, one a layer, which writers put beside the projections or in them."""


_KV_PROJECTION_NAMES: Final = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")
"""The projections beside which, or in which, they are."""


def quantize_model(model: Model, config: Mapping[str, object], stored: Manifest | None = None) -> Model:
    """Return `model` as its `quantization_config` says it is stored: the arrays of each quantized weight instead of it.

    Which weights those are, the config says only in part, for it also depends on the code of the class (routers and
    heads are spared unsaid). So where `stored` has a weight in one form or the other, that decides, and the config
    only where it has none.
    Raises UnsupportedError for a method that is not known, or codes that no config explains, SourceError for settings
    that make no sense and for an array that is stored as another type than its method has.
    """
    if find_quantization_config(config) is None:
        noticed = check_unexplained_codes(model, stored) if stored is not None else ()
        return replace(model, warnings=(*model.warnings, *noticed)) if noticed else model
    from shardctl.models.quantization.methods import read_scheme

    scheme = read_scheme(config)
    if scheme is None:
        return model
    if model.transposed:
        raise UnsupportedError(f"quantized weights of {model.architecture}, which are [in, out], are not known")
    with limit_matching():
        return _ModelQuantizer(model, scheme, known=stored is not None).model_of(stored)


@value_class
class _QuantizableWeight:
    """A weight that may be quantized."""

    tensor: ModelTensor
    module: str
    names: Names
    """What the config may call the module."""
    storage: WeightStorage


@value_class
class _StoredWeight:
    """What is stored of a quantized weight, as of many others."""

    arrays: tuple[tuple[str, tuple[tuple[int, ...], DType] | None], ...]
    """By each name that an array may have after the module's: its shape and type, None if it is not there."""
    parts: tuple[WeightArray, ...]


@state_class
class _ModelQuantizer:
    """One model, while its weights are replaced."""

    plain: Model
    scheme: QuantizationScheme
    known: bool
    """Whether what is stored is known."""
    present: dict[str, Tensor] = field(default_factory=dict)
    """What is stored, by canonical name."""
    beside: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    """Of these, by the last part of the name and then by the module, those that stand beside the codes of a weight."""
    kinds: dict[tuple[object, ...], tuple[WeightArray, ...]] = field(default_factory=dict)
    """The arrays of each kind of weight, of which a model has few."""
    last: dict[tuple[object, ...], _StoredWeight] = field(default_factory=dict)
    """By kind of weight: what was found of the last one."""
    cuts: dict[Cuts, Cuts] = field(default_factory=dict)
    """Cuts that are equal as one object, so that arrays that are cut alike share their specs, too."""
    specs: dict[tuple[int, int], PartitionSpec] = field(default_factory=dict)
    """By the ids of an array's cuts and of the weight's spec."""
    endings: set[str] = field(default_factory=set)
    """The last parts of all names that are stored or in the table."""
    tabled_endings: set[str] = field(default_factory=set)
    """Of those in the table."""
    likely: dict[int, list[str]] = field(default_factory=dict)
    """By the id of a storage, which `storages` keeps: the names of its arrays that may be there."""
    likely_tabled: dict[int, list[str]] = field(default_factory=dict)
    """Of these, the names that may be in the table beside the weight's."""
    storages: list[WeightStorage] = field(default_factory=list)
    contrary: list[str] = field(default_factory=list)
    """Modules that are quantized though the config says that they are not."""

    def model_of(self, stored: Manifest | None) -> Model:
        """Return the quantized model."""
        weights = {name: w for name, t in self.plain.tensors.items() if (w := self.weight(t))}
        stacks = dict(list_weight_stacks(self.plain, weights.keys()))
        if stored is not None:
            self.read(stored, weights, stacks)
        tensors: dict[str, ModelTensor] = {}
        encodings: dict[str, WeightEncoding] = {}
        for name, tensor in self.plain.tensors.items():
            weight = weights.get(name)
            if weight is None:
                tensors[name] = tensor
                continue
            parts = self.find_parts(weight)
            if parts is not None:
                encodings[name] = WeightEncoding(weight.module, weight.storage.decoder, parts)
                self.add_arrays(weight, parts, tensors)
            else:
                tensors[name] = tensor
            if weight.module.endswith(_KV_PROJECTION_NAMES):
                tensors |= {scale.name: scale for scale in self.cache_scales(weight)}
        fusions = {n: f for n, f in self.plain.fusions.items() if encodings.keys().isdisjoint(f.tensors)}
        fusions |= {stack.name: stack for stack in stack_arrays_alike(stacks, encodings)}
        if self.scheme.example and not encodings:
            raise UnsupportedError(
                f"config.json names each quantized module, such as {self.scheme.example}, and "
                f"{self.plain.architecture} has none of them",
                hint="the names may have another prefix, or the config may belong to another model",
            )
        warnings = self.plain.warnings
        if self.contrary:
            warnings += (f"config.json says that {format_first_few(self.contrary)} is not quantized, but it is",)
        return replace(
            self.plain,
            tensors=tensors,
            fusions=fusions,
            warnings=warnings,
            plain=self.plain,
            encodings=encodings,
        )

    def weight(self, tensor: ModelTensor) -> _QuantizableWeight | None:
        """Return the weight that `tensor` is; None if it cannot be quantized."""
        name = tensor.name
        unfit = len(tensor.shape) != _MATRIX_NDIM or tensor.free or tensor.ties or tensor.row.buffer
        if unfit or not name.endswith(_WEIGHT_SUFFIX):
            return None
        module = name[: -len(_WEIGHT_SUFFIX)]
        names = self.names(module)
        return _QuantizableWeight(tensor, module, names, self.scheme.storage(names))

    def read(
        self, stored: Manifest, weights: Mapping[str, _QuantizableWeight], stacks: Mapping[str, TensorFusion]
    ) -> None:
        """Find out what is stored of each weight."""
        modules = {weight.module: weight for weight in weights.values()}
        others: list[tuple[str, Tensor]] = []
        tabled = self.plain.tensors
        self.present.update(stored.tensors)
        for name in [name for name in stored.tensors if name not in tabled]:
            module, _, own = name.rpartition(".")
            weight = modules.get(module)
            if weight is None or own not in weight.storage.names:
                others.append((name, self.present.pop(name)))
            else:
                self.beside[own][weight.module] = self.present[name]
        if not others:
            return
        known = dict(self.plain.tensors)
        for weight in weights.values():
            known.update((f"{weight.module}.{name}", weight.tensor) for name in weight.storage.names)
            known.update((name, weight.tensor) for name in _list_cache_names(weight.module))
        for module, stack in stacks.items():
            one = weights[stack.tensors[0]]
            known.update((f"{module}.{name}", one.tensor) for name in one.storage.names)
        reader = replace(self.plain, tensors=known)
        for name, tensor in others:
            meant = find_canonical_name(reader, name)
            if meant is None:
                continue
            module, _, own = meant.rpartition(".")
            if module in stacks:
                self.present.update(list_stacked_parts(stacks[module], own, tensor))
            else:
                self.present[meant] = tensor

    def find_parts(self, weight: _QuantizableWeight) -> tuple[WeightArray, ...] | None:
        """Find the arrays of the weight, None if it is not quantized; nearly all are as another one was before."""
        key = (id(weight.storage), id(weight.tensor.row), id(weight.tensor.spec.cuts), weight.tensor.shape)
        last = self.last.get(key)
        if last is not None and self.is_stored_as(weight, last):
            if self.listed(weight):
                self.contrary.append(weight.module)
            return last.parts
        held = self.list_held(weight)
        if not self.is_quantized(weight, held):
            return None
        parts = self.parts(weight, held)
        coded = not held.keys() <= _PLAIN_NAMES or ("weight" in held and held["weight"].dtype.name not in FLOAT)
        if coded and not self.list_tabled_names(weight.storage):
            likely = self.list_likely_names(weight.storage)
            arrays = tuple((n, (held[n].shape, held[n].dtype) if n in held else None) for n in likely)
            self.last[key] = _StoredWeight(arrays, parts)
        return parts

    def is_stored_as(self, weight: _QuantizableWeight, other: _StoredWeight) -> bool:
        """Return whether the same is stored of a weight as of another one, in arrays alike."""
        present, beside, module = self.present, self.beside, weight.module
        for suffix, kind in other.arrays:
            if suffix == "weight":
                found = present.get(weight.tensor.name)
            else:
                found = beside[suffix].get(module) or present.get(f"{module}.{suffix}")
            if (found is None) != (kind is None):
                return False
            if found is not None and kind is not None and (found.shape != kind[0] or found.dtype is not kind[1]):
                return False
        return True

    def list_held(self, weight: _QuantizableWeight) -> dict[str, Tensor]:
        """List what is stored of a weight, by the names that follow the module's."""
        present, module, held = self.present, weight.module, dict[str, "Tensor"]()
        for name in self.list_likely_names(weight.storage) if present else ():
            found = present.get(weight.tensor.name if name == "weight" else f"{module}.{name}")
            if found is not None:
                held[name] = found
        return held

    def is_quantized(self, weight: _QuantizableWeight, held: Mapping[str, Tensor]) -> bool:
        """Return whether the weight is quantized: by what is stored, else by the config."""
        if not self.present:
            return not self.spared(weight)
        plain = held.get("weight") or self.present.get(weight.tensor.name)
        coded = plain is not None and plain.dtype.name not in FLOAT
        if coded or not held.keys() <= _PLAIN_NAMES:
            if self.listed(weight):
                self.contrary.append(weight.module)
            return True
        return plain is None and not self.spared(weight)

    def spared(self, weight: _QuantizableWeight) -> bool:
        """Return whether the config leaves the weight as it is, or nobody quantizes such weights."""
        if weight.tensor.row.dims.startswith(_SPARED_DIMS) or self.listed(weight):
            return True
        where = {kind for kind, _ in weight.tensor.spec.where}
        return where == {"first"} or (where == {"last"} and not self.scheme.heads)

    def listed(self, weight: _QuantizableWeight) -> bool:
        """Return whether the config expressly leaves the module as it is."""
        return self.scheme.spares(weight.names)

    def names(self, module: str) -> Names:
        """Return the module's name with the base model's prefix and without, today's and older ones."""
        prefix = f"{self.plain.prefix}."
        names: Names = (module, module[len(prefix) :]) if module.startswith(prefix) else (module,)
        if len(names) > 1 and len(self.plain.prefixes) > 1:  # a config may have another of the class's prefixes
            names += tuple(f"{each}.{names[1]}" for each in self.plain.prefixes if each != self.plain.prefix)
        older = list_older_names(self.plain, names[1] if len(names) > 1 else module) if self.plain.legacy else ()
        if not older:
            return names
        return (*names, *older, *(f"{prefix}{name}" for name in older if prefix != "."))

    def add_arrays(
        self, weight: _QuantizableWeight, parts: Sequence[WeightArray], tensors: dict[str, ModelTensor]
    ) -> None:
        """Add what is stored instead of the weight."""
        tensor, spec, module = weight.tensor, weight.tensor.spec, weight.module
        for part in parts:
            # Tensors that are cut alike share their specs in the table, and keep them meanwhile.
            key = (id(part.cuts), id(spec))
            own = self.specs.get(key)
            if own is None:
                own = self.specs[key] = self.build_spec(part, spec)
            if part.suffix == "weight":
                name = tensor.name
            else:
                stored = self.beside[part.suffix].get(module)
                name = stored.name if stored is not None else intern(f"{module}.{part.suffix}")
            optional = tensor.optional or part.optional
            tensors[name] = ModelTensor(
                name, part.shape, part.dtype, own, part.row, (), optional, tensor.spare, part.free
            )

    def build_spec(self, part: WeightArray, spec: PartitionSpec) -> PartitionSpec:
        """Build how an array of a weight is cut; those of all experts of a layer share a rule, as the weights do."""
        if spec.member is None:
            return PartitionSpec(part.cuts, spec.where)
        if spec.rule is spec:
            return PartitionSpec(part.cuts, spec.where, spec.member)
        key = (id(part.cuts), id(spec.rule))
        rule = self.specs.get(key)
        if rule is None:
            rule = self.specs[key] = PartitionSpec(part.cuts, spec.where, spec.rule.member)
        return build_member_spec(rule, spec.member)

    def parts(self, weight: _QuantizableWeight, held: Mapping[str, Tensor]) -> tuple[WeightArray, ...]:
        """Return the arrays of the weight, worked out once for all that are alike."""
        tensor, module, known = weight.tensor, weight.module, self.plain.tensors
        beside = self.list_tabled_names(weight.storage)
        tabled = [name for name in beside if f"{module}.{name}" in known] if beside else beside
        alike = tuple([(name, t.shape, t.dtype.name) for name, t in held.items()])
        # These objects outlive this one, and are the same for weights of one kind.
        key = (id(weight.storage), id(tensor.row), id(tensor.spec.cuts), tensor.shape, alike, *tabled)
        found = self.kinds.get(key)
        if found is None:
            listed = list_stored_arrays(tensor, weight.storage, held if self.known else None, tabled)
            alike_cuts = [self.cuts.setdefault(part.cuts, part.cuts) for part in listed]
            found = tuple([replace(part, cuts=cuts) for part, cuts in zip(listed, alike_cuts, strict=True)])
            self.kinds[key] = found
        return found

    def list_likely_names(self, storage: WeightStorage) -> list[str]:
        """List the names of a weight's arrays that anything ends with, stored or in the table: most end nothing."""
        found = self.likely.get(id(storage))
        if found is None:
            if not self.endings:
                self.tabled_endings.update([name.rpartition(".")[2] for name in self.plain.tensors])
                others = self.present.keys() - self.plain.tensors.keys()
                self.endings.update([name.rpartition(".")[2] for name in others], self.tabled_endings)
            found = self.likely[id(storage)] = [n for n in storage.names if n.rpartition(".")[2] in self.endings]
            self.storages.append(storage)
        return found

    def list_tabled_names(self, storage: WeightStorage) -> list[str]:
        """List those that anything in the table ends with, but for the weight itself: mostly none."""
        found = self.likely_tabled.get(id(storage))
        if found is None:
            likely = self.list_likely_names(storage)
            found = [n for n in likely if n != "weight" and n.rpartition(".")[2] in self.tabled_endings]
            self.likely_tabled[id(storage)] = found
        return found

    def cache_scales(self, weight: _QuantizableWeight) -> Iterator[ModelTensor]:
        """Yield the scales of the key/value cache that are stored beside or in this projection."""
        names = _list_cache_names(weight.module) if self.present else ()
        rows = _list_cache_names(weight.tensor.row.name.removesuffix(_WEIGHT_SUFFIX)) if names else ()
        for name, row in zip(names, rows, strict=True):
            stored = self.present.get(name)
            if stored is not None and stored.shape in ((), (1,)):
                spec = PartitionSpec(((),) * len(stored.shape), weight.tensor.spec.where)
                dims = " ".join("1" for _ in stored.shape)
                yield ModelTensor(name, stored.shape, BY_NAME[SCALE[0]], spec, Row(row, dims))


def _list_cache_names(module: str) -> tuple[str, ...]:
    if not module.endswith(_KV_PROJECTION_NAMES):
        return ()
    parent, _, own = module.rpartition(".")
    if own not in _KV_PROJECTION_NAMES:
        return ()
    return tuple(f"{where}.{scale}" for where in (parent, module) for scale in _CACHE_SCALES)
