"""A program that trains a small decoder as one of two processes with DeepSpeed on the CPU and prints its moments.

    DS_ACCELERATOR=cpu python deepspeed_moments.py RANK PORT STAGE [TRAINED]

TRAINED is a pattern of the names of the parameters that are trained, by default of all. What it printed with DeepSpeed
0.19.8 and torch 2.13 is in test_timeline_deepspeed.py. Tensors on the meta device, of which DeepSpeed makes one for
each parameter, take no memory and are not counted.
"""

from __future__ import annotations

import json
import os
import re
import sys

import torch
from fsdp2_moments import Decoder, Norm, Tracker
from torch.nn import functional

MODEL = {
    "layers": 3, "hidden": 256, "intermediate": 768, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocabulary": 2048,
}  # fmt: skip
TOKENS = 128
BUCKET = 400_000
SMALL = 1000


class DeviceTracker(Tracker):
    """Leaves out what is on the meta device."""

    def see(self, tensor, made_by):
        if not tensor.is_meta:
            super().see(tensor, made_by)


def main():
    rank, port, stage, *trained = sys.argv[1:]
    os.environ |= {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    Norm.forward = lambda self, x: functional.rms_norm(x, (x.shape[-1],), self.weight)
    shared = {
        "stage": int(stage), "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET, "overlap_comm": False,
        "stage3_param_persistence_threshold": SMALL,
    }  # fmt: skip
    settings = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": shared,
        "zero_allow_untested_optimizer": True, "gradient_clipping": 1.0,
    }  # fmt: skip
    tracker = DeviceTracker()
    with tracker:
        model = Decoder(**MODEL)
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.see(tensor, "model")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not trained or re.search(trained[0], name) is not None)
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learning, fused=False, foreach=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        for step in range(3):
            tracker.armed = step == 2
            tracker.enter("forward")
            logits = engine(ids)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(0, 1))
            del logits
            tracker.enter("backward")
            engine.backward(loss)
            del loss
            tracker.enter("step")
            engine.step()
            tracker.enter("after")
    if rank == "0":
        print(json.dumps(tracker.most))


if __name__ == "__main__":
    main()
