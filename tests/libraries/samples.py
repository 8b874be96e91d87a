"""Makes one small checkpoint of every library, and says what each library cannot do, with the reason."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from shardctl.api import Mesh, ReshardOptions, SourceOptions, reshard
from shardctl.tensors.record import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "trtllm/llama_pp3/source"
DEEPSEEK = FIXTURES / "deepseek_mp/bf16/source"


def read_llama() -> Mapping[str, torch.Tensor]:
    """The Llama's tensors, as the library of safetensors reads them."""
    return load_file(LLAMA / "model.safetensors")


def read_deepseek() -> Mapping[str, torch.Tensor]:
    """The DeepSeek-V3's tensors, as the library of safetensors reads them."""
    return load_file(DEEPSEEK / "model.safetensors")


def read_whole_tp() -> Mapping[str, torch.Tensor]:
    """What torch made of the live model whose ranks saved the fixture."""
    return torch.load(FIXTURES / "dcp/tp.whole.pt", weights_only=True)["weights"]


@dataclass(frozen=True, kw_only=True)
class WriterSample:
    """How a layout is tried, and what its library has no place for."""

    mesh: Mesh | None = None
    model: Path = LLAMA
    """The Hugging Face checkpoint that is written."""
    modelless: bool = False
    """Whether tensors of no model can be written; else a stranger is tried beside the tensors of `model`."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """What the message says of strangers that have no place in it, by a pattern of their kinds."""


@dataclass(frozen=True, kw_only=True)
class ReaderSample:
    """A checkpoint of one library, how it is read, and which of its files say nothing of the weights."""

    make: Callable[[Path], None]
    """Writes it into a folder that is not there yet."""
    config: Path | None = LLAMA / "config.json"
    """None for a container that has a config for each of its parts."""
    weights: Callable[[], Mapping[str, torch.Tensor]] = read_llama
    """What it must hold, by the library that wrote it."""
    rules: Path | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Patterns of files that are not read, and why: whatever they hold, the digest is the same."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """Patterns of files that may be missing, and why; if they are there, they must be sound."""
    said: Mapping[str, str] = field(default_factory=dict)
    """What the message says instead of the file's name, by a pattern of files."""
    slack: Mapping[str, str] = field(default_factory=dict)
    """Patterns of files whose last byte no tensor needs, and why."""
    no_replicas: str = ""
    """Why no element is stored twice; empty where some are."""

    @property
    def source_options(self) -> SourceOptions:
        """How Python reads it."""
        return SourceOptions(config=self.config, rules=self.rules)

    @property
    def arguments(self) -> tuple[str, ...]:
        """How the command line reads it."""
        given = (("--config", self.config), ("--rules", self.rules))
        return tuple(text for flag, path in given if path is not None for text in (flag, str(path)))


def write_by_layout(name: str) -> Callable[[Path], None]:
    """What writes the sample of a layout, without the record: only the library's own files are to speak."""

    def make(folder: Path) -> None:
        sample = WRITERS[name]
        reshard(sample.model, folder, ReshardOptions(to=name, mesh=sample.mesh))
        (folder / RECORD).unlink()

    return make


