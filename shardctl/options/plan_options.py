"""Declares the options that only `plan` has: what the devices are used for, and what they are."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from shardctl.base.errors import UsageError
from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess
from shardctl.options.known_words import ESTIMATED_SERVERS, USES, list_gpu_names, list_optimizer_names, list_uses
from shardctl.options.places import parse_output_file
from shardctl.options.sizes import parse_price, parse_rate, parse_run_tokens, parse_size, parse_token_count

if TYPE_CHECKING:
    from shardctl.estimate.training.calibrate import FittedCalibration
    from shardctl.hardware.devices import DeviceSpec

_OTHER_WORDS = {"serve": {"inference", "serving", "infer"}, "train": {"training", "finetuning", "pretraining"}}
"""What other tools call the uses."""
_OPTIMIZER_EXAMPLES = "adamw, adamw-8bit, sgd, adafactor, muon, soap, lion and others"
_VERSION_PATTERN = re.compile(r"(\d+)\.(\d+)(?:\.\w+)*$")
_DEVICE_COUNT_PATTERN = re.compile(r"([1-9]\d{0,6})\s*[xX]\s*(\S.*)")
"""Several devices, such as ``2xh100``; no device's name begins so."""
_MEMORY_SIZE_PATTERN = re.compile(r"([\d.]+)\s*([A-Za-z]+)$")
"""A number alone may be a device's name (4090), and a size has a unit."""


def find_device(text: str) -> "DeviceSpec":
    """Find what `--gpu` names: a device in the table, a memory size, or the device of this machine.

    Makers of devices count 2^30 bytes as one GB, and so does this.
    """
    several = _DEVICE_COUNT_PATTERN.fullmatch(text)
    if several is not None:
        return replace(find_device(several[2]), count=int(several[1]))
    if text == "auto":
        from shardctl.estimate.local_device import find_local_device

        return find_local_device()[0]
    from shardctl.hardware.devices import find_named_device, get_device

    size = None if find_named_device(text) else _MEMORY_SIZE_PATTERN.match(text)
    return get_device(parse_size(size[1] + ("GiB" if size[2].upper() in {"G", "GB"} else size[2])) if size else text)


def parse_engine_version(text: str) -> tuple[int, int] | None:
    """Parse the version in ``vllm@0.19`` or ``vllm@0.19.1``; None where there is none.

    >>> parse_engine_version("vllm@0.19.1"), parse_engine_version("vllm")
    ((0, 19), None)
    """
    found = _VERSION_PATTERN.match(text.partition("@")[2])
    return (int(found[1]), int(found[2])) if found else None


def parse_use(text: str) -> str:
    """Refuse what is neither a use of devices nor a consumer that serves; any version of vLLM has rules of memory."""
    if text not in USES and not (text.startswith("vllm@") and parse_engine_version(text)):
        from shardctl.libraries.consumers.profile import find_profile

        try:
            profile = find_profile(text)
        except UsageError as error:
            meant = next((use for use, words in _OTHER_WORDS.items() if text.lower() in words), "")
            hint = f"did you mean {meant}?" if meant else f"use serve or train, or a server: {error.hint}"
            raise UsageError(
                f"invalid value for '--for': {text!r} is not serve, train or a server", hint=hint
            ) from error
        if profile.consumer not in ESTIMATED_SERVERS:
            raise UsageError(
                f"{profile.consumer} is not a server whose memory use is estimated",
                hint="use --for serve, or --for vllm",
            )
    return text


def parse_part(text: str) -> float:
    """Parse a part of a whole, such as ``0.9``; raises UsageError for what is none."""
    try:
        part = float(text)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise UsageError(
            f"{text!r} is not a fraction of a device", hint="write a number above 0 and up to 1, such as 0.9"
        )
    return part


def parse_dropout(text: str) -> float:
    """Parse a probability of dropout, such as ``0.05`` or ``0``; raises UsageError for what is none."""
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise UsageError(
            f"{text!r} is no probability of dropout", hint="write 0.05, or another number from 0 to below 1"
        )
    return part


