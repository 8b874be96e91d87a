"""The memory law of one worker of several: that of a whole run, over the same plan."""

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_memory import MIB, linux, llama, measured


@linux
@pytest.mark.parametrize("worker", ["0/3", "1/3"])
def test_many_chunks_of_a_worker_are_counted(tmp_path, worker):
    source = tmp_path / "source"
    source.mkdir()
    args = ("--tp", 8, "--threads", 1, "--memory", "116MiB", "--worker", worker)
    run = measured(llama(source, 400), tmp_path / "out", *args)
    assert run.code == 0, run.last
    assert run.peak <= run.projected <= 116 * MIB


@linux
def test_the_worker_that_keeps_the_names_of_all_tensors_has_room_for_them(tmp_path):
    tensors = {f"model.layers.{i}.some_module.weight": np.zeros(8, np.float32) for i in range(10_000)}
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    args = ("--max-shard-size", "160kB", "--threads", 1, "--memory", "112MiB", "--worker", "0/2")
    run = measured(source, tmp_path / "out", *args)
    assert run.code == 0, run.last
    assert run.peak <= run.projected <= 112 * MIB
