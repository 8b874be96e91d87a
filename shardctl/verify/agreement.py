"""Checks that a checkpoint agrees with itself: copies are equal, and boxes do not partly overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.errors import SourceError
from shardctl.verify.content import compare_replicas
from shardctl.verify.structure import find_overlaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.base.workers import ExecutionOptions
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.manifest import Tensor
    from shardctl.verify.structure import SpecFinder


def list_untied_heads(tensors: Sequence[Tensor], reader: ByteReader, effort: ExecutionOptions) -> list[str]:
    """List the heads that are weights of their own although a config ties them to the embedding, in sentences.

    Training changes nearly every element. A head that differs in fewer than half of them is rather damaged: it is not
    listed, and `require_agreement` refuses it. Reads the embedding and the head, if both are stored.
    """
    tied = [tensor for tensor in tensors if tensor.ties]
    found = []
    for difference in compare_replicas(tied, reader, effort):
        tensor = next(t for t in tied if t.name == difference.tensor)
        if difference.count > tensor.size / 2:
            names = list(dict.fromkeys(chunk.name for chunk in tensor.chunks))
            found.append(
                f"{' and '.join(names)} are two weights, although config.json ties them: {difference.count:,} of "
                f"{tensor.size:,} elements differ; tie_word_embeddings is set to false"
            )
    return found


def require_agreement(
    tensors: Sequence[Tensor], reader: ByteReader, effort: ExecutionOptions, find_spec: SpecFinder | None = None
) -> None:
    """Raise SourceError, naming the place, if two stored versions of an element differ: one of them would be lost.

    Reads only what is stored more than once. Boxes that overlap in part are refused even where their values agree:
    they are left over from another mesh. `find_spec` as in `find_overlaps`.
    """
    for tensor in tensors:
        for found in find_overlaps(tensor, find_spec):
            raise SourceError(found.message, hint="a file may be left over from a save on another mesh; remove it")
    for difference in compare_replicas(tensors, reader, effort):
        tensor = next(t for t in tensors if t.name == difference.tensor)
        names = list(dict.fromkeys(chunk.name for chunk in tensor.chunks))
        where = f"differ in {difference.count:,} elements, first at {difference.first} in {difference.file}"
        if difference.other not in {"", difference.file}:
            where = f"{where} and {difference.other}"
        if tensor.ties and len(names) > 1:
            raise SourceError(
                f"{' and '.join(names)} are tied by config.json, but their stored values {where}",
                hint="if they are two weights, give a config with tie_word_embeddings false by --config",
            )
        raise SourceError(
            f"{tensor.name}: copies {where}",
            hint=(
                "shardctl verify SRC --level full lists all that differ; --prefer-index takes the copy "
                "that an index names; without an index, give the right file"
            ),
        )
