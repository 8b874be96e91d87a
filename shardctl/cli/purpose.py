"""The options that say what the devices are for, and what they are."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardctl.cli.sizes import parse_size

if TYPE_CHECKING:
    from shardctl.memory.devices import Device
    from shardctl.verbs.purpose import Purpose

_PURPOSE = "What the devices are for"
_SERVING = "Serving"
_TRAINING = "Training"
_DEVICES = "Devices"
_OPTIMIZERS = "adamw, adamw-8bit, sgd, adafactor, muon, lion, ..."

For = Annotated[
    Literal["serve", "train"] | None,
    typer.Option(
        "--for",
        rich_help_panel=_PURPOSE,
        show_default=False,
        help="Default: train if fsdp ranks or anything of training is asked for, else serve.",
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        min=1,
        rich_help_panel=_PURPOSE,
        show_default=False,
        help="Tokens per sequence. Default: 8192, or the model's own limit if that is less.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_PURPOSE,
        show_default=False,
        help="Sequences served at once, or per forward pass of a data-parallel rank. Default: 1.",
    ),
]
KvDtype = Annotated[
    Literal["bf16", "fp16", "fp8", "fp32"] | None,
    typer.Option(rich_help_panel=_SERVING, show_default=False, help="Of the key/value cache. Default: the model's."),
]
EncoderLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        min=1,
        rich_help_panel=_SERVING,
        show_default=False,
        help="Tokens per sequence of an encoder with a decoder. Default: --seq-len.",
    ),
]
BatchedTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_SERVING,
        show_default=False,
        help="Most tokens of a forward pass (vLLM: max_num_batched_tokens). Default: 8192.",
    ),
]
MaxSeqs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_SERVING,
        show_default=False,
        help="Most sequences at once, for all of which the sampler makes room (vLLM: max_num_seqs). Default: --batch.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|SIZE|auto",
        rich_help_panel=_DEVICES,
        show_default=False,
        help="h100-80g, a100-40g, ..., 80GiB, or auto for what this machine has. Exit code 3 if it does not fit.",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_DEVICES,
        show_default=False,
        help="Devices for --search and for the comparison. Default: the mesh's ranks.",
    ),
]
Search = Annotated[
    bool, typer.Option("--search", metavar="", rich_help_panel=_DEVICES, help="Rank all meshes of --gpus devices.")
]
Optimizer = Annotated[
    str | None,
    typer.Option(metavar="NAME", rich_help_panel=_TRAINING, show_default=False, help=f"{_OPTIMIZERS}. Default: adamw."),
]
Zero = Annotated[
    int | None,
    typer.Option(
        metavar="0..3",
        min=0,
        max=3,
        rich_help_panel=_TRAINING,
        show_default=False,
        help="What dp ranks share: 1 optimizer states, 2 and gradients, 3 and parameters. Default: 0.",
    ),
]
ProfileName = Annotated[
    Literal["megatron", "hf", "fsdp2", "deepspeed"] | None,
    typer.Option("--profile", rich_help_panel=_TRAINING, show_default=False, help="Whose runtime. Default: fsdp2."),
]
Recompute = Annotated[
    Literal["none", "selective", "full"] | None,
    typer.Option(rich_help_panel=_TRAINING, show_default=False, help="Activations that are not kept. Default: none."),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_TRAINING,
        show_default=False,
        help="Forward passes per optimizer step. Default: as many as there are stages.",
    ),
]
Schedule = Annotated[
    Literal["gpipe", "1f1b", "interleaved"] | None,
    typer.Option(rich_help_panel=_TRAINING, show_default=False, help="Of the pipeline. Default: 1f1b."),
]
Vp = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_TRAINING,
        show_default=False,
        help="Model chunks per stage, interleaved. Default: 1.",
    ),
]
Offload = Annotated[
    Literal["none", "cpu", "nvme"] | None,
    typer.Option(rich_help_panel=_TRAINING, show_default=False, help="Where optimizer states go. Default: none."),
]
OffloadParameters = Annotated[
    bool,
    typer.Option("--offload-parameters", metavar="", rich_help_panel=_TRAINING, help="Offload parameters, too."),
]
GradientDtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    typer.Option(rich_help_panel=_TRAINING, show_default=False, help="Of gradients. Default: the profile's."),
]
NoSequenceParallel = Annotated[
    bool,
    typer.Option(
        "--no-sequence-parallel", metavar="", rich_help_panel=_TRAINING, help="tp ranks repeat norms and dropouts."
    ),
]
AttentionKind = Annotated[
    Literal["fused", "eager"] | None,
    typer.Option(
        "--attention",
        rich_help_panel=_TRAINING,
        show_default=False,
        help="Whether scores are kept: FlashAttention and sdpa keep none. Default: fused.",
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        metavar="LOG", rich_help_panel=_TRAINING, show_default=False, help="Fit the profile to measured peaks."
    ),
]

WhatIf = Annotated[
    Literal["keep", "bf16", "fp16", "fp32", "fp8", "int8", "int4"],
    typer.Option(
        rich_help_panel="What is written",
        help="Cast floating-point tensors; fp8, int8 and int4 say what a quantised model would need.",
    ),
]
CODES = ("fp8", "int8", "int4")
"""Types that plan reckons with, and reshard does not make."""
_SIZE = re.compile(r"[\d.]+\s*[A-Za-z]+$")
"""A number alone may be a device's name (4090), and a size has a unit."""
_NAMES = {"bf16": "BF16", "fp16": "F16", "fp8": "F8_E4M3", "fp32": "F32"}


def device(text: str | None) -> "Device | None":
    """What `--gpu` names: a device of the table, a size, or what this machine has."""
    if text is None:
        return None
    if text == "auto":
        from shardctl.memory.local_device import local_device

        return local_device()[0]
    from shardctl.memory.devices import device as named

    return named(parse_size(text) if _SIZE.match(text) else text)


def purpose(*, gpu: str | None, **fields: Any) -> "Purpose":  # noqa: ANN401 - the fields of Purpose, checked by it
    """What the devices are for; options that were not given keep the defaults."""
    from shardctl.verbs.purpose import Purpose

    named = {key: _NAMES[fields.pop(key)] for key in ("kv_dtype", "gradient_dtype") if fields.get(key)}
    return Purpose(device=device(gpu), **(fields | named))
