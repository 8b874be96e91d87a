"""Describes how a training run keeps its states: in which types, shared by how many ranks, and where.

The runtimes keep the same states differently:

- `units` (FSDP2): fp32 parameters, gradients and moments, all shared; the units that compute are gathered in a
  narrower type (torch 2.13, `torch.distributed.fsdp.fully_shard` with a `MixedPrecisionPolicy`);
- `partitions` (DeepSpeed): parameters in the type that computes, gradients likewise, fp32 copies beside them
  (Rajbhandari et al. 2020, sec. 3.1), shared as the ZeRO stage says;
- `buffers` (Megatron): the same with fp32 gradients; the distributed optimizer shares the states
  (Megatron-LM, docs/user-guide/features/dist_optimizer.md);
- `autocast` (one device, or DDP): fp32 parameters that `torch.autocast` casts for each operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.dtype import BY_NAME, DType
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.model.inventory import FLOATING
from shardctl.estimate.training.optimizers import build_plain_optimizer, get_optimizer, narrow_moments
from shardctl.tensors.mesh import EXPERT_FSDP

if TYPE_CHECKING:
    from shardctl.estimate.term import Tier
    from shardctl.estimate.training.optimizers import OptimizerSpec
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.tensors.mesh import Mesh

Runtime = Literal["units", "partitions", "buffers", "autocast"]
F32: Final = BY_NAME["F32"]
_MEGATRON_OPTIMIZERS: Final = frozenset({"adamw", "adamw-bf16", "sgd", "sgd-momentum", "muon"})
"""Those of megatron-core 0.16, optimizer/__init__.py and muon.py; Adam also where all is in bf16."""


@value_class
class TrainingScheme:
    """The choices of a workload, worked out."""

    runtime: Runtime
    compute: DType
    """Of the parameters that compute."""
    resident: DType
    """Of the parameters that are kept."""
    gathered: DType
    """Of the matrices of layers that FSDP2 gathers."""
    gradient: DType
    """Of the gradients that are kept; of units, of those that are reduced, for they are kept as the parameters are."""
    optimizer: OptimizerSpec
    master: bool
    """Whether the optimizer updates fp32 copies that are kept beside the parameters."""
    foreach: bool
    """Whether the optimizer computes with all parameters at once, which copies them."""
    said: bool
    """Whether somebody said so, or that it does not."""
    steps_in_backward: bool
    """Whether each gradient is freed as soon as its parameter is updated."""
    decoupled: bool
    """Whether the optimizer is Megatron-LM's precision-aware one, which reads gradients as they are kept, and keeps of
    fp32 copies of bf16 parameters only the 16 bits that these lack."""
    zero: int
    """What the ranks of dp and cp share: 1 optimizer states, 2 and gradients, 3 and parameters."""
    sharers: int
    """Ranks of dp and cp, which share by `zero` what is not an expert's."""
    expert_sharers: int
    """Ranks which share by `zero` what is an expert's: those that ep, etp and efsdp leave over."""
    parameters: Tier
    """Where the parameters are."""
    gradients: Tier
    """Where the gradients are."""
    states: Tier
    """Where the fp32 copies and the optimizer states are."""

    @property
    def flat(self) -> bool:
        """Whether the optimizer sees its share as one long vector, not tensor by tensor."""
        return self.zero > 0 and self.runtime != "units"

    @property
    def spread(self) -> bool:
        """Whether ranks that hold the same parameters spread the optimizer's blocks among them."""
        return self.optimizer.spreads and not self.zero and self.sharers > 1

    @property
    def offloaded(self) -> bool:
        """Whether the optimizer works on the host."""
        return self.states != "device"

    def count_sharing_ranks(self, *, expert: bool) -> int:
        """Return ranks that share by `zero`."""
        return self.expert_sharers if expert else self.sharers


