"""What four gloo ranks do with distributed checkpoints: run as a script, they load each and train on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WORLD = 4
FIXTURES = Path(__file__).parents[2] / "fixtures"


def losses(folder: Path, checkpoints: dict[str, str], timeout: float = 200) -> dict[str, list[float]]:
    """For each checkpoint, by path, the losses of two more steps; the values say under which key it was saved."""
    folder.mkdir()
    (folder / "checkpoints.json").write_text(json.dumps(checkpoints))
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in range(WORLD):
        with (folder / f"log-{rank}.txt").open("wb") as log:
            told = {"RANK": str(rank), "PYTHONPATH": str(FIXTURES.parent)}
            command = [sys.executable, __file__, str(folder)]
            ranks.append(subprocess.Popen(command, env=os.environ | quiet | told, stdout=log, stderr=log))
    try:
        for rank in ranks:
            rank.wait(timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = "\n".join((folder / f"log-{rank}.txt").read_text()[-3000:] for rank in range(WORLD))
    assert all(rank.returncode == 0 for rank in ranks), logs
    return json.loads((folder / "losses.json").read_text())


def _trained_on(path: str, under: str) -> list[float]:
    """Load into FSDP2 x TP on 2 x 2 ranks, and take two steps."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    from fixtures.dcp import make as make_dcp

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    module = make_dcp.shard(make_dcp.tensor_parallel(make_dcp.model(), mesh["tp"]), mesh["fsdp"])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    optimizer = make_dcp.adamw(module)
    state = make_dcp.both(module, optimizer)
    dcp.load({under: state} if under else state, checkpoint_id=path)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        tokens = torch.randint(0, 48, (2, 8))
        loss = module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _main(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    checkpoints = json.loads((folder / "checkpoints.json").read_text())
    found = {path: _trained_on(path, under) for path, under in checkpoints.items()}
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
