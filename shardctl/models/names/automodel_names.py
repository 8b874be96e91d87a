"""Describes the arrays into which NeMo Automodel groups the experts of a layer, as its optimizer's states have them.

Its weights are saved under the names of the Hub, which its adapters make of the arrays; the states are not. It has
`gate_and_up_projs` `[expert, in, 2 * out]`, all gates before all up projections, and `down_projs` `[expert, in, out]`
(Automodel 0.7.0, `components/moe/state_dict_mixin.py`). Those of gpt-oss are the Hub's arrays under these names.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.models.tables.fusion import FusionPlaces, TensorFusion, join_tensors
from shardctl.tensors.views import ArrayView

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardctl.models.tables.model import Model

AUTOMODEL: Final = "automodel"
_SUPPORTED_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")
"""Families whose parameters it calls as transformers does, but for grouped experts."""
GROUPED_NOTE: Final = "experts grouped by NeMo Automodel; their states were taken apart"
_GROUPED_EXPERT_ARRAYS: Final = {
    "gate_proj": "gate_and_up_projs",
    "up_proj": "gate_and_up_projs",
    "down_proj": "down_projs",
}
_EXPERT_WEIGHT_PATTERN: Final = re.compile(rf"(.+\.experts)\.([0-9]+)\.({'|'.join(_GROUPED_EXPERT_ARRAYS)})\.weight")
_GPT_OSS_SUFFIX_RENAMES: Final = {
    "mlp.experts.gate_up_proj": "mlp.experts.gate_and_up_projs",
    "mlp.experts.down_proj": "mlp.experts.down_projs",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.bias",
}
"""How names of gpt-oss end on the Hub and there (`components/models/gpt_oss/state_dict_adapter.py`)."""


def build_saved_arrays(model: Model, there: Collection[str]) -> dict[str, TensorFusion]:
    """Build the arrays of weights that Automodel saves, which are the tensors of the Hub; of a tie the first.

    What besides the model's own is `there`, such as layers that predict, has no array. Raises UnsupportedError for a
    family whose names in Automodel were not compared.
    """
    del there
    if model.family not in _SUPPORTED_FAMILIES:
        raise UnsupportedError(
            f"Automodel's names for {model.architecture or 'this model'} are not known here",
            hint=f"known are {', '.join(_SUPPORTED_FAMILIES)}; --to hf gives weights from which it begins",
        )
    return {each.name: TensorFusion(each.name, (each.name,), join_tensors((each.shape,))) for each in model.own()}


def group_parameters(model: Model, arrays: Mapping[str, TensorFusion]) -> dict[str, TensorFusion]:
    """Return the arrays that Automodel trains, whose optimizer states are saved: `arrays`, with experts grouped."""
    grouped = build_grouped_arrays({name: model.tensors[name].shape for name in arrays})
    held = {name for fusion in grouped.values() for name in fusion.tensors}
    return {**{name: fusion for name, fusion in arrays.items() if name not in held}, **grouped}


def names_groups(keys: Iterable[str]) -> bool:
    """Return whether some keys of an optimizer are those of such arrays."""
    return any(".experts.gate_and_up_projs" in key or ".experts.down_projs" in key for key in keys)


def build_grouped_arrays(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorFusion]:
    """Build the arrays that hold the experts of some tensors, by name; `shapes` are those of all tensors.

    An array some of whose experts have another shape is left out.
    """
    groups: dict[str, dict[tuple[int, str], str]] = {}
    arrays = {}
    for name, shape in shapes.items():
        expert = _EXPERT_WEIGHT_PATTERN.fullmatch(name)
        if expert is not None:
            groups.setdefault(f"{expert[1]}.{_GROUPED_EXPERT_ARRAYS[expert[3]]}", {})[int(expert[2]), expert[3]] = name
        elif (end := next((end for end in _GPT_OSS_SUFFIX_RENAMES if name.endswith(f".{end}")), None)) is not None:
            own = name.removesuffix(end) + _GPT_OSS_SUFFIX_RENAMES[end]
            arrays[own] = TensorFusion(own, (name,), join_tensors((shape,)))
    for array, members in groups.items():
        names = tuple(members[at] for at in sorted(members))
        kinds, count = len({part for _, part in members}), len({number for number, _ in members})
        if len({shapes[name] for name in names}) == 1 and len(names) == kinds * count:
            arrays[array] = TensorFusion(array, names, _group_experts(shapes[names[0]], kinds, count))
    return arrays


@cache
def _group_experts(shape: tuple[int, ...], kinds: int, count: int) -> FusionPlaces:
    """Return `count` groups of `kinds` matrices of `shape`, stacked; those of a group transposed and side by side."""
    views = [ArrayView((group, 0, kind * shape[0]), (2, 1)) for group in range(count) for kind in range(kinds)]
    return FusionPlaces.of(views, (shape,) * len(views))
