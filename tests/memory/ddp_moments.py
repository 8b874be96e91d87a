"""A program that trains a Llama as one of several processes with DDP and prints the most bytes of moments of a step.

Its processes speak by gloo; autocast and AdamW are as in transformers' Trainer. The third step is measured, because DDP
makes its buckets anew in the second.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from fsdp2_moments import Tracker
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, masking_utils


def measure(case):
    tracker = Tracker()
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**case["model"]), dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    if case["recompute"] == "full":
        model.activation_checkpointing_enable()
    ids = torch.zeros(1, case["tokens"], dtype=torch.long)
    with tracker, mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.see(tensor, "model")
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=case["view"])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(3):
            tracker.armed = step == 2
            optimizer.zero_grad()
            for left in reversed(range(case["microbatches"])):
                with parallel.no_sync() if left else contextlib.nullcontext():
                    tracker.enter("forward")
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = parallel(input_ids=ids, labels=ids, use_cache=False).loss
                    tracker.enter("backward")
                    loss.backward()
                    del loss
            tracker.enter("step")
            optimizer.step()
    return tracker.most


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place, rank, ranks, cases = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    dist.init_process_group("gloo", store=dist.FileStore(place, ranks), rank=rank, world_size=ranks)
    found = [measure(case) for case in cases]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
