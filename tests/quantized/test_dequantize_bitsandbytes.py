"""Weights that transformers wrote with bitsandbytes become the numbers of bitsandbytes' own dequantization."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from codes import LLAMA, plain_state
from reading import assert_same, of, read
from safetensors.torch import load_file, save_file

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

ODD = {**LLAMA, "hidden_size": 72, "intermediate_size": 90, "head_dim": 8}
"""Blocks of 64 begin in the middle of rows, and the last of a weight is incomplete."""
SETTINGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4-in-bf16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Gives the directory that transformers wrote; it is shared, so nobody may change it."""
    made = {}

    pytest.importorskip("bitsandbytes")

    def give(name, config=LLAMA):
        key = name, config["hidden_size"]
        if key not in made:
            plain, path = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp(name) / "source"
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).bfloat16()
            model.load_state_dict(plain_state(config))
            model.save_pretrained(plain)
            settings = transformers.BitsAndBytesConfig(**SETTINGS[name])
            transformers.AutoModelForCausalLM.from_pretrained(
                plain, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
            ).save_pretrained(path)
            made[key] = path
        return made[key]

    return give


def decode(module, state):
    """A module's weight, as bitsandbytes decodes it."""
    from bitsandbytes import functional as library

    arrays = of(module, state)
    if "SCB" in arrays:
        return library.int8_vectorwise_dequant(arrays["weight"], arrays["SCB"])
    parts = {name.removeprefix("weight."): t for name, t in arrays.items() if name.startswith("weight.")}
    return library.dequantize_4bit(arrays["weight"], library.QuantState.from_dict(parts, torch.device("cpu")))


def list_modules(state):
    found = [name.removesuffix(".weight.absmax") for name in state if name.endswith(".absmax")]
    return found or [name.removesuffix(".SCB") for name in state if name.endswith(".SCB")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [LLAMA, ODD], ids=["whole blocks", "odd"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_numbers_are_those_of_bitsandbytes(written, tmp_path, name, config, dtype):
    source = written(name, config)
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype=dtype))
    stored, found = read(source), read(tmp_path / "out")
    assert found.keys() == plain_state(config).keys()
    modules = list_modules(stored)
    assert len(modules) == 14
    for module in modules:
        assert torch.equal(found[f"{module}.weight"], decode(module, stored).to(DTYPES[dtype])), module
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("name", ["nf4-nested", "nf4-in-bf16", "int8"])
def test_every_layout_holds_the_same_numbers(written, tmp_path, name):
    source = written(name, ODD if name == "nf4-nested" else LLAMA)
    reshard(source, tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    for number, wish in enumerate(
        (
            ReshardOptions(mesh=Mesh.of(tp=2), dtype="bf16"),
            ReshardOptions(mesh=Mesh.of(tp=2, pp=2, fsdp=3), dtype="bf16"),
            ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=3), dtype="bf16"),
        )
    ):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        reshard(source, there, wish)
        assert verify(there, VerifyOptions(level="full", against=source)).ok
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(read(back), read(tmp_path / "plain"))


def change(source, path, changes):
    """A copy of a checkpoint in which some tensors are others."""
    path.mkdir()
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    state = load_file(source / "model.safetensors")
    found = {name: changes.get(name.rpartition(".")[2], t).clone() for name, t in state.items()}
    save_file(found, path / "model.safetensors")
    return path


def pack(**said):
    text = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, 256], **said}
    return torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)


WRONG = {
    "blocks": (pack(blocksize=128), r"absmax has 512 elements, but .* says 256"),
    "shape": (pack(shape=[64, 512]), r"says that the weight has the shape \[64, 512\]"),
    "no shape": (pack(shape="many"), "has shape = 'many'"),
    "type": (pack(dtype="int8"), "has dtype = 'int8'"),
    "size": (pack(blocksize=0), "has blocksize = 0"),
    "long": (torch.zeros(70000, dtype=torch.uint8), "has 70,000 bytes or more"),
    "no text": (torch.zeros(70, dtype=torch.uint8), "is not JSON"),
}


@pytest.mark.parametrize(("state", "message"), WRONG.values(), ids=WRONG)
def test_settings_that_do_not_fit_the_arrays_are_an_error(written, tmp_path, state, message):
    source = change(written("nf4"), tmp_path / "changed", {"bitsandbytes__nf4": state})
    with pytest.raises(SourceError, match=message):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))


def test_rows_in_the_order_of_a_kernel_are_refused(written, tmp_path):
    source = change(written("int8"), tmp_path / "changed", {"weight_format": torch.tensor(2, dtype=torch.uint8)})
    with pytest.raises(
        UnsupportedError, match=r"weight_format is 2 .col_turing.: the codes are in the order"
    ) as caught:
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    assert "save it again" in caught.value.hint
