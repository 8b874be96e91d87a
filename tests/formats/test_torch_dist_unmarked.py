"""Megatron-LM's distributed checkpoints whose `metadata.json` is gone or broken: none of torch's, and said so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardctl.base.errors import SourceError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries.registry import detect_format
from shardctl.options import SourceOptions
from shardctl.storage.local import LocalSource

HERE = Path(__file__).parents[2] / "fixtures" / "torch_dist"


@pytest.mark.parametrize("number", ["9" * 5_000, "²", "-1", ""])
def test_a_tracker_that_names_no_iteration_is_none(tmp_path, number):
    """Of whatever checkpoint it lies beside: Python refuses to read a number of so many digits."""
    where = shutil.copytree(HERE / "stacked" / "iter", tmp_path / "iter")
    (where / "latest_checkpointed_iteration.txt").write_text(number)
    assert detect_format(LocalSource(where)).name == "torch_dist"


@pytest.mark.parametrize("content", [None, "", '{"sharded_backend": "torch_', "[]"])
def test_they_are_not_taken_for_checkpoints_of_torch(tmp_path, content):
    where = shutil.copytree(HERE / "stacked" / "iter", tmp_path / "iter")
    mark = where / "metadata.json"
    mark.unlink()
    if content is not None:
        mark.write_text(content)
    assert detect_format(LocalSource(where)).name == "torch_dist"
    source_options = SourceOptions(config=HERE / "hf" / "llama")
    with (
        pytest.raises(SourceError, match=r"no metadata\.json .* that can be read"),
        open_checkpoint(where, source_options),
    ):
        pass
