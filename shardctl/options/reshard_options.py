"""Declares what a checkpoint is converted to: the options that `plan`, `reshard` and the plan file share."""

from pathlib import Path
from typing import Annotated, Final, Literal

from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel, OptionGroup, PathAccess
from shardctl.options.known_words import (
    list_consumer_names,
    list_layout_names,
    list_part_names,
    list_recipe_names,
    parse_target,
)
from shardctl.options.mesh_flags import MeshFlags
from shardctl.options.sizes import parse_size
from shardctl.options.sum_options import ADD_DIFFERENCE, AVERAGE_WEIGHTS, AVERAGE_WITH, EMA, SCALE
from shardctl.tensors.mesh import Mesh

Threads = Annotated[
    int | None,
    CommandOption(
        HelpPanel.EFFORT,
        "Number of threads. Default: one more than there are cores, at most eight.",
        brief="Threads (default: cores + 1, at most 8)",
        metavar="N",
        least=1,
        shapes_result=False,
    ),
]
HostMemory = Annotated[
    int,
    CommandOption(
        HelpPanel.EFFORT,
        "Maximum host memory to use. Default: 1GiB.",
        brief="Maximum host memory",
        flag="--memory",
        metavar="SIZE",
        parser=parse_size,
        key="memory",
        shapes_result=False,
    ),
]
LAYOUT_OPTIONS: Final = (
    *("max_shard_size", "names", "experts"),
    *("meta_embedding", "megatron", "trtllm_embedding", "vllm_profile"),
)
"""The fields that only some layouts have a use for; each layout says which in `Layout.options`."""


