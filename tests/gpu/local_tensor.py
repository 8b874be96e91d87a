"""transformers' own tensor parallelism of several ranks in one process, by torch's LocalTensorMode.

Each rank's model is built under a process group that does nothing; then the parameters of all are put together as
LocalTensors, and one forward pass computes every rank's part (torch 2.10 and later, `torch.distributed._local_tensor`).
"""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gpu_models import LLAMA, cut, random_checkpoint

import shardctl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpu_models import Scale


@dataclass(frozen=True)
class Native:
    """One forward pass of all ranks."""

    tp: int
    apart: float
    """Relative L2 distance of the logits of the rank that is farthest off from the unsharded model's."""
    seconds: float
    problem: str = ""


def native(folder: Path, scale: Scale) -> Iterator[Native]:
    """Llama at tp 2 and 8, in fp32."""
    changes = {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
    changes |= {"head_dim": 16} if scale.tiny else {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000}
    source = random_checkpoint(folder / "source", scale.config(LLAMA, 2, "float32", **changes))
    for tp in (2, 8):
        place = cut(source, folder / f"tp{tp}", tp=tp)
        began = time.perf_counter()
        try:
            apart, problem = one(source, place, tp, scale.device), ""
        except (ImportError, AttributeError, RuntimeError, ValueError, NotImplementedError, KeyError) as error:
            apart, problem = float("nan"), f"{type(error).__name__}: {error}".partition("\n")[0][:160]
        yield Native(tp, apart, time.perf_counter() - began, problem)


def one(source: Path, place: Path, tp: int, device: str) -> float:
    """How far the logits of any rank are from the source's."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    values = json.loads((source / "config.json").read_text())
    ids = torch.randint(0, values["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(1)).to(device)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        whole = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval()
        wanted = whole(input_ids=ids, use_cache=False).logits.double()
        del whole
        parts: dict[str, dict[int, torch.Tensor]] = {}
        try:
            for rank in reversed(range(tp)):  # the model that is built last carries the parts of all
                os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(tp))
                dist.init_process_group("fake", rank=rank, world_size=tp, store=FakeStore())
                model = LlamaForCausalLM.from_pretrained(
                    None,
                    config=LlamaConfig.from_dict(values),
                    state_dict=dict(shardctl.lens(place)),
                    distributed_config=DistributedConfig(tp_size=tp),
                    dtype=torch.float32,
                )
                for name, parameter in model.named_parameters(remove_duplicate=False):
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    parts.setdefault(name, {})[rank] = local.detach().to(device)
                if rank:
                    dist.destroy_process_group()
            with LocalTensorMode(tp):
                swap(model, parts, LocalTensor, DTensor)
                logits = model.to(device).eval()(input_ids=ids, use_cache=False).logits
                found = getattr(logits, "_local_tensor", logits)
                ranks = found._local_tensors.values() if isinstance(found, LocalTensor) else [found]
                return max(float((each.double() - wanted).norm() / wanted.norm()) for each in ranks)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)


def swap(model: Any, parts: dict[str, dict[int, torch.Tensor]], local_tensor: Any, dtensor: Any) -> None:
    """Set the parts of all ranks in the place of one rank's parameters; what is tied stays tied."""
    made: dict[int, Any] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            local = local_tensor(parts[name])
            if isinstance(parameter, dtensor):
                local = dtensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            made[id(parameter)] = torch.nn.Parameter(local, requires_grad=False)
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module)._parameters[attribute] = made[id(parameter)]
