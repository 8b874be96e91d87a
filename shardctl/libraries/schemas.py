"""Binds arrays that another library made to the tensors of a model, whatever their naming scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.libraries.arrays import binding
from shardctl.libraries.catalogue import get_schema
from shardctl.models.names.naming import bind_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.models import Model
    from shardctl.tensors.manifest import Manifest


def bind_checkpoint(
    model: Model, stored: Manifest, read: Callable[[str, int, int], bytes], *, partial: bool = False
) -> Manifest:
    """Return `stored` under canonical names, whatever library's arrays it holds.

    `read` gives a file's bytes from an offset.

    Raises as `Model.bind` and `binding.bind`.
    """
    if stored.dialect is not None:
        stored = binding.bind_arrays(get_schema(stored.dialect.schema), model, stored, read)
    return bind_manifest(model, stored, partial=partial)
