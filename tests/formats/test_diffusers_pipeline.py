"""A whole pipeline of diffusers is one checkpoint: its parts are converted together, and all else travels along."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from shardctl.base.errors import HostileError, SourceError, UnsupportedError, UsageError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.report.documents import build_inspect_document
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

PIPELINE = Path(__file__).parents[2] / "fixtures/diffusers/pipeline"
PARTS = ("text_encoder", "unet", "vae")


@pytest.fixture
def pipeline(tmp_path):
    return Path(shutil.copytree(PIPELINE, tmp_path / "pipeline"))


def test_every_part_and_every_other_file_is_in_the_result(tmp_path):
    done = reshard(PIPELINE, tmp_path / "out", ReshardOptions(to="hf"))
    paths = {path.relative_to(PIPELINE).as_posix() for path in PIPELINE.rglob("*") if path.is_file()}
    made = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert made == paths | {"shardctl.json"}
    for path in paths:
        if path.endswith(".safetensors"):
            ours, theirs = load_file(tmp_path / "out" / path), load_file(PIPELINE / path)
            assert ours.keys() == theirs.keys()
            assert all(ours[key].tobytes() == theirs[key].tobytes() for key in theirs)
        else:
            assert (tmp_path / "out" / path).read_bytes() == (PIPELINE / path).read_bytes()
    assert done.record.digest == digest(PIPELINE).digest
    found = verify(tmp_path / "out", VerifyOptions(level="full", against=str(PIPELINE)))
    assert (found.ok, list(found.findings)) == (True, [])


def test_inspect_shows_every_part():
    found = inspect(PIPELINE)
    assert [(part.name, part.class_name, part.dtypes) for part in found.parts] == [
        ("text_encoder", "CLIPTextModel", ("F32",)),
        ("unet", "UNet2DConditionModel", ("F32",)),
        ("vae", "AutoencoderKL", ("F32",)),
    ]
    assert sum(part.parameters for part in found.parts) == found.parameters
    assert [part["name"] for part in build_inspect_document(found)["parts"]] == list(PARTS)


def test_a_cast_is_said_where_a_config_says_the_type(tmp_path):
    reshard(PIPELINE, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    assert json.loads((tmp_path / "out/text_encoder/config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out/unet/config.json").read_bytes() == (PIPELINE / "unet/config.json").read_bytes()
    assert not verify(tmp_path / "out", VerifyOptions(level="full", against=str(PIPELINE))).findings
    config = tmp_path / "out/text_encoder/config.json"
    config.write_text(config.read_text().replace('"hidden_size": 8', '"hidden_size": 9'))
    (tmp_path / "out/shardctl.json").unlink()
    found = verify(tmp_path / "out", VerifyOptions(level="full", against=str(PIPELINE)))
    assert "text_encoder/config.json differs from that of the source" in [each.message for each in found.findings]


def test_files_of_torch_and_several_files_a_part_are_the_same_pipeline(pipeline, tmp_path):
    for part in PARTS:
        file = next((pipeline / part).glob("*.safetensors"))
        stem = {"model": "pytorch_model"}.get(file.stem, file.stem)
        torch.save(
            {key: torch.from_numpy(value) for key, value in load_file(file).items()}, file.with_name(f"{stem}.bin")
        )
        file.unlink()
    done = reshard(pipeline, tmp_path / "out", ReshardOptions(to="hf", max_shard_size=20_000))
    assert done.record.digest == digest(PIPELINE).digest == digest(tmp_path / "out").digest
    assert (tmp_path / "out/text_encoder/model.safetensors").is_file()
    index = json.loads((tmp_path / "out/unet/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert all((tmp_path / "out/unet" / file).is_file() for file in index["weight_map"].values())
    assert index["weight_map"].keys() == load_file(PIPELINE / "unet/diffusion_pytorch_model.safetensors").keys()
    assert not list((tmp_path / "out").rglob("*.bin"))


def test_the_weights_without_a_variant_are_read_and_others_left_behind(pipeline, tmp_path):
    plain = pipeline / "unet/diffusion_pytorch_model.safetensors"
    half = {key: value.astype(np.float16) for key, value in load_file(plain).items()}
    save_file(half, pipeline / "unet/diffusion_pytorch_model.fp16.safetensors")
    save_file({"model.weight": np.ones(3, np.float32)}, pipeline / "v1-5-pruned.safetensors")
    done = reshard(pipeline, tmp_path / "out", ReshardOptions(to="hf"))
    assert done.record.digest == digest(PIPELINE).digest
    assert "unet/ holds the variant fp16 besides, which is left behind" in done.warnings
    assert {"unet/diffusion_pytorch_model.fp16.safetensors", "v1-5-pruned.safetensors"} <= set(done.dropped)
    plain.unlink()
    alone = reshard(pipeline, tmp_path / "alone", ReshardOptions(to="hf"))
    assert "unet/ holds the variant fp16, which is written without that name" in alone.warnings
    assert load_file(tmp_path / "alone/unet/diffusion_pytorch_model.safetensors").keys() == half.keys()
    save_file(half, pipeline / "unet/diffusion_pytorch_model.non_ema.safetensors")
    with pytest.raises(SourceError, match=r"unet/ holds several variants of its weights, .*: fp16, non_ema"):
        inspect(pipeline)


def test_a_folder_that_no_list_names_is_carried_and_said(pipeline, tmp_path):
    (pipeline / "extra").mkdir()
    save_file({"a": np.ones(3, np.float32)}, pipeline / "extra/model.safetensors")
    done = reshard(pipeline, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    assert "extra/ holds weights, but model_index.json does not name it: it is carried as it is" in done.warnings
    assert load_file(tmp_path / "out/extra/model.safetensors")["a"].dtype == np.float32


def test_a_part_without_its_weights_is_an_error(pipeline):
    (pipeline / "vae/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(SourceError, match="vae/ has the config of AutoencoderKL, but no weights"):
        inspect(pipeline)


def test_a_link_out_of_a_part_is_hostile(pipeline, tmp_path):
    shutil.move(pipeline / "vae/config.json", tmp_path / "config.json")
    (pipeline / "vae/config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(HostileError, match=r"vae/config\.json is a link that leaves"):
        inspect(pipeline)


def test_the_scales_of_a_quantized_part_are_not_cast(pipeline, tmp_path):
    config = pipeline / "text_encoder/config.json"
    values = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    config.write_text(json.dumps(values))
    with pytest.raises(UnsupportedError, match="would cast the scales of text_encoder, which is quantized"):
        reshard(pipeline, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    reshard(pipeline, tmp_path / "out", ReshardOptions(to="hf"))


def test_what_is_for_one_model_is_refused(tmp_path):
    for options in (ReshardOptions(to="dcp"), ReshardOptions(to="hf", quantize="int8"), ReshardOptions(only="text")):
        with pytest.raises(UnsupportedError, match=r"a pipeline of diffusers|whole pipeline of diffusers") as caught:
            reshard(PIPELINE, tmp_path / "out", options)
        assert caught.value.hint == f"give the folder of one part, such as {PIPELINE}/text_encoder"
    with pytest.raises(UsageError, match="--config is for one model"):
        inspect(PIPELINE, source_options=SourceOptions(config=PIPELINE / "unet/config.json"))
