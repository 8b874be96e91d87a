"""Offers every verb as a function with a keyword for each option: the public Python API.

Keywords are the long options of the command line with underscores. A result has `verdict`, `to_dict()` (the JSON that
the command prints) and `str()` (its text). On failure a `ShardctlError` is raised, whose `hint` says what to do.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import wraps
from inspect import BoundArguments, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, cast, overload

from shardctl.base.errors import ShardctlError, UsageError
from shardctl.base.workers import CallbackWatcher, ExecutionOptions, NullWatcher, ProgressUpdate, ProgressWatcher
from shardctl.conversion.engine.worker import WorkerId, find_job_name
from shardctl.conversion.plan_file import PlanFile, read_plan_file
from shardctl.conversion.worker_part import ContributeResult
from shardctl.conversion.worker_part import contribute as _contribute
from shardctl.options import (
    DestinationOptions,
    InspectOptions,
    PlanOptions,
    ReshardOptions,
    SourceOptions,
    VerifyOptions,
)
from shardctl.options.keywords import OptionKeywords, check_argument, check_path, describe_value, warn_of_object
from shardctl.options.reshard_options import HostMemory, Threads
from shardctl.planning.plan_result import PlanResult
from shardctl.running.state_dict import lens as _lens
from shardctl.running.state_dict import load as _load
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.attest import AttestResult
from shardctl.verbs.attest import attest as _attest
from shardctl.verbs.diff import DiffResult
from shardctl.verbs.diff import diff as _diff
from shardctl.verbs.digest import DigestResult
from shardctl.verbs.digest import digest as _digest
from shardctl.verbs.find_newest import NewestCheckpoint
from shardctl.verbs.find_newest import find_newest as _find_newest
from shardctl.verbs.finish import FinishResult
from shardctl.verbs.finish import finish as _finish
from shardctl.verbs.inspect import InspectResult
from shardctl.verbs.inspect import inspect as _inspect
from shardctl.verbs.plan import plan as _plan
from shardctl.verbs.reshard import ReshardResult
from shardctl.verbs.reshard import reshard as _reshard
from shardctl.verbs.reshard_each import ReshardEachResult
from shardctl.verbs.reshard_each import reshard_each as _reshard_each
from shardctl.verbs.verify import VerifyResult
from shardctl.verbs.verify import verify as _verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from shardctl.conversion.engine_sums import EngineSums
    from shardctl.estimate.training.calibrate import FittedCalibration
    from shardctl.hardware.devices import DeviceSpec
    from shardctl.verbs.dry_run import RehearsalResult
    from shardctl.verbs.reshard_each import EachOutcome

__all__ = [
    "AttestResult",
    "ContributeResult",
    "DestinationOptions",
    "DiffResult",
    "DigestResult",
    "ExecutionOptions",
    "FinishResult",
    "InspectOptions",
    "InspectResult",
    "Mesh",
    "NewestCheckpoint",
    "PlanOptions",
    "PlanResult",
    "ProgressUpdate",
    "ReshardEachResult",
    "ReshardOptions",
    "ReshardResult",
    "ShardctlError",
    "SourceOptions",
    "UsageError",
    "VerifyOptions",
    "VerifyResult",
    "WorkerId",
    "attest",
    "contribute",
    "diff",
    "digest",
    "find_newest",
    "finish",
    "inspect",
    "lens",
    "load",
    "plan",
    "reshard",
    "reshard_each",
    "verify",
]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Detail = Literal["summary", "stage", "rank", "tensor", "time", "zero"]
_PATH_PARAMETER_NAMES = frozenset({"path", "a", "b", "destination", "pattern"})
"""Parameters that take a path or an address."""


class _LinedSignature(Signature):
    """A signature that `help` shows with each keyword on a line of its own."""

    __slots__ = ()

    @classmethod
    def of(cls, function: Callable[..., object]) -> _LinedSignature:
        """Make that of a function."""
        found = signature(function)
        return cls(list(found.parameters.values()), return_annotation=found.return_annotation)

    def __str__(self) -> str:
        """Format it as the source has it, without the quotes of annotations."""
        lines, keyword_only = [], False
        for each in self.parameters.values():
            if each.kind is each.KEYWORD_ONLY and not keyword_only:
                lines.append("*")
                keyword_only = True
            default = "" if each.default is each.empty else f" = {each.default!r}"
            lines.append(f"{each.name}: {each.annotation}{default}")
        return "".join(["(\n", *(f"    {line},\n" for line in lines), f") -> {self.return_annotation}"])


def _bind(lined: Signature, args: tuple[object, ...], keywords: dict[str, object]) -> BoundArguments:
    """Bind the arguments of a call; a keyword that does not exist is a TypeError, as always, with a hint."""
    try:
        return lined.bind(*args, **keywords)
    except TypeError as error:
        unknown = next((name for name in keywords if name not in lined.parameters), "")
        near = get_close_matches(unknown, lined.parameters, 1)
        if unknown:
            error.add_note(f"hint: {f'did you mean {near[0]}?' if near else 'help() lists the keywords'}")
        raise


def _add_hints(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Check the paths that a function gets, and give its errors the hints that the command line gives."""
    lined = _LinedSignature.of(function)

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            bound = _bind(lined, args, kwargs)
            for name in _PATH_PARAMETER_NAMES & bound.arguments.keys():
                if bound.arguments[name] is not None:
                    bound.arguments[name] = check_path(name, bound.arguments[name])
            return function(*bound.args, **bound.kwargs)
        except (ShardctlError, OSError, MemoryError) as error:
            from shardctl.report.failure import describe_failure

            if isinstance(error, ShardctlError) and not error.hint:
                error.hint = describe_failure(error).hint
                error.add_note(f"hint: {error.hint}")
            elif not isinstance(error, ShardctlError):
                error.add_note(f"hint: {describe_failure(error).hint}")
            raise

    call.__signature__ = lined  # type: ignore[attr-defined]
    return call


