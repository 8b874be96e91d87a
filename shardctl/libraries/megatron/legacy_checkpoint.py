"""Joins what Megatron-LM's ranks have in their folders (`--ckpt-format torch`) into one checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.libraries.files.sharded_backend import TRACKER
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.megatron import arrays as megatron
from shardctl.libraries.megatron.arguments import (
    LAST_ROW,
    convert_arguments_to_config,
    has_zero_centred_norms,
)
from shardctl.libraries.megatron.directory import choose_iteration, list_rank_folders
from shardctl.libraries.megatron.dist_common import USED, USED_OF_STATES, collect_progress, find_step
from shardctl.libraries.megatron.dist_groups import UNASSIGNED, assign_parameters, read_clipping
from shardctl.libraries.megatron.further_layers import COUNT, count_stored_layers
from shardctl.libraries.megatron.layers import BY_GROUP, BY_HEAD, BY_KIND, ZERO_CENTRED
from shardctl.libraries.megatron.library_settings import build_library_settings
from shardctl.libraries.megatron.names import EXTRA_STATE
from shardctl.libraries.megatron.namespace import require_no_weight_shards
from shardctl.libraries.megatron.rank_file import read_rank_file
from shardctl.libraries.megatron.ranks import TITLE, build_least_mesh
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, OpaqueObject, Tensor, TrainingState
from shardctl.tensors.naming_scheme import NamingScheme

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardctl.libraries.megatron.directory import RankDirectory
    from shardctl.libraries.megatron.rank_file import MegatronRankFile
    from shardctl.libraries.megatron.rank_states import RankStates
    from shardctl.libraries.reader import Weights
    from shardctl.storage import Source
    from shardctl.tensors.mesh import Mesh

_QKV_ROW_ORDERS: Final = {0.0: BY_KIND, 1.0: BY_HEAD, 2.0: BY_GROUP, 3.0: BY_GROUP}
"""How rows of queries, keys and values follow each other, by `checkpoint_version`."""
_EMBEDDING_SUFFIX: Final = "embedding.word_embeddings.weight"
_OUTPUT_LAYER_SUFFIX: Final = "output_layer.weight"
_OF_RANKS: Final = re.compile(
    r"(iter_[0-9]+|release)/.*|(.*/)?mp_rank_[^/]*/.*|(.*/)?train_dataloader_dprank[0-9]+\.pt"
)
_LAYER_WISE: Final = "layer_wise_optimizer_"
_OPTIMIZER_FILE_PATTERN: Final = re.compile(rf".*/(distrib_optim|{_LAYER_WISE}[0-9]+|optim)\.pt")
_LAYER_WISE_HINT: Final = (
    f"; {_LAYER_WISE}N.pt numbers the parameters of each rank: Megatron-LM's --ckpt-format torch_dist saves names, by "
    "which these states are read"
)
_PARALLEL_DEGREE_LIMIT: Final = 1 << 20
_ETP_ARGUMENT: Final = "expert_tensor_parallel_size"

_EXPERT_FC2_PATTERN: Final = re.compile(r".*\.mlp\.experts\.local_experts\.0\.linear_fc2\.weight")
"""An expert's projection back, of which a rank has columns: ``[hidden, inner / etp]``."""
_GROUPED_FC2_PATTERN: Final = re.compile(r".*\.mlp\.experts\.weight2")
"""The same of all of a rank's experts, one behind another: ``[experts / ep * inner / etp, hidden]``."""


