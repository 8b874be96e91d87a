"""Describes a quantised model: instead of each quantised weight the arrays that are stored of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from shardctl.dtype import BY_NAME
from shardctl.errors import SourceError, UnsupportedError
from shardctl.models.binding import listed, meaning
from shardctl.models.config import Config
from shardctl.models.model import ModelTensor
from shardctl.models.quantisation.awq import AWQ
from shardctl.models.quantisation.bitsandbytes import BITSANDBYTES
from shardctl.models.quantisation.compressed_tensors import COMPRESSED_TENSORS
from shardctl.models.quantisation.following import blocks, following, refusing
from shardctl.models.quantisation.fp8 import FBGEMM, FINE_GRAINED
from shardctl.models.quantisation.gptq import GPTQ
from shardctl.models.quantisation.modelopt import MODELOPT
from shardctl.models.quantisation.storage import FLOAT, SCALE, Along, Method
from shardctl.placement import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.manifest import Manifest, Tensor
    from shardctl.models.family import Row
    from shardctl.models.model import Model
    from shardctl.models.quantisation.storage import Array, Form, Names, Scheme, Storage

METHODS: Final[tuple[Method, ...]] = (
    AWQ,
    BITSANDBYTES,
    COMPRESSED_TENSORS,
    FBGEMM,
    FINE_GRAINED,
    GPTQ,
    MODELOPT,
    Method(("mxfp4",), lambda _config: None),  # gpt-oss has its blocks and scales in its own table
)
"""Every method; to add one, write its file and name it here."""
_WEIGHT: Final = ".weight"
_MATRIX: Final = 2
_TRANSPOSED: Final = ("gpt2",)
"""Families whose linear weights are `[in, out]`."""
_CACHE_SCALES: Final = ("k_scale", "v_scale", "q_scale", "kv_scale")
"""Scales of the key/value cache, one a layer, which writers put beside the projections or in them."""


def quantisation_config(config: Mapping[str, object]) -> Config | None:
    """The `quantization_config` of a `config.json` or of its text half; None if the model is not quantised."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            settings = values.get(key)
            if isinstance(settings, dict):
                return Config(settings)
    return None