@_add_hints
def plan(
    path: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    # options: python docs/python_api.py writes these
    detail: Literal["summary", "stage", "rank", "tensor", "time", "zero"] = "summary",
    out: str | Path | None = None,
    tp: int | None = None,
    tensor_parallel_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    stages: str | None = None,
    for_: str | None = None,
    seq_len: int | str | None = None,
    max_model_len: int | str | None = None,
    batch: int | None = None,
    users: int | None = None,
    kv_dtype: Literal["bf16", "fp16", "fp8", "nvfp4", "fp32"] | None = None,
    kv_cache_dtype: Literal["bf16", "fp16", "fp8", "nvfp4", "fp32"] | None = None,
    decode_cp: int | None = None,
    dcp: int | None = None,
    encoder_len: int | str | None = None,
    batched_tokens: int | str | None = None,
    max_num_batched_tokens: int | str | None = None,
    max_seqs: int | None = None,
    max_num_seqs: int | None = None,
    encoder_tp: Literal["shard", "replicate", "cut", "whole"] | None = None,
    towers: Literal["shard", "replicate", "cut", "whole"] | None = None,
    utilization: float | None = None,
    gpu_memory_utilization: float | None = None,
    gpu: str | Path | Mapping[str, object] | DeviceSpec | None = None,
    gpus: int | None = None,
    price: float | str | None = None,
    search: bool = False,
    optimizer: str | None = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    lora_dropout: float | None = None,
    base_dtype: Literal["bf16", "fp16", "fp32", "int8", "nf4"] | None = None,
    prepare_base: Literal["peft", "trl"] | None = None,
    train_only: str | None = None,
    extra_model: str | Path | Sequence[str | Path] = (),
    beside: str | Path | Sequence[str | Path] = (),
    precision: Literal["mixed", "bf16", "fp32"] | None = None,
    zero: int | None = None,
    profile: Literal["megatron", "hf", "fsdp2", "deepspeed", "torchtune", "ddp"] | None = None,
    recompute: Literal["none", "selective", "full"] | None = None,
    gradient_checkpointing: bool = False,
    recompute_modules: str | None = None,
    recompute_every: int = 1,
    microbatches: int | None = None,
    global_batch: int | None = None,
    global_batch_size: int | None = None,
    tokens: int | str | None = None,
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None,
    vp: int | None = None,
    offload: Literal["none", "cpu", "nvme"] | None = None,
    offload_parameters: bool = False,
    gradient_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] | None = None,
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] | None = None,
    no_sequence_parallel: bool = False,
    attention: Literal["flash", "sdpa", "eager"] | None = None,
    no_dropout: bool = False,
    no_grad_accum_fusion: bool = False,
    fused_loss: bool = False,
    chunked_loss: Literal["torchtune", "litgpt", "torchtitan", "liger", "unsloth"] | None = None,
    offload_checkpoints: bool = False,
    optimizer_in_backward: bool = False,
    cp_a2a: bool = False,
    overlap_all_to_all: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    compile: Literal["layers", "all"] | None = None,
    float8: Literal["tensorwise", "rowwise"] | None = None,
    float8_gather: bool = False,
    optimizer_kernel: Literal["fused", "foreach"] | None = None,
    mtp_layers: int | None = None,
    allocator: Literal["native", "expandable"] | None = None,
    calibrate: str | Path | FittedCalibration | None = None,
    to: str | None = None,
    names: Literal["hub", "transformers", "keep", "accelerate", "torchtitan", "automodel", "veomni", "maxtext"]
    | None = None,
    experts: Literal["keep", "fused", "fused@0.18", "split"] = "keep",
    max_shard_size: int | str | None = None,
    trtllm_embedding: Literal["whole", "vocabulary", "hidden"] | None = None,
    meta_embedding: Literal["vocabulary", "hidden"] | None = None,
    megatron: str | None = None,
    dtype: Literal["keep", "bf16", "fp16", "fp32", "fp8", "int8", "int4"] = "keep",
    keep_fp32: str | None = None,
    only: str | None = None,
    merge: str | Path | Sequence[str | Path] = (),
    average_with: str | Sequence[str] = (),
    average_weights: str | None = None,
    ema: str | None = None,
    add_difference: str | Sequence[str] | None = None,
    scale: str | None = None,
    dequantize: str | Sequence[str] = (),
    allow_partial_adapter: bool = False,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    reflink: bool = False,
    include: str | None = None,
    exclude: str | None = None,
    extra_tensors: Literal["keep", "drop", "error"] = "keep",
    allow_expansion: bool = False,
    optimizer_states: Literal["keep", "drop"] | None = None,
    disk_rate: int | str | None = None,
    probe: bool = False,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    rules_from: Literal["transformers", "names", "none"] | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    kv_heads: Literal["error", "replicate"] | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    destination: str | Path | None = None,
    source_options: SourceOptions | None = None,
    plan_options: PlanOptions | None = None,
) -> PlanResult:
    """Estimate what each device will hold, whether it fits, and what a conversion will cost.

    Only headers are read, and nothing is written. `fits` of the result is the answer, and `str(result)` is what
    `shardctl plan` prints. A memory limit that cannot hold the conversion is a warning of the result.

    Example:
        planned = shardctl.plan("llama", tp=2, gpu="h100", seq_len=32768, users=50)
        print(planned)
        assert planned.fits

    Arguments:
        path: The checkpoint, or a config.json alone: a path, owner/name[@revision] on the Hub, or an address.
        destination: Where free space is looked up for the conversion. Default: at the source.
        reshard_options: Options of the conversion as an object, until the next release.
        source_options: Options of the source as an object, until the next release.
        plan_options: Options of the workload as an object, until the next release.

    Options:
        detail: How much the text shows: time has the peaks of a training step, zero the stages of ZeRO. Default:
            "summary".
        out: Write the plan to this file, for `reshard(plan=...)`.

    Mesh:
        tp: Number of tensor-parallel ranks.
        tensor_parallel_size: The same as tp.
        pp: Number of pipeline stages.
        dp: Number of data-parallel replicas.
        fsdp: Number of ranks that share the first dim of each tensor.
        cp: Number of context-parallel ranks.
        ep: Number of expert-parallel ranks; they are ranks of the stage.
        etp: Number of tensor-parallel ranks within each expert.
        mesh: The whole mesh, outermost axis first, such as pp=2,fsdp=2,tp=4. A text, a dictionary such as {"pp": 2,
            "tp": 4}, or a Mesh.
        stages: Number of layers in each stage, or transformers for its own division (transformers@5.23 before 5.24).
            Default: balanced by bytes.

    Workload:
        for_: What to estimate: serve, train, or a server such as vllm, vllm@0.19 or sglang, with memory as it counts.
            Default: train if fsdp or a training option is given, else serve.
        seq_len: Tokens per sequence; 32k is 32,000 and 32K is 32,768, as in vLLM (max_model_len). Default: 8192, or the
            model's limit if that is lower.
        max_model_len: The same as seq_len.
        batch: Sequences (users) served at once; in training, per forward pass of a data-parallel rank. Default: 1.
        users: The same as batch.

    Serving:
        kv_dtype: Type of the key/value cache (vLLM: kv_cache_dtype). Default: the model's type.
        kv_cache_dtype: The same as kv_dtype.
        decode_cp: Number of tp ranks that share a head's cache by tokens (vLLM: decode_context_parallel_size). Default:
            1.
        dcp: The same as decode_cp.
        encoder_len: Tokens per sequence in the encoder of an encoder-decoder model. Default: seq_len.
        batched_tokens: Maximum tokens per forward pass (vLLM: max_num_batched_tokens). Default: 8192, with for_="vllm"
            the engine's for the device.
        max_num_batched_tokens: The same as batched_tokens.
        max_seqs: Maximum sequences at once; the sampler reserves memory for all of them (vLLM: max_num_seqs). Default:
            batch, with for_="vllm" the engine's for the device, 256 or 1024.
        max_num_seqs: The same as max_seqs.
        encoder_tp: Shard or replicate vision and audio encoders across tp (vLLM: mm_encoder_tp_mode weights or data).
            Default: shard, where it is known how.
        towers: The same as encoder_tp.
        utilization: Part of the device that the engine may use (vLLM: gpu_memory_utilization, SGLang:
            mem_fraction_static). Default: 0.92 with for_="vllm", else all of it.
        gpu_memory_utilization: The same as utilization.

    Devices:
        gpu: Device name (h100-80g, rtx-4090, ...), memory size (80GB), a file that describes one (FILE.toml), or auto
            for this machine's device. 2xh100 is gpu h100 gpus 2. GB is nominal here, 2^30 bytes, and 10^9 bytes in all
            other options. A dictionary with the keys of such a file, or a DeviceSpec, works too.
        gpus: Number of devices for search and for the comparison. Default: the ranks of the mesh.
        price: Price of one device for one hour, such as 2.50: what a million tokens cost, and with tokens the run.
        search: Compare all meshes of gpus devices and rank them.

    Training:
        optimizer: Optimizer: adamw, adamw-8bit, sgd, adafactor, muon, soap, lion and others. Default: adamw.
        lora_rank: Train a low-rank adapter of this rank instead of the model.
        lora_targets: Linear layers that the adapter changes, such as q_proj,v_proj. Default: all-linear.
        lora_dropout: Dropout of the adapter, as PEFT's lora_dropout: any above 0 keeps masks and copies. Default: 0.
        base_dtype: Type of the weights under the adapter; int8 and nf4 as bitsandbytes stores them. Default: the
            model's.
        prepare_base: Who prepares a quantized base: PEFT's prepare_model_for_kbit_training makes its norms, embedding
            and head fp32, and TRL the latter two bf16 again. Default: neither.
        train_only: Train only the tensors with a matching name.
        extra_model: Also count this model's weights: reference, reward or critic; a list gives more than one.
        beside: The same as extra_model.
        precision: mixed computes in 16 bits and updates fp32 copies, bf16 and fp32 keep everything in one type.
            Default: mixed.
        zero: What dp ranks share: 1 is optimizer states, 2 adds gradients, 3 adds parameters. Default: 0.
        profile: Training runtime to estimate. Default: fsdp2.
        recompute: Which activations to recompute instead of keeping them; selective is attention between its
            projections, and with profile="fsdp2" all but what torchtitan's list of operations saves; full is gradient
            checkpointing. Default: none.
        gradient_checkpointing: The same as recompute="full".
        recompute_modules: Profile megatron: what recompute="selective" recomputes, separated by commas: core_attn,
            moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts. Default: core_attn.
        recompute_every: Recompute only the last of every N layers, as recompute says. Default: 1.
        microbatches: Forward passes per optimizer step of each data-parallel rank, also of each mesh of search.
            Default: the number of stages; with search, as many as give all meshes equal steps.
        global_batch: Sequences per optimizer step, over all devices; also of each mesh of search. Default: microbatches
            times the data-parallel ranks.
        global_batch_size: The same as global_batch.
        tokens: Tokens of the whole run, such as 1T or 500B (powers of 1,000): how many days it takes.
        schedule: Pipeline schedule. Default: 1f1b.
        vp: Model chunks per stage, for the interleaved schedule. Default: 1.
        offload: Where to offload optimizer states. Default: none.
        offload_parameters: Offload parameters as well.
        gradient_dtype: Type of gradients. Default: the type that the profile uses.
        exp_avg_dtype: Profile megatron: type of the first moment, in the precision-aware optimizer. Default: fp32, in
            another.
        exp_avg_sq_dtype: Profile megatron: type of the second moment, in the precision-aware optimizer. Default: fp32,
            in another.
        no_sequence_parallel: Compute norms and dropouts on whole sequences on every tp rank.
        attention: Attention kernel: eager keeps the scores, flash (FlashAttention) and sdpa (torch) do not; they differ
            for windows and for values narrower than keys. Default: flash.
        no_dropout: Train without dropout, which is the config's, or 0.1 with the profile megatron.
        no_grad_accum_fusion: Profile megatron: sum weight gradients outside of their kernels.
        fused_loss: Profile megatron: cross entropy in place of the logits (Transformer Engine's).
        chunked_loss: Whose cross entropy computes the loss in chunks of tokens: torchtune's and litgpt's keep
            logarithms of all probabilities, torchtitan's, liger's and unsloth's nothing as large. Default: all logits
            at once.
        offload_checkpoints: With recompute="full": keep the inputs of layers on the host (Unsloth's gradient
            checkpointing, torchtune's activation offloading).
        optimizer_in_backward: Update each parameter in the backward pass and free its gradient (torchtune's
            optimizer_in_bwd).
        cp_a2a: Profile megatron: cp ranks exchange heads (cp_comm_type a2a), not keys and values in a ring.
        overlap_all_to_all: Profile megatron: the all-to-all of experts runs behind the computation of another
            microbatch.
        overlap_moe_expert_parallel_comm: The same as overlap_all_to_all.
        compile: Profile fsdp2: what torch.compile compiles, each layer, or the loss too (all). Default: nothing.
        float8: Profile fsdp2: products of layers in float8 (torchao), with one scale for each tensor or row.
        float8_gather: With float8="tensorwise": FSDP2 gathers weights in float8 (enable_fsdp_float8_all_gather).
        optimizer_kernel: Profiles fsdp2 and hf: kernels of torch's AdamW; foreach ones copy all parameters (torchtitan:
            fused). Default: foreach, with hf fused.
        mtp_layers: Number of multi-token prediction layers (MTP) that are trained, of a model that is only described.
            Default: with profile="megatron" those of the config, else 0.
        allocator: Whether torch's allocator has expandable segments (PYTORCH_CUDA_ALLOC_CONF), which lose less to
            fragmentation. Default: expandable with fsdp2, as torchtitan starts it, else native.
        calibrate: Fit the estimate to the measured peaks in a log.

    Output:
        to: hf, ranks, dcp, universal, meta, torch_dist, fsdp_dtensor, megatron, trtllm, deepseek, vllm or orbax.
            Default: ranks for a mesh, else hf.
        names: Tensor names: of the Hub (hf), of transformers' classes, or of the source; in dcp those of Accelerate,
            torchtitan, NeMo Automodel and VeOmni, in orbax MaxText's. Default: transformers; in hf those of the source
            if its class loads them from the Hub, else hub.
        experts: Write the experts of a layer as one array (fused), or each by itself (split). Adapters: fused is the
            layout of PEFT 0.19 and later, fused@0.18 that of PEFT 0.18. Default: "keep".
        max_shard_size: Maximum bytes of tensors per file. Default: 5GB for hf.
        trtllm_embedding: How to="trtllm" stores the embedding: whole, or cut along a dim. Default: whole.
        meta_embedding: Dim along which to="meta" cuts the embedding: vocabulary (the code of Llama 3) or hidden (Llama
            2). Default: by rope_theta.
        megatron: How Megatron-LM will run the model, for to="megatron" and fsdp_dtensor, such as layers=local.
        dtype: Type to cast floating-point tensors to; fp8, int8 and int4 only estimate a quantized model. Default:
            "keep".
        keep_fp32: Keep tensors with a matching name in fp32.
        only: Split a part off: text, vision or adapter, with a config of its own; mtp, experts or a pattern of names.
        merge: Merge this adapter of PEFT (LoRA, DoRA) into the weights; a list gives more than one.
        average_with: Average the source with this checkpoint, in any layout; a list gives more than one.
        average_weights: Weights of the average, the source's first, such as 0.5,0.25,0.25. Default: equal.
        ema: Exponential moving average over the checkpoints of the run SRC, by step: decay * average + (1 - decay) *
            next.
        add_difference: Add scale times the difference B - C of two checkpoints (a task vector) to the source.
        scale: Factor of add_difference. Default: 1.
        dequantize: Decode only this quantized module to dtype, a name or re:REGEX; a list gives more than one. The
            others stay quantized.
        allow_partial_adapter: Merge an adapter that lacks some of the modules that its config lists.
        quantize: Quantize linear layers without data: fp8-block, fp8-channel, fp8-tensor, mxfp8, mxfp4, nvfp4, int8 or
            int4.
        quantize_ignore: Leave this module as it is, a name or re:REGEX; a list gives more than one. Heads and routers
            are left anyway.
        reflink: Share blocks with the files of the source instead of writing them again, where the file system can
            (XFS, btrfs).
        include: Write only tensors with a matching name.
        exclude: Leave out tensors with a matching name.
        extra_tensors: What to do with tensors that the model's class does not have: keep them in
            extra/extra_tensors.safetensors, drop them, or stop. Default: "keep".
        allow_expansion: Allow a result of more than four times the bytes of the source.
        optimizer_states: Whether to convert optimizer states as well. Default: keep for dcp and universal, else drop.
        disk_rate: Rate at which a conversion reads and writes, for the time that it takes. Default: 1GB/s.
        probe: Measure that rate by reading at most 256 MB of the source; plan reads headers only else.

    Effort:
        memory: Maximum host memory to use. Default: 1GiB.
        threads: Number of threads. Default: one more than there are cores, at most eight.

    Source:
        config: The model's config.json, its directory, or owner/name on the Hub.
        rules: A rule file, which says how tensors are named and cut.
        rules_from: Where the rules for a model without a table come from. Default: derived from transformers' plan,
            names and shapes.
        from_: safetensors, dcp, deepspeed, meta, pickled-ranks, torch, torch_dist, megatron, trtllm, deepseek, vllm,
            grok, orbax or diffusers. Default: detected.
        weights: Which weights of a training checkpoint: the module's, or the optimizer's fp32 master copy. Default:
            master.
        true_vocab: Vocabulary size without padding, for files that do not say it, such as Megatron-LM's, or have more
            rows.
        keep_padding: Keep the rows that Megatron-LM padded the vocabulary with, and raise vocab_size, instead of
            leaving them out.
        source_etp: Number of tensor-parallel ranks within each expert of the source, for Megatron-LM's directories that
            do not say it.
        kv_heads: What to do if there are more tp ranks than key/value heads. Default: replicate for serving, else
            error.
        prefer_index: If two files hold different values for a tensor, take those in the file that the index names.
        subtree: Read only the tensors below this prefix, for files with more than one model, such as an EMA or a
            teacher.
        complete_from: Another checkpoint, which has what the source lacks: layers that predict, a vision model, a head,
            files.
        apply: Apply this weight delta, such as weight_v000001 of SGLang, to the source; a list gives more than one, in
            order.
        strict: Treat every warning as an error.
        allow_unverified: Accept files that cannot be compared with the Hub's hashes, and name them.

    Errors:
        UsageError: An option has a wrong type or value, or the mesh cannot hold the model.
        SourceError: The checkpoint is missing, malformed or not supported.
    """
    keywords = OptionKeywords(locals(), ReshardOptions, PlanOptions, SourceOptions)
    planned = _plan(
        path,
        keywords.make(ReshardOptions),
        source_options=keywords.make(SourceOptions),
        destination=destination,
        plan_options=keywords.make(PlanOptions),
    )
    return replace(planned, detail=check_argument("detail", _Detail, detail))


