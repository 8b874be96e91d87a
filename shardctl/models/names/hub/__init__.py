"""Knows the names and arrays that transformers' classes read from the Hub and that `save_pretrained` writes.

`conversions.json` has what transformers 5.24 says, frozen by `docs/benchmarks/freeze_conversions.py`.
"""

from shardctl.models.names.hub.conversion_table import (
    HUB_NAMES,
    SAVED_AS,
    SAVED_FOR_NOBODY,
    NameConversions,
    find_conversions,
    list_unsaved_names,
)
from shardctl.models.names.hub.hub_arrays import (
    build_hub_arrays,
    list_state_arrays,
    pad_saved_tensors,
    take_saved_arrays_apart,
)
from shardctl.models.names.hub.older_names import read_older_names
from shardctl.models.names.hub.other_names import add_saved_arrays, bind_other_names
from shardctl.models.names.hub.tied_names import find_tied_names, merge_tied_tensors

__all__ = [
    "HUB_NAMES",
    "SAVED_AS",
    "SAVED_FOR_NOBODY",
    "NameConversions",
    "add_saved_arrays",
    "bind_other_names",
    "build_hub_arrays",
    "find_conversions",
    "find_tied_names",
    "list_state_arrays",
    "list_unsaved_names",
    "merge_tied_tensors",
    "pad_saved_tensors",
    "read_older_names",
    "take_saved_arrays_apart",
]
