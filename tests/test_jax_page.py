"""The page about JAX is executed on simulated devices, and its arrays are the model's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "fixtures" / "trtllm" / "llama_tp2_pp2" / "source"
CHECK = """
whole = safe_open(SOURCE, framework="flax")
assert tensors.keys() == set(whole.keys())
for name, array in tensors.items():
    assert (np.asarray(array) == np.asarray(whole.get_tensor(name))).all(), name
    assert array.dtype == whole.get_tensor(name).dtype
wider = load("llama-tp2", Mesh(np.array(jax.devices()), ("tp",)))
assert all((np.asarray(wider[name]) == np.asarray(array)).all() for name, array in tensors.items())
print(len(jax.devices()), "devices")
"""


@pytest.mark.skipif(find_spec("jax") is None, reason="needs jax")
def test_the_page_runs_and_gives_the_models_tensors(tmp_path):
    reshard(SOURCE, tmp_path / "llama-tp2", ReshardOptions(mesh=Mesh.of(tp=2)))
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jax.md").read_text(), re.DOTALL)
    code = f"SOURCE = {str(SOURCE / 'model.safetensors')!r}\n{example}\n{CHECK}"
    simulated = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={**os.environ, **simulated}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "(32, 32) bfloat16 ('tp', None) (16, 32)",
        "4 devices",
    ]
