"""Writes directories as DeepSpeed would on more ranks, or larger ones, than the fixtures have; and damaged ones."""

from __future__ import annotations

import shutil
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def scattered(place: Path, weights: Mapping[str, torch.Tensor], ranks: int) -> Path:
    """A directory of ZeRO stage 3 with one group, whose states are the weights and twice them."""
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    folder = place / "global_step7"
    folder.mkdir(parents=True)
    (place / "latest").write_text("global_step7")
    for rank in range(ranks):
        parts = []
        for tensor in weights.values():
            share = -(-tensor.numel() // ranks)
            part = torch.zeros(share, dtype=torch.float32)
            own = tensor.flatten()[rank * share : (rank + 1) * share]
            part[: own.numel()] = own
            parts.append(part)
        flat = torch.cat(parts)
        state = {0: {"step": torch.tensor(7.0), "exp_avg": flat.clone(), "exp_avg_sq": flat * 2}}
        optimizer = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]},
            "fp32_flat_groups": [flat],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0"}, folder / f"{name}_optim_states.pt")
        model = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in weights},
            "buffer_names": [],
            "param_shapes": [shapes],
            "shared_params": {},
            "global_steps": 7,
            "dp_world_size": ranks,
            "mp_world_size": 1,
        }
        torch.save(model, folder / f"{name}_model_states.pt")
    return place


def joined(place: Path, weights: Mapping[str, torch.Tensor], ranks: int, stage: int = 2) -> Path:
    """A directory of ZeRO stage 1 or 2 with one group, whose states are the weights and twice them."""
    folder = place / "global_step7"
    folder.mkdir(parents=True)
    (place / "latest").write_text("global_step7")
    total = sum(prod(tensor.shape) for tensor in weights.values())
    length = -(-total // (2 * ranks)) * 2
    flat = torch.zeros(length * ranks)
    flat[:total] = torch.cat([tensor.flatten() for tensor in weights.values()])
    for rank in range(ranks):
        part = flat[rank * length : (rank + 1) * length].clone()
        padding = min(max((rank + 1) * length - total, 0), length)
        state = {0: {"step": torch.tensor(7.0), "exp_avg": part.clone(), "exp_avg_sq": part * 2}}
        optimizer = {
            "zero_stage": stage,
            "partition_count": [ranks],
            "group_paddings": [padding],
            "base_optimizer_state": {"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]},
            "single_partition_of_fp32_groups": [part[: length - padding].clone()],
        }
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0"},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    model = {
        "module": {name: tensor.bfloat16() for name, tensor in weights.items()},
        "buffer_names": [],
        "param_shapes": [{name: tensor.shape for name, tensor in weights.items()}],
        "shared_params": {},
        "global_steps": 7,
        "dp_world_size": ranks,
        "mp_world_size": 1,
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    return place


def changed(fixture: Path, place: Path, file: str, change: Callable[[dict], object]) -> Path:
    """A copy of a checkpoint, one file of which `change` has altered, or replaced by what it returns."""
    shutil.copytree(fixture, place)
    (path,) = place.rglob(file)
    tree = torch.load(path, weights_only=True)
    torch.save(change(tree) or tree, path)
    return place