def quantise(model: Model, config: Mapping[str, object], stored: Manifest | None = None) -> Model:
    """`model` as its `quantization_config` says it is stored: the arrays of each quantised weight instead of it.

    Which weights those are, the config says only in part, for it also depends on the code of the class (routers and
    heads are spared unsaid). So where `stored` has a weight in one form or the other, that decides, and the config
    only where it has none.
    Raises UnsupportedError for a method that is not known, SourceError for settings that make no sense and for an
    array that is stored as another type than its method has.
    """
    settings = quantisation_config(config)
    if settings is None:
        return model
    name = settings.text("quant_method", "compressed-tensors" if "config_groups" in settings.values else "")
    method = next((m for m in METHODS if name.lower() in m.names), None)
    if method is None:
        raise UnsupportedError(
            f"quantised weights by {name!r} are not known" if name else "quantization_config names no quant_method",
            hint="on one device they are converted as they are; for a mesh, say how they are cut with --rules FILE",
        )
    scheme = method.read(settings)
    if scheme is None:
        return model
    if model.family in _TRANSPOSED:
        raise UnsupportedError(f"quantised weights of {model.architecture}, which are [in, out], are not known")
    return _Quantiser(model, scheme, name).model_of(stored)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight that may be quantised."""

    tensor: ModelTensor
    module: str
    storage: Storage

    def names(self, array: Array) -> Iterator[str]:
        """The names that an array of this weight may have."""
        return (f"{self.module}.{name}" for name in array.name.split())


@dataclass(slots=True)
class _Quantiser:
    """One model, while its weights are replaced."""

    plain: Model
    scheme: Scheme
    method: str
    present: dict[str, Tensor] = field(default_factory=dict)
    """What is stored, by canonical name."""
    specs: dict[tuple[object, ...], Spec] = field(default_factory=dict)
    contrary: list[str] = field(default_factory=list)

    def model_of(self, stored: Manifest | None) -> Model:
        """The quantised model."""
        weights = {t.name: w for t in self.plain.tensors.values() if (w := self.weight(t))}
        if stored is not None:
            self.read(stored, weights)
        tensors: dict[str, ModelTensor] = {}
        replaced: set[str] = set()
        for tensor in self.plain.tensors.values():
            weight = weights.get(tensor.name)
            if weight is None or not self.quantised(weight):
                tensors.setdefault(tensor.name, tensor)
            else:
                replaced.add(tensor.name)
                tensors |= {array.name: array for array in self.arrays(weight, stored is not None)}
            if weight is not None:
                tensors |= {scale.name: scale for scale in self.cache_scales(weight)}
        fusions = {n: f for n, f in self.plain.fusions.items() if replaced.isdisjoint(f.tensors)}
        warnings = self.plain.warnings
        if self.contrary:
            warnings += (f"config.json says that {listed(self.contrary)} is not quantised, but it is",)
        return replace(self.plain, tensors=tensors, fusions=fusions, warnings=warnings)

    def weight(self, tensor: ModelTensor) -> _Weight | None:
        """The weight that `tensor` is; None if it cannot be quantised."""
        unfit = len(tensor.shape) != _MATRIX or tensor.free or tensor.ties or tensor.row.buffer
        if unfit or not tensor.name.endswith(_WEIGHT):
            return None
        module = tensor.name.removesuffix(_WEIGHT)
        return _Weight(tensor, module, self.scheme.storage(self.names(module)))

    def read(self, stored: Manifest, weights: Mapping[str, _Weight]) -> None:
        """Find out what is stored of each weight."""
        known = {name: t for w in weights.values() for name, t in self.possible(w)}
        reader = replace(self.plain, tensors={**self.plain.tensors, **known})
        for name, tensor in stored.tensors.items():
            meant = meaning(reader, name)
            if meant is not None:
                self.present[meant] = tensor

    def possible(self, weight: _Weight) -> Iterator[tuple[str, ModelTensor]]:
        """Every name that an array of the weight may have."""
        for array in weight.storage.arrays:
            yield from ((name, weight.tensor) for name in weight.names(array))
        yield from ((name, weight.tensor) for name in _cache_names(weight.module))

    def quantised(self, weight: _Weight) -> bool:
        """Whether the weight is quantised: by what is stored, else by the config."""
        said = not self.spared(weight)
        plain = self.present.get(weight.tensor.name)
        own = (name for array in weight.storage.arrays for name in weight.names(array))
        companions = any(name in self.present for name in own if name.rpartition(".")[2] not in ("weight", "bias"))
        if companions or (plain is not None and plain.dtype.name not in FLOAT):
            if not said and self.listed(weight.module):
                self.contrary.append(weight.module)
            return True
        return said and plain is None

    def spared(self, weight: _Weight) -> bool:
        """Whether the config leaves the weight as it is, or nobody quantises such weights."""
        row, where = weight.tensor.row, {kind for kind, _ in weight.tensor.spec.where}
        if self.listed(weight.module) or row.dims.startswith("experts "):
            return True
        return where == {"first"} or (where == {"last"} and not self.scheme.heads)

    def listed(self, module: str) -> bool:
        """Whether the config expressly leaves the module as it is."""
        return self.scheme.spares(self.names(module))

    def names(self, module: str) -> Names:
        """The module's name with the base model's prefix, and without."""
        prefix = f"{self.plain.prefix}."
        return (module, module.removeprefix(prefix)) if module.startswith(prefix) else (module,)

    def arrays(self, weight: _Weight, known: bool) -> Iterator[ModelTensor]:  # noqa: FBT001 - one caller
        """What is stored instead of the weight; optional arrays only if they are there, where that is `known`."""
        chosen: list[tuple[Array, str, Form]] = []
        for array in weight.storage.arrays:
            names = list(weight.names(array))
            name = next((n for n in names if n in self.present), names[0])
            table = name in self.plain.tensors and name != weight.tensor.name  # a bias that the table has
            if array.optional and (table or (known and name not in self.present)):
                continue
            chosen.append((array, name, self.form(weight, array, name)))
        together = blocks(form for _, _, form in chosen)
        for array, name, form in chosen:
            yield self.array(weight, array, name, form, together)

    def form(self, weight: _Weight, array: Array, name: str) -> Form:
        """The form of an array: the one that is stored, else the usual one."""
        stored = self.present.get(name)
        if stored is not None:
            if array.dtypes and stored.dtype.name not in array.dtypes:
                raise SourceError(
                    f"{stored.name} is {stored.dtype}, but {self.method} weights have {array.dtypes[0]} there",
                    hint="quantization_config may belong to another checkpoint, or a writer cast what is no number",
                )
            for form in array.forms:
                if len(form) == len(stored.shape) and _shape(form, weight.tensor.shape, stored) == stored.shape:
                    return form
        return array.forms[0]

    def array(self, weight: _Weight, array: Array, name: str, form: Form, together: Mapping[int, int]) -> ModelTensor:
        """One array of a weight."""
        tensor = weight.tensor
        shape = _shape(form, tensor.shape, self.present.get(name))
        key = (id(tensor.spec), tensor.shape, form, shape, tuple(together.items()), id(weight.storage))
        spec = self.specs.get(key)
        if spec is None:
            codes = array is weight.storage.arrays[0]
            if weight.storage.whole:
                spec = Spec(((),) * len(shape), tensor.spec.where, tensor.spec.member)
                spec = refusing(tensor.spec, shape, weight.storage.whole) if codes else spec
            else:
                spec = following(tensor.spec, tensor.shape, form, together, weight.storage.uncut)
            self.specs[key] = spec
        return replace(
            tensor,
            name=name,
            shape=shape,
            dtype=BY_NAME[array.dtypes[0]] if array.dtypes else tensor.dtype,
            spec=spec,
            row=_row(tensor.row, name.removeprefix(f"{weight.module}."), form),
            optional=tensor.optional or (array.optional and name not in self.present),
            free=tuple(dim for dim, extent in enumerate(form) if extent is None),
        )

    def cache_scales(self, weight: _Weight) -> Iterator[ModelTensor]:
        """The scales of the key/value cache that are stored beside or in this projection."""
        for name in _cache_names(weight.module):
            stored = self.present.get(name)
            if stored is not None and stored.shape in ((), (1,)):
                spec = Spec(((),) * len(stored.shape), weight.tensor.spec.where)
                yield ModelTensor(name, stored.shape, BY_NAME[SCALE[0]], spec, replace(weight.tensor.row, name=name))


def _cache_names(module: str) -> tuple[str, ...]:
    parent, _, own = module.rpartition(".")
    if own not in ("k_proj", "v_proj", "qkv_proj", "kv_b_proj"):
        return ()
    return tuple(f"{where}.{scale}" for where in (parent, module) for scale in _CACHE_SCALES)


def _shape(form: Form, weight: tuple[int, ...], stored: Tensor | None) -> tuple[int, ...]:
    """The extents of a form; what it leaves open is as stored, or 1."""
    known = stored.shape if stored is not None and len(stored.shape) == len(form) else (1,) * len(form)
    return tuple(
        extent.extent(weight[extent.dim]) if isinstance(extent, Along) else known[dim] if extent is None else extent
        for dim, extent in enumerate(form)
    )


def _row(row: Row, name: str, form: Form) -> Row:
    """The row of an array, for the table of rules: its dims are those of the weight, divided."""
    words = row.dims.split()
    dims = (
        f"{words[extent.dim]}{f'/{extent.block}' if extent.block > 1 else ''}"
        if isinstance(extent, Along) and words
        else "*"
        if extent is None
        else str(extent)
        for extent in form
    )
    return replace(row, name=f"{row.name.removesuffix('weight')}{name}", dims=" ".join(dims))