@overload
def reshard(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    # options: python docs/python_api.py writes these
    dry_run: Literal[False] = False,
    overwrite: bool = False,
    no_resume: bool = False,
    hash: Literal["sha256"] | None = None,
    prove: bool = False,
    allow_overflow: bool = False,
    create: bool = False,
    private: bool = False,
    tp: int | None = None,
    tensor_parallel_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    stages: str | None = None,
    for_: str | None = None,
    to: str | None = None,
    names: Literal["hub", "transformers", "keep", "accelerate", "torchtitan", "automodel", "veomni", "maxtext"]
    | None = None,
    experts: Literal["keep", "fused", "fused@0.18", "split"] = "keep",
    max_shard_size: int | str | None = None,
    trtllm_embedding: Literal["whole", "vocabulary", "hidden"] | None = None,
    meta_embedding: Literal["vocabulary", "hidden"] | None = None,
    megatron: str | None = None,
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "keep",
    keep_fp32: str | None = None,
    only: str | None = None,
    merge: str | Path | Sequence[str | Path] = (),
    average_with: str | Sequence[str] = (),
    average_weights: str | None = None,
    ema: str | None = None,
    add_difference: str | Sequence[str] | None = None,
    scale: str | None = None,
    dequantize: str | Sequence[str] = (),
    allow_partial_adapter: bool = False,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    reflink: bool = False,
    include: str | None = None,
    exclude: str | None = None,
    extra_tensors: Literal["keep", "drop", "error"] = "keep",
    allow_expansion: bool = False,
    optimizer_states: Literal["keep", "drop"] | None = None,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    rules_from: Literal["transformers", "names", "none"] | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    kv_heads: Literal["error", "replicate"] | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    plan: str | Path | PlanFile | None = None,
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
) -> ReshardResult: ...


