"""Describes a model that no table knows, as far as none is needed: how fsdp cuts its tensors, and which stage has each.

fsdp cuts dim 0 of every tensor, whatever it means, and names number the layers (`layer_names.py`). What tp and ep would
need, which dims are heads or experts, nothing here guesses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import format_first_few
from shardctl.base.value import value_class
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.family import Row
from shardctl.models.tables.layer_names import LayerPlaces, count_layers
from shardctl.models.tables.model import Model, ModelTensor
from shardctl.models.tables.name_pattern import list_name_patterns
from shardctl.models.tables.table import FSDP
from shardctl.tensors.mesh import EXPERT_AXES
from shardctl.tensors.placement import PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.placement import AxisPartition, Where

NEEDING_TABLE: Final = ("tp", *EXPERT_AXES)
"""The mesh axes that only a table, or rules, say how to cut with; of the others a name and a shape say enough."""
_VOCAB_SIZE_KEY: Final = "vocab_size"
_TIED_EMBEDDINGS_KEY: Final = "tie_word_embeddings"
_LM_HEAD_CLASS_SUFFIXES: Final = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How classes with a head end; a config of theirs that is silent ties it, as `PreTrainedConfig` long assumed."""
_SHARED_EMBEDDING_MODULE: Final = "shared"
"""What encoder-decoders call the embedding of both."""
_MATRIX_NDIM: Final = 2


@value_class
class UntabledModel:
    """A model known by names and shapes alone."""

    model: Model
    """Its tensors, cut by fsdp alone; canonical names are the stored ones."""
    places: LayerPlaces
    title: str
    """What it is called in messages."""

    def places_on(self, mesh: Mesh) -> bool:
        """Return whether no axis of the mesh needs a table."""
        return all(mesh.degree(axis) == 1 for axis in NEEDING_TABLE)

    def notes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return how its tensors were placed on a mesh, in a line, and what its names leave open."""
        line = (
            f"no table for {self.title}: tensors are {'cut along dim 0' if mesh.degree('fsdp') > 1 else 'placed whole'}"
        )
        if not self.places_on(mesh):
            line = f"no table for {self.title}"  # how its tensors are cut is said by who derived it
        if mesh.degree("pp") == 1:
            return (line,) if self.places_on(mesh) else ()
        names = self.model.tensors
        repeated = [name for name, tensor in names.items() if len(tensor.spec.where) > 1]
        undecided = list_name_patterns(name for name in names if self.places.is_undecided(name))
        return (
            f"{line}; layers are counted by names: {self.places}",
            *([f"held by every stage that computes with it: {format_first_few(repeated)}"] if repeated else ()),
            *(
                [f"assumed to precede the layers, because names do not say: {format_first_few(undecided)}"]
                if undecided
                else ()
            ),
        )


def build_untabled_model(config: Mapping[str, object] | None, stored: Manifest) -> UntabledModel:
    """Build the model of a checkpoint that no table knows; `config` may say that an embedding is the head, too."""
    read = ModelConfig(config or {})
    places = _count_stored_layers(stored)
    head = _find_tied_head(read, stored, places)
    tensors = {}
    for name, tensor in stored.tensors.items():
        where = [places.find_stage(each) for each in (name, *tensor.ties)]
        if _SHARED_EMBEDDING_MODULE in name.split("."):
            where += [("layer", tower.first) for tower in places.towers if "decoder" in tower.patterns[0].split(".")]
        if name == head:
            where.append(("last", 0))
        tensors[name] = place_tensor(tensor, tuple(dict.fromkeys(where)))
    architecture = read.architecture()
    title = architecture or read.text("model_type", "") or "a model without config.json"
    return UntabledModel(Model("", architecture, places.layers, tensors), places, title)


def order_ties(stored: Manifest) -> Manifest:
    """Return `stored`, each tied tensor called by the name that comes first in the order of computation.

    The stages that hold it share out its names in that order.
    """
    if not any(tensor.ties for tensor in stored.tensors.values()):
        return stored
    places = _count_stored_layers(stored)
    order = ("first", "layer", "last")

    def rank(name: str) -> tuple[int, int]:
        kind, layer = places.find_stage(name)
        return order.index(kind), layer

    renamed = {}
    for tensor in stored.tensors.values():
        name, *ties = sorted((tensor.name, *tensor.ties), key=rank)
        renamed[name] = replace(tensor, name=name, ties=tuple(ties)) if ties else tensor
    return replace(stored, tensors=renamed)


def place_tensor(tensor: Tensor, where: tuple[tuple[Where, int], ...]) -> ModelTensor:
    """Return a tensor whose dim 0 fsdp cuts."""
    row = Row(list_name_patterns([tensor.name])[0], "")
    return ModelTensor(tensor.name, tensor.shape, tensor.dtype, _build_spec(len(tensor.shape), where), row, tensor.ties)


@lru_cache(maxsize=4096)
def _build_spec(dims: int, where: tuple[tuple[Where, int], ...]) -> PartitionSpec:
    """Build the spec that tensors of as many dims on the same stages share."""
    return PartitionSpec(_build_cuts(dims), where)


@cache
def _build_cuts(dims: int) -> tuple[tuple[AxisPartition, ...], ...]:
    """Build the cuts that tensors of as many dims share; tensors that are cut alike are known by this object."""
    return ((FSDP,), *((),) * (dims - 1)) if dims else ()


def _count_stored_layers(stored: Manifest) -> LayerPlaces:
    return count_layers({name: t.shape for t in stored.tensors.values() for name in (t.name, *t.ties)})


def _find_tied_head(config: ModelConfig, stored: Manifest, places: LayerPlaces) -> str:
    """Find the embedding that is the head, too, because the config ties it and no head is stored; empty if none is."""
    inner = [value for value in config.values.values() if isinstance(value, dict)]
    outer, said = (
        config.values.get(_TIED_EMBEDDINGS_KEY),
        [values[_TIED_EMBEDDINGS_KEY] for values in inner if values.get(_TIED_EMBEDDINGS_KEY) is not None],
    )
    if outer is None:
        outer = any(said) if said else config.architecture().endswith(_LM_HEAD_CLASS_SUFFIXES)
    if not outer:
        return ""
    rows = {values[_VOCAB_SIZE_KEY] for values in (config.values, *inner) if values.get(_VOCAB_SIZE_KEY) is not None}
    tables = [t for t in stored.tensors.values() if len(t.shape) == _MATRIX_NDIM and t.shape[0] in rows and not t.ties]
    if any(places.find_stage(table.name) == ("last", 0) for table in tables):
        return ""
    known = [table.name for table in tables if table.name not in places.inside]
    return known[0] if len(known) == 1 else ""
