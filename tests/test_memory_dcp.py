"""The memory law for distributed checkpoints: 360 MB are written and read in a fraction of that."""

from __future__ import annotations

from test_memory import MIB, assert_kept, large, linux, llama, measured  # noqa: F401 - a fixture is among them


@linux
def test_writing_and_reading_keep_to_the_limit(large, tmp_path):  # noqa: F811
    written = measured(large, tmp_path / "dcp", "--to", "dcp", "--fsdp", 2, "--tp", 2, "--memory", "128MiB")
    assert_kept(written, 128 * MIB, spare=4)
    read = measured(tmp_path / "dcp", tmp_path / "hf", "--to", "hf", "--memory", "128MiB")
    assert_kept(read, 128 * MIB, spare=4)
    assert read.last["digest"] == written.last["digest"]


@linux
def test_many_boxes_are_counted(tmp_path):
    llama(tmp_path, 100)
    made = measured(tmp_path, tmp_path.with_name("dcp"), "--to", "dcp", "--fsdp", 8, "--threads", 1)
    assert_kept(made, 1 << 30, spare=4)
    read = measured(tmp_path.with_name("dcp"), tmp_path.with_name("hf"), "--to", "hf", "--threads", 1)
    assert_kept(read, 1 << 30, spare=4)
