"""Tiny models that transformers itself makes and saves, and what the safetensors library finds in a checkpoint."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from stored_bits import bits

from shardctl.models import describe_model
from shardctl.models.tables.predicting import list_predicting_names
from shardctl.verbs.digest import DigestResult, digest

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
FIXTURES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
DIVISIBLE = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Changes to a decoder's config after which tp=4 divides everything, and queries still share key/value heads."""
SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": "{{ 'ä' }}\n".encode(),
    "modeling_custom.py": b"raise SystemExit('never run')\n",
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "assets/empty.txt": b"",
}


@dataclass(frozen=True)
class Tiny:
    """A model in memory, and the directory that `save_pretrained` wrote."""

    path: Path
    model: Any
    config: Mapping[str, Any]

    @property
    def kind(self) -> Any:
        """The class that `architectures` names."""
        return getattr(transformers, self.config["architectures"][0])

    @cached_property
    def digest(self) -> DigestResult:
        """The digest of the source."""
        return digest(self.path)


@cache
def config_of(name: str, *, divisible: bool = True) -> Mapping[str, Any]:
    """A fixture's config; `divisible` gives decoders enough heads for tp=4."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    if divisible and "num_key_value_heads" in config:
        config |= DIVISIBLE
    return config


def build(config: Mapping[str, Any], seed: int = 0) -> Any:
    """The transformers model of a config with every float of its state random: norms and biases too."""
    kind = getattr(transformers, config["architectures"][0])
    dtype = getattr(torch, config.get("dtype", "float32"))
    read = kind.config_class.from_dict(dict(config))
    model = kind(read).to(dtype)
    with torch.device("meta"):
        made = kind._from_config(read, dtype=dtype)
    for name, parameter in made.named_parameters():  # modules that are made in fp32 whatever the model's type
        if parameter.dtype != dtype:
            model.get_parameter(name).data = model.get_parameter(name).data.to(parameter.dtype)
    for kept in model._keep_in_fp32_modules_strict or ():  # as from_pretrained does
        for module in model.modules():
            if kept in module._buffers:
                module._buffers[kept] = module._buffers[kept].float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model.eval()


def save(path: Path, config: Mapping[str, Any], **options: Any) -> Tiny:
    """Build a model and save it as transformers does, with side files beside it."""
    model = build(config)
    model.save_pretrained(path, **options)
    for name, content in SIDE_FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return Tiny(path, model, config)


def add_predicting_layers(path: Path) -> None:
    """Add to a model in one file the layers that predict further tokens, which transformers leaves out."""
    config = json.loads((path / "config.json").read_text())
    tensors = stored(path)
    described = describe_model(config).tensors
    generator = torch.Generator().manual_seed(7)
    for name in list_predicting_names(config, described):
        dtype = getattr(torch, described[name].dtype.torch)
        tensors[name] = torch.randn(described[name].shape, generator=generator).to(dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every safetensors file of a directory, as the safetensors library reads it."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted([path] if path.is_file() else path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no dict
                assert name not in found, f"{name} is stored twice"
                found[name] = opened.get_tensor(name)
    return found


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names with the same types, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def loaded(path: Path, kind: Any, **options: Any) -> Any:
    """The model that `from_pretrained` makes of a directory, with nothing missing and nothing left over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        model, info = kind.from_pretrained(path, dtype="auto", output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def assert_loaded(model: Any, source: Tiny) -> None:
    """The model has the state of the one that was saved.

    Where a class keeps some tensors in fp32, transformers 5.23 does so from plain files only: from rank files some of
    its classes get them in the type of all others.
    """
    found, expected = model.state_dict(), source.model.state_dict()
    kept = [f".{part}." for part in source.model._keep_in_fp32_modules_strict or ()]
    wide = {name for name in expected if any(part in f".{name}." for part in kept)}
    assert_same(found, {n: t.to(found[n].dtype) if n in wide else t for n, t in expected.items()})


def side_files(path: Path) -> dict[str, bytes]:
    """Every file that holds no tensors, but the index and the record, which describe those that do."""
    names = [file for file in sorted(path.rglob("*")) if file.is_file()]
    describing = (".safetensors", ".index.json", "shardctl.json", ".bin", ".pt", ".pth")
    return {f.relative_to(path).as_posix(): f.read_bytes() for f in names if not f.name.endswith(describing)}
