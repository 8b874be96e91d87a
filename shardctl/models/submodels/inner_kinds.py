"""Knows text models inside others whose layers are those of a family, and that no inner config names as it.

They have a `model_type` of their own, or no config of their own: then the class around them says what they may be.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from shardctl.models.families import load_families, load_family
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.family import Family

ROPES: Final = ("rope_parameters", "rope_scaling")
"""Keys of the settings of a rotary embedding."""
_HEAD_DIM_KEY: Final = "head_dim"


@cache
def _list_inner_kinds() -> Mapping[str, tuple[str, Mapping[str, object]]]:
    """List, by the `model_type` of a text model inside another, the family by itself and what its class assumes."""
    return {kind: (family.name, assumed) for family in load_families() for kind, assumed in family.inner_kinds.items()}


def list_flat_families(config: Mapping[str, object]) -> list[Family]:
    """List the families of which the model inside may be, where its keys stand in the outer config.

    >>> [family.name for family in list_flat_families({"architectures": ["DotsOCRForCausalLM"]})]
    ['qwen2']
    """
    architecture = ModelConfig(config).architecture()
    return [family for family in load_families() if architecture in family.outer_classes] if architecture else []


def find_inner_family(inner: Mapping[str, object]) -> Family | None:
    """Find the family of a text model inside another, by its `model_type`, else by its class; None for no text model.

    DeepSeek-OCR and the smaller DeepSeek-VL2 call theirs V2, and say that its attention is not latent.

    >>> find_inner_family({"architectures": ["DeepseekV2ForCausalLM"], "use_mla": False}).name
    'deepseek'
    """
    family = load_family(str(inner.get("model_type", ""))) or load_family(name_plain_kind(inner))
    named = "" if family is not None else ModelConfig(inner).architecture()
    family = family or next((each for each in load_families() if named and named in each.classes), None)
    if family is not None and family.without_latents and inner.get("use_mla") is False:
        return load_family(family.without_latents)
    return family


def name_plain_kind(inner: Mapping[str, object]) -> str:
    """Name the `model_type` that the text model of an inner config has by itself; empty for none.

    >>> name_plain_kind({"model_type": "qwen2_vl_text"})
    'qwen2'
    """
    kind = str(inner.get("model_type") or "")
    return _list_inner_kinds().get(kind, (kind,))[0]


def assume_inner_values(inner: Mapping[str, object]) -> Mapping[str, object]:
    """Return an inner config with what its class assumes otherwise than that of the text model by itself.

    >>> assume_inner_values({"model_type": "qwen2_vl_text"})["rms_norm_eps"]
    1e-05
    """
    _, assumed = _list_inner_kinds().get(str(inner.get("model_type") or ""), ("", {}))
    turned = [key for rope in ROPES if isinstance(settings := inner.get(rope), dict) for key in settings]
    values = {**{key: value for key, value in assumed.items() if key not in turned}, **inner}
    if values.get(_HEAD_DIM_KEY, 0) is None:
        values[_HEAD_DIM_KEY] = ModelConfig(values).divided("hidden_size", "num_attention_heads")
    return values