@settings_class
class ReshardOptions:
    """What a checkpoint is converted to."""

    mesh: Annotated[Mesh | None, OptionGroup(MeshFlags)] = None
    stages: Annotated[
        str | None,
        CommandOption(
            HelpPanel.MESH,
            "Number of layers in each stage, or transformers for its own division (transformers@5.23 before 5.24). "
            "Default: balanced by bytes.",
            metavar="N,N,...",
        ),
    ] = None
    consumer: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "Write what this program loads, check that it will load, and print the command that starts it: vllm, "
            "vllm@0.33, sglang, transformers, transformers@4.57, tgi or llama.cpp.",
            brief="Write what this loads: vllm, sglang, tgi",
            flag="--for",
            metavar="CONSUMER",
            parser=parse_target,
            words=list_consumer_names,
        ),
    ] = None
    """A consumer and, if given, its version; the mesh is then the one that it runs on."""
    consumer_mesh: Mesh | None = None
    """The mesh that the consumer runs on, where the files are not cut for it; `--for` sets this, not an option."""
    to: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "{layouts}. Default: ranks for a mesh, else hf.",
            brief="Layout to write",
            metavar="LAYOUT",
            words=list_layout_names,
        ),
    ] = None
    """The layout; by default `ranks` for a mesh and `hf` for one device."""
    names: Annotated[
        Literal["hub", "transformers", "keep", "accelerate", "torchtitan", "automodel", "veomni", "maxtext"] | None,
        CommandOption(
            HelpPanel.WRITING,
            "Tensor names: of the Hub (hf), of transformers' classes, or of the source; in dcp those of Accelerate, "
            "torchtitan, NeMo Automodel and VeOmni, in orbax MaxText's. Default: transformers; in hf those of the "
            "source if its class loads them from the Hub, else hub.",
        ),
    ] = None
    """Whose names and arrays are written; `hub` is what `save_pretrained` of transformers 5.24 writes."""
    experts: Annotated[
        Literal["keep", "fused", "fused@0.18", "split"],
        CommandOption(
            HelpPanel.WRITING,
            "Write the experts of a layer as one array (fused), or each by itself (split). Adapters: fused is the "
            "layout of PEFT 0.19 and later, fused@0.18 that of PEFT 0.18.",
            brief="Write experts as one array (fused), or each by itself (split)",
        ),
    ] = "keep"
    """The form of experts: `fused` as in transformers 5, `split` with a tensor for each, `keep` as in the source."""
    max_shard_size: Annotated[
        int | None,
        CommandOption(
            HelpPanel.WRITING,
            "Maximum bytes of tensors per file. Default: 5GB for hf.",
            brief="Maximum size of a file",
            metavar="SIZE",
            parser=parse_size,
        ),
    ] = None
    vllm_profile: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "Engine whose names --to vllm writes: vLLM 0.32, 0.25 or 0.11, or sglang. Default: 0.32.",
            hidden=True,
        ),
    ] = None
    """The former option of `--for vllm@VERSION --to vllm`."""
    trtllm_embedding: Annotated[
        Literal["whole", "vocabulary", "hidden"] | None,
        CommandOption(
            HelpPanel.WRITING, "How --to trtllm stores the embedding: whole, or cut along a dim. Default: whole."
        ),
    ] = None
    meta_embedding: Annotated[
        Literal["vocabulary", "hidden"] | None,
        CommandOption(
            HelpPanel.WRITING,
            "Dim along which --to meta cuts the embedding: vocabulary (the code of Llama 3) or hidden (Llama 2). "
            "Default: by rope_theta.",
        ),
    ] = None
    megatron: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "How Megatron-LM will run the model, for --to megatron and fsdp_dtensor, such as layers=local.",
            metavar="TEXT",
        ),
    ] = None
    """Which implementation of layers Megatron-LM uses and how it runs them; `MegatronOptions` reads this text."""
    dtype: Annotated[
        Literal["keep", "bf16", "fp16", "fp32"],
        CommandOption(
            HelpPanel.WRITING,
            "Type to cast floating-point tensors to; quantized weights are decoded.",
            brief="Type to cast to: bf16, fp16, fp32",
        ),
    ] = "keep"
    keep_fp32: Annotated[
        str | None, CommandOption(HelpPanel.WRITING, "Keep tensors with a matching name in fp32.", metavar="REGEX")
    ] = None
    """Tensors whose names match this regular expression are not cast."""
    only: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "Split a part off: text, vision or adapter, with a config of its own; mtp, experts or a pattern of names.",
            metavar="PART",
            words=list_part_names,
        ),
    ] = None
    """`text` and `vision` are models inside one that sees or hears, `adapter` is one of PEFT; a pattern is such as
    `model.visual.**`."""
    merge: Annotated[
        tuple[Path, ...],
        CommandOption(
            HelpPanel.WRITING,
            "Merge this adapter of PEFT (LoRA, DoRA) into the weights; may be repeated.",
            brief="Merge this LoRA or DoRA adapter",
            metavar="DIR",
            accepts=list[Path],
            access=PathAccess.READ,
        ),
    ] = ()
    """Adapters that are merged one after the other, as PEFT's `merge_and_unload` does."""
    average_with: Annotated[tuple[str, ...], AVERAGE_WITH] = ()
    """Paths or addresses of further checkpoints of the same model."""
    average_weights: Annotated[str | None, AVERAGE_WEIGHTS] = None
    """Decimals or fractions that add up to 1; they are taken exactly."""
    ema: Annotated[str | None, EMA] = None
    add_difference: Annotated[tuple[str, str] | None, ADD_DIFFERENCE] = None
    scale: Annotated[str | None, SCALE] = None
    dequantize: Annotated[
        tuple[str, ...],
        CommandOption(
            HelpPanel.WRITING,
            "Decode only this quantized module to --dtype, a name or re:REGEX; may be repeated. The others stay "
            "quantized.",
            metavar="MODULE",
            accepts=list[str],
        ),
    ] = ()
    """Modules that are decoded while all others stay quantized; the config's list of modules that are left has them."""
    allow_partial_adapter: Annotated[
        bool,
        CommandOption(
            HelpPanel.WRITING,
            "Merge an adapter that lacks some of the modules that its config lists.",
            shapes_result=False,
        ),
    ] = False
    """What it lacks is then a warning."""
    quantize: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "Quantize linear layers without data: fp8-block, fp8-channel, fp8-tensor, mxfp8, mxfp4, nvfp4, int8 "
            "or int4.",
            brief="Quantize without data: fp8-block, nvfp4, int4",
            metavar="FORMAT",
            words=list_recipe_names,
        ),
    ] = None
    """A format of compressed-tensors whose scales follow from the weights alone."""
    quantize_ignore: Annotated[
        tuple[str, ...],
        CommandOption(
            HelpPanel.WRITING,
            "Leave this module as it is, a name or re:REGEX; may be repeated. Heads and routers are left anyway.",
            metavar="MODULE",
            accepts=list[str],
        ),
    ] = ()
    """As in the ignore list of compressed-tensors."""
    reflink: Annotated[
        bool,
        CommandOption(
            HelpPanel.WRITING,
            "Share blocks with the files of the source instead of writing them again, where the file system can (XFS, "
            "btrfs).",
        ),
    ] = False
    """Bytes that stay as they are take no space then; headers are padded, so that they lie in blocks as they did."""
    include: Annotated[
        str | None, CommandOption(HelpPanel.WRITING, "Write only tensors with a matching name.", metavar="REGEX")
    ] = None
    exclude: Annotated[
        str | None, CommandOption(HelpPanel.WRITING, "Leave out tensors with a matching name.", metavar="REGEX")
    ] = None
    extra_tensors: Annotated[
        Literal["keep", "drop", "error"],
        CommandOption(
            HelpPanel.WRITING,
            "What to do with tensors that the model's class does not have: keep them in "
            "extra/extra_tensors.safetensors, drop them, or stop.",
        ),
    ] = "keep"
    """Such as a value head, a weighted loss, or an EMA beside the model; no index lists the file."""
    allow_expansion: Annotated[
        bool,
        CommandOption(
            HelpPanel.WRITING,
            "Allow a result of more than four times the bytes of the source.",
            shapes_result=False,
        ),
    ] = False
    """Several names for one storage, or strides that repeat elements, can make a small file fill a disk."""
    optimizer_states: Annotated[
        Literal["keep", "drop"] | None,
        CommandOption(
            HelpPanel.WRITING,
            "Whether to convert optimizer states as well. Default: keep for {trained}, else drop.",
        ),
    ] = None
    """Whether optimizer states are converted; by default they are for layouts that trainers read."""
    host_memory: HostMemory = 1 << 30
    """Bytes of anonymous memory on this machine; `plan` estimates what devices need."""
    threads: Threads = None
