"""Finds which version of vLLM wrote a directory, and how it was started, from the names of the arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.dialect import LibraryDialect, format_rank_prefix
from shardctl.errors import UnsupportedError
from shardctl.libraries.vllm import arrays as vllm
from shardctl.libraries.vllm.rank import EXPERT_MAPS, SCALES
from shardctl.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.dialect import Fact
    from shardctl.manifest import Tensor

_EXPERTS: Final = (".w13_weight", ".w2_weight")
_ROUTED: Final = ".routed_experts"
_LATENT: Final = ".mla_attn.o_proj.weight"
_BIAS: Final = ".w2_bias"
_VOCABULARY: Final = ("lm_head.weight", "embed_out.weight", "embed_tokens.weight")


def recognise_dialect(arrays: Mapping[str, Tensor], ranks: int) -> LibraryDialect:
    """Return the dialect of `arrays` of so many ranks, by their names with ``rankR/`` before them.

    Raises UnsupportedError, by name, where some are as one version has them and others as another.
    """
    facts: dict[str, Fact] = {
        vllm.PROFILE: _choose_profile(arrays),
        vllm.LATENT: any(name.endswith(_LATENT) for name in arrays),
    }
    for fact, names in ((vllm.BIAS_TYPE, _BIAS), (vllm.VOCABULARY_TYPE, _VOCABULARY)):
        known = next((tensor for name, tensor in arrays.items() if name.endswith(names)), None)
        if known is not None:
            facts[fact] = known.dtype.name
    whole_experts = any(name.rpartition(".")[2] in EXPERT_MAPS for name in arrays)
    mesh = Mesh.of(tp=ranks, ep=ranks) if whole_experts else Mesh.of(tp=ranks)
    return LibraryDialect(vllm.NAME, mesh, {rank: format_rank_prefix(rank) for rank in range(ranks)}, facts=facts)


def _choose_profile(arrays: Mapping[str, Tensor]) -> str:
    """Choose the profile that has such names."""
    scales = {suffix for name in arrays for suffix in SCALES if name.endswith(f".{suffix}")}
    experts = [name for name in arrays if name.endswith(_EXPERTS)]
    routed = [name for name in experts if name.rpartition(".")[0].endswith(_ROUTED)]
    modern, older = vllm.PROFILES
    if len(scales) == len(SCALES) and len(routed) == len(experts):
        return modern
    if not scales and not routed:
        return older
    wanted = [suffix for suffix in SCALES if suffix not in scales]
    if wanted:
        has = f"{min(scales)} in attention" if scales else f"experts called {_strip_rank_prefix(routed[0])}"
        lacks = f"no {wanted[0]}"
    else:
        has, lacks = (
            f"{SCALES[0]} in attention",
            f"experts called {_strip_rank_prefix(next(n for n in experts if n not in routed))}",
        )
    raise UnsupportedError(
        f"the arrays belong to no known version of vLLM: {has}, but {lacks}. "
        f"vLLM {modern} has {', '.join(SCALES)} and experts{_ROUTED}.w13_weight, vLLM {older} has none of them",
        hint="save the model with one of these versions, or convert the model that vLLM was given",
    )


def _strip_rank_prefix(name: str) -> str:
    return name.partition("/")[2]
