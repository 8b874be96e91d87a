"""Decides of models that see or hear for a text model whether a plan of serving cuts them over tp, as engines do.

Measured with the modules of vLLM 0.32.0: it cuts the attention, the MLPs and what joins pictures to text of the towers
whose tables say how, unless ``--mm-encoder-tp-mode data`` is given, which few of its classes have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_memory_size
from shardctl.base.errors import PartitionError
from shardctl.models import ModelConfig, describe_model, find_family
from shardctl.planning.workload import decide_use
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import check_cuts, compute_rank_boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.models import Model
    from shardctl.models.tables.family import Family
    from shardctl.models.tables.model import ModelTensor
    from shardctl.options import PlanOptions, ReshardOptions

_WITH_DATA_MODE: Final = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "llama4"}
)
"""Families whose class in vLLM 0.32 has the mode (`supports_encoder_tp_data`); it cuts the others all the same."""
_NEVER_CUT: Final = frozenset({"gemma4"})
"""Families whose towers vLLM 0.32 builds of transformers' own modules."""
_DATA_MODE: Final = "as in vLLM with --mm-encoder-tp-mode data"


def cut_towers(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, plan_options: PlanOptions
) -> tuple[OpenedCheckpoint, list[str]]:
    """Return the checkpoint with a model whose towers are cut as engines cut them, and one line about each tower.

    It is returned as it is where its files have towers whole, for training, in a search, and where a mesh cannot cut
    them.
    """
    model, config, mesh = checkpoint.model, checkpoint.config, reshard_options.mesh
    found = find_family(config) if model is not None and model.family and config is not None else None
    if model is None or config is None or found is None or mesh is None or mesh.degree("tp") == 1:
        return checkpoint, []
    family, towers = found[0], _list_towers(model, found[0])
    why = _find_reason_for_whole(checkpoint, family, reshard_options, plan_options, config)
    if not why:
        stored = None if checkpoint.hypothetical else checkpoint.stored
        cut = describe_model(config, kv_heads="replicate", stored=stored, cut_towers=True).tensors
        changed = {
            name: replace(tensor, spec=cut[name].spec)
            for name, tensor in model.tensors.items()
            if name in cut and "tp" in cut[name].spec.axes and "tp" not in tensor.spec.axes
        }
        try:
            for name, tensor in changed.items():
                check_cuts(name, tensor.shape, tensor.spec, mesh)
        except PartitionError as error:
            why = f"because vLLM {error.message}" + (
                "; it needs --mm-encoder-tp-mode data" if family.name in _WITH_DATA_MODE else ""
            )
        else:
            model = replace(model, tensors={**model.tensors, **changed})
            return replace(checkpoint, model=model), _describe_cut(
                model, towers, mesh, family, written_whole=reshard_options.to is None and not checkpoint.hypothetical
            )
    return checkpoint, [
        f"{tower}.** is taken to be whole on every tp rank, {_format_size(tensors)} on each, {why}"
        for tower, tensors in towers.items()
    ]


def _list_towers(model: Model, family: Family) -> Mapping[str, list[ModelTensor]]:
    found: dict[str, list[ModelTensor]] = {}
    for tensor in model.own():
        for tower in family.towers:
            if f".{tensor.name}".startswith((f".{tower}.", f".{model.prefix}.{tower}.")):
                found.setdefault(tower, []).append(tensor)
    return found


def _find_reason_for_whole(
    checkpoint: OpenedCheckpoint,
    family: Family,
    reshard_options: ReshardOptions,
    plan_options: PlanOptions,
    config: Mapping[str, object],
) -> str:
    """Say why towers are counted whole; empty if they are cut."""
    dims = family.facts(family.complete_config(ModelConfig(config))).dims.values()
    known = any(one.tower_axis for dim in dims for one in (dim if isinstance(dim, tuple) else (dim,)))
    if family.name in _NEVER_CUT:
        return "as in vLLM"
    if not known or checkpoint.ruled:
        return "because how engines cut it is not known"
    if plan_options.towers in {"whole", "replicate"}:
        return _DATA_MODE if family.name in _WITH_DATA_MODE else "as --encoder-tp asks; vLLM cuts it"
    if plan_options.search:
        return "in every mesh that --search compares; vLLM cuts it"
    if reshard_options.to == "ranks":
        return "as --to ranks writes it; vLLM cuts it"
    serving = decide_use(plan_options, reshard_options.mesh or Mesh.of()) == "serve"
    return "" if serving and not checkpoint.adapter else "as in training"


def _describe_cut(
    model: Model,
    towers: Mapping[str, list[ModelTensor]],
    mesh: Mesh,
    family: Family,
    *,
    written_whole: bool,
) -> list[str]:
    """Describe what a rank has of each tower."""
    also = f"; --encoder-tp replicate counts it {_DATA_MODE}" if family.name in _WITH_DATA_MODE else ""
    files = "; the files of --to ranks have it whole" if written_whole else ""
    at, lines = mesh.coordinate(0), []
    for tower, tensors in towers.items():
        held = sum(
            tensor.dtype.nbytes(box.shape)
            for tensor in (model.tensors[one.name] for one in tensors)
            for box in compute_rank_boxes(tensor.shape, tensor.spec, mesh, at)
        )
        lines.append(
            f"{tower}.** is cut over tp, as in vLLM: {format_memory_size(held)} on each rank, of "
            f"{_format_size(tensors)}{also}{files}"
        )
    return lines


def _format_size(tensors: Iterable[ModelTensor]) -> str:
    return format_memory_size(sum(tensor.dtype.nbytes(tensor.shape) for tensor in tensors))
