"""Names every format, layout and schema of a library, and the modules in which they are declared.

All formats are loaded, because each is asked whether a source is one of its checkpoints; so their modules are small,
and load what reads a checkpoint when it is read. A layout or a schema is loaded when a command asks for it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UsageError
from shardctl.libraries.dcp import reading as dcp
from shardctl.libraries.deepseek import reading as deepseek
from shardctl.libraries.deepspeed import reading as deepspeed
from shardctl.libraries.diffusers import reading as diffusers
from shardctl.libraries.grok import reading as grok
from shardctl.libraries.megatron import dist_reading, legacy_reading
from shardctl.libraries.meta import reading as meta
from shardctl.libraries.orbax import reading as orbax
from shardctl.libraries.rank_pickles import reading as rank_pickles
from shardctl.libraries.safetensors import reading as safetensors
from shardctl.libraries.torch_save import reading as torch_save
from shardctl.libraries.trtllm import reading as trtllm
from shardctl.libraries.vllm import reading as vllm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.libraries.arrays.schema import Schema
    from shardctl.libraries.reader import Format
    from shardctl.libraries.writer import Layout

FORMATS: Final[tuple[Format, ...]] = (
    safetensors.FORMAT,
    dcp.FORMAT,
    deepspeed.FORMAT,
    meta.FORMAT,
    rank_pickles.FORMAT,
    torch_save.FORMAT,
    dist_reading.FORMAT,
    legacy_reading.FORMAT,
    trtllm.FORMAT,
    deepseek.FORMAT,
    vllm.FORMAT,
    grok.FORMAT,
    orbax.FORMAT,
    diffusers.FORMAT,
)
"""What `--from` accepts, and what is detected, in the order in which messages and help list them."""
LAYOUT_FILES: Final = {
    "hf": "safetensors.hf_writing",
    "ranks": "safetensors.ranks_writing",
    "dcp": "dcp.writing",
    "universal": "deepspeed.writing",
    "meta": "meta.writing",
    "torch_dist": "megatron.dist_writing",
    "fsdp_dtensor": "megatron.fsdp_writing",
    "megatron": "megatron.legacy_writing",
    "trtllm": "trtllm.writing",
    "deepseek": "deepseek.writing",
    "vllm": "vllm.writing",
    "orbax": "orbax.writing",
}
"""What `--to` accepts, in the order in which messages and help list it: the module whose `LAYOUT` writes it."""
SCHEMA_FILES: Final = {
    "meta": "meta.llama4_arrays",
    "torch_dist": "megatron.dist_arrays",
    "megatron": "megatron.arrays",
    "trtllm": "trtllm.arrays",
    "deepseek": "deepseek.arrays",
    "vllm": "vllm.arrays",
    "gpt_neox": "deepspeed.gpt_neox_ranks",
}
"""Every naming scheme but that of transformers, which `models` has: the module whose `SCHEMA` describes its arrays."""

_OTHER_NAMES: Final = {
    **dict.fromkeys(
        ("safetensors", "huggingface", "transformers", "sglang", "lmdeploy"), "write --to hf, which this loads"
    ),
    **dict.fromkeys(("deepspeed", "zero", "ucp"), "write --to universal, which DeepSpeed resumes from at any size"),
    **dict.fromkeys(("fsdp", "fsdp2", "torchtitan", "distcp"), "write --to dcp, which this resumes from"),
    **dict.fromkeys(
        ("mcore", "megatron-core", "nemo"), "write --to torch_dist, or --to megatron for mp_rank directories"
    ),
    **dict.fromkeys(("tensorrt-llm", "tensorrt_llm", "tensorrt"), "write --to trtllm, or --to hf from version 1.3 on"),
    **dict.fromkeys(
        ("jax", "flax", "maxtext"), "write --to orbax, which Orbax restores; its names are those of the source"
    ),
    "diffusers": "write --to hf: parts of a pipeline have the names of files that diffusers looks for",
    **dict.fromkeys(("llama", "consolidated"), "write --to meta for consolidated.NN.pth files"),
    **dict.fromkeys(("bin", "pt", "pth", "pytorch", "torch"), "shardctl writes safetensors: write --to hf"),
    **dict.fromkeys(
        ("gguf", "ggml", "llama.cpp"),
        "shardctl writes no GGUF: write --to hf, which convert_hf_to_gguf.py of llama.cpp reads",
    ),
    **dict.fromkeys(
        ("awq", "gptq", "fp8", "fp4", "int8", "int4", "nvfp4", "mxfp4", "mxfp8"),
        "a layout is no quantization: see --quantize",
    ),
}
"""What to do for words that people take for a layout."""


@cache
def get_layout(name: str) -> Layout:
    """Return the layout that `--to` calls so; raises UsageError if there is none."""
    if name not in LAYOUT_FILES:
        known = f"the layouts are {', '.join(LAYOUT_FILES)}"
        raise UsageError(f"unknown layout {name!r}", hint=_OTHER_NAMES.get(name.lower(), known))
    layout: Layout = import_module(f"shardctl.libraries.{LAYOUT_FILES[name]}").LAYOUT
    return layout


def is_served_layout(name: str) -> bool:
    """Return whether `from_pretrained` or an engine loads a directory of a layout, by the name in a record."""
    return name in LAYOUT_FILES and get_layout(name).served


def load_layouts() -> tuple[Layout, ...]:
    """Load every layout, in the order of the help."""
    return tuple(map(get_layout, LAYOUT_FILES))


def list_layouts_with(option: str) -> tuple[str, ...]:
    """List the names of the layouts to which an option means something."""
    return tuple(layout.name for layout in load_layouts() if option in layout.options)


@cache
def get_schema(name: str) -> Schema:
    """Return the naming scheme of a name that a `NamingScheme` has."""
    schema: Schema = import_module(f"shardctl.libraries.{SCHEMA_FILES[name]}").SCHEMA
    return schema


def format_choice(names: Sequence[str]) -> str:
    """Format names as a choice among them, such as ``hf, ranks or dcp``."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def list_choices() -> dict[str, str]:
    """List what stands in the help for ``{formats}``, ``{layouts}`` and ``{trained}``."""
    return {
        "formats": format_choice([each.name for each in FORMATS]),
        "layouts": format_choice(list(LAYOUT_FILES)),
        "trained": " and ".join(layout.name for layout in load_layouts() if layout.states == "by default"),
    }
