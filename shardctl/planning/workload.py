"""Makes the workload of a model from the options of `plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, TypeVar, get_args

from shardctl.base.amounts import format_plural
from shardctl.base.errors import UsageError
from shardctl.estimate.model.inventory import FLOATING
from shardctl.estimate.search.mesh_comparison import count_microbatches
from shardctl.estimate.serving.engine_budget import choose_batch_limits, get_engine_rules
from shardctl.estimate.workload import (
    EngineBudget,
    Precision,
    Profile,
    RecomputedModule,
    ServingWorkload,
    TrainingWorkload,
)
from shardctl.options import PlanOptions
from shardctl.options.declaration import HelpPanel, find_flag, given_options
from shardctl.options.plan_options import parse_engine_version
from shardctl.planning.tuning import ALL_LINEAR, TuningChoice

if TYPE_CHECKING:
    from shardctl.estimate.model.layer_graph import LayerGraph
    from shardctl.planning.estimated_model import EstimatedModel
    from shardctl.tensors.mesh import Mesh

Use = Literal["serve", "train"]
Value = TypeVar("Value")


_SAFETENSORS_DTYPES: Final = {"bf16": "BF16", "fp16": "F16", "fp8": "F8_E4M3", "nvfp4": "NVFP4", "fp32": "F32"}
"""Safetensors' names of the types of caches and gradients."""
USUAL_CONTEXT: Final = 8192
"""Tokens per sequence if nobody says, unless the model was made for fewer."""


def decide_use(options: PlanOptions, mesh: Mesh) -> Use:
    """Return what the devices are for: as said, else training where something is asked that only training has."""
    if options.use is not None:
        return "train" if options.use == "train" else "serve"
    return "train" if mesh.degree("fsdp") > 1 or given_options(options, HelpPanel.TRAINING) else "serve"


def plan_workload(options: PlanOptions, about: EstimatedModel, mesh: Mesh) -> ServingWorkload | TrainingWorkload | None:
    """Return what the devices do, with the defaults that the model decides; None to serve one that is not described.

    Raises UsageError for options that contradict each other.
    """
    use = decide_use(options, mesh)
    _check_about_use(options, use)
    if use == "serve" and not options.search and options.devices not in {None, mesh.world}:
        raise UsageError(
            f"--gpus {options.devices} applies to --search, but the mesh has {format_plural(mesh.world, 'rank')}",
            hint=f"add --search, or divide them, such as with --tp {options.devices}",
        )
    if about.anatomy is None and use == "serve":
        return None
    if about.anatomy is None and not about.dequantised:
        _check_no_codes(about)
    limit = about.anatomy.positions if about.anatomy is not None else None
    tokens = options.seq_len or min(limit or USUAL_CONTEXT, USUAL_CONTEXT)
    if use == "serve":
        return _build_serving(options, about, mesh, tokens)
    return _build_training(options, about, mesh, tokens)


def choose_tuning(options: PlanOptions) -> TuningChoice | None:
    """Return what is trained of a model; None for all of it.

    Raises UsageError for options that contradict each other.
    """
    rank, pattern = options.lora_rank, options.train_only
    if rank is not None and pattern is not None:
        raise UsageError("--lora-rank and --train-only train different parts", hint="give one of them")
    for name in ("lora_targets", "lora_dropout", "base_dtype", "prepare_base"):
        if rank is None and getattr(options, name):
            raise UsageError(f"{find_flag(PlanOptions, name)} needs an adapter", hint="give --lora-rank, such as 16")
    if options.prepare_base and options.base_dtype not in {"int8", "nf4"}:
        raise UsageError("--prepare-base needs a quantized base", hint="give --base-dtype nf4 or int8")
    if rank is None and pattern is None:
        return None
    return TuningChoice(rank, options.lora_targets or ALL_LINEAR, options.base_dtype, options.prepare_base, pattern)


