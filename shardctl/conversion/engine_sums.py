"""Computes the SHA-256 of every array that vLLM holds of a model, by rank, under the keys of its weight checker.

The arrays are those that `--to vllm` writes: files are filled group by group in the directory for temporary files,
hashed and removed, so that neither the memory nor the disk holds the model. Keys and sums are those of vLLM 0.32
(`v1/worker/gpu_worker.py`, `compute_weight_checksums`; `model_executor/model_loader/weight_checksum.py`): parameters
without buffers, one of the names of a tie.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.base.workers import ExecutionOptions
from shardctl.conversion.bucket_output import ShareGroups, ShareSender, scratch_directory
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.preparing import open_conversion
from shardctl.conversion.share_transfer import list_source_versions
from shardctl.libraries.registry import scan_checkpoint
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.storage.local import LocalSource
from shardctl.tensors.manifest import Region

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.conversion.engine.part import WorkerPart
    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.mesh import Mesh

_RANK_FILE_PATTERN: Final = re.compile(r"model-(?:rank-([0-9]+)|pp-([0-9]+)-tp-([0-9]+))-part-[0-9]+\.safetensors")
_EXPERT_WEIGHT_PATTERN: Final = re.compile(r".+\.w(13|2)_[a-z_]+")
_LM_HEAD_NAME: Final = "lm_head.weight"
_EMBEDDING_NAME: Final = "model.embed_tokens.weight"
_ROUTER_NAME_PATTERN: Final = re.compile(r"\.experts\._?gate\.")
_SHARED_EXPERTS_PATTERN: Final = re.compile(r"\.experts\._shared_experts\.(_layer\.)?")
_BUFFER_NAME_PREFIX: Final = "_"
"""What the names of buffers begin with: scales of attention, and maps of experts."""
_UNQUANTIZED_DTYPES: Final = frozenset({"F32", "F16", "BF16"})
_HASH_BLOCK_BYTES: Final = 1 << 20


@value_class
class EngineSums(ResultView):
    """The SHA-256 of each array of each rank."""

    sums: Mapping[str, str]
    """In hexadecimal, by keys such as ``dp0:pp0:pcp0:tp1:lm_head.weight``."""
    reordered: frozenset[str]
    """Those of which a kernel of the engine may keep another order, padding or type: experts, and quantized layers."""
    nbytes: int
    """Bytes of all arrays."""
    warnings: tuple[str, ...]
    path: str = ""


def sum_engine_arrays(
    path: str | Path,
    mesh: Mesh,
    *,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
    host_memory: int = 1 << 30,
) -> EngineSums:
    """Read the checkpoint at `path`, and sum the arrays that vLLM's ranks of `mesh` (tp and pp) have of it.

    `host_memory` bounds the bytes of anonymous memory.

    Raises UnsupportedError for a model whose arrays are not known, PartitionError for a mesh that does not fit.
    """
    effort = effort or ExecutionOptions()
    options = ReshardOptions(to="vllm", mesh=mesh, threads=effort.threads, host_memory=host_memory)
    reading = replace(source_options or SourceOptions(), kv_heads="replicate")
    with (
        scratch_directory() as scratch,
        # nothing is published, and the engine holds what its own cast made
        open_conversion(path, scratch / "result", options, reading, None, allow_overflow=True) as work,
        stop_on_signals(effort.stop),
    ):
        summing = _ArraySums(mesh)
        sender = ShareSender(
            work, list_source_versions(work), scratch, summing, effort.watcher, effort.stop, sha256=False
        )
        sender.send(ShareGroups.of(work, scratch, None), ())
        work.checkpoint.prove()
        tied = any(_LM_HEAD_NAME in (tensor.name, *tensor.ties) for tensor in work.have.tensors.values() if tensor.ties)
        single = any(".shared_expert." in name for name in work.have.tensors)
        sums, changed = _name_parameters(summing.sums, tied=tied, single=single), _list_reordered(work.plan.want)
        reordered = frozenset(key for key in sums if key.rpartition(":")[2] in changed)
        return EngineSums(dict(sorted(sums.items())), reordered, summing.nbytes, work.have.warnings, str(path))


def format_engine_key(name: str, *, pp: int, tp: int, dp: int = 0) -> str:
    """Format the key of a parameter on a rank.

    >>> format_engine_key("lm_head.weight", pp=0, tp=1)
    'dp0:pp0:pcp0:tp1:lm_head.weight'
    """
    return f"dp{dp}:pp{pp}:pcp0:tp{tp}:{name}"


def _name_parameters(sums: Mapping[str, str], *, tied: bool, single: bool) -> dict[str, str]:
    """Return the sums of arrays by the names that parameters have, of which those that are shared have one.

    A head that is tied is the embedding, and what the experts' module shares with the layer's is the layer's.
    """
    found = {}
    for key, value in sums.items():
        rank, _, name = key.rpartition(":")
        found[f"{rank}:{_EMBEDDING_NAME if tied and name == _LM_HEAD_NAME else _name_shared(name, single=single)}"] = (
            value
        )
    return found


def _name_shared(name: str, *, single: bool) -> str:
    """Return what the layer calls what the experts' module has, too; `single` says that it has one shared expert."""
    name = _ROUTER_NAME_PATTERN.sub(".gate.", name)
    if not single:
        return _SHARED_EXPERTS_PATTERN.sub(".shared_experts.", name)
    return _SHARED_EXPERTS_PATTERN.sub(".shared_expert.", name).replace(
        ".shared_expert.expert_gate.", ".shared_expert_gate."
    )