def choose_scheme(mesh: Mesh, work: TrainingWorkload) -> TrainingScheme:
    """Choose how `work` keeps its states on `mesh`.

    Raises UsageError for an unknown optimizer or type, and for what the profile's runtime cannot do.
    """
    cp = mesh.degree("cp")
    if cp > 1 and work.sequence % (2 * cp):
        # Each rank gets an early and a late part, so that causal work is even (Megatron-LM, context parallelism).
        raise UsageError(
            f"cp={cp} divides a sequence into {2 * cp} equal parts, but it has {work.sequence} tokens",
            hint=f"use --seq-len {-(-work.sequence // (2 * cp)) * 2 * cp}",
        )
    known = get_optimizer(work.optimizer)
    if work.precision == "bf16":
        known = build_plain_optimizer(known)
    if work.moment_dtypes is not None:
        known = _choose_narrow_moments(known, work)
    compute = _get_float_dtype(work.dtype)
    runtime = _choose_runtime(mesh, work)
    wide = F32 if known.master else compute
    resident = wide if runtime in {"units", "autocast"} else compute
    usual = {"units": F32, "partitions": compute, "buffers": F32, "autocast": resident}[runtime]
    replicas = mesh.world // mesh.degree("pp") // (mesh.ep * mesh.etp)
    parameters, gradients, states = _choose_tiers(runtime, work)
    if not 0 <= work.zero <= 3:  # noqa: PLR2004 - the stages of the paper
        raise UsageError(f"there is no ZeRO stage {work.zero}", hint="the stages are 0, 1, 2 and 3")
    stage = 3 if mesh.degree("fsdp") > 1 else work.zero
    if runtime == "partitions" and stage > 1 and mesh.degree("pp") > 1:
        # DeepSpeed, runtime/pipe/engine.py: gradients that are shared would be reduced in every microbatch.
        raise UsageError(
            f"DeepSpeed does not support pipelines with ZeRO {stage}",
            hint="give --zero 1, or a mesh without pipeline stages",
        )
    _check_optimizer(runtime, known, work)
    _check_step(runtime, mesh, work)
    return TrainingScheme(
        runtime=runtime,
        compute=compute,
        resident=resident,
        gathered=BY_NAME["F8_E4M3"] if work.float8_gathered else compute,
        gradient=_get_float_dtype(work.gradient_dtype) if work.gradient_dtype else usual,
        optimizer=known,
        master=known.master and resident != F32,
        foreach=_has_foreach(runtime, known, work),
        said=work.optimizer_kernel is not None,
        steps_in_backward=work.step_in_backward,
        decoupled=work.moment_dtypes is not None,
        zero=work.zero,
        sharers=mesh.degree("dp") * mesh.degree("cp"),
        expert_sharers=replicas // mesh.degree(EXPERT_FSDP),
        parameters=parameters,
        gradients=gradients,
        states=states,
    )


def _check_step(runtime: Runtime, mesh: Mesh, work: TrainingWorkload) -> None:
    """Raise UsageError for runtimes that cannot update a parameter in the backward pass, or that have no DDP."""
    if work.profile == "ddp" and (mesh.degree("fsdp") > 1 or work.zero):
        raise UsageError("DDP shares no states between ranks", hint="use --profile fsdp2, or a mesh with dp alone")
    if not work.step_in_backward:
        return
    if runtime not in {"units", "autocast"}:
        raise UsageError(
            f"the {work.profile} profile has no optimizer step in the backward pass",
            hint="use --profile torchtune, fsdp2, ddp or hf, or leave --optimizer-in-backward out",
        )
    if work.count_passes(mesh.degree("pp")) > 1:
        raise UsageError(
            "an optimizer step in the backward pass cannot add the gradients of microbatches",
            hint="give --microbatches 1 and no pipeline stages",
        )


def _check_optimizer(runtime: Runtime, known: OptimizerSpec, work: TrainingWorkload) -> None:
    """Raise UsageError for runtimes that have no such optimizer, or give theirs no matrices."""
    if runtime == "buffers" and work.optimizer not in _MEGATRON_OPTIMIZERS:
        raise UsageError(
            f"Megatron-LM has no {work.optimizer}: its optimizers are Adam, SGD and Muon",
            hint="use another --profile, or --exp-avg-dtype and --exp-avg-sq-dtype with --zero 1 for narrower moments",
        )
    if runtime == "partitions" and known.spreads:
        # DeepSpeed 0.19.8, runtime/zero, and unfused_optimizer.py, whose fp32 copies it would not see
        raise UsageError(
            f"DeepSpeed gives its optimizers flat partitions, and {work.optimizer} needs matrices",
            hint="use --profile fsdp2, or --profile hf without --zero, which is DDP",
        )


