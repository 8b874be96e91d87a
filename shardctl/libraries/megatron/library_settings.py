"""Says which of Megatron-LM's `args` are compared with a config of transformers or with other args."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.libraries.megatron.family_features import TRAITS
from shardctl.tensors.manifest import LibrarySettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.settings import Setting
    from shardctl.models import Model

_QUERY_GROUPS_ARGUMENT: Final = "num_query_groups"
_UNCOMPARED_ARGUMENTS: Final = frozenset(
    {
        *("add_position_embedding", "use_rotary_position_embeddings"),
        *("mtp_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern"),
    }
)
"""Args that older versions read instead of others, and those that count MTP layers, which may be left out."""


def build_library_settings(arguments: Mapping[str, Setting]) -> LibrarySettings | None:
    """Build the settings that are compared with a config or with other args; None if there are no args."""
    return LibrarySettings("the namespace args", arguments, _expect_arguments, partial=True) if arguments else None


def _expect_arguments(config: Mapping[str, object], model: Model) -> Mapping[str, Setting]:
    """Return the args that decide what a model computes; raises UnsupportedError as `convert_config_to_arguments`."""
    from shardctl.libraries.megatron.model_arguments import convert_config_to_arguments  # few commands need it

    if model.family not in TRAITS:
        return {}
    found = convert_config_to_arguments(config, model)
    grouped = found.get("group_query_attention") is not False
    return {
        key: value
        for key, value in found.items()
        if key not in _UNCOMPARED_ARGUMENTS and (grouped or key != _QUERY_GROUPS_ARGUMENT)
    }
