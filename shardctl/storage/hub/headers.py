"""Fetches the headers of all shards of a model in one request, where the Hub has read them already.

`GET /api/models/{repository}/safetensors-metadata/{index}` answers for the branch main only (huggingface_hub 2.4,
`hf_api.py`, `get_sharded_safetensors_metadata`). It gives each header as JSON: that is enough to describe a checkpoint,
and nothing is converted from it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from shardctl.base.errors import ShardctlError
from shardctl.base.version import __version__
from shardctl.storage.hub.listing import NOT_AN_ANSWER
from shardctl.storage.hub.questions import HubQuestions
from shardctl.storage.retries import TroubleError

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.storage.hub.address import HubAddress
    from shardctl.storage.hub.listing import HubListing

INDEX: Final = "model.safetensors.index.json"
FEWEST: Final = 4
"""Shards from which on one request, and one more to see that main has not moved, are fewer than theirs."""
_BRANCH: Final = "main"
_LENGTH_BYTES: Final = 8
_SLACK, _BESIDES = 2, 1024
"""A header in its file may be this much longer than without spaces; one that lacks tensors would be longer still."""


def fetch_headers(address: HubAddress, listing: HubListing, shards: Collection[str]) -> dict[str, bytes]:
    """Return the beginning of each shard, up to its first tensor, with the entries that its header has.

    The text is the Hub's, filled with spaces to the length that follows from the size of the file. Empty if the Hub
    does not answer for these files at this commit, or not in this form: each file is then read by itself.
    """
    from huggingface_hub import constants

    from shardctl.storage.hub.library import HfHubHTTPError, TransportError, build_hf_headers

    if address.revision != _BRANCH or INDEX not in listing.files or len(shards) < FEWEST:
        return {}
    headers = build_hf_headers(library_name="shardctl", library_version=__version__)
    hub = HubQuestions(constants.ENDPOINT, headers, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    api = f"{constants.ENDPOINT}/api/models/{address.repository}"
    try:
        document, _ = hub.ask(f"{api}/safetensors-metadata/{quote(INDEX)}")
        found = {path: _build_beginning(document["headers"][path], listing.files[path].size) for path in shards}
        now, _ = hub.ask(f"{api}/revision/{_BRANCH}?expand=sha")
        return found if now["sha"] == listing.commit else {}
    except (HfHubHTTPError, TransportError, TroubleError, ShardctlError, *NOT_AN_ANSWER):
        return {}


def _build_beginning(header: Any, size: int) -> bytes:  # noqa: ANN401 - it is any JSON
    """Build the first bytes of a file of `size` bytes; raises ValueError for a header that no such file has."""
    data = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    length = size - data - _LENGTH_BYTES
    if not len(text) <= length <= _SLACK * len(text) + _BESIDES:
        raise ValueError("a header that does not end where the tensors begin")
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