@overload
def reshard(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    # options: python docs/python_api.py writes these
    dry_run: Literal[True],
    overwrite: bool = False,
    no_resume: bool = False,
    hash: Literal["sha256"] | None = None,
    prove: bool = False,
    allow_overflow: bool = False,
    create: bool = False,
    private: bool = False,
    tp: int | None = None,
    tensor_parallel_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    stages: str | None = None,
    for_: str | None = None,
    to: str | None = None,
    names: Literal["hub", "transformers", "keep", "accelerate", "torchtitan", "automodel", "veomni", "maxtext"]
    | None = None,
    experts: Literal["keep", "fused", "fused@0.18", "split"] = "keep",
    max_shard_size: int | str | None = None,
    trtllm_embedding: Literal["whole", "vocabulary", "hidden"] | None = None,
    meta_embedding: Literal["vocabulary", "hidden"] | None = None,
    megatron: str | None = None,
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "keep",
    keep_fp32: str | None = None,
    only: str | None = None,
    merge: str | Path | Sequence[str | Path] = (),
    average_with: str | Sequence[str] = (),
    average_weights: str | None = None,
    ema: str | None = None,
    add_difference: str | Sequence[str] | None = None,
    scale: str | None = None,
    dequantize: str | Sequence[str] = (),
    allow_partial_adapter: bool = False,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    reflink: bool = False,
    include: str | None = None,
    exclude: str | None = None,
    extra_tensors: Literal["keep", "drop", "error"] = "keep",
    allow_expansion: bool = False,
    optimizer_states: Literal["keep", "drop"] | None = None,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    rules_from: Literal["transformers", "names", "none"] | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    kv_heads: Literal["error", "replicate"] | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    plan: str | Path | PlanFile | None = None,
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
) -> RehearsalResult: ...


@_add_hints
def reshard(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    # options: python docs/python_api.py writes these
    dry_run: bool = False,
    overwrite: bool = False,
    no_resume: bool = False,
    hash: Literal["sha256"] | None = None,
    prove: bool = False,
    allow_overflow: bool = False,
    create: bool = False,
    private: bool = False,
    tp: int | None = None,
    tensor_parallel_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    stages: str | None = None,
    for_: str | None = None,
    to: str | None = None,
    names: Literal["hub", "transformers", "keep", "accelerate", "torchtitan", "automodel", "veomni", "maxtext"]
    | None = None,
    experts: Literal["keep", "fused", "fused@0.18", "split"] = "keep",
    max_shard_size: int | str | None = None,
    trtllm_embedding: Literal["whole", "vocabulary", "hidden"] | None = None,
    meta_embedding: Literal["vocabulary", "hidden"] | None = None,
    megatron: str | None = None,
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "keep",
    keep_fp32: str | None = None,
    only: str | None = None,
    merge: str | Path | Sequence[str | Path] = (),
    average_with: str | Sequence[str] = (),
    average_weights: str | None = None,
    ema: str | None = None,
    add_difference: str | Sequence[str] | None = None,
    scale: str | None = None,
    dequantize: str | Sequence[str] = (),
    allow_partial_adapter: bool = False,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    reflink: bool = False,
    include: str | None = None,
    exclude: str | None = None,
    extra_tensors: Literal["keep", "drop", "error"] = "keep",
    allow_expansion: bool = False,
    optimizer_states: Literal["keep", "drop"] | None = None,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    rules_from: Literal["transformers", "names", "none"] | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    kv_heads: Literal["error", "replicate"] | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    plan: str | Path | PlanFile | None = None,
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
) -> ReshardResult | RehearsalResult:
    """Convert a checkpoint to another layout in a new directory, a bucket or a branch of the Hub.

    When this returns, every byte is right and on stable storage. On any error the source and what stood at the
    destination are untouched, and the same call resumes. If the destination holds exactly this result already, nothing
    is written. With `dry_run`, every check is made, and the result says what would be written.

    Example:
        done = shardctl.reshard("llama", "llama-tp2", tp=2, progress=True)
        back = shardctl.reshard("llama-tp2", "llama-hf", to="hf", progress=lambda update: print(update.done_bytes))
        assert back.record.digest == done.record.digest

    Arguments:
        path: The checkpoint: a path, owner/name[@revision] on the Hub, or the address of a bucket.
        destination: A directory that is new, empty or written by shardctl, or an hf://, s3://, gs:// or az:// address.
        plan: A file that `plan(out=...)` wrote: then this is done, or nothing.
        progress: True shows a bar on stderr; a callable gets a ProgressUpdate at each phase and file, and up to ten
            times a second, from one thread at a time; what it raises ends the run. Default: False.
        reshard_options: Options of the conversion as an object, until the next release.
        source_options: Options of the source as an object, until the next release.
        destination_options: Options of the destination as an object, until the next release.

    Options:
        dry_run: Check everything and return what would be written, but write nothing.
        overwrite: Replace a checkpoint that shardctl wrote.
        no_resume: Start again instead of resuming an earlier run.
        hash: Write SHA256SUMS, and Megatron-LM's integrity.json.
        prove: Run the result and the source, and publish the result only if they agree.
        allow_overflow: Publish a result in which finite values became infinite, which is refused otherwise.
        create: Create the repository or the branch of a destination on the Hub.
        private: With create, make the repository private.

    Mesh:
        tp: Number of tensor-parallel ranks.
        tensor_parallel_size: The same as tp.
        pp: Number of pipeline stages.
        dp: Number of data-parallel replicas.
        fsdp: Number of ranks that share the first dim of each tensor.
        cp: Number of context-parallel ranks.
        ep: Number of expert-parallel ranks; they are ranks of the stage.
        etp: Number of tensor-parallel ranks within each expert.
        mesh: The whole mesh, outermost axis first, such as pp=2,fsdp=2,tp=4. A text, a dictionary such as {"pp": 2,
            "tp": 4}, or a Mesh.
        stages: Number of layers in each stage, or transformers for its own division (transformers@5.23 before 5.24).
            Default: balanced by bytes.

    Output:
        for_: Write what this program loads, check that it will load, and print the command that starts it: vllm,
            vllm@0.33, sglang, transformers, transformers@4.57, tgi or llama.cpp.
        to: hf, ranks, dcp, universal, meta, torch_dist, fsdp_dtensor, megatron, trtllm, deepseek, vllm or orbax.
            Default: ranks for a mesh, else hf.
        names: Tensor names: of the Hub (hf), of transformers' classes, or of the source; in dcp those of Accelerate,
            torchtitan, NeMo Automodel and VeOmni, in orbax MaxText's. Default: transformers; in hf those of the source
            if its class loads them from the Hub, else hub.
        experts: Write the experts of a layer as one array (fused), or each by itself (split). Adapters: fused is the
            layout of PEFT 0.19 and later, fused@0.18 that of PEFT 0.18. Default: "keep".
        max_shard_size: Maximum bytes of tensors per file. Default: 5GB for hf.
        trtllm_embedding: How to="trtllm" stores the embedding: whole, or cut along a dim. Default: whole.
        meta_embedding: Dim along which to="meta" cuts the embedding: vocabulary (the code of Llama 3) or hidden (Llama
            2). Default: by rope_theta.
        megatron: How Megatron-LM will run the model, for to="megatron" and fsdp_dtensor, such as layers=local.
        dtype: Type to cast floating-point tensors to; quantized weights are decoded. Default: "keep".
        keep_fp32: Keep tensors with a matching name in fp32.
        only: Split a part off: text, vision or adapter, with a config of its own; mtp, experts or a pattern of names.
        merge: Merge this adapter of PEFT (LoRA, DoRA) into the weights; a list gives more than one.
        average_with: Average the source with this checkpoint, in any layout; a list gives more than one.
        average_weights: Weights of the average, the source's first, such as 0.5,0.25,0.25. Default: equal.
        ema: Exponential moving average over the checkpoints of the run SRC, by step: decay * average + (1 - decay) *
            next.
        add_difference: Add scale times the difference B - C of two checkpoints (a task vector) to the source.
        scale: Factor of add_difference. Default: 1.
        dequantize: Decode only this quantized module to dtype, a name or re:REGEX; a list gives more than one. The
            others stay quantized.
        allow_partial_adapter: Merge an adapter that lacks some of the modules that its config lists.
        quantize: Quantize linear layers without data: fp8-block, fp8-channel, fp8-tensor, mxfp8, mxfp4, nvfp4, int8 or
            int4.
        quantize_ignore: Leave this module as it is, a name or re:REGEX; a list gives more than one. Heads and routers
            are left anyway.
        reflink: Share blocks with the files of the source instead of writing them again, where the file system can
            (XFS, btrfs).
        include: Write only tensors with a matching name.
        exclude: Leave out tensors with a matching name.
        extra_tensors: What to do with tensors that the model's class does not have: keep them in
            extra/extra_tensors.safetensors, drop them, or stop. Default: "keep".
        allow_expansion: Allow a result of more than four times the bytes of the source.
        optimizer_states: Whether to convert optimizer states as well. Default: keep for dcp and universal, else drop.

    Effort:
        memory: Maximum host memory to use. Default: 1GiB.
        threads: Number of threads. Default: one more than there are cores, at most eight.

    Source:
        config: The model's config.json, its directory, or owner/name on the Hub.
        rules: A rule file, which says how tensors are named and cut.
        rules_from: Where the rules for a model without a table come from. Default: derived from transformers' plan,
            names and shapes.
        from_: safetensors, dcp, deepspeed, meta, pickled-ranks, torch, torch_dist, megatron, trtllm, deepseek, vllm,
            grok, orbax or diffusers. Default: detected.
        weights: Which weights of a training checkpoint: the module's, or the optimizer's fp32 master copy. Default:
            master.
        true_vocab: Vocabulary size without padding, for files that do not say it, such as Megatron-LM's, or have more
            rows.
        keep_padding: Keep the rows that Megatron-LM padded the vocabulary with, and raise vocab_size, instead of
            leaving them out.
        source_etp: Number of tensor-parallel ranks within each expert of the source, for Megatron-LM's directories that
            do not say it.
        kv_heads: What to do if there are more tp ranks than key/value heads. Default: replicate for serving, else
            error.
        prefer_index: If two files hold different values for a tensor, take those in the file that the index names.
        subtree: Read only the tensors below this prefix, for files with more than one model, such as an EMA or a
            teacher.
        complete_from: Another checkpoint, which has what the source lacks: layers that predict, a vision model, a head,
            files.
        apply: Apply this weight delta, such as weight_v000001 of SGLang, to the source; a list gives more than one, in
            order.
        strict: Treat every warning as an error.
        allow_unverified: Accept files that cannot be compared with the Hub's hashes, and name them.

    Errors:
        UsageError: An option has a wrong type or value, or the mesh cannot hold the model.
        SourceError: The checkpoint is missing, malformed or not supported, or changed while it was read.
        DestinationError: The destination is not shardctl's, has no space or cannot be written.
        Mismatch: With prove, the result computes something else than the source.
    """
    keywords = OptionKeywords(locals(), ReshardOptions, DestinationOptions, SourceOptions)
    conversion, source, file = _follow_plan(plan, keywords, reshard_options, source_options)
    target = keywords.make(DestinationOptions)
    if check_argument("dry_run", bool, dry_run):
        from shardctl.verbs.dry_run import RehearsalResult, rehearse_reshard

        planned = rehearse_reshard(
            path, destination, conversion, source_options=source, destination_options=target, plan=file
        )
        return RehearsalResult(planned, str(destination))
    with _watch_progress("reshard", progress) as watcher:
        return _reshard(
            path,
            destination,
            conversion,
            source_options=source,
            destination_options=target,
            progress=watcher,
            plan=file,
        )