def _choose_narrow_moments(known: OptimizerSpec, work: TrainingWorkload) -> OptimizerSpec:
    """Return the optimizer with narrower moments; raises UsageError where Megatron-LM has none."""
    assert work.moment_dtypes is not None  # noqa: S101 - asked before
    why = {
        "--profile megatron": work.profile != "megatron",
        "--zero 1": not work.zero,
        "--optimizer adamw": work.optimizer != "adamw",
        "--precision mixed": work.precision != "mixed",
        "no --offload": work.offload != "none",
    }
    lacking = [need for need, lacks in why.items() if lacks]
    if lacking:
        raise UsageError(
            f"moments in types of their own, which Megatron-LM's precision-aware optimizer has, need {lacking[0]}",
            hint="leave out --exp-avg-dtype and --exp-avg-sq-dtype, or change that",
        )
    return narrow_moments(known, work.moment_dtypes)


def _has_foreach(runtime: Runtime, known: OptimizerSpec, work: TrainingWorkload) -> bool:
    """Return whether torch computes with all parameters at once; raises UsageError for kernels that there are not."""
    if work.optimizer_kernel is None:
        return runtime == "units" or work.profile in {
            "torchtune",
            "ddp",
        }  # torch's own default; transformers' Trainer takes AdamW's fused one
    if runtime not in {"units", "autocast"} or known.name not in {"adamw", "adamw-bf16"}:
        raise UsageError(
            "--optimizer-kernel says how torch's AdamW computes, which is known of the profiles fsdp2 and hf",
            hint="leave it out",
        )
    return work.optimizer_kernel == "foreach"


def _get_float_dtype(name: str) -> DType:
    if name not in FLOATING:
        raise UsageError(f"cannot train in {name}", hint=f"the types are {', '.join(sorted(FLOATING))}")
    return BY_NAME[name]


def _choose_runtime(mesh: Mesh, work: TrainingWorkload) -> Runtime:
    """Choose the runtime: in transformers' Trainer, ZeRO is DeepSpeed's, fsdp is FSDP2's, and all else DDP's."""
    if work.profile == "megatron":
        return "buffers"
    if work.profile == "deepspeed":
        return "partitions"
    if work.profile == "ddp":
        return "autocast"
    if work.profile == "fsdp2" or mesh.degree("fsdp") > 1:
        return "units"
    return "partitions" if work.zero else "autocast"


def _choose_tiers(runtime: Runtime, work: TrainingWorkload) -> tuple[Tier, Tier, Tier]:
    """Choose where parameters, gradients and optimizer states are."""
    if work.offload == "none":
        if work.offload_parameters:
            raise UsageError("--offload-parameters needs --offload", hint="give --offload cpu or nvme")
        return "device", "device", "device"
    tier: Tier = "nvme" if work.offload == "nvme" else "host"
    if tier == "nvme" and runtime != "partitions":
        raise UsageError(f"the {work.profile} profile has no offload to NVMe", hint="use --profile deepspeed")
    if runtime == "units":
        return tier, tier, tier  # torch's CPUOffloadPolicy moves all three
    if runtime == "autocast" or (runtime == "partitions" and not work.zero):
        raise UsageError("offloading needs sharded states", hint="give --zero 1, 2 or 3")
    if runtime == "buffers":
        if work.offload_parameters:
            raise UsageError("the megatron profile offloads optimizer states, not parameters")
        return "device", "device", tier
    if work.offload_parameters and work.zero < 3:  # noqa: PLR2004 - the stage that shares parameters
        raise UsageError("DeepSpeed offloads parameters only with ZeRO-3", hint="give --zero 3")
    return tier if work.offload_parameters else "device", tier if work.zero > 1 else "device", tier
