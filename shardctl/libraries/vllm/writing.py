"""Plans directories that vLLM loads with ``--load-format sharded_state``.

Files are cut as `ShardedStateLoader.save_model` cuts them, by default at the 5 GiB of vLLM's example
(`examples/features/sharded_state/save_sharded_state_offline.py`), which also carries along whatever is no weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.dialect import LibraryDialect, format_rank_prefix
from shardctl.errors import CutError, UsageError
from shardctl.libraries.arrays.composing import build_manifest, compose_arrays
from shardctl.libraries.safetensors.packing import FileBuilder
from shardctl.libraries.vllm.arrays import BIAS_TYPE, LATENT, NAME, PROFILE, PROFILES, SCHEMA, VOCABULARY_TYPE
from shardctl.libraries.writer import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.dialect import Fact
    from shardctl.libraries.arrays.composing import ComposedArray
    from shardctl.libraries.writer import PackRequest
    from shardctl.manifest import Manifest
    from shardctl.mesh import Mesh

OPTION: Final = "vllm_profile"
_USUAL_PART: Final = 5 << 30
_BIAS: Final = ".down_proj_bias"
_VOCABULARY: Final = ("embed_tokens.weight", "embed_in.weight", "word_embeddings.weight", "wte.weight")


def pack_vllm(order: PackRequest) -> Manifest:
    """Return the files of every tp rank.

    Raises as `Layout.pack` says.
    """
    SCHEMA.check(order.model)
    mesh = _build_mesh(order)
    profile = order.options.get(OPTION, PROFILES[0])
    if profile not in PROFILES:
        raise UsageError(f"unknown --vllm-profile {profile!r}", hint=f"known are {' and '.join(PROFILES)}")
    facts: dict[str, Fact] = {PROFILE: profile, LATENT: True}
    for fact, names in ((BIAS_TYPE, _BIAS), (VOCABULARY_TYPE, _VOCABULARY)):
        known = next((dtype for name, dtype in order.dtypes.items() if name.endswith(names)), None)
        if known is not None:
            facts[fact] = known.name
    dialect = LibraryDialect(NAME, mesh, {rank: format_rank_prefix(rank) for rank in range(mesh.world)}, facts=facts)
    builder = FileBuilder({"format": "pt"})
    for rank, arrays in compose_arrays(order, SCHEMA, dialect).items():
        for part, some in enumerate(_split_into_parts(arrays, order.max_shard_size or _USUAL_PART)):
            builder.add(f"{_format_file_prefix(dialect, rank)}part-{part}.safetensors", some)
    return build_manifest(NAME, order, SCHEMA, dialect, builder.files, builder.stored())


def _build_mesh(order: PackRequest) -> Mesh:
    """Build the mesh of a directory, which has ranks of tp and nothing else."""
    mesh, tp = order.mesh, order.mesh.degree("tp")
    if mesh.world != tp:
        axis = next(axis for axis, degree in mesh.axes if degree > 1 and axis != "tp")
        why = (
            "every stage would write the same names"
            if axis == "pp"
            else "every replica loads the same directory"
            if axis == "dp"
            else "vLLM does not cut weights this way"
        )
        raise CutError(
            f"the names of vLLM's files contain only a tp rank, so {axis}={mesh.degree(axis)} is not possible: {why}",
            hint="use --tp, with or without --ep; vLLM itself divides layers over stages when it reads --to hf"
            if axis == "pp"
            else f"leave {axis} out",
        )
    return mesh


def _split_into_parts(arrays: Sequence[ComposedArray], most: int) -> Iterator[list[ComposedArray]]:
    """Yield arrays in runs of at most `most` bytes; a larger one is alone."""
    run: list[ComposedArray] = []
    size = 0
    for array in arrays:
        if run and size + array.nbytes > most:
            yield run
            run, size = [], 0
        run.append(array)
        size += array.nbytes
    if run:
        yield run


def _format_file_prefix(dialect: LibraryDialect, rank: int) -> str:
    del dialect
    return f"model-rank-{rank}-"


LAYOUT: Final = Layout(
    NAME, pack_vllm, ranks="library", options=frozenset({OPTION, "max_shard_size"}), prefix=_format_file_prefix
)