def _check_about_use(options: PlanOptions, use: Use) -> None:
    """Refuse options of serving in a plan of training, and the other way round."""
    foreign = given_options(options, HelpPanel.TRAINING if use == "serve" else HelpPanel.SERVING)
    if foreign:
        flag = find_flag(PlanOptions, foreign[0])
        here, there = ("serving", "training") if use == "serve" else ("training", "serving")
        other = "train" if use == "serve" else "serve"
        raise UsageError(f"{flag} applies to {there}, but this plan is for {here}", hint=f"add --for {other}")
    if use == "train" and options.quantized_type is not None:
        raise UsageError(
            f"--dtype {options.quantized_type} applies to serving, but this plan is for training",
            hint="codes have no gradients; --optimizer adamw-8bit narrows what training keeps",
        )


def _check_decode_cp(anatomy: LayerGraph, mesh: Mesh, degree: int) -> None:
    """Refuse what vLLM refuses: more ranks than have one head's cache, and windows (`config/model.py`)."""
    tp = mesh.degree("tp")
    for one in {layer.attention for layer in anatomy.layers if layer.attention is not None}:
        alike = tp if one.latent else tp // one.kv_heads
        if one.window is not None or not alike or alike % degree or (one.heads // max(1, one.kv_heads)) % degree:
            what = "a window" if one.window is not None else f"{max(alike, 1)} ranks with the same cache"
            raise UsageError(
                f"--decode-cp {degree} cannot divide the cache: at tp={tp} attention has {what}",
                hint="it shares a cache among tp ranks that would otherwise hold copies of it",
            )


def _build_serving(options: PlanOptions, about: EstimatedModel, mesh: Mesh, tokens: int) -> ServingWorkload:
    """Build the work of serving a model that is described; raises UsageError for what it has not."""
    assert about.anatomy is not None  # noqa: S101 - there is no serving of others
    if options.encoder_len is not None and not any(layer.encoder for layer in about.anatomy.layers):
        raise UsageError("--encoder-len needs a model with an encoder and a decoder", hint="leave it out")
    if options.encoder_len is not None and about.anatomy.source_positions:
        raise UsageError(
            f"the encoder of this model always reads {about.anatomy.source_positions:,} positions",
            hint="leave --encoder-len out",
        )
    unkept = next((name for name in ("kv_dtype", "max_seqs", "decode_cp") if getattr(options, name) is not None), "")
    if unkept and not about.anatomy.generates:
        raise UsageError(f"{find_flag(PlanOptions, unkept)} needs a model that generates", hint="leave it out")
    if options.max_seqs is not None and (options.batch or 1) > options.max_seqs:
        raise UsageError(f"--batch {options.batch} is more than --max-seqs {options.max_seqs}", hint="raise --max-seqs")
    if options.decode_cp is not None and options.decode_cp > 1:
        _check_decode_cp(about.anatomy, mesh, options.decode_cp)
    work = ServingWorkload(
        tokens,
        options.batch or 1,
        _SAFETENSORS_DTYPES[options.kv_dtype] if options.kv_dtype is not None else None,
        source=options.encoder_len,
        decode_cp=options.decode_cp or 1,
        rows=options.max_seqs,
        budget=_build_budget(options),
    )
    if work.budget is not None and work.budget.engine == "vllm":
        limit, passed = choose_batch_limits(work.budget)
        work = replace(work, batched_tokens=passed)
        if about.anatomy.generates and options.max_seqs is None:
            limit = min(limit, _choose_value(options.batched_tokens, passed))
            work = replace(work, rows=max(limit, work.batch))
    return replace(work, batched_tokens=_choose_value(options.batched_tokens, work.batched_tokens))


def _build_budget(options: PlanOptions) -> EngineBudget | None:
    """Build what the engine may use; raises UsageError where nobody knows how much that is."""
    if options.engine is None and options.utilization is None:
        return None
    if options.device is None:
        if options.utilization is None and options.server is None:
            return None  # --for names the server, and nothing says how large its devices are
        flag = "--server" if options.utilization is None else "--utilization"
        raise UsageError(f"{flag} needs a device of which it is a part", hint="name it, such as --gpu h100-80g")
    engine = options.engine or "vllm"
    if options.utilization is None and engine == "sglang":
        raise UsageError(
            "SGLang chooses mem_fraction_static by device and model if nobody says it",
            hint="give it, such as --utilization 0.88; its log says which it chose",
        )
    version = parse_engine_version(options.use or "")
    return EngineBudget(
        engine,
        options.utilization or get_engine_rules(version).utilization,
        options.device.usable_bytes,
        version,
        options.device.compute_capability,
    )


def _build_training(options: PlanOptions, about: EstimatedModel, mesh: Mesh, tokens: int) -> TrainingWorkload:
    """Build the work of training; what was not asked for is as `TrainingWorkload` has it."""
    computes = about.dtype if about.dtype in {"F16", "BF16"} else "BF16"
    precision: Precision = options.precision or "mixed"
    if precision != "mixed":
        computes = _SAFETENSORS_DTYPES[precision]
    usual = TrainingWorkload(sequence=tokens, micro_batch=options.batch or 1, dtype=computes, precision=precision)
    for name in ("no_gradient_fusion", "fused_loss", "exchanged_heads", "overlapped_all_to_all"):
        if getattr(options, name) and options.profile != "megatron":
            profile = options.profile or usual.profile
            raise UsageError(
                f"{find_flag(PlanOptions, name)} is of Megatron-LM, and the profile is {profile}",
                hint="add --profile megatron, or leave it out",
            )
    _check_compiling(options, options.profile or usual.profile)
    _check_loss(options, options.profile or usual.profile)
    stages = _choose_value(options.virtual_stages, usual.virtual_stages)
    schedule = _choose_value(options.schedule, "interleaved" if stages > 1 else usual.schedule)
    if stages > 1 and schedule != "interleaved":
        raise UsageError(
            f"--vp {stages} applies to the interleaved schedule, not to {schedule}",
            hint="give --schedule interleaved, or leave --schedule out",
        )
    if options.recompute_every > 1 and options.recompute in {None, "none"}:
        raise UsageError("--recompute-every needs --recompute", hint="give --recompute full")
    if options.overlapped_all_to_all:
        _check_overlap(options, about, mesh, stages)
    return replace(
        usual,
        microbatches=_choose_microbatches(options, mesh),
        profile=_choose_value(options.profile, usual.profile),
        optimizer=_choose_value(options.optimizer, usual.optimizer),
        zero=_choose_value(options.zero, usual.zero),
        recompute=_choose_value(options.recompute, usual.recompute),
        recompute_modules=_parse_modules(options) or usual.recompute_modules,
        recompute_every=options.recompute_every,
        schedule=schedule,
        virtual_stages=stages,
        offload=_choose_value(options.offload, usual.offload),
        offload_parameters=options.offload_parameters,
        gradient_dtype=_SAFETENSORS_DTYPES[options.gradient_dtype] if options.gradient_dtype is not None else None,
        sequence_parallel=not options.no_sequence_parallel,
        attention=_choose_value(options.attention, usual.attention),
        dropout=not options.no_dropout,
        fused_gradients=not options.no_gradient_fusion,
        fused_loss=options.fused_loss,
        chunked_loss=options.chunked_loss,
        offload_checkpoints=options.offload_checkpoints,
        step_in_backward=options.step_in_backward,
        exchanged_heads=options.exchanged_heads,
        overlapped_all_to_all=options.overlapped_all_to_all,
        adapter_dropout=bool(options.lora_dropout),
        moment_dtypes=_choose_moment_dtypes(options),
        compiled=_choose_value(options.compiled, usual.compiled),
        float8=_choose_value(options.float8, usual.float8),
        float8_gathered=options.float8_gathered,
        optimizer_kernel=options.optimizer_kernel,
        allocator=options.allocator,
    )


def _check_overlap(options: PlanOptions, about: EstimatedModel, mesh: Mesh, virtual_stages: int) -> None:
    """Refuse what Megatron-LM refuses with --overlap-moe-expert-parallel-comm (`validate_args`)."""
    flag = find_flag(PlanOptions, "overlapped_all_to_all")
    if about.anatomy is None or not any(layer.experts for layer in about.anatomy.layers):
        raise UsageError(f"{flag} needs a model with experts", hint="leave it out")
    if options.recompute == "full":
        raise UsageError(
            f"{flag} does not go with --recompute full", hint="give --recompute selective, or leave it out"
        )
    if mesh.degree("pp") > 1 and virtual_stages == 1:
        raise UsageError(f"{flag} needs an interleaved schedule if there are stages", hint="give --vp 2")


def _choose_microbatches(options: PlanOptions, mesh: Mesh) -> int | None:
    """Choose the microbatches of each data-parallel rank: those given, or those that make up `--global-batch`.

    A search divides its steps among the ranks of each mesh that it compares, so it gets none here.
    """
    if options.global_batch is None:
        return options.microbatches
    if options.microbatches is not None:
        raise UsageError(
            "--global-batch and --microbatches both say how long a step is",
            hint="leave --microbatches out: it follows from the batch and the mesh",
        )
    return None if options.search else count_microbatches(mesh, options.global_batch, options.batch or 1)


def _choose_moment_dtypes(options: PlanOptions) -> tuple[str, str] | None:
    """Choose the types of both moments if somebody says that of one; the other is then fp32, as Megatron-LM has it."""
    asked = options.exp_avg_dtype, options.exp_avg_sq_dtype
    if asked == (None, None):
        return None
    first, second = (_SAFETENSORS_DTYPES[name or "fp32"] for name in asked)
    return first, second


def _check_compiling(options: PlanOptions, profile: Profile) -> None:
    """Raise UsageError for compilation and float8 where nobody knows what they change."""
    for name in ("compiled", "float8", "float8_gathered"):
        if getattr(options, name) and profile not in {"fsdp2", "torchtune", "ddp"}:
            raise UsageError(
                f"{find_flag(PlanOptions, name)} is known of torch's own modules, and the profile is {profile}",
                hint="leave --profile out, or give fsdp2, torchtune or ddp",
            )
    if options.float8_gathered and options.float8 != "tensorwise":
        raise UsageError(
            "--float8-gather needs a scale for each tensor: torchao gathers no rows with scales of their own",
            hint="add --float8 tensorwise, or leave it out",
        )


def _check_loss(options: PlanOptions, profile: Profile) -> None:
    """Raise UsageError for a loss in chunks that the profile's runtime does not have, and offloading of nothing."""
    if options.chunked_loss is not None and profile == "megatron":
        raise UsageError(
            "--chunked-loss names losses of torch's trainers, and the profile is megatron",
            hint="use --fused-loss, or another --profile",
        )
    if options.offload_checkpoints and (options.recompute != "full" or profile == "megatron"):
        raise UsageError(
            "--offload-checkpoints keeps the inputs of recomputed layers on the host, and there are none",
            hint="add --recompute full, with a profile other than megatron",
        )


def _parse_modules(options: PlanOptions) -> tuple[RecomputedModule, ...]:
    """Parse `--recompute-modules`, in the order in which Megatron-LM lists them; empty if nobody gives any."""
    if options.recompute_modules is None:
        return ()
    if options.profile != "megatron" or options.recompute != "selective":
        raise UsageError(
            "--recompute-modules says what Megatron-LM's selective recomputation computes again",
            hint="add --profile megatron --recompute selective, or leave it out",
        )
    known = get_args(RecomputedModule)
    names = {name.strip() for name in options.recompute_modules.split(",")}
    if wrong := sorted(names.difference(known)):
        raise UsageError(
            f"--recompute-modules does not know {', '.join(map(repr, wrong))}",
            hint=f"the modules are {', '.join(known)}",
        )
    return tuple(name for name in known if name in names)


def _choose_value(value: Value | None, usual: Value) -> Value:
    """Choose what was asked for, else what is usual."""
    return usual if value is None else value


def _check_no_codes(about: EstimatedModel) -> None:
    """Raise UsageError for matrices of codes where nobody knows which weights they stand for."""
    for kind in about.inventory.kinds:
        if kind.matrix and kind.dtype.name not in {*FLOATING, "I64", "BOOL"}:
            raise UsageError(
                f"{kind.example} is {kind.dtype}, and codes cannot be trained",
                hint="name the model's config with --config, which says what the codes stand for",
            )
