"""A sharded directory without its index is refused by transformers, and so it is by `verify`."""

from __future__ import annotations

import pytest
import transformers
from forward_models import build, config_of

from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.record import RECORD
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify
from shardctl.verify.structure import check_index


@pytest.fixture
def sharded(tmp_path):
    """A Llama as transformers saves it, in several files."""
    build(config_of("llama")).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    return tmp_path / "sharded"


def find_indexes(place, **options):
    found = verify(place, VerifyOptions(**options))
    return found.exit_code, [each for each in found.findings if each.check == "index"]


def test_files_without_their_index_are_an_error_where_transformers_refuses_them(sharded):
    assert find_indexes(sharded) == (0, [])
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(OSError, match="no file named"):
        transformers.LlamaForCausalLM.from_pretrained(sharded)
    for level in ("quick", "full"):
        code, (found,) = find_indexes(sharded, level=level)
        assert (code, found.severity) == (3, "error")
        assert found.message.startswith("there is no model.safetensors.index.json beside model-00001-of-")


def test_the_elements_are_compared_all_the_same(sharded, tmp_path):
    reshard(sharded, tmp_path / "whole", ReshardOptions(to="hf"))
    (sharded / "model.safetensors.index.json").unlink()
    found = verify(sharded, VerifyOptions(level="full", against=tmp_path / "whole"))
    assert [each.check for each in found.findings if each.severity == "error"] == ["index"]
    assert next(level for level in found.levels if level.name == "identity").status == "passed"


def test_files_of_a_variant_need_their_index_too(sharded):
    for path in sharded.glob("model-*.safetensors"):
        path.rename(path.with_name(path.name.replace("model-", "model.fp16-")))
    (sharded / "model.safetensors.index.json").unlink()
    assert find_indexes(sharded)[0] == 3


def test_what_shardctl_writes_and_what_no_config_describes_raise_no_alarm(sharded, tmp_path):
    reshard(sharded, tmp_path / "out", ReshardOptions(to="hf", max_shard_size=40_000))
    assert find_indexes(tmp_path / "out") == (0, [])
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / RECORD).unlink()
    assert find_indexes(tmp_path / "out")[1] == []


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (("pytorch_model-00001-of-00002.bin",), "pytorch_model.bin.index.json"),
        (("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"), None),
        (("model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"), None),
        (("model-00001-of-00002.safetensors", "model.safetensors"), None),
        (("consolidated-00001-of-00002.safetensors",), None),
        (("unet/config.json", "unet/diffusion_pytorch_model-00001-of-00002.safetensors"), "unet/diffusion_pytorch_"),
    ],
)
def test_every_library_that_looks_for_an_index_needs_it(files, missing):
    found = list(check_index({"config.json", *files}, [path for path in files if "-of-" in path]))
    assert len(found) == (missing is not None)
    assert all(f"there is no {missing}" in each.message for each in found)