def write_shards(folder: Path, save: Callable[[dict[str, torch.Tensor], Path], object], names: str) -> None:
    """Two shards with the index that transformers writes."""
    folder.mkdir()
    shutil.copy(LLAMA / "config.json", folder)
    tensors = load_file(LLAMA / "model.safetensors")
    keys = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((keys[::2], keys[1::2]), 1):
        file = names.format(f"-{number:05d}-of-00002")
        save({key: tensors[key] for key in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{names.format('')}.index.json").write_text(json.dumps(index))


def copy_fixture(path: str) -> Callable[[Path], None]:
    """What copies a checkpoint that its own library wrote."""
    return lambda folder: shutil.copytree(FIXTURES / path, folder)


def read_result(folder: Path) -> Mapping[str, torch.Tensor]:
    """What the library of safetensors reads in Hugging Face's files; names begin with the folders of a pipeline."""
    return {
        f"{path.parent.name}/{name}" if path.parent != folder else name: tensor
        for path in folder.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def write_grok(folder: Path) -> None:
    """The Llama's tensors in files like those of Grok-2: feed-forward layers in a part for each of two ranks."""
    folder.mkdir()
    shutil.copy(LLAMA / "config.json", folder)
    cuts = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
    tensors = {"": {}} | {module: {} for module in cuts}
    for name, tensor in read_llama().items():
        module = name.split(".")[-2]
        tensors[module if module in cuts else ""][name] = tensor
    for number, (module, found) in enumerate(tensors.items()):
        parts = {"common": found}
        if module:
            halves = {name: tensor.chunk(2, cuts[module]) for name, tensor in found.items()}
            parts = {f"{n:03d}": {name: half[n].clone() for name, half in halves.items()} for n in range(2)}
        for part, some in parts.items():
            save_file(some, folder / f"pytorch_model-{number:05d}-TP-{part}.safetensors")


TWO = Mesh.of(tp=2)
FOLDERS = {"name *": "cannot be the name of a folder"}
"""Each tensor has a folder of its name."""
WRITERS = {
    "hf": WriterSample(modelless=True),
    "ranks": WriterSample(mesh=TWO),
    "dcp": WriterSample(mesh=TWO, modelless=True),
    "universal": WriterSample(modelless=True, refuses=FOLDERS),
    "meta": WriterSample(mesh=TWO),
    "torch_dist": WriterSample(mesh=TWO),
    "fsdp_dtensor": WriterSample(mesh=TWO),
    "megatron": WriterSample(mesh=TWO),
    "trtllm": WriterSample(mesh=TWO),
    "deepseek": WriterSample(mesh=TWO, model=DEEPSEEK),
    "vllm": WriterSample(mesh=TWO),
    "orbax": WriterSample(modelless=True, refuses=FOLDERS),
}

CONFIG = {"config.json": "the one that --config names is read"}
ONCE = "the library stores each element once"
READERS = {
    "safetensors": ReaderSample(
        make=lambda folder: write_shards(folder, save_file, "model{}.safetensors"),
        ignored=CONFIG,
        optional={"*.index.json": "the shards say themselves what they hold"},
        no_replicas="shards divide the tensors among them",
    ),
    "dcp": ReaderSample(make=write_by_layout("dcp"), ignored=CONFIG, no_replicas=ONCE),
    "deepspeed": ReaderSample(
        make=write_by_layout("universal"),
        ignored=CONFIG | {"*/zero_pp_rank_*": "a copy for loaders of ZeRO-3, which hold no weights"},
        optional={
            "latest_universal": "there is one folder",
            "*/mp_rank_*": "it holds no weights in Universal Checkpoints",
            "*/optimizer_state.pt": "only a trainer goes on from it",
        },
        no_replicas=ONCE,
    ),
    "meta": ReaderSample(
        make=write_by_layout("meta"), ignored=CONFIG, optional={"params.json": "the config says the same"}
    ),
    "pickled-ranks": ReaderSample(
        make=copy_fixture("pickled_ranks/tp"), config=FIXTURES / "dcp/config.json", weights=read_whole_tp
    ),
    "torch": ReaderSample(
        make=lambda folder: write_shards(folder, torch.save, "pytorch_model{}.bin"),
        ignored=CONFIG,
        optional={"*.index.json": "the shards say themselves what they hold"},
        no_replicas="shards divide the tensors among them",
    ),
    "torch_dist": ReaderSample(
        make=write_by_layout("torch_dist"),
        ignored=CONFIG,
        optional={"*/common.pt": "the config says what the model is"},
        said={
            "latest_checkpointed_iteration.txt": "in folders of their own: release",
            "release/metadata.json": "has no metadata.json of Megatron-LM that can be read",
        },
        no_replicas=ONCE,
    ),
    "megatron": ReaderSample(
        make=write_by_layout("megatron"),
        ignored=CONFIG,
        optional={"latest_checkpointed_iteration.txt": "there is one iteration"},
    ),
    "trtllm": ReaderSample(make=write_by_layout("trtllm")),
    "deepseek": ReaderSample(
        make=write_by_layout("deepseek"),
        config=DEEPSEEK / "config.json",
        weights=read_deepseek,
        ignored=CONFIG | {"tokenizer_config.json": "it is no weight"},
    ),
    "vllm": ReaderSample(
        make=write_by_layout("vllm"),
        ignored=CONFIG,
        said={
            "model-rank-0-*": "there is no file of rank 0",
            "model-rank-1-*": "model.embed_tokens.weight has shape [32, 32], but the model gives it [64, 32]",
        },
    ),
    "grok": ReaderSample(
        make=write_grok,
        ignored=CONFIG,
        said={"*-common.safetensors": "a file numbered 00000 is missing"},
        no_replicas="ranks divide the tensors among them",
    ),
    "orbax": ReaderSample(
        make=copy_fixture("orbax/ocdbt"),
        rules=FIXTURES / "orbax/names.toml",
        ignored={
            "_CHECKPOINT_METADATA": "it says when the checkpoint was saved",
            "_sharding": "it says which device had what",
            "array_metadatas/*": "the arrays say the same",
            "ocdbt.process_0/manifest.ocdbt": "that of one process, which the merged one replaces",
            "ocdbt.process_0/d/[!5]*": "nodes of the tree of one process, which the merged tree replaces",
        },
        slack={"ocdbt.process_0/d/5*": "nothing refers to its last byte"},
        said={"manifest.ocdbt": "holds no checkpoint", "ocdbt.process_0/d/5*": "cannot be read"},
        no_replicas=ONCE,
    ),
    "diffusers": ReaderSample(
        make=copy_fixture("diffusers/pipeline"),
        config=None,
        weights=lambda: read_result(FIXTURES / "diffusers/pipeline"),
        ignored={"*/*config.json": "it says nothing of the weights", "tokenizer/*": "it is no weight"},
        said={"model_index.json": "holds no checkpoint", "*/*.safetensors": ", but no weights"},
        no_replicas=ONCE,
    ),
}
"""By `Format.name`."""
