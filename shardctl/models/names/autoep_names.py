"""Translates the arrays that DeepSpeed's AutoEP makes of a model's experts, and the names of its routers.

A layer's experts are three arrays there: `w1` has the gates, `w3` the up projections, `w2` the down projections, each
`[expert, out, in]`; its router is `router.gate` (DeepSpeed 0.19.8, `module_inject/auto_ep_layer.py` and
`moe/ep_experts.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.names.binding import find_canonical_name
from shardctl.models.names.trainer_arrays import bind_arrays
from shardctl.models.tables.fusion import TensorFusion, join_tensors, stack_tensors

if TYPE_CHECKING:
    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest

_FIRST: Final = ".experts.w1"
"""How the name of a layer's first array ends."""
_SOURCES: Final = {
    "w1": ("gate_up_proj", 0, 2),
    "w3": ("gate_up_proj", 1, 2),
    "w2": ("down_proj", 0, 1),
}
"""By array: that of transformers, and which of how many parts of each expert it has."""
_NOTE: Final = "the experts and routers of DeepSpeed's AutoEP; read as those of transformers"


def bind_autoep_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` with experts and routers under the model's names, if it has such arrays; else as it is."""
    arrays: dict[str, TensorFusion] = {}
    for name in stored.tensors:
        if name.endswith(_FIRST):
            arrays |= _build_layer(model, name.removesuffix(_FIRST))
    return bind_arrays(stored, arrays, _NOTE) if arrays else stored


def _build_layer(model: Model, prefix: str) -> dict[str, TensorFusion]:
    """Build the arrays of one layer; none if the model has no such layer."""
    found = {}
    for array, (theirs, part, parts) in _SOURCES.items():
        fusion = model.fusions.get(find_canonical_name(model, f"{prefix}.experts.{theirs}") or "")
        if fusion is None:
            return {}
        names = fusion.tensors[part::parts]
        places = stack_tensors((model.tensors[names[0]].shape,), len(names))
        found[f"{prefix}.experts.{array}"] = TensorFusion(f"{prefix}.experts.{array}", names, places)
    for kind in ("weight", "bias"):
        router = find_canonical_name(model, f"{prefix}.gate.{kind}")
        if router is not None:
            (router,) = model.fusions[router].tensors if router in model.fusions else (router,)
            name = f"{prefix}.router.gate.{kind}"
            found[name] = TensorFusion(name, (router,), join_tensors((model.tensors[router].shape,)))
    return found
