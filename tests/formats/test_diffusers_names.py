"""Parts of a diffusion pipeline: their files have other names than models of transformers."""

import json

import numpy as np
from safetensors.numpy import save_file

from shardctl.options import ReshardOptions
from shardctl.verbs.reshard import reshard


def test_results_have_the_names_that_diffusers_looks_for(tmp_path):
    """The names are those of diffusers 0.42.1 (`utils/constants.py`), whose `from_pretrained` loaded such results."""
    unet = tmp_path / "unet"
    unet.mkdir()
    (unet / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1"}))
    weights = {f"conv{n}.weight": np.full((4, 8), n, np.float32) for n in range(3)}
    save_file(weights, unet / "diffusion_pytorch_model.safetensors")
    one = reshard(unet, tmp_path / "one", ReshardOptions(to="hf"))
    assert (tmp_path / "one/diffusion_pytorch_model.safetensors").is_file()
    many = reshard(unet, tmp_path / "many", ReshardOptions(to="hf", max_shard_size=128))
    index = json.loads((tmp_path / "many/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["weight_map"]["conv1.weight"] == "diffusion_pytorch_model-00002-of-00003.safetensors"
    assert not list(tmp_path.glob("*/model*"))
    again = reshard(tmp_path / "many", tmp_path / "again", ReshardOptions(to="hf"))
    assert one.record.digest == many.record.digest == again.record.digest
