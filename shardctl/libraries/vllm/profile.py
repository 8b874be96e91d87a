"""Finds which version of vLLM wrote a directory, and how it was started, from the names of the arrays."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.vllm import arrays as vllm
from shardctl.libraries.vllm.rank import EXPERT_MAPS, SCALES, SGLANG
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme, format_rank_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.tensors.manifest import Tensor
    from shardctl.tensors.naming_scheme import Fact

_EXPERT_WEIGHT_SUFFIXES: Final = (".w13_weight", ".w2_weight")
_ROUTED_EXPERTS_SUFFIX: Final = ".routed_experts"
_MLA_OUTPUT_SUFFIX: Final = ".mla_attn.o_proj.weight"
_EXPERT_BIAS_SUFFIX: Final = ".w2_bias"
_SGLANG_NAMES: Final = (".self_attn.fused_qkv_a_proj_with_mqa.", ".mlp.shared_expert", ".w13_weight_bias")
"""Parts of names that SGLang's classes have, and none of vLLM."""
_VOCABULARY_WEIGHT_SUFFIXES: Final = ("lm_head.weight", "embed_out.weight", "embed_tokens.weight", "embed_in.weight")
_NEWEST_PROFILE_MARKERS: Final = ("/language_model.", ".linear_attn.", ".layer_scalar", "/model.embed_in.weight")
"""Parts of names that only models have whose arrays are known of the newest profile alone."""
_GEMMA_NORMS: Final = 2
"""Of a layer of Gemma 1; later ones have four, and Cohere, without a head as well, one."""
_LAYER_PATTERN: Final = re.compile(r"rank([0-9]+)/(?:language_model\.)?[a-z_]+\.(?:layers|h)\.([0-9]+)\.")
_FUSED_EXPERTS_PATTERN: Final = re.compile(r"(.+?)\.experts(?:\.routed_experts)?\.w13_weight")
_ROUTER_MODULE_NAMES: Final = ("gate", "experts.gate", "experts._gate", "router", "router.proj")


def recognise_dialect(
    arrays: Mapping[str, Tensor], ranks: int, stages: int = 1
) -> tuple[NamingScheme, tuple[str, ...]]:
    """Return the dialect of `arrays` of so many ranks, by their names with ``rankR/`` before them.

    With it comes every profile that has such names; the dialect has the first of them. Raises UnsupportedError, by
    name, where some are as one version has them and others as another.
    """
    divided, mapped = _are_experts_divided(arrays), any(name.rpartition(".")[2] in EXPERT_MAPS for name in arrays)
    profiles = _list_profiles(arrays, divided=divided and not mapped, mapped=mapped)
    facts: dict[str, Fact] = {
        vllm.PROFILE: profiles[0],
        vllm.LATENT: any(name.endswith(_MLA_OUTPUT_SUFFIX) for name in arrays),
    }
    if profiles[0] == SGLANG:
        facts[vllm.SHARED_LAST] = any(here > there for here, there in _count_experts(arrays))
    for fact, names in ((vllm.BIAS_TYPE, _EXPERT_BIAS_SUFFIX), (vllm.VOCABULARY_TYPE, _VOCABULARY_WEIGHT_SUFFIXES)):
        known = next((tensor for name, tensor in arrays.items() if name.endswith(names)), None)
        if known is not None:
            facts[fact] = known.dtype.name
    tp = ranks // stages
    mesh = Mesh.of(pp=stages, tp=tp, ep=tp if divided or mapped else 1)
    prefixes = {rank: format_rank_prefix(rank) for rank in range(ranks)}
    return NamingScheme(vllm.NAME, mesh, prefixes, _count_layers(arrays, stages, tp), facts), profiles


def _count_layers(arrays: Mapping[str, Tensor], stages: int, tp: int) -> tuple[int, ...]:
    """Count the layers of every stage; of one stage alone, the config says how many there are."""
    if stages == 1:
        return ()
    found: list[set[str]] = [set() for _ in range(stages)]
    for match in filter(None, map(_LAYER_PATTERN.match, arrays)):
        found[int(match[1]) // tp].add(match[2])
    return tuple(map(len, found))


def _are_experts_divided(arrays: Mapping[str, Tensor]) -> bool:
    """Return whether some rank has fewer experts than its router, which every rank has whole."""
    return any(here < there for here, there in _count_experts(arrays))


def _count_experts(arrays: Mapping[str, Tensor]) -> Iterator[tuple[int, int]]:
    """Yield how many experts an array has, and how many its router."""
    for name, tensor in arrays.items():
        if (match := _FUSED_EXPERTS_PATTERN.fullmatch(name)) is not None:
            routers = (arrays.get(f"{match[1]}.{router}.weight") for router in _ROUTER_MODULE_NAMES)
            router = next(filter(None, routers), None)
            if router is not None and tensor.shape:
                yield tensor.shape[0], router.shape[0]


def _list_profiles(arrays: Mapping[str, Tensor], *, divided: bool, mapped: bool) -> tuple[str, ...]:
    """List the profiles that have such names; `divided` experts have no map, `mapped` ones have."""
    scales = {suffix for name in arrays for suffix in SCALES if name.endswith(f".{suffix}")}
    experts = [name for name in arrays if name.endswith(_EXPERT_WEIGHT_SUFFIXES)]
    routed = [name for name in experts if name.rpartition(".")[0].endswith(_ROUTED_EXPERTS_SUFFIX)]
    newest, middle, oldest = vllm.PROFILES
    if len(scales) == len(SCALES) and len(routed) == len(experts):
        if mapped or _has_only_older_names(arrays):
            return (middle,)
        newer = divided or any(part in name for name in arrays for part in _NEWEST_PROFILE_MARKERS)
        return (newest,) if newer else (newest, middle)
    if not scales and not routed:
        return (SGLANG,) if any(part in name for name in arrays for part in _SGLANG_NAMES) else (oldest,)
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
        f"the arrays belong to no known version of vLLM: {has}, but {lacks}. vLLM {middle} and {newest} have"
        f" {', '.join(SCALES)} and experts{_ROUTED_EXPERTS_SUFFIX}.w13_weight, vLLM {oldest} has none of them",
        hint="save the model with one of these versions, or convert the model that vLLM was given",
    )


def _has_only_older_names(arrays: Mapping[str, Tensor]) -> bool:
    """Return whether names are those of GPT-NeoX or Gemma 1 before 0.32: the latter has no head, and two norms."""
    names = {_strip_rank_prefix(name) for name in arrays}
    headless = "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    norms = sum(name.startswith("model.layers.0.") and name.endswith("layernorm.weight") for name in names)
    return (headless and norms == _GEMMA_NORMS) or any(name.startswith("gpt_neox.") for name in names)


def _strip_rank_prefix(name: str) -> str:
    return name.partition("/")[2]
