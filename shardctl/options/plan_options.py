"""What the devices of a plan are for, and what they are: the options that only `plan` has."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.options.sizes import parse_size

if TYPE_CHECKING:
    from shardctl.estimate.calibrate import FittedCalibration
    from shardctl.estimate.devices import DeviceSpec

_OPTIMIZERS = "adamw, adamw-8bit, sgd, adafactor, muon, lion, ..."
_SIZE = re.compile(r"[\d.]+\s*[A-Za-z]+$")
"""A number alone may be a device's name (4090), and a size has a unit."""


def find_device(text: str) -> "DeviceSpec":
    """What `--gpu` names: a device of the table, a size, or what this machine has."""
    if text == "auto":
        from shardctl.estimate.local_device import find_local_device

        return find_local_device()[0]
    from shardctl.estimate.devices import get_device

    return get_device(parse_size(text) if _SIZE.match(text) else text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the devices are for; None stands for the default that the model or the mesh decides."""

    use: Annotated[
        Literal["serve", "train"] | None,
        CommandOption(
            HelpPanel.PURPOSE,
            "Default: train if fsdp ranks or anything of training is asked for, else serve.",
            flag="--for",
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        CommandOption(
            HelpPanel.PURPOSE,
            "Tokens per sequence. Default: 8192, or the model's own limit if that is less.",
            metavar="TOKENS",
            least=1,
        ),
    ] = None
    batch: Annotated[
        int | None,
        CommandOption(
            HelpPanel.PURPOSE,
            "Sequences served at once, or per forward pass of a data-parallel rank. Default: 1.",
            metavar="N",
            least=1,
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["bf16", "fp16", "fp8", "fp32"] | None,
        CommandOption(HelpPanel.SERVING, "Of the key/value cache. Default: the model's."),
    ] = None
    encoder_len: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SERVING,
            "Tokens per sequence of an encoder with a decoder. Default: --seq-len.",
            metavar="TOKENS",
            least=1,
        ),
    ] = None
    batched_tokens: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SERVING,
            "Most tokens of a forward pass (vLLM: max_num_batched_tokens). Default: 8192.",
            metavar="N",
            least=1,
        ),
    ] = None
    max_seqs: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SERVING,
            "Most sequences at once, for all of which the sampler makes room (vLLM: max_num_seqs). Default: --batch.",
            metavar="N",
            least=1,
        ),
    ] = None
    device: Annotated[
        "DeviceSpec | None",
        CommandOption(
            HelpPanel.DEVICES,
            "h100-80g, a100-40g, ..., 80GiB, or auto for what this machine has. Exit code 3 if it does not fit.",
            flag="--gpu",
            metavar="NAME|SIZE|auto",
            parser=find_device,
        ),
    ] = None
    """What each rank runs on; without one, needs are stated and nothing is said to fit."""
    devices: Annotated[
        int | None,
        CommandOption(
            HelpPanel.DEVICES,
            "Devices for --search and for the comparison. Default: the mesh's ranks.",
            flag="--gpus",
            metavar="N",
            least=1,
        ),
    ] = None
    search: Annotated[bool, CommandOption(HelpPanel.DEVICES, "Rank all meshes of --gpus devices.")] = False
    optimizer: Annotated[
        str | None, CommandOption(HelpPanel.TRAINING, f"{_OPTIMIZERS}. Default: adamw.", metavar="NAME")
    ] = None
    zero: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "What dp ranks share: 1 optimizer states, 2 and gradients, 3 and parameters. Default: 0.",
            metavar="0..3",
            least=0,
            most=3,
        ),
    ] = None
    profile: Annotated[
        Literal["megatron", "hf", "fsdp2", "deepspeed"] | None,
        CommandOption(HelpPanel.TRAINING, "Whose runtime. Default: fsdp2."),
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "full"] | None,
        CommandOption(HelpPanel.TRAINING, "Activations that are not kept. Default: none."),
    ] = None
    microbatches: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Forward passes per optimizer step. Default: as many as there are stages.",
            metavar="N",
            least=1,
        ),
    ] = None
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved"] | None,
        CommandOption(HelpPanel.TRAINING, "Of the pipeline. Default: 1f1b."),
    ] = None
    virtual_stages: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Model chunks per stage, interleaved. Default: 1.",
            flag="--vp",
            metavar="N",
            least=1,
        ),
    ] = None
    offload: Annotated[
        Literal["none", "cpu", "nvme"] | None,
        CommandOption(HelpPanel.TRAINING, "Where optimizer states go. Default: none."),
    ] = None
    offload_parameters: Annotated[bool, CommandOption(HelpPanel.TRAINING, "Offload parameters, too.")] = False
    gradient_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        CommandOption(HelpPanel.TRAINING, "Of gradients. Default: the profile's."),
    ] = None
    no_sequence_parallel: Annotated[bool, CommandOption(HelpPanel.TRAINING, "tp ranks repeat norms and dropouts.")] = (
        False
    )
    attention: Annotated[
        Literal["fused", "eager"] | None,
        CommandOption(
            HelpPanel.TRAINING, "Whether scores are kept: FlashAttention and sdpa keep none. Default: fused."
        ),
    ] = None
    calibration: Annotated[
        "Path | FittedCalibration | None",
        CommandOption(
            HelpPanel.TRAINING,
            "Fit the profile to measured peaks.",
            flag="--calibrate",
            metavar="LOG",
            parser=Path,
        ),
    ] = None
    """A log of measured peaks, which the estimate of training is fitted to, or what it was fitted to already."""
    dtype: Annotated[
        Literal["keep", "bf16", "fp16", "fp32", "fp8", "int8", "int4"],
        CommandOption(
            HelpPanel.WRITING,
            "Cast floating-point tensors; fp8, int8 and int4 say what a quantised model would need.",
        ),
    ] = "keep"
    """What is said here is said instead of the conversion's `dtype`; `keep` leaves that as it is."""

    @property
    def cast_type(self) -> Literal["bf16", "fp16", "fp32"] | None:
        """The type that weights are to be written in; None leaves it to the conversion."""
        return self.dtype if self.dtype in ("bf16", "fp16", "fp32") else None

    @property
    def quantised_type(self) -> Literal["fp8", "int8", "int4"] | None:
        """The type that weights would have if someone quantised them, which plan estimates and reshard does not do."""
        return self.dtype if self.dtype in ("fp8", "int8", "int4") else None