def read_megatron_ranks(source: Source, etp: int | None, weights: Weights) -> Manifest:
    """Read every rank's pickle and join what they have; arguments and errors are those of `scan_megatron`."""
    found = choose_iteration(source)
    files = {name: read_rank_file(source, path) for name, path in found.files.items()}
    first = next(iter(files.values()))
    mesh = _build_mesh(files, etp)
    ranks = list_rank_folders(found, mesh)
    for each in files.values():
        _check_version(each)
        if each.version != first.version:
            raise SourceError(
                f"{each.path} has checkpoint_version {each.version:g}, but {first.path} {first.version:g}"
            )
    counts = _count_layers(files, ranks, mesh)
    tied = _is_tied(first, files, ranks, mesh)
    tensors = {tensor.name: tensor for name, each in files.items() for tensor in _build_tensors(name, each)}
    from shardctl.libraries.megatron.rank_states import read_rank_states  # of these files alone

    held = read_rank_states(source, files, ranks, mesh)
    if weights == "master" and not held.masters:
        raise SourceError(f"{source.name} has no weights of an optimizer", hint="leave --weights out")
    own = (*found.files.values(), *held.files)
    side, left = list_side_files(source, set(own))
    return Manifest(
        format=megatron.NAME,
        tensors=tensors if weights == "module" else tensors | held.masters,
        files={path: CheckpointFile(path, source.files()[path].size) for path in own},
        objects=(
            *(_set_policy(each) for each in side),
            *(each for file in files.values() for each in _list_inner_objects(file, held)),
        ),
        warnings=(
            *left,
            *_note_other_iterations(found),
            *_note_swapped_ranks(files, ranks, mesh),
            *_note_expert_degree(files, etp, mesh),
            *_warn_of_states(source, found, held, tensors),
        ),
        training=_build_training(source, first, held, tensors, _list_notes(files, held, weights), len(files)),
        dialect=NamingScheme(
            megatron.NAME,
            mesh,
            {rank: f"{name}/" for rank, name in ranks.items()},
            tuple(sum(counts[stage :: mesh.degree("pp")]) for stage in range(mesh.degree("pp"))),
            {megatron.LAYERS: counts, **_collect_facts(first, files, mesh)},
        ),
        settings=build_library_settings(first.arguments),
        own_config=convert_arguments_to_config(first.arguments, tied=tied),
    )


def _build_mesh(files: Mapping[str, MegatronRankFile], etp: int | None) -> Mesh:
    """Build the mesh that the args describe, without replicas; `etp` is what the user says."""
    file = next(iter(files.values()))
    said = file.arguments
    if not said:
        raise SourceError(f"{file.path} has no args of {TITLE}, so its mesh is not known")
    require_no_weight_shards(said, file.path, whole=False)

    def degree(*names: str) -> int | None:
        found = next((value for name in names if (value := said.get(name)) is not None), None)
        if found is None:
            return None
        if not isinstance(found, int) or not 0 < found < _PARALLEL_DEGREE_LIMIT:
            raise SourceError(f"{file.path} has {names[0]} {ascii(found)[:40]} among its args, which is not a degree")
        return found

    tp = degree("tensor_model_parallel_size", "model_parallel_size") or 1
    pp, ep = degree("pipeline_model_parallel_size") or 1, degree("expert_model_parallel_size") or 1
    etp = etp if etp is not None else _choose_etp(files, degree(_ETP_ARGUMENT), tp, ep)
    try:
        return build_least_mesh(tp=tp, pp=pp, ep=ep, etp=etp)
    except UsageError as error:
        raise SourceError(f"{file.path} has impossible args: {error.message}") from error


def _choose_etp(files: Mapping[str, MegatronRankFile], said: int | None, tp: int, ep: int) -> int:
    """Choose over how many ranks an expert is divided; without experts it means nothing, and tp fits any mesh."""
    if not _has_experts(files):
        return tp
    return said or _infer_expert_degree(files.values(), ep) or tp


def _has_experts(files: Mapping[str, MegatronRankFile]) -> bool:
    return bool(next(iter(files.values())).arguments.get("num_experts"))


def _note_expert_degree(files: Mapping[str, MegatronRankFile], etp: int | None, mesh: Mesh) -> Iterator[str]:
    """Note that etp is assumed: the args do not say it, and nothing says how large an expert is."""
    said = next(iter(files.values())).arguments.get(_ETP_ARGUMENT)
    if etp is None and said is None and _has_experts(files) and _infer_expert_degree(files.values(), mesh.ep) is None:
        yield (
            f"the args say neither {_ETP_ARGUMENT} nor the size of an expert: etp={mesh.etp} is assumed, as Megatron-LM"
            " does; --source-etp gives another"
        )


def _check_version(file: MegatronRankFile) -> None:
    if file.version not in _QKV_ROW_ORDERS:
        raise UnsupportedError(
            f"{file.path} has a checkpoint_version that is not known ({file.version:g}): how rows of queries, keys and "
            "values follow each other is not known",
            hint=f"known are {', '.join(f'{version:g}' for version in _QKV_ROW_ORDERS)}",
        )


