"""Ray's tasks as workers of one bucket."""

import os
import subprocess
import sys

import pytest
from cloud_models import llama, on_disk

from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

pytest.importorskip("ray", reason="ray is not installed")
LIMIT = 400


def test_ray_writes_into_a_bucket_what_one_machine_writes(open_place, tmp_path):
    place, source = open_place("s3"), llama(tmp_path / "source")
    reshard(source, tmp_path / "one", ReshardOptions(mesh=Mesh.of(tp=2)))
    command = [sys.executable, "-m", "shardctl", "reshard", str(source), place.address("out"), "--tp", "2"]
    command += ["--engine", "ray", "--threads", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert place.held("out/") == on_disk(tmp_path / "one")
