"""Plans directories that vLLM loads with ``--load-format sharded_state``.

Files are cut as `ShardedStateLoader.save_model` cuts them, by default at the 5 GiB of vLLM's example
(`examples/features/sharded_state/save_sharded_state_offline.py`), which also carries along whatever is no weight.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, UsageError
from shardctl.base.workers import split_into_batches
from shardctl.libraries.arrays.composing import build_manifest, compose_arrays
from shardctl.libraries.safetensors.packing import FileBuilder
from shardctl.libraries.vllm.arrays import (
    BIAS_TYPE,
    LATENT,
    NAME,
    PROFILE,
    PROFILES,
    SCHEMA,
    SHARED_LAST,
    VOCABULARY_TYPE,
    split_into_stages,
)
from shardctl.libraries.vllm.rank import SGLANG
from shardctl.libraries.writer import Layout
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme, format_rank_prefix

if TYPE_CHECKING:
    from shardctl.libraries.writer import PackRequest
    from shardctl.models import Model
    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.naming_scheme import Fact

OPTION: Final = "vllm_profile"
_VLLM_VERSION_PATTERN: Final = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.[0-9a-z.+]{1,40})?")
_UNUSED_KV_PATTERN: Final = re.compile(r"\.self_attn\.(k_proj|v_proj|k_norm)\.")
_USUAL_PART: Final = 5 << 30
_EXPERT_BIAS_SUFFIX: Final = ".down_proj_bias"
_FUSED_SHARED_EXPERT_MODEL: Final = "DeepseekV3ForCausalLM", 256
"""The class and the number of experts for which SGLang puts the expert that all tokens share behind the others.