def _count_layers(files: Mapping[str, MegatronRankFile], ranks: Mapping[int, str], mesh: Mesh) -> tuple[int, ...]:
    """Count the layers of each chunk, in the order in which data flows: every stage's first chunk, then the next.

    The files do not say which layers of the model theirs are; what `get_transformer_layer_offset` computes from the
    args is this order in any case. Raises SourceError if the ranks of a stage differ, or not all layers are there.
    """
    stages: dict[int, tuple[MegatronRankFile, tuple[int, ...]]] = {}
    for rank, name in ranks.items():
        each, stage = files[name], mesh.coordinate(rank)["pp"]
        other, counts = stages.setdefault(stage, (each, each.layers))
        if counts != each.layers:
            raise SourceError(
                f"{each.path} has {sum(each.layers)} layers, but {other.path} {sum(counts)}",
                hint="files of two checkpoints are mixed",
            )
    chunks = {len(counts) for _, counts in stages.values()}
    if len(chunks) > 1:
        raise SourceError(
            "the stages have different numbers of chunks of layers", hint="files of two checkpoints are mixed"
        )
    found = tuple(stages[stage][1][chunk] for chunk in range(chunks.pop()) for stage in range(mesh.degree("pp")))
    first = next(iter(files.values()))
    said = first.arguments.get("num_layers")
    if isinstance(said, int) and said != sum(found):
        raise SourceError(f"the files hold {sum(found)} layers, but the args of {first.path} say {said}")
    return found


def _is_tied(
    first: MegatronRankFile, files: Mapping[str, MegatronRankFile], ranks: Mapping[int, str], mesh: Mesh
) -> bool:
    """Return whether the head is the embedding: as the args say, else as the files have none."""
    untied = first.arguments.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        return not untied
    last = next(files[name] for rank, name in ranks.items() if mesh.coordinate(rank)["pp"] == mesh.degree("pp") - 1)
    return mesh.degree("pp") == 1 and not any(name.endswith(_OUTPUT_LAYER_SUFFIX) for name in last.views)


def _collect_facts(
    first: MegatronRankFile, files: Mapping[str, MegatronRankFile], mesh: Mesh
) -> dict[str, str | int | bool]:
    """Collect what else decides how the arrays are made."""
    rows = next((view.shape[0] for name, view in first.views.items() if name.endswith(_EMBEDDING_SUFFIX)), 0)
    latents = next((v.shape[0] for n, v in first.views.items() if n.endswith("linear_kv_down_proj.weight")), None)
    whole = [first.arguments.get(name) for name in ("kv_lora_rank", "qk_pos_emb_head_dim")]
    cut = latents is not None and latents != sum(part for part in whole if isinstance(part, int))
    grouped = any(name.endswith(".mlp.experts.weight1") for each in files.values() for name in each.views)
    return {
        megatron.VOCABULARY: rows * mesh.degree("tp"),
        megatron.LAST_ROW: first.arguments.get(LAST_ROW) is True,
        megatron.ROWS: _QKV_ROW_ORDERS[first.version],
        megatron.LATENTS_CUT: cut,
        megatron.GROUPED: grouped,
        COUNT: count_stored_layers(name for each in files.values() for name in each.views),
        ZERO_CENTRED: has_zero_centred_norms(first.arguments),
    }


def _build_tensors(folder: str, file: MegatronRankFile) -> Iterator[Tensor]:
    for name, view in file.views.items():
        stored = file.stored[name]
        chunk = Chunk(Box.whole(view.shape), view.dtype, file.saved.region(view, stored), stored)
        yield Tensor(f"{folder}/{name}", view.dtype, view.shape, (chunk,))


def _set_policy(side: OpaqueObject) -> OpaqueObject:
    """Leave the files of ranks and of the training loop behind."""
    loop = side.name == TRACKER or _OF_RANKS.fullmatch(side.name) is not None
    return replace(side, policy="drop") if loop else side


def _list_inner_objects(file: MegatronRankFile, held: RankStates) -> Iterator[OpaqueObject]:
    for name in file.others:
        if name not in USED and not (held.states and name in USED_OF_STATES):
            yield OpaqueObject(name, "drop", file=file.path)


