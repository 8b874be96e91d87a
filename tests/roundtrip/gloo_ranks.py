"""What two gloo ranks do with rank files: run as a script, one process a rank, it carries out a list of jobs.

Each job is `[function, {argument: value}]`; what went wrong in it, if anything, is written to `result-<rank>.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

WORLD = 2


def run(folder: Path, jobs: list[tuple[str, dict[str, object]]], timeout: float = 240) -> list[str]:
    """Carry out `jobs` on all ranks; for each what went wrong on any rank, or an empty text."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    shared = {"PYTHONPATH": str(Path(__file__).parents[1])}
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in range(WORLD):
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
        with (folder / f"log-{rank}.txt").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, __file__, folder], env=os.environ | told | quiet | shared, stdout=log, stderr=log
                )
            )
    end = time.monotonic() + timeout
    try:
        for rank in ranks:
            rank.wait(max(end - time.monotonic(), 0))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = [(folder / f"log-{rank}.txt").read_text() for rank in range(WORLD)]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(logs)
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(WORLD)]
    return ["\n".join(filter(None, each)) for each in zip(*results, strict=True)]


def read_into_dtensors(path: str, expected: str, dim: int) -> None:
    """torch's reader fills DTensors that are cut along `dim` (0-d and shorter ones replicated)."""
    import torch
    import torch.distributed.checkpoint as dcp
    from tiny_models import assert_same
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, zeros

    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.load(expected)
    state = {
        name: zeros(*t.shape, dtype=t.dtype, device_mesh=mesh, placements=[Shard(dim) if t.ndim > dim else Replicate()])
        for name, t in whole.items()
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    assert_same({name: t.full_tensor() for name, t in state.items()}, whole)


def transformers_loads(path: str, expected: str, how: dict[str, object]) -> None:
    """transformers loads rank files into a model that it distributes over the ranks itself."""
    import torch
    import transformers
    from tiny_models import assert_same
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    config = json.loads((Path(path) / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(path, dtype="auto", distributed_config=DistributedConfig(**how))
    state = model.state_dict()
    assert any(isinstance(t, DTensor) for t in state.values()), "nothing was distributed"
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    assert_same(full, torch.load(expected))


def write_with_fsdp2(path: str, expected: str, config: dict[str, object]) -> None:
    """FSDP2 cuts a model, and torch's writer saves what each rank holds."""
    import torch
    import torch.distributed.checkpoint as dcp
    from tiny_models import build
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(config)
    if os.environ["RANK"] == "0":
        torch.save(model.state_dict(), expected)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    dcp.save(dict(model.state_dict()), storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


def write_with_tp(path: str, expected: str, config: dict[str, object]) -> None:
    """Rows of some and columns of other tensors are cut, as tensor parallelism does; norms are replicated."""
    import torch
    import torch.distributed.checkpoint as dcp
    from tiny_models import build
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    state = build(config).state_dict()
    if os.environ["RANK"] == "0":
        torch.save(state, expected)
    mesh = init_device_mesh("cpu", (WORLD,))

    def placed(name, tensor):
        if tensor.ndim < 2:
            return distribute_tensor(tensor, mesh, [Replicate()])
        columns = any(part in name for part in ("o_proj", "down_proj", "c_proj"))
        cut = distribute_tensor(tensor, mesh, [Shard(int(columns))])
        return type(cut).from_local(
            cut.to_local().contiguous(), mesh, cut.placements, shape=cut.shape, stride=cut.stride()
        )

    cut = {name: placed(name, tensor) for name, tensor in state.items()}
    dcp.save(cut, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


def write_odd_shapes(path: str, expected: str) -> None:
    """Fewer rows than ranks (torch writes an empty shard), 0-d integers, booleans, columns that do not divide."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    state = {
        "one_row": torch.randn(1, 4, generator=torch.Generator().manual_seed(1)),
        "seven_rows": torch.arange(7 * 3, dtype=torch.int64).reshape(7, 3),
        "flags": torch.tensor([True, False, True]),
        "step": torch.tensor(41),
        "float8": torch.arange(24, dtype=torch.float32).reshape(6, 4).to(torch.float8_e4m3fn),
    }
    if os.environ["RANK"] == "0":
        torch.save(state, expected)
    mesh = init_device_mesh("cpu", (WORLD,))
    rank = int(os.environ["RANK"])

    def part(tensor):  # gloo cannot scatter every type
        parts = [tensor] * WORLD if not tensor.ndim else [*tensor.chunk(WORLD), tensor[:0]]
        how = [Shard(0) if tensor.ndim else Replicate()]
        return DTensor.from_local(parts[rank].clone(), mesh, how, shape=tensor.shape, stride=tensor.stride())

    cut = {name: part(tensor) for name, tensor in state.items()}
    dcp.save(cut, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


def transformers_saves(path: str, expected: str, source: str, how: dict[str, object]) -> None:
    """transformers distributes a model over the ranks, and saves it as a distributed checkpoint."""
    import torch
    import transformers
    from transformers.distributed import DistributedConfig

    config = json.loads((Path(source) / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    if os.environ["RANK"] == "0":
        torch.save(kind.from_pretrained(source, dtype="auto").state_dict(), expected)
    model = kind.from_pretrained(source, dtype="auto", distributed_config=DistributedConfig(**how))
    model.save_pretrained(path, distributed_checkpoint=True)


def _main(folder: Path) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    wrong = []
    for function, arguments in json.loads((folder / "jobs.json").read_text()):
        try:
            globals()[function](**arguments)
        except BaseException:  # noqa: BLE001 - torch's CheckpointException is one
            wrong.append(f"rank {rank}: {traceback.format_exc()}")
        else:
            wrong.append("")
    (folder / f"result-{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