`shared_experts_fusion_disable_reason` of its deepseek_v2.py; it asks for a GPU of NVIDIA from capability 8.0 on, too.
"""
_SAID_LAST: Final = (
    "the expert that all tokens share lies behind the 256 others, as in SGLang on a GPU of NVIDIA; SGLang with "
    "--disable-shared-experts-fusion does not load the result"
)
_VOCABULARY_WEIGHT_SUFFIXES: Final = ("embed_tokens.weight", "embed_in.weight", "word_embeddings.weight", "wte.weight")


def pack_vllm(order: PackRequest) -> Manifest:
    """Return the files of every tp rank.

    Raises as `Layout.pack` says.
    """
    SCHEMA.check(order.model)
    profile = choose_profile(order.options.get(OPTION, PROFILES[0]))
    mesh = _build_mesh(order, profile)
    stages = split_into_stages(order.model.layers, mesh.degree("pp"))
    if order.stages not in (None, stages):
        raise PartitionError(
            f"vLLM divides layers over stages by itself, as {','.join(map(str, stages))}", hint="leave --stages out"
        )
    facts: dict[str, Fact] = {PROFILE: profile, LATENT: True}
    unused, said = _list_unused_keys(order)
    if profile == SGLANG and _has_fusable_expert(order.model):
        facts[SHARED_LAST] = True
        said.append(_SAID_LAST)
    for fact, names in ((BIAS_TYPE, _EXPERT_BIAS_SUFFIX), (VOCABULARY_TYPE, _VOCABULARY_WEIGHT_SUFFIXES)):
        known = next((dtype for name, dtype in order.dtypes.items() if name.endswith(names)), None)
        if known is not None:
            facts[fact] = known.name
    ranks = {rank: format_rank_prefix(rank) for rank in range(mesh.world)}
    dialect = NamingScheme(NAME, mesh, ranks, stages if len(stages) > 1 else (), facts)
    builder = FileBuilder({"format": "pt"})
    most = order.max_shard_size or _USUAL_PART
    for rank, arrays in compose_arrays(order, SCHEMA, dialect).items():
        for part, some in enumerate(split_into_batches(arrays, most, lambda array: array.nbytes)):
            builder.add(f"{_format_file_prefix(dialect, rank)}part-{part}.safetensors", some)
    return build_manifest(NAME, order, SCHEMA, dialect, builder.files, builder.stored(), (unused, said))


def _list_unused_keys(order: PackRequest) -> tuple[list[str], list[str]]:
    """List keys and values of the layers of Gemma 4 that borrow those of others, and what is to be said of them."""
    if not order.model.family.startswith("gemma4"):
        return [], []
    known = order.model.tensors
    unused = [name for name in order.have.tensors if known[name].optional and _UNUSED_KV_PATTERN.search(name)]
    said = f"{len(unused)} tensors of layers that borrow keys and values are left behind: no layer of vLLM uses them"
    return unused, [said] * bool(unused)


def choose_profile(version: str) -> str:
    """Choose the profile of a version of vLLM, such as ``0.32`` or ``0.32.1``, or SGLang's.

    Raises UsageError for a version whose names were not compared, and says whether it is newer than all that were.
    """
    if version == SGLANG:
        return version
    found = _VLLM_VERSION_PATTERN.fullmatch(version)
    if found is None:
        raise UsageError(f"unknown --vllm-profile {version!r}", hint=f"known are {', '.join((*PROFILES, SGLANG))}")
    asked = f"{int(found[1])}.{int(found[2])}"
    if asked in PROFILES:
        return asked
    newest = PROFILES[0]
    if (int(found[1]), int(found[2])) > tuple(map(int, newest.split("."))):
        raise UsageError(
            f"vLLM {version} is newer than {newest}, the newest whose names are known here",
            hint=f"use --vllm-profile {newest}, and then shardctl verify --engine vllm, which asks your vLLM",
        )
    raise UsageError(
        f"the names of vLLM {version} are not known here",
        hint=f"known are {', '.join(PROFILES)}; shardctl verify --engine vllm says whether your vLLM loads one of them",
    )


def _has_fusable_expert(model: Model) -> bool:
    """Return whether SGLang by default puts the expert that all tokens share behind the others."""
    architecture, count = _FUSED_SHARED_EXPERT_MODEL
    for name, tensor in model.tensors.items():
        if model.architecture == architecture and name.endswith(".mlp.shared_experts.down_proj.weight"):
            each = model.tensors.get(name.replace("shared_experts", f"experts.{count - 1}"))
            more = name.replace("shared_experts", f"experts.{count}") in model.tensors
            return each is not None and not more and each.shape == tensor.shape
    return False


def _build_mesh(order: PackRequest, profile: str) -> Mesh:
    """Build the mesh of a directory, whose ranks are those of tp and pp."""
    mesh = order.mesh
    other = next((axis for axis, degree in mesh.axes if degree > 1 and axis not in {"tp", "pp"}), None)
    if other is not None:
        why = "every replica loads the same directory" if other == "dp" else "vLLM does not cut weights this way"
        raise PartitionError(
            f"the names of vLLM's files contain a tp and a pp rank, so {other}={mesh.degree(other)} is not possible: "
            f"{why}",
            hint=f"leave {other} out",
        )
    if mesh.degree("pp") > 1 and profile != PROFILES[0]:
        engine = "SGLang" if profile == SGLANG else f"vLLM {profile}"
        raise PartitionError(
            f"the files of {engine} have no names for stages, so pp={mesh.degree('pp')} is not possible",
            hint=f"use --for vllm@{PROFILES[0]}, or --to hf",
        )
    if mesh.ep > 1 and profile == SGLANG:
        raise PartitionError(
            "SGLang's arrays of experts that are divided whole were not compared", hint="leave --ep out, or use --to hf"
        )
    return Mesh.of(pp=mesh.degree("pp"), tp=mesh.degree("tp"), ep=mesh.ep, etp=mesh.etp)


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
    place = dialect.mesh.coordinate(rank)
    staged = dialect.mesh.degree("pp") > 1
    return f"model-pp-{place['pp']}-tp-{place.get('tp', 0)}-" if staged else f"model-rank-{rank}-"


LAYOUT: Final = Layout(
    NAME,
    pack_vllm,
    ranks="library",
    options=frozenset({OPTION, "max_shard_size"}),
    prefix=_format_file_prefix,
    served=True,
)
