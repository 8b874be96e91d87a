"""What torch allocates at most when a model is served and trained, beside what the estimator says."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from gpu_models import LLAMA, MIXTRAL, QWEN

from shardctl.estimate.model.inventory import build_inventory
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.serving.rank_serving import list_serving_terms
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training.rank_training import list_training_terms
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.models import describe_model
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_models import Scale

    from shardctl.estimate.term import MemoryTerm


@dataclass(frozen=True)
class Case:
    """What is run."""

    model: str
    base: dict[str, Any]
    layers: int
    sequence: int
    batch: int
    use: Literal["serve", "hf", "fsdp2"]
    """Serving, or training: with fp32 weights under autocast, or by FSDP2 with gathered weights in bf16."""
    recompute: Literal["none", "full"] = "none"

    def __str__(self) -> str:
        how = "serve" if self.use == "serve" else f"train {self.use}, recompute {self.recompute}"
        return f"{self.model}, {self.layers} layers, {self.batch} x {self.sequence} tokens, {how}"


CASES = (
    Case("Llama 3 8B", LLAMA, 4, 2048, 1, "serve"),
    Case("Llama 3 8B", LLAMA, 4, 8192, 4, "serve"),
    Case("Qwen 2.5 7B", QWEN, 4, 4096, 2, "serve"),
    Case("Mixtral 8x7B", MIXTRAL, 2, 4096, 2, "serve"),
    Case("Llama 3 8B", LLAMA, 1, 2048, 1, "hf"),
    Case("Llama 3 8B", LLAMA, 2, 4096, 1, "hf"),
    Case("Llama 3 8B", LLAMA, 4, 4096, 1, "hf", "full"),
    Case("Qwen 2.5 7B", QWEN, 2, 2048, 2, "hf"),
    Case("Mixtral 8x7B", MIXTRAL, 1, 2048, 1, "hf"),
    Case("Llama 3 8B", LLAMA, 2, 2048, 1, "fsdp2"),
    Case("Qwen 2.5 7B", QWEN, 2, 4096, 1, "fsdp2", "full"),
    Case("Mixtral 8x7B", MIXTRAL, 1, 2048, 1, "fsdp2"),
)


@dataclass(frozen=True)
class Peaked:
    """What was allocated, and what was said."""

    case: Case
    measured: int | None
    """Bytes; None where they cannot be measured."""
    planned: int
    low: int
    high: int
    problem: str = ""
    """Why it could not be run."""


def peaks(scale: Scale, cases: tuple[Case, ...] = CASES) -> Iterator[Peaked]:
    """Each case; one that does not fit the device says so."""
    for case in cases:
        config = scale.config(case.base, case.layers)
        sequence = 32 if scale.tiny else case.sequence
        said = [term for term in planned(config, case, sequence) if term.category != "runtime"]
        expected = sum_terms(said)
        measured, problem = None, ""
        try:
            measured = (
                served(config, case, sequence, scale) if case.use == "serve" else trained(config, case, sequence, scale)
            )
        except torch.OutOfMemoryError as error:
            problem = str(error).partition(".")[0]
        gc.collect()
        if scale.cuda:
            torch.cuda.empty_cache()
        yield Peaked(case, measured, expected.nbytes, expected.low, expected.high, problem)


def planned(config: dict[str, Any], case: Case, sequence: int) -> tuple[MemoryTerm, ...]:
    """What the estimator says that one device needs."""
    model, mesh, stages = describe_model(config), Mesh.of(), [case.layers]
    tensors = [Tensor(t.name, t.dtype, t.shape, ()) for t in model.own()]
    inventory = build_inventory(tensors, {t.name: model.tensors[t.name].spec for t in tensors}, model.layers)
    (holding,) = list_rank_shards(inventory, mesh, stages)
    described = build_layer_graph(config)
    if case.use == "serve":
        work = ServingWorkload(context=sequence, batch=case.batch, batched_tokens=case.batch * sequence)
        return list_serving_terms(described, holding, mesh, work, dtype="BF16")
    training = TrainingWorkload(
        sequence, micro_batch=case.batch, profile=case.use, recompute=case.recompute, microbatches=1
    )
    return list_training_terms(described, holding, mesh, training, stages=stages)


def built(config: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    """The class of transformers, with random weights made on the device."""
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    described = kind.config_class.from_dict({**config, "dtype": str(dtype).removeprefix("torch.")})
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return kind._from_config(described, dtype=dtype, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(usual)


@contextlib.contextmanager
def watched(scale: Scale) -> Iterator[list[int]]:
    """What was allocated at most in the block, if that can be measured."""
    found: list[int] = []
    if scale.cuda:
        torch.cuda.synchronize(scale.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(scale.device)
    yield found
    if scale.cuda:
        torch.cuda.synchronize(scale.device)
        found.append(torch.cuda.max_memory_allocated(scale.device))


def served(config: dict[str, Any], case: Case, sequence: int, scale: Scale) -> int | None:
    """One prefill that fills the whole cache, and the choice of the next token."""
    with torch.inference_mode():
        model = built(config, torch.bfloat16, scale.device).eval()
        ids = torch.randint(0, config["vocab_size"], (case.batch, sequence), device=scale.device)
        with watched(scale) as found:
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            probabilities = out.logits[:, -1].float().softmax(-1)
            torch.multinomial(probabilities, 1)
    return found[0] if found else None


def trained(config: dict[str, Any], case: Case, sequence: int, scale: Scale) -> int | None:
    """Two steps of forward, backward and AdamW: in the second all states are there."""
    with one_rank(scale) if case.use == "fsdp2" else contextlib.nullcontext():
        model = built(config, torch.float32, scale.device).train()
        if case.recompute == "full":
            newer = getattr(model, "activation_checkpointing_enable", None)  # its later name
            (newer or model.gradient_checkpointing_enable)()
        if case.use == "fsdp2":
            model = shared(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        ids = torch.randint(0, config["vocab_size"], (case.batch, sequence), device=scale.device)
        kind = torch.device(scale.device).type
        with watched(scale) as found:
            for _ in range(2):
                with torch.autocast(kind, torch.bfloat16, enabled=case.use == "hf"):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
        del model, optimizer
    return found[0] if found else None


def shared(model: Any) -> Any:
    """The model under FSDP2: each block and the rest gathered in bf16, gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


@contextlib.contextmanager
def one_rank(scale: Scale) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    if scale.cuda:
        torch.cuda.set_device(scale.device)
    dist.init_process_group("nccl" if scale.cuda else "gloo", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