@settings_class
class PlanOptions:
    """What the devices are for; None stands for the default that the model or the mesh decides."""

    out: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Write the plan to a file, for reshard --plan FILE.",
            metavar="FILE",
            parser=parse_output_file,
            access=PathAccess.WRITTEN,
        ),
    ] = None
    """There is no plan to follow of a model that is not stored."""
    use: Annotated[
        str | None,
        CommandOption(
            HelpPanel.PURPOSE,
            "What to estimate: serve, train, or a server such as vllm, vllm@0.19 or sglang, with memory as it counts. "
            "Default: train if --fsdp or a training option is given, else serve.",
            brief="serve, train, or an engine such as vllm, sglang",
            flag="--for",
            metavar="USE|SERVER",
            parser=parse_use,
            words=list_uses,
        ),
    ] = None
    """`serve`, `train`, or the server that will hold the model."""
    seq_len: Annotated[
        int | None,
        CommandOption(
            HelpPanel.PURPOSE,
            "Tokens per sequence; 32k is 32,000 and 32K is 32,768, as in vLLM (max_model_len). Default: 8192, or the "
            "model's limit if that is lower.",
            brief="Tokens per sequence (default: at most 8192)",
            metavar="TOKENS",
            parser=parse_token_count,
            accepts=str,
            aliases=("--max-model-len",),
        ),
    ] = None
    batch: Annotated[
        int | None,
        CommandOption(
            HelpPanel.PURPOSE,
            "Sequences (users) served at once; in training, per forward pass of a data-parallel rank. Default: 1.",
            brief="Sequences at once; in training, per rank",
            metavar="N",
            least=1,
            aliases=("--users",),
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["bf16", "fp16", "fp8", "nvfp4", "fp32"] | None,
        CommandOption(
            HelpPanel.SERVING,
            "Type of the key/value cache (vLLM: kv_cache_dtype). Default: the model's type.",
            brief="Type of the KV cache",
            aliases=("--kv-cache-dtype",),
        ),
    ] = None
    decode_cp: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SERVING,
            "Number of tp ranks that share a head's cache by tokens (vLLM: decode_context_parallel_size). Default: 1.",
            flag="--decode-cp",
            aliases=("--dcp",),
            metavar="N",
            least=1,
        ),
    ] = None
    encoder_len: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SERVING,
            "Tokens per sequence in the encoder of an encoder-decoder model. Default: --seq-len.",
            metavar="TOKENS",
            parser=parse_token_count,
            accepts=str,
        ),
    ] = None
    batched_tokens: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SERVING,
            "Maximum tokens per forward pass (vLLM: max_num_batched_tokens). Default: 8192, with --for vllm the "
            "engine's for the device.",
            metavar="TOKENS",
            parser=parse_token_count,
            accepts=str,
            aliases=("--max-num-batched-tokens",),
        ),
    ] = None
    max_seqs: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SERVING,
            "Maximum sequences at once; the sampler reserves memory for all of them (vLLM: max_num_seqs). "
            "Default: --batch, with --for vllm the engine's for the device, 256 or 1024.",
            metavar="N",
            least=1,
            aliases=("--max-num-seqs",),
        ),
    ] = None
    server: Annotated[
        Literal["vllm", "sglang"] | None,
        CommandOption(
            HelpPanel.SERVING,
            "The same as --for vllm or --for sglang, which replaces it.",
            hidden=True,
        ),
    ] = None
    """The former option of `--for SERVER`."""
    towers: Annotated[
        Literal["shard", "replicate", "cut", "whole"] | None,
        CommandOption(
            HelpPanel.SERVING,
            "Shard or replicate vision and audio encoders across tp (vLLM: mm_encoder_tp_mode weights or data). "
            "Default: shard, where it is known how.",
            flag="--encoder-tp",
            accepts=Literal["shard", "replicate"] | None,
            aliases=("--towers",),
            former_values=(("cut", "shard"), ("whole", "replicate")),
        ),
    ] = None
    """`cut` and `whole` are former names of `shard` and `replicate`."""
    utilization: Annotated[
        float | None,
        CommandOption(
            HelpPanel.SERVING,
            "Part of the device that the engine may use (vLLM: gpu_memory_utilization, SGLang: mem_fraction_static). "
            "Default: 0.92 with --for vllm, else all of it.",
            brief="Part of the device used (default: 1, vllm 0.92)",
            metavar="PART",
            parser=parse_part,
            accepts=str,
            aliases=("--gpu-memory-utilization",),
        ),
    ] = None
    device: Annotated[
        "DeviceSpec | None",
        CommandOption(
            HelpPanel.DEVICES,
            "Device name (h100-80g, rtx-4090, ...), memory size (80GB), a file that describes one (FILE.toml), or auto "
            "for this machine's device. 2xh100 is --gpu h100 --gpus 2. GB is nominal here, 2^30 bytes, and 10^9 bytes "
            "in all other options. Exits with 3 if the model does not fit.",
            brief="Name (h100), memory (80GB), FILE.toml or auto",
            flag="--gpu",
            metavar="NAME|SIZE|FILE|auto",
            words=list_gpu_names,
            parser=find_device,
        ),
    ] = None
    """The device of every rank; without one, the plan states needs and does not say whether they fit."""
    devices: Annotated[
        int | None,
        CommandOption(
            HelpPanel.DEVICES,
            "Number of devices for --search and for the comparison. Default: the ranks of the mesh.",
            brief="Number of devices",
            flag="--gpus",
            metavar="N",
            least=1,
        ),
    ] = None
    price: Annotated[
        float | None,
        CommandOption(
            HelpPanel.DEVICES,
            "Price of one device for one hour, such as 2.50: what a million tokens cost, and with --tokens the run.",
            metavar="PRICE",
            parser=parse_price,
            accepts=str,
        ),
    ] = None
    search: Annotated[
        bool,
        CommandOption(
            HelpPanel.DEVICES,
            "Compare all meshes of --gpus devices and rank them.",
            brief="Compare all meshes of --gpus devices",
        ),
    ] = False
    optimizer: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRAINING,
            f"Optimizer: {_OPTIMIZER_EXAMPLES}. Default: adamw.",
            brief="Optimizer, such as adamw-8bit or muon",
            metavar="NAME",
            words=list_optimizer_names,
        ),
    ] = None
    lora_rank: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Train a low-rank adapter of this rank instead of the model.",
            metavar="N",
            least=1,
        ),
    ] = None
    lora_targets: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Linear layers that the adapter changes, such as q_proj,v_proj. Default: all-linear.",
            metavar="NAMES",
        ),
    ] = None
    lora_dropout: Annotated[
        float | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Dropout of the adapter, as PEFT's lora_dropout: any above 0 keeps masks and copies. Default: 0.",
            metavar="PART",
            parser=parse_dropout,
            accepts=str,
        ),
    ] = None
    base_dtype: Annotated[
        Literal["bf16", "fp16", "fp32", "int8", "nf4"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Type of the weights under the adapter; int8 and nf4 as bitsandbytes stores them. Default: the model's.",
        ),
    ] = None
    prepare_base: Annotated[
        Literal["peft", "trl"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Who prepares a quantized base: PEFT's prepare_model_for_kbit_training makes its norms, embedding and head "
            "fp32, and TRL the latter two bf16 again. Default: neither.",
        ),
    ] = None
    train_only: Annotated[
        str | None,
        CommandOption(HelpPanel.TRAINING, "Train only the tensors with a matching name.", metavar="REGEX"),
    ] = None
    beside: Annotated[
        tuple[Path, ...],
        CommandOption(
            HelpPanel.TRAINING,
            "Also count this model's weights: reference, reward or critic; may be repeated.",
            flag="--extra-model",
            aliases=("--beside",),
            metavar="PATH",
            accepts=list[Path],
            access=PathAccess.READ,
        ),
    ] = ()
    """Models that the same ranks hold on the same mesh, and which are not trained."""
    precision: Annotated[
        Literal["mixed", "bf16", "fp32"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "mixed computes in 16 bits and updates fp32 copies, bf16 and fp32 keep everything in one type. "
            "Default: mixed.",
        ),
    ] = None
    zero: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "What dp ranks share: 1 is optimizer states, 2 adds gradients, 3 adds parameters. Default: 0.",
            brief="ZeRO stage of dp ranks, 0 to 3",
            metavar="N",
            least=0,
            most=3,
        ),
    ] = None
    profile: Annotated[
        Literal["megatron", "hf", "fsdp2", "deepspeed", "torchtune", "ddp"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Training runtime to estimate. Default: fsdp2.",
            brief="Runtime: megatron, hf, deepspeed",
        ),
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "full"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Which activations to recompute instead of keeping them; selective is attention between its projections, "
            "and with --profile fsdp2 all but what torchtitan's list of operations saves; full is "
            "gradient checkpointing. Default: none.",
            brief="Recompute activations: selective, full",
            aliases=("--gradient-checkpointing=full",),
        ),
    ] = None
    recompute_modules: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Profile megatron: what --recompute selective recomputes, separated by commas: core_attn, moe_act, "
            "layernorm, mla_up_proj, mlp, moe, shared_experts. Default: core_attn.",
            metavar="NAMES",
        ),
    ] = None
    recompute_every: Annotated[
        int,
        CommandOption(
            HelpPanel.TRAINING,
            "Recompute only the last of every N layers, as --recompute says.",
            metavar="N",
            least=1,
        ),
    ] = 1
    microbatches: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Forward passes per optimizer step of each data-parallel rank, also of each mesh of --search. Default: the "
            "number of stages; with --search, as many as give all meshes equal steps.",
            metavar="N",
            least=1,
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Sequences per optimizer step, over all devices; also of each mesh of --search. Default: --microbatches "
            "times the data-parallel ranks.",
            metavar="N",
            least=1,
            aliases=("--global-batch-size",),
        ),
    ] = None
    run_tokens: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Tokens of the whole run, such as 1T or 500B (powers of 1,000): how many days it takes.",
            flag="--tokens",
            metavar="TOKENS",
            parser=parse_run_tokens,
            accepts=str,
        ),
    ] = None
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved"] | None,
        CommandOption(HelpPanel.TRAINING, "Pipeline schedule. Default: 1f1b."),
    ] = None
    virtual_stages: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Model chunks per stage, for the interleaved schedule. Default: 1.",
            flag="--vp",
            metavar="N",
            least=1,
        ),
    ] = None
    offload: Annotated[
        Literal["none", "cpu", "nvme"] | None,
        CommandOption(HelpPanel.TRAINING, "Where to offload optimizer states. Default: none."),
    ] = None
    offload_parameters: Annotated[bool, CommandOption(HelpPanel.TRAINING, "Offload parameters as well.")] = False
    gradient_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        CommandOption(HelpPanel.TRAINING, "Type of gradients. Default: the type that the profile uses."),
    ] = None
    exp_avg_dtype: Annotated[
        Literal["fp32", "fp16", "bf16", "fp8"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Profile megatron: type of the first moment, in the precision-aware optimizer. Default: fp32, in another.",
        ),
    ] = None
    exp_avg_sq_dtype: Annotated[
        Literal["fp32", "fp16", "bf16", "fp8"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Profile megatron: type of the second moment, in the precision-aware optimizer. Default: fp32, in another.",
        ),
    ] = None
    no_sequence_parallel: Annotated[
        bool, CommandOption(HelpPanel.TRAINING, "Compute norms and dropouts on whole sequences on every tp rank.")
    ] = False
    attention: Annotated[
        Literal["flash", "sdpa", "eager"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Attention kernel: eager keeps the scores, flash (FlashAttention) and sdpa (torch) do not; they differ for "
            "windows and for values narrower than keys. Default: flash.",
        ),
    ] = None
    no_dropout: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRAINING, "Train without dropout, which is the config's, or 0.1 with the profile megatron."
        ),
    ] = False
    no_gradient_fusion: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRAINING,
            "Profile megatron: sum weight gradients outside of their kernels.",
            flag="--no-grad-accum-fusion",
        ),
    ] = False
    fused_loss: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRAINING, "Profile megatron: cross entropy in place of the logits (Transformer Engine's)."
        ),
    ] = False
    chunked_loss: Annotated[
        Literal["torchtune", "litgpt", "torchtitan", "liger", "unsloth"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Whose cross entropy computes the loss in chunks of tokens: torchtune's and litgpt's keep logarithms of "
            "all probabilities, torchtitan's, liger's and unsloth's nothing as large. Default: all logits at once.",
        ),
    ] = None
    offload_checkpoints: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRAINING,
            "With --recompute full: keep the inputs of layers on the host (Unsloth's gradient checkpointing, "
            "torchtune's activation offloading).",
        ),
    ] = False
    step_in_backward: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRAINING,
            "Update each parameter in the backward pass and free its gradient (torchtune's optimizer_in_bwd).",
            flag="--optimizer-in-backward",
        ),
    ] = False
    exchanged_heads: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRAINING,
            "Profile megatron: cp ranks exchange heads (cp_comm_type a2a), not keys and values in a ring.",
            flag="--cp-a2a",
        ),
    ] = False
    overlapped_all_to_all: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRAINING,
            "Profile megatron: the all-to-all of experts runs behind the computation of another microbatch.",
            flag="--overlap-all-to-all",
            aliases=("--overlap-moe-expert-parallel-comm",),
        ),
    ] = False
    compiled: Annotated[
        Literal["layers", "all"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Profile fsdp2: what torch.compile compiles, each layer, or the loss too (all). Default: nothing.",
            flag="--compile",
        ),
    ] = None
    float8: Annotated[
        Literal["tensorwise", "rowwise"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Profile fsdp2: products of layers in float8 (torchao), with one scale for each tensor or row.",
        ),
    ] = None
    float8_gathered: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRAINING,
            "With --float8 tensorwise: FSDP2 gathers weights in float8 (enable_fsdp_float8_all_gather).",
            flag="--float8-gather",
        ),
    ] = False
    optimizer_kernel: Annotated[
        Literal["fused", "foreach"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Profiles fsdp2 and hf: kernels of torch's AdamW; foreach ones copy all parameters (torchtitan: fused). "
            "Default: foreach, with hf fused.",
        ),
    ] = None
    mtp_layers: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Number of multi-token prediction layers (MTP) that are trained, of a model that is only described. "
            "Default: with --profile megatron those of the config, else 0.",
            metavar="N",
            least=0,
        ),
    ] = None
    allocator: Annotated[
        Literal["native", "expandable"] | None,
        CommandOption(
            HelpPanel.TRAINING,
            "Whether torch's allocator has expandable segments (PYTORCH_CUDA_ALLOC_CONF), which lose less to "
            "fragmentation. Default: expandable with fsdp2, as torchtitan starts it, else native.",
        ),
    ] = None
    calibration: Annotated[
        "Path | FittedCalibration | None",
        CommandOption(
            HelpPanel.TRAINING,
            "Fit the estimate to the measured peaks in a log.",
            flag="--calibrate",
            metavar="LOG",
            parser=Path,
            access=PathAccess.READ,
        ),
    ] = None
    """A log of measured peaks, which the estimate of training is fitted to, or what it was fitted to already."""
    disk_rate: Annotated[
        int | None,
        CommandOption(
            HelpPanel.WRITING,
            "Rate at which a conversion reads and writes, for the time that it takes. Default: 1GB/s.",
            metavar="RATE",
            parser=parse_rate,
            accepts=str,
        ),
    ] = None
    """Bytes per second, of bytes read and written together."""
    probe: Annotated[
        bool,
        CommandOption(
            HelpPanel.WRITING,
            "Measure that rate by reading at most 256 MB of the source; plan reads headers only else.",
        ),
    ] = False
    dtype: Annotated[
        Literal["keep", "bf16", "fp16", "fp32", "fp8", "int8", "int4"],
        CommandOption(
            HelpPanel.WRITING,
            "Type to cast floating-point tensors to; fp8, int8 and int4 only estimate a quantized model.",
            brief="Type of weights: bf16, fp32, fp8, int4",
        ),
    ] = "keep"
    """This replaces the `dtype` of the conversion; `keep` leaves that as it is."""

    @property
    def cast_type(self) -> Literal["bf16", "fp16", "fp32"] | None:
        """The type that weights are to be written in; None leaves it to the conversion."""
        return self.dtype if self.dtype in ("bf16", "fp16", "fp32") else None

    @property
    def quantized_type(self) -> Literal["fp8", "int8", "int4"] | None:
        """The type that weights would have if someone quantized them, which plan estimates and reshard does not do."""
        return self.dtype if self.dtype in ("fp8", "int8", "int4") else None

    @property
    def engine(self) -> Literal["vllm", "sglang"] | None:
        """The server whose way to count memory is followed, if one is named."""
        named = self.use.partition("@")[0] if self.use is not None else ""
        return next((server for server in ESTIMATED_SERVERS if server == named), self.server)
