"""A program that shards a model as single ranks of many and prints the bytes of its states, by torch's own storages,
and of what it gathers, by torch's own tracker.

The ranks are fake: collectives do nothing, which leaves sizes as they are.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def storage(tensors):
    """Bytes of the storages of tensors, each once."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def joined(ranks, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def sharded(mesh, path):
    config = transformers.LlamaConfig.from_dict(json.loads(Path(path).read_text()) | {"use_cache": False})
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def kept(optimizer):
    """Bytes of all states but the steps' numbers."""
    return storage(
        v for state in optimizer.state.values() for k, v in state.items() if torch.is_tensor(v) and k != "step"
    )


def stepped(optimizer):
    optimizer.step()
    return kept(optimizer)


def initialised(optimizer):
    """The states of bitsandbytes, whose kernels do not take shards: what it allocates before the first step."""
    optimizer.check_overrides()
    for group, parameters in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(parameters["params"]):
            optimizer.init_state(parameters, parameter, group, number)
    return kept(optimizer)


def muon(model):
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    return stepped(torch.optim.Muon(hidden)) + stepped(torch.optim.AdamW(others))


def measured(ranks, rank, path):
    import bitsandbytes

    model = sharded(joined(ranks, rank), path)
    tokens = torch.zeros((1, 8), dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    parameters = list(model.parameters())
    found = {
        "parameters": sum(p._local_tensor.untyped_storage().nbytes() for p in parameters),
        "gradients": storage(p.grad for p in parameters),
        "optimizers": {
            "adamw": stepped(torch.optim.AdamW(parameters)),
            "sgd": stepped(torch.optim.SGD(parameters)),
            "sgd-momentum": stepped(torch.optim.SGD(parameters, momentum=0.9)),
            "muon": muon(model),
            "adamw-8bit": initialised(bitsandbytes.optim.AdamW8bit(parameters)),
            "lion": initialised(bitsandbytes.optim.Lion(parameters)),
            "lion-8bit": initialised(bitsandbytes.optim.Lion8bit(parameters)),
        },
    }
    dist.destroy_process_group()
    return found


def peak(path):
    """Bytes by kind when a forward and a backward pass of one rank of four need most, by torch's own tracker."""
    mesh = joined(4, 0)
    with FakeTensorMode():
        model = sharded(mesh, path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracker = FSDPMemTracker(model, optimizer)
        tokens = torch.zeros((1, 8), dtype=torch.long)
        tracker.track_inputs((tokens,))
        with tracker:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()  # the first pass sets up what the later ones find
            model(input_ids=tokens, labels=tokens).loss.backward()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    dist.destroy_process_group()
    return {getattr(kind, "name", kind): nbytes for kind, nbytes in found.items()}


def main():
    warnings.simplefilter("ignore")
    path, *places = sys.argv[1:]
    print(json.dumps([measured(*map(int, place.split("/")), path) for place in places] if places else peak(path)))


if __name__ == "__main__":
    main()
