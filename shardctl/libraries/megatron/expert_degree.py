"""Finds over how many ranks each expert was divided, where the args of Megatron-LM do not say it.

Args from before core 0.9, and those that a loader copied in part, have no `expert_tensor_parallel_size`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.libraries.megatron.rank_file import MegatronRankFile

_SECOND: Final = re.compile(r".*\.mlp\.experts\.local_experts\.0\.linear_fc2\.weight")
"""An expert's projection back, of which a rank has columns: ``[hidden, inner / etp]``."""
_GROUPED: Final = re.compile(r".*\.mlp\.experts\.weight2")
"""The same of all of a rank's experts, one behind another: ``[experts / ep * inner / etp, hidden]``."""


def infer_expert_degree(files: Iterable[MegatronRankFile], ep: int) -> int | None:
    """Infer etp from the shapes of experts; None where the args do not say how large an expert is.

    Raises SourceError for an expert whose part is no whole fraction of what the args say.
    """
    for each in files:
        said = each.arguments
        whole, experts = said.get("moe_ffn_hidden_size") or said.get("ffn_hidden_size"), said.get("num_experts")
        if not isinstance(whole, int) or not isinstance(experts, int):
            continue
        for name, view in each.views.items():
            if _SECOND.fullmatch(name):
                part = view.shape[1]
            elif _GROUPED.fullmatch(name):
                part = view.shape[0] // max(experts // ep, 1)
            else:
                continue
            if part < 1 or whole % part:
                raise SourceError(
                    f"{each.path}: {name} {list(view.shape)} is no part of experts of {whole}, as the args say",
                    hint="give the number of ranks that divide each expert with --source-etp N",
                )
            return whole // part
    return None
