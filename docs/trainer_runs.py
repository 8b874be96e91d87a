"""Writes small runs as trainers leave them, for `docs/consumers.py`, which says how it is run.

Each writer gets a model of transformers and an empty folder. What a library saves is saved by that library: DeepSpeed,
Lightning, PEFT, transformers, megatron-core, and torch (FSDP2 on two ranks over gloo). Composer, verl, slime, NeMo-RL
and Accelerate save what torch made under names and in folders of their own, which are repeated here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 2
RATE = 1e-3


def load(folder: Path) -> Any:
    """Load a model by the class that its config names."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)


def spawn(function: Any, *given: Any) -> None:
    """Run a function on every rank: `function(rank, port, *given)`."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = int(listening.getsockname()[1])
    mp.spawn(function, (port, *given), nprocs=RANKS)


def enter(rank: int, port: int) -> None:
    """Say to torch and DeepSpeed which rank this process is."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)


def divide(rank: int, port: int, original: Path) -> tuple[Any, Any]:
    """Divide a model with FSDP2, and make an optimizer that has made no step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    enter(rank, port)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    model = load(original)
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):  # noqa: SLF001 - as its trainers do
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def write_fsdp2(rank: int, port: int, original: Path, folder: Path) -> None:
    """Save a divided model as torch's users, Accelerate, verl, slime and NeMo-RL do, each into a folder of its own."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = divide(rank, port, original)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "dcp" / "step-10")
    dcp.save({"model": weights}, checkpoint_id=folder / "accelerate" / "checkpoint-10" / "pytorch_model_fsdp_0")
    (folder / "verl" / "actor").mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / "verl" / "actor" / f"model_world_size_{RANKS}_rank_{rank}.pt")
    dcp.save({"model_state": {"model": weights}}, checkpoint_id=folder / "slime" / "iter_0000010" / "model")
    place = folder / "nemo-rl" / "step_10" / "policy" / "weights" / "model"
    writer = dcp.HuggingFaceStorageWriter(str(place), save_distributed=True)
    dcp.save(weights, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


def write_deepspeed(rank: int, port: int, original: Path, folder: Path, stage: int) -> None:
    """Train no step with DeepSpeed, and save what its engine holds."""
    import deepspeed

    enter(rank, port)
    deepspeed.init_distributed(dist_backend="gloo")
    model = load(original)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=RATE), config=settings
    )
    engine.save_checkpoint(str(folder))
    dist.barrier()
    dist.destroy_process_group()


def write_lightning(original: Path, folder: Path) -> None:
    """Save a LightningModule that has the model in its attribute `model`."""
    import lightning

    class Tuned(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = load(original)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=0, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.fit(Tuned(), [torch.zeros(1, 4, dtype=torch.long)])
    trainer.save_checkpoint(folder / "last.ckpt")


def write_megatron(rank: int, port: int, original: Path, folder: Path) -> None:
    """Save what megatron-core holds on two tensor-parallel ranks as Megatron-LM does, in the format `torch_dist`."""
    import transformers
    from megatron.core import __version__ as version
    from safetensors.torch import load_file

    from fixtures.torch_dist import make

    enter(rank, port)
    make.no_cuda()
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    config = transformers.AutoConfig.from_pretrained(original)
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    case = {"tp": RANKS, "pp": 1, "ep": RANKS if hasattr(config, "num_local_experts") else 1}
    padded = -(-config.vocab_size // (make.DIVISIBLE * RANKS)) * make.DIVISIBLE * RANKS
    with torch.no_grad():
        chunks, settings = make.megatron(case, config, rank, padded)
        make.place_in(chunks, settings, make.whole(load_file(original / "model.safetensors"), config, padded))
    (folder / "iter_0000010").mkdir(parents=True, exist_ok=True)
    make.save(case, folder / "iter_0000010", chunks, config, settings, padded, version)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    dist.destroy_process_group()


def write_older_transformers(original: Path, folder: Path, python: str) -> None:
    """Load and save with another transformers."""
    code = (
        "import sys, torch, transformers as t\n"
        "config = t.AutoConfig.from_pretrained(sys.argv[1])\n"
        "text = config.get_text_config()\n"  # transformers 4 does not read what transformers 5 wrote there
        "text.rope_theta = text.__dict__.pop('rope_parameters')['rope_theta']\n"
        "kind = getattr(t, config.architectures[0])\n"
        "kind.from_pretrained(sys.argv[1], config=config, dtype=torch.float32).save_pretrained(sys.argv[2])\n"
    )
    subprocess.run([python, "-c", code, str(original), str(folder)], check=True, capture_output=True)


def write_adapter(original: Path, folder: Path) -> Any:
    """Save a LoRA of PEFT, and return the model with the LoRA merged by PEFT."""
    from peft import LoraConfig, get_peft_model

    model = load(original)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    tuned.save_pretrained(folder)
    return tuned.merge_and_unload()


def write_runs(original: Path, folder: Path, older_python: str) -> None:
    """Write every run of a model below `folder`, but for the adapter."""
    spawn(write_fsdp2, original, folder)
    for stage in (2, 3):
        spawn(write_deepspeed, original, folder / f"zero-{stage}", stage)
    model = load(original)
    weights = model.state_dict()
    for name in ("fsdp-bin", "composer", "lightning", "transformers-4.57"):
        (folder / name).mkdir(parents=True)
    torch.save(weights, folder / "fsdp-bin" / "pytorch_model_fsdp.bin")
    inner = {f"model.{name}": value for name, value in weights.items()}  # Composer's HuggingFaceModel has it there
    torch.save({"state": {"model": inner}, "rng": []}, folder / "composer" / "ep0-ba10-rank0.pt")
    write_lightning(original, folder / "lightning")
    write_older_transformers(original, folder / "transformers-4.57", older_python)