@_add_hints
def verify(
    path: str | Path,
    verify_options: VerifyOptions | None = None,
    *,
    # options: python docs/python_api.py writes these
    level: Literal["quick", "full", "load", "forward"] = "quick",
    against: str | Path | None = None,
    merge: str | Path | Sequence[str | Path] = (),
    for_: str | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    stages: str | None = None,
    attestation: bool = False,
    public_key: str | Path | None = None,
    identity: str | None = None,
    issuer: str | None = None,
    policy: str | Path | None = None,
    require_finite: bool = False,
    require: Literal["quick", "full", "load", "forward"] | None = None,
    average_with: str | Sequence[str] = (),
    average_weights: str | None = None,
    ema: str | None = None,
    add_difference: str | Sequence[str] | None = None,
    scale: str | None = None,
    load: str | None = None,
    device_memory: int | str | None = None,
    device_map: str | None = None,
    host_memory: int | str | None = None,
    offload_folder: str | Path | None = None,
    forward: bool = False,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    prompt: str | None = None,
    tokens: int = 16,
    processes: int | None = None,
    virtual: bool = False,
    second_opinion: bool = False,
    seq_len: int | None = None,
    decode: int | None = None,
    text: str | Path | None = None,
    write_golden: str | Path | None = None,
    golden: str | Path | None = None,
    engine: str | None = None,
    engine_python: str | Path | None = None,
    engine_timeout: int = 3600,
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> VerifyResult:
    """Check that a checkpoint is complete, equals its source, loads and computes.

    What is wrong is returned as findings, and only a source that cannot be read raises. `ok` of the result is the
    answer; `trouble` says what this machine lacks for a level.

    Example:
        found = shardctl.verify("llama-tp2", level="full", against="llama")
        assert found.ok, found.findings

    Arguments:
        path: The checkpoint: a path, owner/name[@revision] on the Hub, or the address of a bucket.
        progress: True shows a bar on stderr; a callable gets a ProgressUpdate at each phase and file, and up to ten
            times a second, from one thread at a time; what it raises ends the run. Default: False.
        verify_options: Options as an object, until the next release.
        source_options: Options of the source as an object, until the next release.
        effort: Threads and watcher as an object, until the next release.

    Options:
        level: How far to check, from headers to running the model; full reads every element, load brings ranks onto
            their devices, and each includes those before it. Default: "quick".
        against: Compare every element with this checkpoint, which may have any layout.
        merge: An adapter that was merged into the source; a list gives more than one.
        for_: Say from headers whether this program loads the directory: vllm, vllm@0.33, sglang, transformers,
            transformers@4.57, tgi or llama.cpp.
        mesh: Mesh whose ranks the files are, such as pp=2,tp=4, where no record says it; with for_, the mesh that the
            program runs on. A text, a dictionary such as {"pp": 2, "tp": 4}, or a Mesh.
        stages: Layers per pipeline stage of mesh. Default: balanced.
        attestation: First check every file against the signature in the directory, model.sig, which must be of
            public_key or of identity.
        public_key: Public key (elliptic curve, PEM) whose signature attestation trusts.
        identity: Identity whose signature through Sigstore attestation trusts, such as an e-mail address; needs issuer.
        issuer: OpenID Connect issuer that vouches for identity, such as https://accounts.google.com.
        policy: TOML file that says which code, pickles, types and licences are allowed, and whose signature is needed.
        require_finite: Treat NaN and infinity as errors; implies level="full".
        require: The highest level that must be run for `ok`. Default: all that are named.

    Output:
        average_with: Average the source with this checkpoint, in any layout; a list gives more than one.
        average_weights: Weights of the average, the source's first, such as 0.5,0.25,0.25. Default: equal.
        ema: Exponential moving average over the checkpoints of the run SRC, by step: decay * average + (1 - decay) *
            next.
        add_difference: Add scale times the difference B - C of two checkpoints (a task vector) to the source.
        scale: Factor of add_difference. Default: 1.

    On devices:
        load: Load every rank onto this device: cpu, cuda, one such as cuda:1, or auto.
        device_memory: Maximum device memory that a rank may use.
        device_map: Where blocks of a checkpoint without ranks go: balanced over the devices, sequential, or as a JSON
            file of modules and devices says. Default: balanced.
        host_memory: Maximum host memory for blocks that fit on no device. Default: half of what is free.
        offload_folder: Directory for blocks that fit neither on devices nor in host memory; it is left empty.
        forward: Run the model of SRC, and compare it with the source's; implies level="forward".
        dtype: Type that the model computes in. Default: "fp32".
        prompt: Text that the source and the shards continue; implies level="forward".
        tokens: Number of tokens to generate after prompt. Default: 16.
        processes: Maximum number of processes, one per rank; with engine, how many share a model that is not cut.
        virtual: Run all ranks in one process.
        second_opinion: Compare with transformers' own tensor parallelism, too.
        seq_len: Tokens in each sequence that the model is run with, and in each window of text. Default: 32, and 256.
        decode: Also decode the last N tokens of each sequence one by one with a KV cache; implies level="forward".
        text: Measure the perplexity of this text with the tokenizer of the checkpoint; implies level="forward".
        write_golden: Write what the model computes to a new file, which golden reads; implies level="forward".
        golden: Compare what the model computes, and the digest, with this file of write_golden; needs no source.
        engine: Have vllm, transformers or fsdp2 load the directory, and compare what it says with the source; or ask a
            running vLLM at http://HOST:PORT which weights it holds.
        engine_python: Python that has the engine. Default: this one.
        engine_timeout: Seconds that the engine may take. Default: 3600.

    Effort:
        threads: Number of threads. Default: one more than there are cores, at most eight.

    Source:
        config: The model's config.json, its directory, or owner/name on the Hub.
        rules: A rule file, which says how tensors are named and cut.
        from_: safetensors, dcp, deepspeed, meta, pickled-ranks, torch, torch_dist, megatron, trtllm, deepseek, vllm,
            grok, orbax or diffusers. Default: detected.
        weights: Which weights of a training checkpoint: the module's, or the optimizer's fp32 master copy. Default:
            master.
        true_vocab: Vocabulary size without padding, for files that do not say it, such as Megatron-LM's, or have more
            rows.
        keep_padding: Keep the rows that Megatron-LM padded the vocabulary with, and raise vocab_size, instead of
            leaving them out.
        source_etp: Number of tensor-parallel ranks within each expert of the source, for Megatron-LM's directories that
            do not say it.
        prefer_index: If two files hold different values for a tensor, take those in the file that the index names.
        subtree: Read only the tensors below this prefix, for files with more than one model, such as an EMA or a
            teacher.
        complete_from: Another checkpoint, which has what the source lacks: layers that predict, a vision model, a head,
            files.
        apply: Apply this weight delta, such as weight_v000001 of SGLang, to the source; a list gives more than one, in
            order.
        strict: Treat every warning as an error.
        allow_unverified: Accept files that cannot be compared with the Hub's hashes, and name them.

    Errors:
        UsageError: An option has a wrong type or value, or an effect only with another one.
        SourceError: The checkpoint is missing, or cannot be read at all.
    """
    keywords = OptionKeywords(locals(), VerifyOptions, SourceOptions)
    with _watch_effort("verify", threads, progress, effort) as work:
        return _verify(
            path,
            keywords.make(VerifyOptions),
            source_options=keywords.make(SourceOptions),
            effort=work,
        )


@_add_hints
def inspect(
    path: str | Path,
    inspect_options: InspectOptions | None = None,
    *,
    # options: python docs/python_api.py writes these
    tensors: bool = False,
    show_rules: bool = False,
    stats: bool = False,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    rules_from: Literal["transformers", "names", "none"] | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
) -> InspectResult:
    """Describe a checkpoint from its headers: format, layout, model, types, ties and tensors; on request, its values.

    Example:
        found = shardctl.inspect("llama")
        print(found.architecture, found.parameters, [tensor.name for tensor in found.tensors])

    Arguments:
        path: The checkpoint, or a config.json alone: a path, owner/name[@revision] on the Hub, or an address.
        inspect_options: Options as an object, until the next release.
        progress: With stats, True shows a bar on stderr; a callable gets a ProgressUpdate at each phase and file, and
            up to ten times a second, from one thread at a time; what it raises ends the run. Default: False.
        source_options: Options of the source as an object, until the next release.

    Options:
        tensors: List every tensor in the text and the JSON of the result.
        show_rules: List the rules in force in the text and the JSON of the result; derived ones as a rule file.
        stats: Read every value, and print norm, mean, largest absolute value, zeros, NaN and infinities per layer, and
            with tensors per tensor.

    Effort:
        memory: Maximum host memory to use. Default: 1GiB.
        threads: Number of threads. Default: one more than there are cores, at most eight.

    Source:
        config: The model's config.json, its directory, or owner/name on the Hub.
        rules: A rule file, which says how tensors are named and cut.
        rules_from: Where the rules for a model without a table come from. Default: derived from transformers' plan,
            names and shapes.
        from_: safetensors, dcp, deepspeed, meta, pickled-ranks, torch, torch_dist, megatron, trtllm, deepseek, vllm,
            grok, orbax or diffusers. Default: detected.
        weights: Which weights of a training checkpoint: the module's, or the optimizer's fp32 master copy. Default:
            master.
        true_vocab: Vocabulary size without padding, for files that do not say it, such as Megatron-LM's, or have more
            rows.
        keep_padding: Keep the rows that Megatron-LM padded the vocabulary with, and raise vocab_size, instead of
            leaving them out.
        source_etp: Number of tensor-parallel ranks within each expert of the source, for Megatron-LM's directories that
            do not say it.
        prefer_index: If two files hold different values for a tensor, take those in the file that the index names.
        subtree: Read only the tensors below this prefix, for files with more than one model, such as an EMA or a
            teacher.
        complete_from: Another checkpoint, which has what the source lacks: layers that predict, a vision model, a head,
            files.
        apply: Apply this weight delta, such as weight_v000001 of SGLang, to the source; a list gives more than one, in
            order.
        strict: Treat every warning as an error.
        allow_unverified: Accept files that cannot be compared with the Hub's hashes, and name them.

    Errors:
        UsageError: An option has a wrong type or value.
        SourceError: The checkpoint is missing, malformed or not supported.
    """
    keywords = OptionKeywords(locals(), InspectOptions, SourceOptions)
    options = keywords.make(InspectOptions)
    with _watch_effort("inspect", options.threads, progress, None) as work:
        found = _inspect(path, options, source_options=keywords.make(SourceOptions), effort=work)
    return replace(found, show_tensors=check_argument("tensors", bool, tensors), show_rules=options.show_rules)


@_add_hints
def diff(
    a: str | Path,
    b: str | Path,
    *,
    # options: python docs/python_api.py writes these
    all: bool = False,
    write: str | None = None,
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options_a: SourceOptions | None = None,
    source_options_b: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> DiffResult:
    """List the tensors, settings and auxiliary files that differ between two checkpoints in any layouts.

    Example:
        found = shardctl.diff("llama", "llama-tp2")
        assert found.equal_all, found.changes

    Arguments:
        a: One checkpoint: a path, owner/name[@revision] on the Hub, or the address of a bucket.
        b: The other checkpoint.
        progress: True shows a bar on stderr; a callable gets a ProgressUpdate at each phase and file, and up to ten
            times a second, from one thread at a time; what it raises ends the run. Default: False.
        source_options_a: How `a` is understood, if the two need different options: instead of the keywords.
        source_options_b: How `b` is understood.
        effort: Threads and watcher as an object, until the next release.

    Options:
        all: List every difference in the text, not only the first 20.

    Output:
        write: Write the weight delta from A to B, which SGLang and apply read, to this new directory.

    Effort:
        threads: Number of threads. Default: one more than there are cores, at most eight.

    Source:
        config: The model's config.json, its directory, or owner/name on the Hub.
        rules: A rule file, which says how tensors are named and cut.
        weights: Which weights of a training checkpoint: the module's, or the optimizer's fp32 master copy. Default:
            master.
        true_vocab: Vocabulary size without padding, for files that do not say it, such as Megatron-LM's, or have more
            rows.
        keep_padding: Keep the rows that Megatron-LM padded the vocabulary with, and raise vocab_size, instead of
            leaving them out.
        source_etp: Number of tensor-parallel ranks within each expert of the source, for Megatron-LM's directories that
            do not say it.
        prefer_index: If two files hold different values for a tensor, take those in the file that the index names.
        subtree: Read only the tensors below this prefix, for files with more than one model, such as an EMA or a
            teacher.
        complete_from: Another checkpoint, which has what the source lacks: layers that predict, a vision model, a head,
            files.
        apply: Apply this weight delta, such as weight_v000001 of SGLang, to the source; a list gives more than one, in
            order.
        strict: Treat every warning as an error.
        allow_unverified: Accept files that cannot be compared with the Hub's hashes, and name them.

    Errors:
        UsageError: An option has a wrong type or value.
        SourceError: A checkpoint is missing, malformed or not supported, or lacks elements.
    """
    keywords = OptionKeywords(locals(), SourceOptions)
    if (source_options_a is not None or source_options_b is not None) and set(keywords.list_given()):
        raise UsageError(
            f"{keywords.list_given()[0]} and source_options_a or source_options_b are both given",
            hint="keywords are for both checkpoints: write everything in the two objects",
        )
    for name, given in (("source_options_a", source_options_a), ("source_options_b", source_options_b)):
        if given is not None and not isinstance(given, SourceOptions):
            raise UsageError(f"{name} takes SourceOptions, not {describe_value(given)}")
    both = keywords.make(SourceOptions)
    with _watch_effort("diff", threads, progress, effort) as work:
        found = _diff(
            a,
            b,
            source_options_a=source_options_a or both,
            source_options_b=source_options_b or both,
            effort=work,
            write=check_path("write", write) if write is not None else None,
        )
    return replace(found, show_all=check_argument("all", bool, all))


@overload
def digest(
    path: str | Path,
    *,
    # options: python docs/python_api.py writes these
    tensors: bool = False,
    expect: str | None = None,
    as_: None = None,
    tp: int = 1,
    pp: int = 1,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
    host_memory: int | None = None,
) -> DigestResult: ...


@overload
def digest(
    path: str | Path,
    *,
    # options: python docs/python_api.py writes these
    tensors: bool = False,
    expect: str | None = None,
    as_: Literal["vllm"],
    tp: int = 1,
    pp: int = 1,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
    host_memory: int | None = None,
) -> EngineSums: ...


@_add_hints
def digest(
    path: str | Path,
    *,
    # options: python docs/python_api.py writes these
    tensors: bool = False,
    expect: str | None = None,
    as_: Literal["vllm"] | None = None,
    tp: int = 1,
    pp: int = 1,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
    host_memory: int | None = None,
) -> DigestResult | EngineSums:
    """Compute the digest of a checkpoint, which is the same for every layout of the same tensors.

    Example:
        assert shardctl.digest("llama").digest == shardctl.digest("llama-tp2").digest

    Arguments:
        path: The checkpoint: a path, owner/name[@revision] on the Hub, or the address of a bucket.
        progress: True shows a bar on stderr; a callable gets a ProgressUpdate at each phase and file, and up to ten
            times a second, from one thread at a time; what it raises ends the run. Default: False.
        source_options: Options of the source as an object, until the next release.
        effort: Threads and watcher as an object, until the next release.
        host_memory: The former name of memory, until the next release.

    Options:
        tensors: List every tensor in the text and the JSON of the result.
        expect: The digest that is expected; `ok` of the result says whether it is this one.
        as_: Return the SHA-256 of the arrays that the ranks of this engine hold, as its weight checker has them.
        tp: With as_, tensor-parallel ranks. Default: 1.
        pp: With as_, pipeline stages. Default: 1.

    Effort:
        memory: Maximum host memory to use. Default: 1GiB.
        threads: Number of threads. Default: one more than there are cores, at most eight.

    Source:
        config: The model's config.json, its directory, or owner/name on the Hub.
        rules: A rule file, which says how tensors are named and cut.
        from_: safetensors, dcp, deepspeed, meta, pickled-ranks, torch, torch_dist, megatron, trtllm, deepseek, vllm,
            grok, orbax or diffusers. Default: detected.
        weights: Which weights of a training checkpoint: the module's, or the optimizer's fp32 master copy. Default:
            master.
        true_vocab: Vocabulary size without padding, for files that do not say it, such as Megatron-LM's, or have more
            rows.
        keep_padding: Keep the rows that Megatron-LM padded the vocabulary with, and raise vocab_size, instead of
            leaving them out.
        source_etp: Number of tensor-parallel ranks within each expert of the source, for Megatron-LM's directories that
            do not say it.
        prefer_index: If two files hold different values for a tensor, take those in the file that the index names.
        subtree: Read only the tensors below this prefix, for files with more than one model, such as an EMA or a
            teacher.
        complete_from: Another checkpoint, which has what the source lacks: layers that predict, a vision model, a head,
            files.
        apply: Apply this weight delta, such as weight_v000001 of SGLang, to the source; a list gives more than one, in
            order.
        strict: Treat every warning as an error.
        allow_unverified: Accept files that cannot be compared with the Hub's hashes, and name them.

    Errors:
        UsageError: An option has a wrong type or value, or memory is too small.
        SourceError: The checkpoint is missing, malformed or not supported, or lacks elements.
    """
    keywords = OptionKeywords(locals(), SourceOptions)
    if host_memory is not None:
        warn_of_object("host_memory", "write memory", frames=2)
    limit = check_argument("memory", HostMemory, memory if host_memory is None else host_memory)
    wanted = check_argument("expect", str | None, expect)
    engine = check_argument("as_", Literal["vllm"] | None, as_)
    degrees = {"pp": check_argument("pp", int, pp), "tp": check_argument("tp", int, tp)}
    source = keywords.make(SourceOptions)
    if engine is not None and wanted is not None:
        raise UsageError("as_ gives sums of arrays, and expect compares a digest", hint="leave one of them out")
    if engine is None and set(degrees.values()) != {1}:
        raise UsageError("tp and pp are for as_: a digest is the same for every mesh", hint='add as_="vllm"')
    with _watch_effort("digest", threads, progress, effort) as work:
        if engine is not None:
            from shardctl.conversion.engine_sums import sum_engine_arrays  # few need what it loads

            return sum_engine_arrays(path, Mesh.of(**degrees), source_options=source, effort=work, host_memory=limit)
        found = _digest(path, source_options=source, effort=work, host_memory=limit)
    return replace(found, expected=wanted, show_tensors=check_argument("tensors", bool, tensors))


@_add_hints
def attest(
    path: str | Path,
    *,
    # options: python docs/python_api.py writes these
    key: str | Path | None = None,
    sigstore: bool = False,
    threads: int | None = None,
    # end of options
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
) -> AttestResult:
    """Verify a finished checkpoint, state where it comes from, and sign all its files (extra `[sign]`).

    Example:
        shardctl.attest("llama-tp2", key="key.pem")
        assert shardctl.verify("llama-tp2", attestation=True, public_key="key.pub").ok

    Arguments:
        path: A local directory that reshard wrote.
        progress: True shows a bar on stderr; a callable gets a ProgressUpdate at each phase and file, and up to ten
            times a second, from one thread at a time; what it raises ends the run. Default: False.

    Options:
        key: Sign with this private key: elliptic curve, PEM, without a password.
        sigstore: Sign with an identity through Sigstore, online: that of the CI job, or of whoever logs in with a
            browser. The identity becomes public.

    Effort:
        threads: Number of threads. Default: one more than there are cores, at most eight.

    Errors:
        UsageError: An option has a wrong type or value, or no signer is named, or two.
        Mismatch: The checkpoint is not what its record says; it is not signed.
        SourceError: The directory is not a finished result.
        DestinationError: The directory is signed already, or cannot be written.
    """
    wanted = None if key is None else Path(check_path("key", key))
    by_identity = check_argument("sigstore", bool, sigstore)
    with _watch_effort("attest", threads, progress, None) as work:
        return _attest(path, key=wanted, sigstore=by_identity, effort=work)


@_add_hints
def reshard_each(
    pattern: str,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    # options: python docs/python_api.py writes these
    overwrite: bool = False,
    no_resume: bool = False,
    hash: Literal["sha256"] | None = None,
    prove: bool = False,
    allow_overflow: bool = False,
    create: bool = False,
    private: bool = False,
    tp: int | None = None,
    tensor_parallel_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    stages: str | None = None,
    for_: str | None = None,
    to: str | None = None,
    names: Literal["hub", "transformers", "keep", "accelerate", "torchtitan", "automodel", "veomni", "maxtext"]
    | None = None,
    experts: Literal["keep", "fused", "fused@0.18", "split"] = "keep",
    max_shard_size: int | str | None = None,
    trtllm_embedding: Literal["whole", "vocabulary", "hidden"] | None = None,
    meta_embedding: Literal["vocabulary", "hidden"] | None = None,
    megatron: str | None = None,
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "keep",
    keep_fp32: str | None = None,
    only: str | None = None,
    merge: str | Path | Sequence[str | Path] = (),
    average_with: str | Sequence[str] = (),
    average_weights: str | None = None,
    ema: str | None = None,
    add_difference: str | Sequence[str] | None = None,
    scale: str | None = None,
    dequantize: str | Sequence[str] = (),
    allow_partial_adapter: bool = False,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    reflink: bool = False,
    include: str | None = None,
    exclude: str | None = None,
    extra_tensors: Literal["keep", "drop", "error"] = "keep",
    allow_expansion: bool = False,
    optimizer_states: Literal["keep", "drop"] | None = None,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    rules_from: Literal["transformers", "names", "none"] | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    kv_heads: Literal["error", "replicate"] | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    fail_fast: bool = False,
    watch: Callable[[], AbstractContextManager[ProgressWatcher]] | None = None,
    tell: Callable[[EachOutcome], None] | None = None,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
) -> ReshardEachResult:
    """Convert each checkpoint that a pattern matches into the directory of its name inside `destination`.

    A checkpoint that an earlier run converted in the same way is kept. A failure does not stop the others, unless
    `fail_fast`. `tell` is called with what became of each, and `watch` gives the watcher of one. The other keywords are
    those of `reshard`.

    Example:
        done = shardctl.api.reshard_each("run/step-*", "converted", to="hf")
        assert done.exit_code == 0, [each.error for each in done.outcomes]
    """
    keywords = OptionKeywords(locals(), ReshardOptions, DestinationOptions, SourceOptions)
    return _reshard_each(
        pattern,
        destination,
        keywords.make(ReshardOptions),
        source_options=keywords.make(SourceOptions),
        destination_options=keywords.make(DestinationOptions),
        fail_fast=check_argument("fail_fast", bool, fail_fast),
        watch=watch,
        tell=tell,
    )


@_add_hints
def contribute(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    worker: str | WorkerId,
    # options: python docs/python_api.py writes these
    overwrite: bool = False,
    no_resume: bool = False,
    hash: Literal["sha256"] | None = None,
    prove: bool = False,
    allow_overflow: bool = False,
    create: bool = False,
    private: bool = False,
    tp: int | None = None,
    tensor_parallel_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    stages: str | None = None,
    for_: str | None = None,
    to: str | None = None,
    names: Literal["hub", "transformers", "keep", "accelerate", "torchtitan", "automodel", "veomni", "maxtext"]
    | None = None,
    experts: Literal["keep", "fused", "fused@0.18", "split"] = "keep",
    max_shard_size: int | str | None = None,
    trtllm_embedding: Literal["whole", "vocabulary", "hidden"] | None = None,
    meta_embedding: Literal["vocabulary", "hidden"] | None = None,
    megatron: str | None = None,
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "keep",
    keep_fp32: str | None = None,
    only: str | None = None,
    merge: str | Path | Sequence[str | Path] = (),
    average_with: str | Sequence[str] = (),
    average_weights: str | None = None,
    ema: str | None = None,
    add_difference: str | Sequence[str] | None = None,
    scale: str | None = None,
    dequantize: str | Sequence[str] = (),
    allow_partial_adapter: bool = False,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    reflink: bool = False,
    include: str | None = None,
    exclude: str | None = None,
    extra_tensors: Literal["keep", "drop", "error"] = "keep",
    allow_expansion: bool = False,
    optimizer_states: Literal["keep", "drop"] | None = None,
    memory: int | str = "1GiB",
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    rules_from: Literal["transformers", "names", "none"] | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    kv_heads: Literal["error", "replicate"] | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    plan: str | Path | PlanFile | None = None,
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
    run: str = "",
) -> ContributeResult:
    """Write the part of one worker of a conversion into the staging area of `destination`, which all workers see.

    `worker` is `"0/3"` for the first of three, `"auto"` for what torchrun, Slurm or Kubernetes says, or a WorkerId.
    `run` names the job that starts workers again, if there is one. When all are done, call `finish`. The other keywords
    are those of `reshard`, and the same for every worker except memory and threads.

    Example:
        for worker in ("0/2", "1/2"):
            shardctl.api.contribute("llama", "llama-tp2-shared", tp=2, worker=worker)
        shardctl.api.finish("llama-tp2-shared")
    """
    keywords = OptionKeywords(locals(), ReshardOptions, DestinationOptions, SourceOptions)
    conversion, source, file = _follow_plan(plan, keywords, reshard_options, source_options)
    if not isinstance(worker, str | WorkerId):
        hint = 'write "0/3" for the first of three, or "auto"'
        raise UsageError(f"worker takes a text or a WorkerId, not {describe_value(worker)}", hint=hint)
    with _watch_progress("reshard", progress) as watcher:
        return _contribute(
            path,
            destination,
            conversion,
            worker=WorkerId.parse(worker, os.environ) if isinstance(worker, str) else worker,
            source_options=source,
            destination_options=keywords.make(DestinationOptions),
            progress=watcher,
            plan=file,
            run=run or (find_job_name(os.environ) if worker == "auto" else ""),
        )


@_add_hints
def find_newest(
    path: str | Path,
    verify_options: VerifyOptions | None = None,
    *,
    # options: python docs/python_api.py writes these
    level: Literal["quick", "full", "load", "forward"] = "quick",
    against: str | Path | None = None,
    merge: str | Path | Sequence[str | Path] = (),
    for_: str | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    stages: str | None = None,
    attestation: bool = False,
    public_key: str | Path | None = None,
    identity: str | None = None,
    issuer: str | None = None,
    policy: str | Path | None = None,
    require_finite: bool = False,
    require: Literal["quick", "full", "load", "forward"] | None = None,
    average_with: str | Sequence[str] = (),
    average_weights: str | None = None,
    ema: str | None = None,
    add_difference: str | Sequence[str] | None = None,
    scale: str | None = None,
    load: str | None = None,
    device_memory: int | str | None = None,
    device_map: str | None = None,
    host_memory: int | str | None = None,
    offload_folder: str | Path | None = None,
    forward: bool = False,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    prompt: str | None = None,
    tokens: int = 16,
    processes: int | None = None,
    virtual: bool = False,
    second_opinion: bool = False,
    seq_len: int | None = None,
    decode: int | None = None,
    text: str | Path | None = None,
    write_golden: str | Path | None = None,
    golden: str | Path | None = None,
    engine: str | None = None,
    engine_python: str | Path | None = None,
    engine_timeout: int = 3600,
    threads: int | None = None,
    config: str | Path | None = None,
    rules: str | Path | None = None,
    from_: str | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    keep_padding: bool = False,
    source_etp: int | None = None,
    prefer_index: bool = False,
    subtree: str | None = None,
    complete_from: str | None = None,
    apply: str | Sequence[str] = (),
    strict: bool = False,
    allow_unverified: bool = False,
    # end of options
    progress: bool | Callable[[ProgressUpdate], object] | ProgressWatcher | None = None,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> NewestCheckpoint:
    """Verify the directories of a run, the newest first, until one is whole, whose `name` is in the result.

    The keywords are those of `verify`.

    Example:
        found = shardctl.api.find_newest("run", level="full")
        print(found.name, [each.reasons for each in found.passed])
    """
    keywords = OptionKeywords(locals(), VerifyOptions, SourceOptions)
    with _watch_effort("verify", threads, progress, effort) as work:
        return _find_newest(
            path, keywords.make(VerifyOptions), source_options=keywords.make(SourceOptions), effort=work
        )


finish, lens, load = _add_hints(_finish), _add_hints(_lens), _add_hints(_load)


def _follow_plan(
    plan: str | Path | PlanFile | None,
    keywords: OptionKeywords,
    reshard_options: ReshardOptions | None,
    source_options: SourceOptions | None,
) -> tuple[ReshardOptions, SourceOptions, PlanFile | None]:
    """Make the options of a conversion, which are those of the plan if one is followed."""
    conversion, source = keywords.make(ReshardOptions), keywords.make(SourceOptions)
    if plan is None:
        return conversion, source, None
    file = plan if isinstance(plan, PlanFile) else read_plan_file(check_path("plan", plan))
    if reshard_options is None and source_options is None:
        conversion, source = file.apply_run_options(conversion, source, keywords.list_given())
    return conversion, source, file


@contextmanager
def _watch_progress(verb: str, progress: object) -> Iterator[ProgressWatcher]:
    """Give who watches a task: a bar, a callable, an object, or nobody."""
    methods = ("warn", "begin", "work_on", "advance", "file_done")
    if progress is None or progress is False:
        yield NullWatcher()
    elif progress is True:
        from shardctl.cli.progress import watch_progress

        with watch_progress(verb) as bar:
            yield bar
    elif all(callable(getattr(progress, name, None)) for name in methods):
        yield cast("ProgressWatcher", progress)
    elif callable(progress):
        watcher = CallbackWatcher(progress)
        yield watcher
        watcher.finish()
    else:
        hint = "write True for a bar on stderr, or give a function, which gets a ProgressUpdate"
        raise UsageError(f"progress takes True, False or a callable, not {describe_value(progress)}", hint=hint)


@contextmanager
def _watch_effort(
    verb: str, threads: object, progress: object, effort: ExecutionOptions | None
) -> Iterator[ExecutionOptions]:
    """Give how much to spend on a task that reads everything, and who watches it."""
    count = check_argument("threads", Threads, threads)
    if effort is None:
        with _watch_progress(verb, progress) as watcher:
            yield ExecutionOptions(watcher=watcher) if count is None else ExecutionOptions(count, watcher)
        return
    if not isinstance(effort, ExecutionOptions):
        raise UsageError(f"effort takes ExecutionOptions, not {describe_value(effort)}", hint="write threads=4")
    warn_of_object("effort", "write threads=4, progress=True", frames=4)
    if count is not None or progress is not None:
        given = "threads" if count is not None else "progress"
        raise UsageError(f"{given} is given as a keyword and in effort", hint="leave effort out")
    yield effort