def _list_reordered(want: Manifest) -> set[str]:
    """List the names of arrays of experts, and all of modules with one that holds no plain floating-point numbers."""
    names = {chunk.name: chunk.dtype.name for _, chunk in want.arrays()}
    coded = {
        name.rpartition(".")[0] for name, dtype in names.items() if dtype not in _UNQUANTIZED_DTYPES or "_scale" in name
    }
    return {name for name in names if _EXPERT_WEIGHT_PATTERN.fullmatch(name) or name.rpartition(".")[0] in coded}


class _ArraySums:
    """Takes groups of files as a destination does, and keeps the sums of their arrays only."""

    def __init__(self, mesh: Mesh) -> None:
        self._tp = mesh.degree("tp")
        self.sums: dict[str, str] = {}
        self.nbytes = 0

    def group(self, number: int) -> WorkerPart | None:
        """Return nothing: no earlier run has left anything."""
        del number
        return None

    def upload(self, number: int, part: WorkerPart, tree: Path) -> WorkerPart:
        """Sum every parameter in the files."""
        del number
        for path in part.files:
            match = _RANK_FILE_PATTERN.fullmatch(path)
            if match is not None:
                pp, tp = divmod(int(match[1]), self._tp) if match[1] else (int(match[2]), int(match[3]))
                self._sum_file(tree / path, pp, tp)
        return part

    def _sum_file(self, path: Path, pp: int, tp: int) -> None:
        source = LocalSource(path)
        for tensor, chunk in scan_checkpoint(source).arrays():
            if not tensor.name.rpartition(".")[2].startswith(_BUFFER_NAME_PREFIX) and isinstance(chunk.where, Region):
                key = format_engine_key(tensor.name, pp=pp, tp=tp)
                self.sums[key] = _hash_range(source, chunk.where.file, chunk.where.offset, tensor.nbytes)
                self.nbytes += tensor.nbytes
        source.close()

    def note_group(self, number: int, part: WorkerPart) -> None:
        """Do nothing: no earlier run has left anything."""

    def write(self, path: str, content: bytes) -> None:
        """Do nothing: no file is kept."""

    def publish(self, record: bytes, sizes: Mapping[str, int]) -> None:
        """Do nothing: no file is kept."""

    def discard(self) -> None:
        """Forget the sums: the source has changed."""
        self.sums.clear()


def _hash_range(source: LocalSource, path: str, offset: int, size: int) -> str:
    state, buffer = hashlib.sha256(), bytearray(min(size, _HASH_BLOCK_BYTES))
    for start in range(0, size, _HASH_BLOCK_BYTES):
        block = memoryview(buffer)[: min(_HASH_BLOCK_BYTES, size - start)]
        source.read_at(path, offset + start, block)
        state.update(block)
    return state.hexdigest()