def _note_other_iterations(found: RankDirectory) -> Iterator[str]:
    if found.others:
        others = ", ".join(each.rstrip("/") for each in found.others)
        yield f"{found.folder.rstrip('/') or 'this iteration'} is read; {others} is left behind"


def _note_swapped_ranks(files: Mapping[str, MegatronRankFile], ranks: Mapping[int, str], mesh: Mesh) -> Iterator[str]:
    """Note where the ranks that the args of each file name are not those of the folders: tp is always innermost."""
    said = {name: files[name].arguments.get("rank") for name in ranks.values()}
    if len({value for value in said.values() if isinstance(value, int)}) < len(said):
        return
    for rank, name in ranks.items():
        value, index = said[name], mesh.coordinate(rank)["tp"]
        if isinstance(value, int) and value % mesh.degree("tp") != index:
            yield f"{files[name].path} was written by rank {value}, not by one of tp{index}: were folders exchanged?"


def _warn_of_states(
    source: Source, found: RankDirectory, held: RankStates, tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Say which states are left behind, and why."""
    others = sorted(
        path
        for path in source.files()
        if path.startswith(found.folder) and _OPTIMIZER_FILE_PATTERN.fullmatch(path) and path not in held.files
    )
    if held.left:
        hint = _LAYER_WISE_HINT if any(_LAYER_WISE in path for path in others) else ""
        yield f"the optimizer's states are left behind: {held.left}{hint}"
    if others and not held.left:
        yield f"{format_first_few(others)}, which an optimizer keeps in a way that is not known, is left behind"
    if held.states and held.groups and not assign_parameters(held.groups, tensors):
        yield UNASSIGNED


def _build_training(
    source: Source,
    first: MegatronRankFile,
    held: RankStates,
    tensors: Mapping[str, Tensor],
    notes: Iterable[str],
    ranks: int,
) -> TrainingState:
    """Build what only a trainer needs of the files."""
    step = find_step(first.optimizer, first.saved, source) if held.states else None
    return TrainingState(
        writer=TITLE,
        ranks=ranks,
        step=step if step is not None else first.iteration,
        states=held.states,
        groups=assign_parameters(held.groups, tensors) if held.states else (),
        progress=collect_progress(first.arguments, first.iteration, first.schedule) if held.states else {},
        clipping=read_clipping(first.arguments),
        notes=tuple(notes),
    )


def _list_notes(files: Mapping[str, MegatronRankFile], held: RankStates, weights: Weights) -> Iterator[str]:
    """List how the files were understood."""
    first = next(iter(files.values()))
    if first.before_core:
        yield f"names from before megatron-core, checkpoint_version {first.version:g}"
    if any(file.scales for file in files.values()):
        yield f"{EXTRA_STATE} of Transformer Engine's layers, which holds no weights, is left behind"
    if held.states:
        kind = "distributed" if held.distributed else "replicated"
        checked = f"{held.compared:,} values of its weights are the model's" if held.masters else "it has no weights"
        yield f"the {kind} optimizer's states are in the order of the model's arrays; {checked}"
    if held.masters:
        which = "the module's own" if weights == "module" else "the optimizer's, in fp32,"
        yield f"there are two copies of the weights; {which} are read"


def _infer_expert_degree(files: Iterable[MegatronRankFile], ep: int) -> int | None:
    """Infer etp from the shapes of experts; None where the args do not say how large an expert is.

    Raises SourceError for an expert whose part is no whole fraction of what the args say.
    """
    for each in files:
        said = each.arguments
        whole, experts = said.get("moe_ffn_hidden_size") or said.get("ffn_hidden_size"), said.get("num_experts")
        if not isinstance(whole, int) or not isinstance(experts, int):
            continue
        for name, view in each.views.items():
            if _EXPERT_FC2_PATTERN.fullmatch(name):
                part = view.shape[1]
            elif _GROUPED_FC2_PATTERN.fullmatch(name):
                part = view.shape[0] // max(experts // ep, 1)
            else:
                continue
            if part < 1 or whole % part:
                raise SourceError(
                    f"{each.path}: {name} {list(view.shape)} is no part of experts of {whole}, as the args say",
                    hint="give the number of ranks that divide each expert with --source-etp N",
                )
            return whole // part
    return None
