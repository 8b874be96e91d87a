"""Every library whose files shardctl reads or writes, named once: what can be done with each follows from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import UsageError
from shardctl.libraries.dcp import reading as dcp
from shardctl.libraries.dcp import writing as dcp_writing
from shardctl.libraries.deepseek import arrays as deepseek_arrays
from shardctl.libraries.deepseek import reading as deepseek
from shardctl.libraries.deepseek import writing as deepseek_writing
from shardctl.libraries.deepspeed import reading as deepspeed
from shardctl.libraries.deepspeed import writing as deepspeed_writing
from shardctl.libraries.diffusers import reading as diffusers
from shardctl.libraries.grok import reading as grok
from shardctl.libraries.megatron import arrays as megatron_arrays
from shardctl.libraries.megatron import (
    dist_arrays,
    dist_reading,
    dist_writing,
    fsdp_writing,
    legacy_reading,
    legacy_writing,
)
from shardctl.libraries.meta import llama4_arrays as meta_arrays
from shardctl.libraries.meta import reading as meta
from shardctl.libraries.meta import writing as meta_writing
from shardctl.libraries.orbax import reading as orbax
from shardctl.libraries.orbax import writing as orbax_writing
from shardctl.libraries.rank_pickles import reading as rank_pickles
from shardctl.libraries.safetensors import hf_writing, ranks_writing
from shardctl.libraries.safetensors import reading as safetensors
from shardctl.libraries.torch_save import reading as torch_save
from shardctl.libraries.trtllm import arrays as trtllm_arrays
from shardctl.libraries.trtllm import reading as trtllm
from shardctl.libraries.trtllm import writing as trtllm_writing
from shardctl.libraries.vllm import arrays as vllm_arrays
from shardctl.libraries.vllm import reading as vllm
from shardctl.libraries.vllm import writing as vllm_writing
from shardctl.value import value_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.libraries.arrays.schema import Schema
    from shardctl.libraries.reader import Format
    from shardctl.libraries.writer import Layout


@value_class
class KnownLibrary:
    """What shardctl can do with the files of one library."""

    format: Format | None = None
    """How they are read."""
    layout: Layout | None = None
    """How they are written."""
    schema: Schema | None = None
    """The arrays in them, where those are not the model's own tensors."""


LIBRARIES: Final = (
    KnownLibrary(safetensors.FORMAT, hf_writing.LAYOUT),
    KnownLibrary(layout=ranks_writing.LAYOUT),
    KnownLibrary(dcp.FORMAT, dcp_writing.LAYOUT),
    KnownLibrary(deepspeed.FORMAT, deepspeed_writing.LAYOUT),
    KnownLibrary(meta.FORMAT, meta_writing.LAYOUT, meta_arrays.SCHEMA),
    KnownLibrary(rank_pickles.FORMAT),
    KnownLibrary(torch_save.FORMAT),
    KnownLibrary(dist_reading.FORMAT, dist_writing.LAYOUT, dist_arrays.SCHEMA),
    KnownLibrary(layout=fsdp_writing.LAYOUT),
    KnownLibrary(legacy_reading.FORMAT, legacy_writing.LAYOUT, megatron_arrays.SCHEMA),
    KnownLibrary(trtllm.FORMAT, trtllm_writing.LAYOUT, trtllm_arrays.SCHEMA),
    KnownLibrary(deepseek.FORMAT, deepseek_writing.LAYOUT, deepseek_arrays.SCHEMA),
    KnownLibrary(vllm.FORMAT, vllm_writing.LAYOUT, vllm_arrays.SCHEMA),
    KnownLibrary(grok.FORMAT),
    KnownLibrary(orbax.FORMAT, orbax_writing.LAYOUT),
    KnownLibrary(diffusers.FORMAT),
)
"""In the order in which messages and help list them."""
FORMATS: Final = tuple(each.format for each in LIBRARIES if each.format is not None)
"""What `--from` accepts, and what is detected."""
LAYOUTS: Final = tuple(each.layout for each in LIBRARIES if each.layout is not None)
"""What `--to` accepts."""
SCHEMAS: Final = tuple(each.schema for each in LIBRARIES if each.schema is not None)
"""Every naming scheme but that of transformers, which `models` has."""

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
        "a layout is no quantisation: see --quantize",
    ),
}
"""What to do for words that people take for a layout."""


def get_layout(name: str) -> Layout:
    """Return the layout that `--to` calls so; raises UsageError if there is none."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    known = f"the layouts are {', '.join(layout.name for layout in LAYOUTS)}"
    raise UsageError(f"unknown layout {name!r}", hint=_OTHER_NAMES.get(name.lower(), known))


def list_layouts_with(option: str) -> tuple[str, ...]:
    """List the names of the layouts to which an option means something."""
    return tuple(layout.name for layout in LAYOUTS if option in layout.options)


def format_choice(names: Sequence[str]) -> str:
    """Format names as a choice among them, such as ``hf, ranks or dcp``."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def list_choices() -> dict[str, str]:
    """List what stands in the help for ``{formats}``, ``{layouts}`` and ``{trained}``."""
    return {
        "formats": format_choice([each.name for each in FORMATS]),
        "layouts": format_choice([layout.name for layout in LAYOUTS]),
        "trained": " and ".join(layout.name for layout in LAYOUTS if layout.states == "by default"),
    }
