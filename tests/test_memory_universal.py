"""The memory law for Universal Checkpoints: 360 MB are written and read in a fraction of that."""

from __future__ import annotations

from test_memory import MIB, assert_kept, large, linux, measured  # noqa: F401 - a fixture is among them


@linux
def test_writing_and_reading_keep_to_the_limit(large, tmp_path):  # noqa: F811
    written = measured(large, tmp_path / "universal", "--to", "universal", "--memory", "128MiB")
    assert_kept(written, 128 * MIB, spare=4)
    read = measured(tmp_path / "universal", tmp_path / "hf", "--to", "hf", "--memory", "128MiB")
    assert_kept(read, 128 * MIB, spare=4)
    assert read.last["digest"] == written.last["digest"]
