"""`--from`: what nobody recognised is read as the format that was named, or refused, whatever it is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from shardctl.base.errors import SourceError
from shardctl.libraries.catalogue import FORMATS
from shardctl.libraries.registry import scan_checkpoint
from shardctl.storage.addresses import open_source

FIXTURES = Path(__file__).parents[2] / "fixtures"
OTHERS = {
    "nothing at all": "",
    "DCP's": "dcp/tp",
    "DeepSeek's": "deepseek_mp/bf16/mp2",
    "Meta's": "meta/llama3",
    "a source": "trtllm/llama_pp3/source",
    "Orbax's": "orbax/zarr",
}


@pytest.mark.parametrize("format_", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("what", OTHERS)
def test_what_is_something_else_is_refused(what, format_, tmp_path):
    """By a SourceError that names the directory or one of its files, and never by a crash."""
    place = FIXTURES / OTHERS[what] if OTHERS[what] else tmp_path
    if what == "Orbax's" and find_spec("tensorstore") is None:
        pytest.skip("needs tensorstore")
    source = open_source(place)
    if format_.detect(source):
        return
    with pytest.raises(SourceError) as error:
        scan_checkpoint(source, override=format_.name)
    named = [source.name, *source.files()]
    assert any(name in error.value.message for name in named)
